"""A Kubernetes cluster on this one machine, for tests: the stand-in of an API server, its
controllers, and nodes whose pods are real processes. (Needs no pytest.)"""

from __future__ import annotations

import base64
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.kubernetes.accounts import Rule
from tests.kubernetes.api_client import Client
from tests.kubernetes.api_server import ApiServer
from tests.kubernetes.controllers import Controllers
from tests.kubernetes.kinds import KINDS, Object, set_condition
from tests.kubernetes.kubelet import Kubelet, Node, Paper
from tests.kubernetes.namespaces import Network
from tests.kubernetes.problems import Refused
from tests.kubernetes.real_server import RealApiServer
from tests.limits import HANGS

NAMESPACE = "training"
QUEUES = """
apiVersion: kueue.x-k8s.io/v1beta2
kind: ClusterQueue
metadata: {name: everything}
spec:
  namespaceSelector: {}
  preemption: {withinClusterQueue: LowerPriority}
  resourceGroups:
  - coveredResources: [cpu, memory, nvidia.com/gpu]
    flavors:
    - name: default
      resources:
      - {name: cpu, nominalQuota: "%(cpu)s"}
      - {name: memory, nominalQuota: 1000Gi}
      - {name: nvidia.com/gpu, nominalQuota: "%(gpu)s"}
---
apiVersion: kueue.x-k8s.io/v1beta2
kind: LocalQueue
metadata: {name: queue, namespace: %(namespace)s}
spec: {clusterQueue: everything}
"""


class NoKubernetes(Exception):
    """Why there can be no cluster on this machine."""


@dataclass(frozen=True)
class Left:
    """A process that runs on a node."""

    node: str
    pid: int
    argv: tuple[str, ...]


