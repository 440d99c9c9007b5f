"""A stand-in of kube-apiserver: HTTPS, bearer tokens, lists, watches, and the faults that a test
asks for."""

from __future__ import annotations

import contextlib
import secrets
import socket
import ssl
import subprocess
import threading
import time
from pathlib import Path

from tests.kubernetes.accounts import ALL, Account, Rule
from tests.kubernetes.connection import Connection
from tests.kubernetes.discovery import custom_definitions
from tests.kubernetes.kinds import KINDS, Object
from tests.kubernetes.namespaces import in_network_of
from tests.kubernetes.problems import Refused
from tests.kubernetes.registry import Registry
from tests.kubernetes.store import Store


class Faults:
    """What goes wrong because a test wants it; the cluster's own controllers see nothing of
    `throttle` and `fail_next`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._throttled = 0.0  # until this moment
        self._failures: list[tuple[int, str, str]] = []
        self._lost: list[str] = []  # methods

    def throttle(self, seconds: float) -> None:
        """Answer 429 for that long."""
        self._throttled = time.monotonic() + seconds

    def fail_next(self, status: int, n: int = 1, *, method: str = "", path: str = "") -> None:
        """Answer the next n requests (of that method, with that text in their path) so."""
        with self._lock:
            self._failures += [(status, method, path)] * n

    def lose_reply(self, method: str = "POST", n: int = 1) -> None:
        """Do what the next n requests of that method ask for, and close the connection without
        an answer."""
        with self._lock:
            self._lost += [method] * n

    def clear(self) -> None:
        """No more faults."""
        with self._lock:
            self._throttled = 0.0
            self._failures.clear()
            self._lost.clear()

    def strike(self, method: str, path: str) -> None:
        """Raise Refused where a request is to fail."""
        if time.monotonic() < self._throttled:
            text = "the server has received too many requests and has asked us to try again later"
            raise Refused(429, text, details={"retryAfterSeconds": 1})
        with self._lock:
            for each in self._failures:
                status, verb, words = each
                if verb in ("", method) and words in path:
                    self._failures.remove(each)
                    raise Refused(status, "the test wants this request to fail")

    def loses(self, method: str) -> bool:
        with self._lock:
            if method in self._lost:
                self._lost.remove(method)
                return True
            return False


def make_certificate(folder: Path, address: str) -> Path:
    """ca.crt, the certificate of a server at 127.0.0.1 and that address; its key is beside it,
    server.key."""
    names = ",".join(f"IP:{each}" for each in ("127.0.0.1", address) if each)
    path = folder / "ca.crt"
    words = "openssl req -x509 -nodes -days 30 -newkey ec -pkeyopt ec_paramgen_curve:P-256"
    argv = [*words.split(), "-subj", "/CN=kubernetes", "-addext", f"subjectAltName={names}"]
    argv += ["-keyout", str(folder / "server.key"), "-out", str(path)]
    subprocess.run(argv, check=True, capture_output=True)
    return path


class ApiServer:
    """Serves from the construction to `close`.

    Args:
        folder: gets certificates, and pods' logs under "logs" as a kubelet writes them.
        without: groups that this cluster does not have ("kueue.x-k8s.io").
        network: the pid of a process; the server listens at `address` in its network namespace
        too.
    """

    def __init__(
        self,
        folder: Path,
        *,
        without: tuple[str, ...] = (),
        network: int | None = None,
        address: str = "",
    ) -> None:
        self.folder, self.missing = folder, set(without)
        self.logs = folder / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        self.store, self.faults = Store(), Faults()
        self.registry = Registry(self.store)
        self.accounts: dict[str, Account] = {}
        self.unreachable: set[str] = set()  # nodes whose kubelet does not answer for logs
        self.watch_seconds = (300.0, 600.0)  # how long a watch lasts that does not say so
        self.events_per_watch: int | None = None  # it ends after so many, but not the system's
        self.bookmark_seconds = 60.0
        self.requests: list[tuple[str, str, str]] = []  # (user, method, path) of all but system's
        self.admin = self.token("test-user", [ALL])
        self.system = self.token("system:controllers", [ALL], system=True)
        self._place = (network, address)
        self._connections: set[Connection] = set()
        self._listeners: list[socket.socket] = []
        self.cuts = 0  # how often all watches were cut
        self.certificate = make_certificate(folder, address)
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._tls.load_cert_chain(self.certificate, folder / "server.key")
        self.port = 0
        self._open()
        for name in ("default", "kube-system"):
            self.add_namespace(name)
        for each in custom_definitions():
            if each["spec"]["group"] not in self.missing:
                self.registry.create(KINDS["customresourcedefinitions"], "", each)

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def token(self, user: str, rules: list[Rule], *, system: bool = False) -> str:
        """A new token; its account has these rules."""
        token = secrets.token_hex(16)
        self.accounts[token] = Account(user, rules, system)
        return token

    def account(self, user: str) -> tuple[str, Account]:
        """The token and account of a user; a service account gets one when asked for."""
        for token, account in list(self.accounts.items()):
            if account.user == user:
                return token, account
        token = self.token(user, [])
        return token, self.accounts[token]

    def token_of(self, namespace: str, account: str) -> str:
        """A service account's token."""
        return self.account(f"system:serviceaccount:{namespace}:{account}")[0]

    def add_namespace(self, name: str) -> None:
        """A namespace with its default service account, as a real cluster makes one."""
        with contextlib.suppress(Refused):  # it is there
            self.registry.create(KINDS["namespaces"], "", {"metadata": {"name": name}})
        with contextlib.suppress(Refused):
            account: Object = {"metadata": {"name": "default"}}
            self.registry.create(KINDS["serviceaccounts"], name, account)

    def _open(self) -> None:
        here = socket.create_server(("127.0.0.1", self.port), backlog=128)
        self.port = here.getsockname()[1]
        self._listeners = [here]
        network, address = self._place
        if network is not None:
            there = in_network_of(
                network, lambda: socket.create_server((address, self.port), backlog=128)
            )
            self._listeners.append(there)
        for listener in self._listeners:
            threading.Thread(target=self._accept, args=[listener], daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                raw, _ = listener.accept()
            except OSError:
                return  # closed
            connection = Connection(self, raw, self._tls)
            self._connections.add(connection)
            threading.Thread(target=self._serve, args=[connection], daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        with contextlib.suppress(OSError, ValueError):
            connection.serve()
        connection.close()
        self._connections.discard(connection)

    def stop(self) -> None:
        """Close all connections and refuse new ones; all objects are kept."""
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for connection in list(self._connections):
            connection.close()

    def throttle(self, seconds: float) -> None:
        """429 for that long, for everybody but the cluster's own controllers."""
        self.faults.throttle(seconds)

    def fail_next(self, status: int, n: int = 1, *, method: str = "", path: str = "") -> None:
        """The next n requests are answered with that status, and not done."""
        self.faults.fail_next(status, n, method=method, path=path)

    def start(self) -> None:
        """Serve again, at the same address."""
        self._open()

    def close(self) -> None:
        self.stop()

    def restart(self, seconds: float = 0.0) -> None:
        """Close all connections, refuse new ones for that long, then serve again at the same
        address, with all objects."""
        self.stop()
        time.sleep(seconds)
        self.start()

    def expire(self) -> None:
        """Forget the history: 410 for every watch and every `continue` from before."""
        self.store.expire()

    def cut_watches(self) -> None:
        """End all watches without an error, as load balancers and timeouts do."""
        self.cuts += 1
        for changed in self.store.changed.values():
            with changed:
                changed.notify_all()
