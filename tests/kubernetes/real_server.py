"""A real kube-apiserver with its etcd in the place of the stand-in's, where KUBEBUILDER_ASSETS
names a folder that has them. There is no kubelet behind it that it could ask for logs, and no
faults; controllers, scheduler and kubelets are the stand-in's."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import socket
import ssl
import subprocess
import time
import urllib.request
from pathlib import Path

from tests.kubernetes.api_client import Client
from tests.kubernetes.api_server import ApiServer, Faults, make_certificate
from tests.kubernetes.discovery import custom_definitions
from tests.kubernetes.kinds import KINDS
from tests.kubernetes.namespaces import END
from tests.kubernetes.problems import Refused


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class RealApiServer(ApiServer):
    """Serves from the construction to `close`.

    What only the stand-in can (faults, accounts with rights, logs) fails here.

    Args:
        folder: gets its data, certificates and output. assets: has etcd and kube-apiserver.
    """

    def __init__(self, folder: Path, assets: Path, *, without: tuple[str, ...] = ()) -> None:
        self.folder, self.missing, self.logs = folder, set(without), folder / "logs"
        self.logs.mkdir(parents=True)
        self.faults, self.unreachable = Faults(), set[str]()  # of the stand-in alone
        self.requests: list[tuple[str, str, str]] = []
        self.admin, self.system = secrets.token_hex(16), secrets.token_hex(16)
        self.certificate = make_certificate(folder, "")
        self.port, peers, clients = free_port(), free_port(), free_port()
        self._processes: list[subprocess.Popen[bytes]] = []
        place = f"http://127.0.0.1:{clients}"
        etcd = [str(assets / "etcd"), "--data-dir", str(folder / "etcd"), "--unsafe-no-fsync"]
        etcd += ["--listen-client-urls", place, "--advertise-client-urls", place]
        self._start([*etcd, "--listen-peer-urls", f"http://127.0.0.1:{peers}"])
        self._start([str(assets / "kube-apiserver"), *self._options(place)])
        self._wait()
        self._client = Client(self.url, self.system, self.certificate)
        for each in custom_definitions():
            if each["spec"]["group"] not in self.missing:
                self._client.create(each)
        self.add_namespace("default")

    def _options(self, etcd: str) -> list[str]:
        tokens = self.folder / "tokens.csv"
        groups = '"system:masters"'
        lines = [f"{self.admin},test-user,1,{groups}", f"{self.system},controllers,2,{groups}"]
        tokens.write_text("\n".join(lines) + "\n")
        key = str(self.folder / "server.key")
        return [
            f"--etcd-servers={etcd}",
            f"--secure-port={self.port}",
            "--bind-address=127.0.0.1",
            f"--tls-cert-file={self.certificate}",
            f"--tls-private-key-file={key}",
            f"--cert-dir={self.folder}",
            f"--token-auth-file={tokens}",
            "--authorization-mode=RBAC",
            "--service-cluster-ip-range=10.0.0.0/24",
            "--service-account-issuer=https://127.0.0.1",
            f"--service-account-signing-key-file={key}",
            f"--service-account-key-file={key}",
        ]

    def _start(self, argv: list[str]) -> None:
        with (self.folder / f"{Path(argv[0]).name}.log").open("ab") as log:
            self._processes.append(
                subprocess.Popen([*END, *argv], stdout=log, stderr=log, start_new_session=True)
            )

    def _wait(self) -> None:
        context = ssl.create_default_context(cafile=str(self.certificate))
        end = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError):
                request = urllib.request.Request(f"{self.url}/readyz")
                request.add_header("Authorization", f"Bearer {self.system}")
                with urllib.request.urlopen(request, context=context):
                    return
            text = (self.folder / "kube-apiserver.log").read_text()[-2000:]
            assert time.monotonic() < end, f"kube-apiserver does not answer: {text}"
            time.sleep(0.1)

    def add_namespace(self, name: str) -> None:
        """A namespace with its default service account, as a controller makes one."""
        with contextlib.suppress(Refused):  # it is there
            self._client.create({"kind": "Namespace", "metadata": {"name": name}})
        with contextlib.suppress(Refused):
            meta = {"name": "default", "namespace": name}
            self._client.create({"kind": "ServiceAccount", "metadata": meta})

    def token_of(self, namespace: str, account: str) -> str:
        path = KINDS["serviceaccounts"].path(namespace, account, "token")
        kind = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        return str(self._client.request("POST", path, kind)["status"]["token"])

    def close(self) -> None:
        self._client.close()
        for process in reversed(self._processes):
            process.kill()
            process.wait()
        shutil.rmtree(self.folder / "etcd", ignore_errors=True)
