"""The scheduler: which node a pod gets, or why it gets none."""

from __future__ import annotations

from collections import Counter

from tests.kubernetes.api_client import Client, Loop
from tests.kubernetes.checks import requests_of
from tests.kubernetes.kinds import Object, condition, ended, is_true, quantity, set_condition
from tests.kubernetes.schema import REQUIRED
from tests.kubernetes.selecting import matches_expression, matches_labels

HOST = "kubernetes.io/hostname"


def tolerates(pod: Object, taint: Object) -> bool:
    for each in pod["spec"].get("tolerations") or []:
        same_effect = each.get("effect") in (None, "", taint["effect"])
        same_key = each.get("key") in (None, "", taint["key"])
        exists = each.get("operator") == "Exists"
        same_value = exists or each.get("value", "") == taint.get("value", "")
        if same_effect and same_key and same_value:
            return True
    return False


def _matches_node(pod: Object, node: Object) -> bool:
    """nodeSelector and required node affinity."""
    labels = node["metadata"].get("labels") or {}
    selector = pod["spec"].get("nodeSelector") or {}
    if any(labels.get(key) != value for key, value in selector.items()):
        return False
    affinity = (pod["spec"].get("affinity") or {}).get("nodeAffinity") or {}
    terms = (affinity.get(REQUIRED) or {}).get("nodeSelectorTerms")
    if not terms:
        return True
    names = {"metadata.name": node["metadata"]["name"]}
    return any(
        all(matches_expression(each, labels) for each in term.get("matchExpressions") or [])
        and all(matches_expression(each, names) for each in term.get("matchFields") or [])
        for term in terms
    )


def _keeps_away(pod: Object, other: Object, labels: Object) -> bool:
    """Whether required anti-affinity of a pod keeps it off the node of another one."""
    if pod["metadata"]["namespace"] != other["metadata"]["namespace"]:
        return False
    anti = (pod["spec"].get("affinity") or {}).get("podAntiAffinity") or {}
    theirs = other["metadata"].get("labels") or {}
    return any(
        each["topologyKey"] in labels and matches_labels(each.get("labelSelector") or {}, theirs)
        for each in anti.get(REQUIRED) or []
    )


