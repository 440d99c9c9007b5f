"""The kubelets of all nodes: pods become processes, and their ends become states."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.kubernetes.api_client import Client, Loop
from tests.kubernetes.kinds import Object, ended, now, set_condition
from tests.kubernetes.namespaces import Host
from tests.kubernetes.pod_process import Container, PodProcess
from tests.kubernetes.volumes import CannotStart, mounts, variables

RETRY = 0.1  # seconds between two tries to start a container that cannot start
HOME = "/run/home"  # a pod's own, as an image's is: kubectl keeps a cache there
CRASHED = 0.2  # before a container is started again in its place, and twice that the next time


@dataclass
class Node:
    """host: None on paper: its pods are no processes. silent: nothing happens on it."""

    name: str
    address: str
    host: Host | None = None
    silent: bool = False


class Paper:
    """A container without a process: it ends by the test's word, and when it is told to."""

    def __init__(self, done: Callable[[], None]) -> None:
        self.code: int | None = None
        self.pid, self.started = 0, True
        self._done = done

    def signal(self, number: int) -> None:
        self.finish(128 + number)

    def finish(self, code: int) -> None:
        if self.code is None:
            self.code = code
            self._done()


@dataclass
class Run:
    """A pod that a kubelet has taken on."""

    process: PodProcess | Paper
    node: Node
    started: str
    restarts: int = 0
    kill_at: float | None = None  # when SIGKILL follows SIGTERM
    told: str = ""  # the last that the API server knows: running or ended
    oom: bool = False
    again_at: float | None = None  # when it is started anew in its place


