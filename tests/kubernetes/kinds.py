"""The kinds of objects that the stand-in of a cluster knows, and what their paths look like."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Object = dict[str, Any]  # as JSON has it
VERBS = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]


@dataclass(frozen=True)
class Kind:
    """One kind: `plural` is unique over all groups here."""

    group: str  # "" is the core
    version: str
    plural: str
    kind: str
    namespaced: bool = True
    short: tuple[str, ...] = ()
    status: bool = False  # whether its status is written by a door of its own

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def qualified(self) -> str:
        """As messages of errors name it: jobs.batch."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """Of the kind, of one namespace's objects, of one object, or of a part of it."""
        start = f"/apis/{self.api_version}" if self.group else f"/api/{self.version}"
        where = f"/namespaces/{namespace}" if namespace and self.namespaced else ""
        return "/".join([start + where, *filter(None, (self.plural, name, subresource))])


# name of the kind, of many, scope (cluster or "."), whether it has a status, short names
TABLE = """
v1 Namespace namespaces cluster status ns
v1 Node nodes cluster status no
v1 Pod pods . status po
v1 Service services . status svc
v1 Event events . . ev
v1 Secret secrets . .
v1 ConfigMap configmaps . . cm
v1 ServiceAccount serviceaccounts . . sa
v1 ResourceQuota resourcequotas . status quota
v1 PersistentVolumeClaim persistentvolumeclaims . status pvc
batch/v1 Job jobs . status
policy/v1 PodDisruptionBudget poddisruptionbudgets . status pdb
jobset.x-k8s.io/v1alpha2 JobSet jobsets . status
kueue.x-k8s.io/v1beta2 Workload workloads . status wl
kueue.x-k8s.io/v1beta2 LocalQueue localqueues . status lq
kueue.x-k8s.io/v1beta2 ClusterQueue clusterqueues cluster status cq
kueue.x-k8s.io/v1beta2 WorkloadPriorityClass workloadpriorityclasses cluster .
apiextensions.k8s.io/v1 CustomResourceDefinition customresourcedefinitions cluster . crd
"""


def _kinds() -> Iterator[Kind]:
    for line in TABLE.strip().splitlines():
        version, kind, plural, scope, status, *short = line.split()
        group, _, version = version.rpartition("/")
        namespaced = scope != "cluster"
        yield Kind(group, version, plural, kind, namespaced, tuple(short), status == "status")


KINDS = {kind.plural: kind for kind in _kinds()}
OF_KIND = {kind.kind: kind for kind in KINDS.values()}
CUSTOM = ("jobset.x-k8s.io", "kueue.x-k8s.io")  # groups that somebody has to install
REVIEWS = {  # what is only asked, never kept
    "selfsubjectaccessreviews": ("authorization.k8s.io", "v1", "SelfSubjectAccessReview"),
    "selfsubjectrulesreviews": ("authorization.k8s.io", "v1", "SelfSubjectRulesReview"),
    "selfsubjectreviews": ("authentication.k8s.io", "v1", "SelfSubjectReview"),
}


def now(later: float = 0.0) -> str:
    """The time as objects state it: whole seconds, UTC. later: seconds from now."""
    time = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=later)
    return time.strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds_of(time: str) -> float:
    """Seconds since 1970 of a time that an object states."""
    return datetime.datetime.fromisoformat(time.replace("Z", "+00:00")).timestamp()


SUFFIXES = {"m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
SUFFIXES |= {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}


def quantity(text: str | float) -> float:
    """The number that a quantity states: "500m" is 0.5, "2Gi" is 2147483648."""
    words = str(text)
    suffix = words.lstrip("0123456789.+-eE")
    return float(words.removesuffix(suffix)) * (SUFFIXES[suffix] if suffix else 1.0)


def condition(obj: Object, name: str) -> Object:
    """The condition of an object's status of that type; {} where it has none."""
    found: list[Object] = obj.get("status", {}).get("conditions") or []
    return next((each for each in found if each["type"] == name), {})


def is_true(obj: Object, name: str) -> bool:
    """Whether that condition is True."""
    return bool(condition(obj, name).get("status") == "True")


def set_condition(status: Object, name: str, value: str, reason: str, message: str) -> bool:
    """Write a condition into a status; whether anything changed."""
    conditions: list[Object] = status.setdefault("conditions", [])
    new = {"type": name, "status": value, "reason": reason, "message": message}
    for each in conditions:
        if each["type"] == name:
            if all(each.get(key) == new[key] for key in new):
                return False
            changed = each["status"] != value
            each.update(new, **({"lastTransitionTime": now()} if changed else {}))
            return True
    conditions.append({**new, "lastTransitionTime": now()})
    return True


def owner_of(obj: Object) -> Object:
    """The owner that controls an object; {} where there is none."""
    owners = obj["metadata"].get("ownerReferences") or []
    return next((each for each in owners if each.get("controller")), {})


def owned_by(owner: Object) -> Object:
    """The metadata of what a controller makes for an object."""
    meta = owner["metadata"]
    reference = {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": meta["name"],
        "uid": meta["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }
    return {"ownerReferences": [reference]}


def ended(pod: Object) -> bool:
    """Whether a pod will never run again."""
    return pod.get("status", {}).get("phase") in ("Succeeded", "Failed")