class KubernetesCluster:
    """Up from the construction to `close`, or to the end of the thread that made it.

    Args:
        folder: must not exist, or be empty; `root` is in it.
        nodes: how many, named node1 and so on. gpus: of each node.
        paper: pods are no processes: they run at once, and end by the test's word (`finish`).
        without: groups that nobody has installed, "kueue.x-k8s.io" or "jobset.x-k8s.io".
        grace, eviction: seconds until a lost node is Unknown, and from then until its pods are
        deleted.
        assets: a folder with etcd and kube-apiserver, which then take the server's place.

    Raises NoKubernetes where this machine cannot have one.
    """

    def __init__(
        self,
        folder: Path,
        nodes: int = 3,
        *,
        gpus: int = 8,
        paper: bool = False,
        without: tuple[str, ...] = (),
        grace: float = 0.5,
        eviction: float = 0.5,
        assets: Path | None = None,
    ) -> None:
        self.folder, self.root, self.paper = folder, folder / "shared", paper
        self.root.mkdir(parents=True)
        self._made: list[Object] = []
        self._before: set[str] = set()
        self.network: Network | None = None
        if not paper:
            self.network = _network()
        pid, address = (self.network.head.pid, self.network.address) if self.network else (None, "")
        if assets is None:
            self.server = ApiServer(
                folder / "server", without=without, network=pid, address=address
            )
        else:
            self.server = RealApiServer(folder / "server", assets, without=without)
        self.kubeconfig = self.write_kubeconfig(folder / "kubeconfig", self.server.admin)
        certificate = self.server.certificate
        self.client = Client(self.server.url, self.server.system, certificate)
        self.controllers = Controllers(self.client, without, grace, eviction)
        self.server.add_namespace(NAMESPACE)
        self.nodes: dict[str, Node] = {}
        self.kubelet = Kubelet(
            self.client,
            self.nodes,
            folder / "pods",
            self.server.logs,
            (address, self.server.port),
            self._token_files,
        )
        for number in range(nodes):
            self.add_node(f"node{number + 1}", gpus)
        self.claim("shared", self.root)
        self.controllers.start()
        self.kubelet.start()
        if "kueue.x-k8s.io" not in without:
            words = {"cpu": 64 * nodes, "gpu": gpus * nodes, "namespace": NAMESPACE}
            for each in yaml.safe_load_all(QUEUES % words):
                self.client.create(each)

    def write_kubeconfig(self, path: Path, token: str, namespace: str = NAMESPACE) -> Path:
        """A kubeconfig for a token."""
        cluster = {"server": self.server.url, "certificate-authority": str(self.server.certificate)}
        context = {"cluster": "test", "user": "test", "namespace": namespace}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "test", "user": {"token": token}}],
            "contexts": [{"name": "test", "context": context}],
            "current-context": "test",
        }
        path.write_text(yaml.safe_dump(config))
        path.chmod(0o600)
        return path

    def close(self) -> None:
        """Take it down; nothing of it runs afterwards. Its folder stays."""
        self.client.close()
        for loop in (*self.controllers.loops, self.kubelet):
            loop.join(10)
        if self.network is not None:
            for each in self.strangers():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(each.pid, signal.SIGKILL)
            self.network.close()
        self.server.close()

    # what there is

    def kubectl(self, *words: str, input: str | None = None, kubeconfig: Path | None = None) -> str:
        """What the real kubectl prints; fails unless it exits with 0."""
        done = self.try_kubectl(*words, input=input, kubeconfig=kubeconfig)
        assert done.returncode == 0, f"kubectl {words}: {done.stdout}{done.stderr}"
        return done.stdout

    def try_kubectl(
        self, *words: str, input: str | None = None, kubeconfig: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """The same, however it ends."""
        cache = f"--cache-dir={self.folder / 'kube-cache'}"
        return subprocess.run(
            ["kubectl", cache, *words],
            env={**os.environ, "KUBECONFIG": str(kubeconfig or self.kubeconfig)},
            input=input,
            capture_output=True,
            text=True,
            timeout=HANGS,
            check=False,
        )

    def get(self, plural: str, name: str, namespace: str = NAMESPACE) -> Object:
        """An object as the server has it now; {} where there is none."""
        kind = KINDS[plural]
        try:
            return self.client.request("GET", kind.path(namespace, name))
        except Refused as refused:
            if refused.code == 404:
                return {}
            raise

    def pods(self, namespace: str = NAMESPACE) -> list[Object]:
        """All pods of a namespace, by name."""
        answer = self.client.request("GET", KINDS["pods"].path(namespace))
        return sorted(answer["items"], key=lambda pod: str(pod["metadata"]["name"]))

    def pod(self, name: str) -> Object:
        found = self.get("pods", name)
        assert found, f"no pod {name}"
        return found

    def _picture(self) -> str:
        """What there is, and what happened last."""
        said = [self.try_kubectl("get", "pods,jobs,jobsets").stdout]
        said.append(self.try_kubectl("events").stdout)
        return "\n".join(line for each in said for line in each.splitlines()[-30:])

    def wait(self, holds: Callable[[], object], what: str, seconds: float = HANGS) -> None:
        """Until something holds."""
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end, (
                f"no {what} after {seconds} s\n{self.problems()}\n{self._picture()}"
            )
            time.sleep(0.02)

    def problems(self) -> list[str]:
        """What went wrong inside the stand-in since it was asked for the last time."""
        found: list[str] = []
        for loop in (*self.controllers.loops, self.kubelet):
            found += loop.problems
            loop.problems.clear()
        return found

    # what a test makes

    def apply(self, *objects: Object) -> None:
        """Create objects, as the cluster's administrator."""
        for each in objects:
            meta = each.setdefault("metadata", {})
            meta.setdefault("namespace", NAMESPACE)
            self._made.append(self.client.create(each))

    def add_node(self, name: str, gpus: int = 8) -> None:
        """Another node; it is ready."""
        address, host = f"10.79.{len(self.nodes) // 250}.{len(self.nodes) % 250 + 1}", None
        if self.network is not None:
            address = self.network.add(name)
            host = self.network.hosts[name]
        self.nodes[name] = Node(name, address, host)
        has = {"cpu": "64", "memory": "512Gi", "pods": "110", "nvidia.com/gpu": str(gpus)}
        labels = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux"}
        node: Object = {"kind": "Node", "metadata": {"name": name, "labels": labels}, "spec": {}}
        made = self.client.create(node)

        def ready(status: Object) -> None:
            status |= {"capacity": has, "allocatable": has}
            status["addresses"] = [{"type": "InternalIP", "address": address}]
            for each in ("MemoryPressure", "DiskPressure", "PIDPressure"):
                set_condition(status, each, "False", "KubeletHasSufficient", "")
            set_condition(status, "Ready", "True", "KubeletReady", "kubelet is ready")

        self.client.update_status(made, ready)

    def claim(self, name: str, folder: Path, mode: str = "ReadWriteMany") -> None:
        """A PersistentVolumeClaim whose volume is a folder of this machine."""
        self.kubelet.claims[f"{NAMESPACE}/{name}"] = folder
        resources = {"requests": {"storage": "1Ti"}}
        spec = {"accessModes": [mode], "resources": resources}
        self.apply({"kind": "PersistentVolumeClaim", "metadata": {"name": name}, "spec": spec})

    def secret(self, name: str, **data: str) -> None:
        coded = {key: base64.b64encode(text.encode()).decode() for key, text in data.items()}
        self.apply({"kind": "Secret", "metadata": {"name": name}, "data": coded})

    def quota(self, name: str, **hard: str) -> None:
        """A ResourceQuota; a name with "_" has "." there: requests_cpu."""
        spec = {"hard": {key.replace("_", "."): value for key, value in hard.items()}}
        self.apply({"kind": "ResourceQuota", "metadata": {"name": name}, "spec": spec})

    def priority_class(self, name: str, value: int) -> None:
        kind = {"kind": "WorkloadPriorityClass", "metadata": {"name": name}}
        self._made.append(self.client.create({**kind, "value": value}))

    def service_account(self, name: str, rules: Sequence[Rule] = ()) -> str:
        """A service account with these rights; its token."""
        if not self.get("serviceaccounts", name):
            self.apply({"kind": "ServiceAccount", "metadata": {"name": name}})
        token, account = self.server.account(f"system:serviceaccount:{NAMESPACE}:{name}")
        account.rules = list(rules)
        return token

    def user(self, name: str, rules: Sequence[Rule] = ()) -> Path:
        """The kubeconfig of another user, who has these rights."""
        token = self.server.token(name, list(rules))
        return self.write_kubeconfig(self.folder / f"kubeconfig-{name}", token)

    def _token_files(self, namespace: str, account: str) -> dict[str, str]:
        token = self.server.token_of(namespace, account)
        certificate = self.server.certificate.read_text()
        return {"token": token, "ca.crt": certificate, "namespace": namespace}

    # what a test does to it

    def _run(self, name: str) -> tuple[Object, int]:
        """A pod and its PID 1."""
        pod = self.pod(name)
        run = self.kubelet.run_of(pod["metadata"]["uid"])
        assert run is not None and run.process.pid, f"pod {name} runs no process"
        return pod, run.process.pid

    def pid(self, name: str) -> int:
        """Of a pod's PID 1, as this machine counts."""
        return self._run(name)[1]

    def kill_pod(self, name: str) -> None:
        """SIGKILL to PID 1 of a pod."""
        os.kill(self.pid(name), signal.SIGKILL)

    def mark_oom(self, name: str) -> None:
        """End a pod as the kernel does one that is out of memory."""
        pod, pid = self._run(name)
        run = self.kubelet.run_of(pod["metadata"]["uid"])
        assert run is not None
        run.oom = True
        os.kill(pid, signal.SIGKILL)

    def finish(self, name: str, code: int = 0) -> None:
        """End a pod that is on paper."""
        run = self.kubelet.run_of(self.pod(name)["metadata"]["uid"])
        assert run is not None and isinstance(run.process, Paper), f"{name} is not on paper"
        run.process.finish(code)

    def delete_pod(self, name: str, grace: int | None = None) -> None:
        """As somebody does by hand; grace 0 is forced."""
        self.client.delete(self.pod(name), grace=grace)

    def evict(self, name: str) -> None:
        """By the eviction API, as drains do."""
        meta = {"name": name, "namespace": NAMESPACE}
        self.client.create({"kind": "Eviction", "metadata": meta}, "eviction", name)

    def cordon(self, node: str, unschedulable: bool = True) -> None:
        found = self.get("nodes", node)
        self.client.patch(found, {"spec": {"unschedulable": unschedulable or None}})

    def drain(self, node: str) -> None:
        """Cordon it, and evict its pods."""
        self.cordon(node)
        for pod in self.pods():
            if pod["spec"].get("nodeName") == node:
                self.evict(pod["metadata"]["name"])

    def lose_node(self, node: str, *, frozen: bool = False) -> None:
        """Its network is cut, its kubelet is silent, and its processes are killed, or frozen so
        that they go on when the node returns."""
        there = self.nodes[node]
        there.silent = True
        self.server.unreachable.add(node)
        if self.network is not None:
            self.network.cut(node)
            self._signal(node, signal.SIGSTOP if frozen else signal.SIGKILL)
        self.controllers.nodes.silent(node)
        self.client.patch(
            self.get("nodes", node), {"metadata": {"annotations": {"test/lost": "1"}}}
        )

    def return_node(self, node: str) -> None:
        """It is back: what was frozen goes on, and its kubelet looks after its pods."""
        if self.network is not None:
            self.network.heal(node)
            self._signal(node, signal.SIGCONT)
        self.server.unreachable.discard(node)
        self.nodes[node].silent = False
        self.controllers.nodes.heard(node)
        meta = {"metadata": {"annotations": {"test/lost": None}}}
        self.client.patch(self.get("nodes", node), meta)
        self.kubelet.wake()

    def _signal(self, node: str, number: int) -> None:
        for each in self._processes(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(each.pid, number)

    def preempt(
        self,
        jobset: str,
        seconds: float = 0.0,
        *,
        reason: str = "Preempted",
        plural: str = "jobsets",
    ) -> None:
        """Kueue evicts it (for another reason: PodsReadyTimeout, NodeFailures), and admits it
        again so many seconds after none of its pods is active: the last may still terminate."""
        found = self.get(plural, jobset)
        assert found, f"no {plural} {jobset}"
        self.controllers.kueue.evict(found["metadata"]["uid"], reason, seconds)
        annotations = {"test/preempt": str(time.monotonic())}
        self.client.patch(found, {"metadata": {"annotations": annotations}})

    def admit(self, jobset: str) -> None:
        """Kueue may admit again what it has evicted."""
        self.controllers.kueue.admit_again()
        annotations = {"test/admit": str(time.monotonic())}
        self.client.patch(self.get("jobsets", jobset), {"metadata": {"annotations": annotations}})

    # what is left

    def _processes(self, node: str) -> list[Left]:
        host = self.nodes[node].host
        found = []
        for pid in host.processes() if host is not None else ():
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
                found.append(Left(node, pid, tuple(words.rstrip("\0").split("\0"))))
        return found

    def strangers(self) -> list[Left]:
        """The processes on all nodes: none, between two tests."""
        return [each for node in self.nodes for each in self._processes(node)]

    def _there(self) -> dict[str, Object]:
        """All objects but events, by uid."""
        found: dict[str, Object] = {}
        for plural, kind in KINDS.items():
            if plural != "events" and kind.group not in self.server.missing:
                answer = self.client.request("GET", kind.path())
                found |= {obj["metadata"]["uid"]: obj for obj in answer["items"]}
        return found

    def begin(self) -> None:
        """What there is now is not left by the test that comes."""
        assert not self.strangers(), "an earlier test has left processes"
        self._before = set(self._there())
        self._made.clear()

    def _left(self) -> list[Object]:
        return [obj for uid, obj in self._there().items() if uid not in self._before]

    def end(self, seconds: float = 120.0) -> list[str]:
        """Bring nodes back, remove what the test made by this class's methods, and wait so long
        for the rest to go; what is left then is named, and removed."""
        for name, node in self.nodes.items():
            if node.silent:
                self.return_node(name)
            self.cordon(name, False)
        for obj in self._made:
            self.client.delete(obj, policy="Background")
        self.server.faults.clear()
        self.kubelet.missing_images.clear()
        deadline = time.monotonic() + seconds
        left: list[Object | Left] = [*self._left(), *self.strangers()]
        while left and time.monotonic() < deadline:
            time.sleep(0.05)
            left = [*self._left(), *self.strangers()]
        names = [
            f"{each['kind']}/{each['metadata']['name']}" if isinstance(each, dict) else str(each)
            for each in left
        ]
        self._remove(left)
        return names

    def _remove(self, left: Sequence[Object | Left]) -> None:
        for each in left:
            if isinstance(each, Left):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(each.pid, signal.SIGKILL)
            else:
                grace = 0 if each["kind"] == "Pod" else None
                self.client.delete(each, grace=grace, policy="Background")
        self.wait(lambda: not self._left() and not self.strangers(), "empty cluster", 120.0)


def _network() -> Network:
    if os.geteuid() != 0:
        raise NoKubernetes("namespaces of its own need root")
    try:
        return Network()
    except (OSError, subprocess.CalledProcessError) as error:
        raise NoKubernetes(f"{error}: {getattr(error, 'stderr', '')}") from None
