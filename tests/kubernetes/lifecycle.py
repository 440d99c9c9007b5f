"""What becomes of objects without owners, of namespaces that are deleted, and of pods on nodes
that are lost."""

from __future__ import annotations

import time
from collections import defaultdict

from tests.kubernetes.api_client import Client, Loop
from tests.kubernetes.job_controller import TRACKING, is_tracked
from tests.kubernetes.kinds import KINDS, OF_KIND, Object, condition, ended, is_true, set_condition
from tests.kubernetes.problems import Refused

FOREGROUND, ORPHAN, NAMESPACE = "foregroundDeletion", "orphan", "kubernetes"
UNREACHABLE = "node.kubernetes.io/unreachable"
OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"


class GarbageCollector(Loop):
    """Follows ownerReferences, and empties namespaces."""

    kinds = tuple(plural for plural in KINDS if plural != "events")

    def sync(self) -> float | None:
        dependents: dict[str, list[Object]] = defaultdict(list)
        everything = [obj for plural in self.kinds for obj in self.client.all(plural)]
        uids = {obj["metadata"]["uid"] for obj in everything}
        for obj in everything:
            owners = obj["metadata"].get("ownerReferences") or []
            for each in owners:
                dependents[each["uid"]].append(obj)
            if owners and not any(each["uid"] in uids for each in owners):
                self._orphaned(obj, owners)
        for obj in everything:
            if "deletionTimestamp" in obj["metadata"]:
                self._being_deleted(obj, dependents[obj["metadata"]["uid"]])
        return None

    def _orphaned(self, obj: Object, owners: list[Object]) -> None:
        if "deletionTimestamp" not in obj["metadata"] and not any(
            self._exists(obj, each) for each in owners
        ):
            self.client.delete(obj, policy="Background")
        elif obj["kind"] == "Pod" and is_tracked(obj):  # its Job counts it no longer
            self.client.drop_finalizer(obj, TRACKING)

    def _exists(self, obj: Object, owner: Object) -> bool:
        """As the server has it: the cache may not have it yet."""
        kind = OF_KIND.get(owner["kind"])
        if kind is None:
            return True
        path = kind.path(obj["metadata"].get("namespace", ""), owner["name"])
        try:
            found = self.client.request("GET", path)
        except Refused as refused:
            return refused.code != 404
        return bool(found["metadata"]["uid"] == owner["uid"])

    def _being_deleted(self, obj: Object, dependents: list[Object]) -> None:
        finalizers = obj["metadata"].get("finalizers") or []
        if FOREGROUND in finalizers:
            blocking = [each for each in dependents if self._blocks(each, obj)]
            for each in dependents:
                if "deletionTimestamp" not in each["metadata"]:
                    policy = "Background" if each["kind"] == "Pod" else "Foreground"
                    self.client.delete(each, policy=policy)
            if not blocking:
                self.client.drop_finalizer(obj, FOREGROUND)
        if ORPHAN in finalizers:
            for each in dependents:
                self.client.update(each, lambda new: new["metadata"].pop("ownerReferences", None))
            self.client.drop_finalizer(obj, ORPHAN)
        if obj["kind"] == "Namespace" and NAMESPACE in finalizers:
            self._empty(obj)

    def _blocks(self, dependent: Object, owner: Object) -> bool:
        return any(
            each["uid"] == owner["metadata"]["uid"] and each.get("blockOwnerDeletion")
            for each in dependent["metadata"]["ownerReferences"]
        )

    def _empty(self, namespace: Object) -> None:
        if namespace["status"]["phase"] != "Terminating":
            self.client.update_status(namespace, lambda status: status.update(phase="Terminating"))
        name, left = namespace["metadata"]["name"], 0
        for plural, kind in KINDS.items():
            if not kind.namespaced:
                continue
            for obj in self.client.all(plural, name):
                left += 1
                if "deletionTimestamp" not in obj["metadata"]:
                    self.client.delete(obj, policy="Background")
        if not left:
            self.client.drop_finalizer(namespace, NAMESPACE)