class Kubelet(Loop):
    """Args:
    nodes: by name. folder: of its pods; logs: where their output goes, named by their uids.
    server: address and port of the API server as pods see it.
    token: the files that a service account's token volume has, by namespace and account.
    """

    kinds = ("pods", "secrets", "configmaps", "persistentvolumeclaims")

    def __init__(
        self,
        client: Client,
        nodes: dict[str, Node],
        folder: Path,
        logs: Path,
        server: tuple[str, int],
        token: Callable[[str, str], dict[str, str]],
    ) -> None:
        super().__init__(client)
        self.nodes, self.token = nodes, token
        self.claims: dict[str, Path] = {}
        self.missing_images: set[str] = set()
        self._folder, self._logs, self._server = folder, logs, server
        self._runs: dict[str, Run] = {}

    def object(self, plural: str, namespace: str, name: str) -> Object | None:
        return self.client.find(plural, namespace, name)

    def run_of(self, uid: str) -> Run | None:
        return self._runs.get(uid)

    def _kick(self) -> None:
        with self.client.changed:
            self.client.counts["pods"] += 1
            self.client.changed.notify_all()

    def wake(self) -> None:
        """Look at everything again: a node has come back."""
        self._kick()

    def sync(self) -> float | None:
        waits: list[float] = []
        pods = self.client.all("pods")
        for pod in pods:
            node = self.nodes.get(pod["spec"].get("nodeName", ""))
            if node is not None and not node.silent:
                wait = self._sync_pod(pod, node)
                if wait is not None:
                    waits.append(max(wait, 0.005))
        self._forget({pod["metadata"]["uid"] for pod in pods})
        return min(waits, default=None)

    def _forget(self, uids: set[str]) -> None:
        """Kill what runs of pods that are no longer there."""
        for uid in [each for each in self._runs if each not in uids]:
            run = self._runs[uid]
            if run.node.silent:
                continue
            if run.process.code is None:
                run.process.signal(signal.SIGKILL)
            else:
                del self._runs[uid]
                shutil.rmtree(self._folder / uid, ignore_errors=True)

    def _sync_pod(self, pod: Object, node: Node) -> float | None:
        uid, leaving = pod["metadata"]["uid"], "deletionTimestamp" in pod["metadata"]
        run = self._runs.get(uid)
        if run is None:
            if leaving or ended(pod):
                if leaving:
                    self._finish(pod)
                return None
            return self._start(pod, node)
        if run.process.code is not None:
            return self._over(pod, node, run)
        if leaving:
            return self._terminate(pod, run)
        if run.told != "running":
            if not run.process.started:
                return 0.005
            run.told = "running"
            self.client.update_status(pod, lambda status: _running(status, pod, node, run))
            self._event(pod, "Started", "Container started")
        return None

    def _event(self, pod: Object, reason: str, message: str, type: str = "Normal") -> None:
        self.client.event(pod, type, reason, message, "kubelet")

    def _start(self, pod: Object, node: Node) -> float | None:
        uid, spec = pod["metadata"]["uid"], pod["spec"]["containers"][0]
        try:
            self._check(pod, spec)
            container = self._container(pod, node)
        except CannotStart as why:
            self._waits(pod, spec, why)
            return RETRY
        self._runs[uid] = Run(self._process(container, node), node, now())
        return 0.005

    def _process(self, container: Container, node: Node) -> PodProcess | Paper:
        if node.host is None:
            return Paper(self._kick)
        log = self._logs / f"{container.uid}.log"
        place = self._folder / container.uid
        return PodProcess(container, node.host.pid, log, place, self._kick)

    def _check(self, pod: Object, spec: Object) -> None:
        """Raise CannotStart where an image or a volume is not to be had."""
        if spec["image"] in self.missing_images:
            text = f'Failed to pull image "{spec["image"]}": not found'
            raise CannotStart("ErrImagePull", text)
        for each in pod["spec"].get("volumes") or []:
            claim = (each.get("persistentVolumeClaim") or {}).get("claimName")
            if claim:
                self._attach(pod, claim)

    def _attach(self, pod: Object, name: str) -> None:
        """A claim that one node may have is not for a second one."""
        namespace = pod["metadata"]["namespace"]
        claim = self.client.find("persistentvolumeclaims", namespace, name)
        folder = self.claims.get(f"{namespace}/{name}")
        if claim is None or folder is None:
            text = f'persistentvolumeclaim "{name}" not found'
            raise CannotStart("ContainerCreating", text, "FailedMount")
        if "ReadWriteOnce" not in claim["spec"]["accessModes"]:
            return
        for other in self.client.all("pods", namespace):
            names = [
                (each.get("persistentVolumeClaim") or {}).get("claimName")
                for each in other["spec"].get("volumes") or []
            ]
            elsewhere = other["spec"].get("nodeName") not in (None, pod["spec"]["nodeName"])
            if name in names and elsewhere and other["metadata"]["uid"] in self._runs:
                if ended(other):
                    continue
                volume = claim["spec"]["volumeName"]
                text = f'Multi-Attach error for volume "{volume}" Volume is already used by pod(s)'
                text += f" {other['metadata']['name']}"
                raise CannotStart("ContainerCreating", text, "FailedAttachVolume")

    def _container(self, pod: Object, node: Node) -> Container:
        meta, spec = pod["metadata"], pod["spec"]["containers"][0]
        place = self._folder / meta["uid"]
        if node.host is not None:
            place.mkdir(parents=True, exist_ok=True)
        hostname = pod["spec"].get("hostname") or meta["name"]
        if pod["spec"].get("hostNetwork"):
            hostname = node.name
        environment = {"PATH": os.environ["PATH"], "HOME": HOME, "HOSTNAME": hostname}
        address, port = self._server
        environment |= {"KUBERNETES_SERVICE_HOST": address, "KUBERNETES_SERVICE_PORT": str(port)}
        environment |= variables(pod, node.address, self)
        argv = [*(spec.get("command") or []), *(spec.get("args") or [])]
        if not argv:
            raise CannotStart("CreateContainerError", "no command specified")
        all = [] if node.host is None else list(mounts(pod, place, self))
        return Container(
            meta["uid"], hostname[:63], argv, environment, spec.get("workingDir", ""), all
        )

    def _waits(self, pod: Object, spec: Object, why: CannotStart) -> None:
        """Say why a container is not started; a pull that failed is retried later and later."""
        seen = (pod["status"].get("containerStatuses") or [{}])[0].get("state", {})
        before = seen.get("waiting", {}).get("reason")
        reason, message = why.reason, why.message
        if reason == "ErrImagePull" and before in ("ErrImagePull", "ImagePullBackOff"):
            reason, message = "ImagePullBackOff", f'Back-off pulling image "{spec["image"]}"'
        if before == reason:
            return
        state = {"waiting": {"reason": reason, "message": message}}
        one = _container_status(spec, state, ready=False)
        self.client.update_status(pod, lambda status: status.update(containerStatuses=[one]))
        event = "BackOff" if reason == "ImagePullBackOff" else why.event
        self._event(pod, event, message, "Warning")

    def _terminate(self, pod: Object, run: Run) -> float | None:
        grace = float(pod["metadata"]["deletionGracePeriodSeconds"])
        if run.kill_at is None:
            if not run.process.started and grace:
                return 0.005
            run.kill_at = time.monotonic() + grace
            self._event(pod, "Killing", "Stopping container")
            if grace:
                run.process.signal(signal.SIGTERM)
        run.kill_at = min(run.kill_at, time.monotonic() + grace)
        if (left := run.kill_at - time.monotonic()) > 0:
            return left
        run.process.signal(signal.SIGKILL)
        return RETRY

    def _over(self, pod: Object, node: Node, run: Run) -> float | None:
        """A container has ended."""
        leaving = "deletionTimestamp" in pod["metadata"]
        code, policy = run.process.code or 0, pod["spec"]["restartPolicy"]
        again = policy == "Always" or (policy == "OnFailure" and code != 0)
        if again and not leaving and run.told != "ended":
            return self._again(pod, node, run)
        if run.told != "ended":
            run.told = "ended"
            self.client.update_status(pod, lambda status: _ended(status, pod, node, run))
        if leaving:
            self._finish(pod)
        return None

    def _again(self, pod: Object, node: Node, run: Run) -> float | None:
        if run.again_at is None:
            run.again_at = time.monotonic() + CRASHED * 2**run.restarts
            state = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}}
            one = _container_status(pod["spec"]["containers"][0], state, ready=False)
            one |= {"restartCount": run.restarts, "lastState": _terminated(run)}
            self.client.update_status(pod, lambda status: status.update(containerStatuses=[one]))
        if (left := run.again_at - time.monotonic()) > 0:
            return left
        run.process = self._process(self._container(pod, node), node)
        run.restarts, run.again_at, run.told, run.started = run.restarts + 1, None, "", now()
        return 0.005

    def _finish(self, pod: Object) -> None:
        """Nothing of a pod that is deleted runs any more."""
        if not ended(self.client.find("pods", *_key(pod)) or pod):
            self.client.update_status(pod, lambda status: status.update(phase="Failed"))
        if pod["metadata"].get("deletionGracePeriodSeconds") != 0:
            self.client.delete(pod, grace=0)