class Scheduler(Loop):
    kinds = ("pods", "nodes", "persistentvolumeclaims")

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        self._said: dict[str, str] = {}  # by uid of a pod
        self._bound: dict[str, str] = {}  # uid: node; the cache hears of it somewhat later

    def sync(self) -> float | None:
        pods = self.client.all("pods")
        waiting = [
            pod
            for pod in pods
            if not self._node_of(pod)
            and not ended(pod)
            and "deletionTimestamp" not in pod["metadata"]
            and not pod["spec"].get("schedulingGates")
        ]
        if not waiting:
            return None
        nodes = self.client.all("nodes")
        there: dict[str, list[Object]] = {node["metadata"]["name"]: [] for node in nodes}
        for pod in pods:
            if not ended(pod) and self._node_of(pod) in there:
                there[self._node_of(pod)].append(pod)
        used = {name: Counter[str]() for name in there}
        for name, several in there.items():
            for pod in several:
                used[name].update(requests_of(pod["spec"]))
        waiting.sort(key=lambda pod: -pod["spec"].get("priority", 0))
        for pod in waiting:
            self._place(pod, nodes, there, used)
        return None

    def _node_of(self, pod: Object) -> str:
        return str(pod["spec"].get("nodeName") or self._bound.get(pod["metadata"]["uid"], ""))

    def _place(
        self,
        pod: Object,
        nodes: list[Object],
        there: dict[str, list[Object]],
        used: dict[str, Counter[str]],
    ) -> None:
        if missing := self._missing_claim(pod):
            text = f"0/{len(nodes)} nodes are available: {missing}."
            self._cannot(pod, text, len(nodes), len(nodes))
            return
        why: Counter[str] = Counter()
        fitting, hopeless = [], 0
        for node in nodes:
            name = node["metadata"]["name"]
            reasons = self._why_not(pod, node, there[name], used[name])
            why.update(reasons)
            hopeless += any(each.startswith("node(s)") for each in reasons)
            if not reasons:
                fitting.append((len(there[name]), name))
        if not fitting:
            self._cannot(pod, self._text(why, len(nodes)), hopeless, len(nodes))
            return
        _, name = min(fitting)
        meta = pod["metadata"]
        target = {"kind": "Node", "name": name}
        binding = {"metadata": {"namespace": meta["namespace"]}, "target": target}
        self.client.create(binding, "binding", meta["name"])
        self._bound[meta["uid"]] = name
        there[name].append(pod)
        used[name].update(requests_of(pod["spec"]))
        text = f"Successfully assigned {meta['namespace']}/{meta['name']} to {name}"
        self.client.event(pod, "Normal", "Scheduled", text, "default-scheduler")

    def _missing_claim(self, pod: Object) -> str:
        for each in pod["spec"].get("volumes") or []:
            claim = (each.get("persistentVolumeClaim") or {}).get("claimName")
            namespace = pod["metadata"]["namespace"]
            if claim and not self.client.find("persistentvolumeclaims", namespace, claim):
                return f'persistentvolumeclaim "{claim}" not found'
        return ""

    def _why_not(
        self, pod: Object, node: Object, there: list[Object], used: Counter[str]
    ) -> list[str]:
        """What keeps a pod off a node, in kube-scheduler's words."""
        if node["spec"].get("unschedulable"):
            return ["node(s) were unschedulable"]
        for taint in node["spec"].get("taints") or []:
            if taint["effect"] != "PreferNoSchedule" and not tolerates(pod, taint):
                text = f"{taint['key']}: {taint.get('value', '')}"
                return [f"node(s) had untolerated taint {{{text}}}"]
        if not is_true(node, "Ready"):
            return ["node(s) were not ready"]
        if not _matches_node(pod, node):
            return ["node(s) didn't match Pod's node affinity/selector"]
        reasons = []
        allocatable = node["status"]["allocatable"]
        if len(there) >= quantity(allocatable.get("pods", "110")):
            reasons.append("Too many pods")
        for name, amount in requests_of(pod["spec"]).items():
            if amount > quantity(allocatable.get(name, "0")) - used[name] + 1e-9:
                reasons.append(f"Insufficient {name}")
        labels = node["metadata"].get("labels") or {}
        for other in there:
            if _keeps_away(pod, other, labels):
                return [*reasons, "node(s) didn't match pod anti-affinity rules"]
            if _keeps_away(other, pod, labels):
                return [*reasons, "node(s) didn't satisfy existing pods anti-affinity rules"]
        return reasons

    def _text(self, why: Counter[str], nodes: int) -> str:
        if not nodes:
            return "no nodes available to schedule pods"
        parts = ", ".join(sorted(f"{number} {text}" for text, number in why.items()))
        return f"0/{nodes} nodes are available: {parts}."

    def _cannot(self, pod: Object, text: str, hopeless: int, nodes: int) -> None:
        """hopeless: on how many nodes it would not help that others went."""
        if nodes:
            parts = [
                f"{number} {said}"
                for number, said in (
                    (nodes - hopeless, "No preemption victims found for incoming pod"),
                    (hopeless, "Preemption is not helpful for scheduling"),
                )
                if number
            ]
            text += f" preemption: 0/{nodes} nodes are available: {', '.join(parts)}."
        if self._said.get(pod["metadata"]["uid"]) == text and condition(pod, "PodScheduled"):
            return
        self._said[pod["metadata"]["uid"]] = text

        def change(status: Object) -> None:
            set_condition(status, "PodScheduled", "False", "Unschedulable", text)

        self.client.update_status(pod, change)
        self.client.event(pod, "Warning", "FailedScheduling", text, "default-scheduler")