class NodeLifecycle(Loop):
    """Nodes whose kubelet is silent, and pods of nodes that are lost or gone.

    Args:
        grace: seconds until a silent node's Ready is Unknown (50 on a real cluster).
        eviction: seconds from then until its pods are deleted (300 on a real one).
    """

    kinds = ("nodes", "pods")

    def __init__(self, client: Client, grace: float = 0.5, eviction: float = 0.5) -> None:
        super().__init__(client)
        self.grace, self.eviction = grace, eviction
        self._silent: dict[str, float] = {}  # node: since when

    def silent(self, node: str) -> None:
        """From now on nothing is heard of a node's kubelet."""
        self._silent[node] = time.monotonic()

    def heard(self, node: str) -> None:
        self._silent.pop(node, None)

    def sync(self) -> float | None:
        nodes = self.client.all("nodes")
        for node in nodes:
            since = self._silent.get(node["metadata"]["name"])
            if since is None:
                if condition(node, "Ready").get("status") == "Unknown":
                    self._is_back(node)
                continue
            if (left := since + self.grace - time.monotonic()) > 0:
                return left
            self._is_lost(node)
        names = {node["metadata"]["name"]: node for node in nodes}
        for pod in self.client.all("pods"):
            name = pod["spec"].get("nodeName")
            if name and name not in names:
                self._collect(pod, "PodGC: node no longer exists")
            elif name in self._silent:
                self._pod_of_lost(pod, names[name], self._silent[name])
        return 0.05 if self._silent else None

    def _is_lost(self, node: Object) -> None:
        def change(status: Object) -> None:
            for name in ("Ready", "MemoryPressure", "DiskPressure", "PIDPressure"):
                if condition({"status": status}, name):
                    said = ("NodeStatusUnknown", "Kubelet stopped posting node status.")
                    set_condition(status, name, "Unknown", *said)

        if is_true(node, "Ready"):
            self.client.update_status(node, change)
            text = f"Node {node['metadata']['name']} status is now: NodeNotReady"
            self.client.event(node, "Normal", "NodeNotReady", text, "node-controller")

        def taint(new: Object) -> None:
            there = new["spec"].setdefault("taints", [])
            for effect in ("NoSchedule", "NoExecute"):
                if not any((t["key"], t["effect"]) == (UNREACHABLE, effect) for t in there):
                    there.append({"key": UNREACHABLE, "effect": effect})

        self.client.update(node, taint)

    def _is_back(self, node: Object) -> None:
        def change(status: Object) -> None:
            for each in status["conditions"]:
                value = "True" if each["type"] == "Ready" else "False"
                set_condition(status, each["type"], value, "KubeletReady", "kubelet is ready")

        self.client.update_status(node, change)

        def clean(new: Object) -> None:
            there = new["spec"].get("taints") or []
            new["spec"]["taints"] = [each for each in there if each["key"] != UNREACHABLE]

        self.client.update(node, clean)

    def _pod_of_lost(self, pod: Object, node: Object, since: float) -> None:
        taints = [each["key"] for each in node["spec"].get("taints") or []]
        if OUT_OF_SERVICE in taints and "deletionTimestamp" in pod["metadata"]:
            self._collect(pod, "PodGC: node has the out-of-service taint")
            return
        if is_true(pod, "Ready") and not ended(pod):
            self.client.update_status(pod, _not_ready)
        if "deletionTimestamp" in pod["metadata"] or ended(pod):
            return
        tolerated = self._tolerated(pod)
        if tolerated is not None and time.monotonic() > since + self.grace + tolerated:
            text = "Taint manager: deleting due to NoExecute taint"
            said = ("DisruptionTarget", "True", "DeletionByTaintManager", text)
            self.client.update_status(pod, lambda status: _set(status, *said))
            text = f"Marking for deletion Pod {pod['metadata']['namespace']}/"
            text += pod["metadata"]["name"]
            self.client.event(pod, "Normal", "TaintManagerEviction", text, "taint-eviction")
            self.client.delete(pod)

    def _tolerated(self, pod: Object) -> float | None:
        """Seconds that a pod stays on an unreachable node; None for ever. The default of 300 is
        as long as the test wants it."""
        found = [
            each.get("tolerationSeconds")
            for each in pod["spec"].get("tolerations") or []
            if each.get("key") in (None, "", UNREACHABLE)
            and each.get("effect") in (None, "", "NoExecute")
        ]
        if None in found:
            return None
        return min((self.eviction if each == 300 else float(each) for each in found), default=0.0)

    def _collect(self, pod: Object, message: str) -> None:
        """What PodGC does: the pod has failed, and goes."""

        def change(status: Object) -> None:
            if status.get("phase") not in ("Succeeded", "Failed"):
                status["phase"] = "Failed"
                said = ("DisruptionTarget", "True", "DeletionByPodGC", message)
                set_condition(status, *said)

        self.client.update_status(pod, change)
        if pod["metadata"].get("deletionGracePeriodSeconds") != 0:
            self.client.delete(pod, grace=0)


def _set(status: Object, *said: str) -> None:
    name, value, reason, message = said
    set_condition(status, name, value, reason, message)


def _not_ready(status: Object) -> None:
    set_condition(status, "Ready", "False", "NodeNotReady", "node is not ready")