def _key(pod: Object) -> tuple[str, str]:
    return pod["metadata"]["namespace"], pod["metadata"]["name"]


def _container_status(spec: Object, state: Object, *, ready: bool) -> Object:
    status: Object = {"name": spec["name"], "image": spec["image"], "imageID": spec["image"]}
    return {**status, "ready": ready, "started": ready, "restartCount": 0, "state": state}


def _terminated(run: Run) -> Object:
    code = run.process.code or 0
    reason = "OOMKilled" if run.oom else "Error" if code else "Completed"
    end = {"exitCode": code, "reason": reason, "startedAt": run.started, "finishedAt": now()}
    return {"terminated": end}


def _conditions(status: Object, ready: bool, reason: str = "") -> None:
    set_condition(status, "Initialized", "True", reason if not ready else "", "")
    for name in ("Ready", "ContainersReady"):
        set_condition(status, name, str(ready), reason, "")


def _running(status: Object, pod: Object, node: Node, run: Run) -> None:
    status |= {"phase": "Running", "hostIP": node.address, "podIP": node.address}
    status["podIPs"] = [{"ip": node.address}]
    status.setdefault("startTime", run.started)
    state = {"running": {"startedAt": run.started}}
    one = _container_status(pod["spec"]["containers"][0], state, ready=True)
    status["containerStatuses"] = [{**one, "restartCount": run.restarts}]
    _conditions(status, True)


def _ended(status: Object, pod: Object, node: Node, run: Run) -> None:
    code = run.process.code or 0
    status |= {"phase": "Failed" if code else "Succeeded", "hostIP": node.address}
    status.setdefault("startTime", run.started)
    one = _container_status(pod["spec"]["containers"][0], _terminated(run), ready=False)
    status["containerStatuses"] = [{**one, "restartCount": run.restarts}]
    _conditions(status, False, "PodFailed" if code else "PodCompleted")
