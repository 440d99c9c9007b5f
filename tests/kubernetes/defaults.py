"""What the API server and the webhooks of JobSet and Kueue write into new objects."""

from __future__ import annotations

import secrets

from tests.kubernetes.kinds import Kind, Object, now

ALPHABET = "bcdfghjklmnpqrstvwxz2456789"  # of names that are made
QUEUE = "kueue.x-k8s.io/queue-name"
TOKENS = "/var/run/secrets/kubernetes.io/serviceaccount"
FOR_EVER = 2147483647


def random_name(letters: int = 5) -> str:
    return "".join(secrets.choice(ALPHABET) for _ in range(letters))


def fill(kind: Kind, obj: Object) -> None:
    """Write the defaults of its kind into a new object, in place."""
    if kind.plural == "pods":
        _fill_pod(obj)
    elif kind.plural == "jobs":
        spec = obj.setdefault("spec", {})
        _fill_job(obj, spec)
        _suspend_for_kueue(obj)
    elif kind.plural == "jobsets":
        fill_jobset(obj.setdefault("spec", {}))
        _suspend_for_kueue(obj)
    elif kind.plural == "namespaces":
        obj["status"] = {"phase": "Active"}
        obj["metadata"]["finalizers"] = ["kubernetes"]  # until it is empty
        obj["metadata"].setdefault("labels", {})["kubernetes.io/metadata.name"] = obj["metadata"][
            "name"
        ]
    elif kind.plural == "persistentvolumeclaims":
        obj["status"] = {"phase": "Bound", "accessModes": obj["spec"].get("accessModes", [])}
        obj["spec"].setdefault("volumeName", f"pvc-{obj['metadata']['uid']}")


def _suspend_for_kueue(obj: Object) -> None:
    """Kueue decides when, unless the owner has been decided on already."""
    meta = obj["metadata"]
    if QUEUE in (meta.get("labels") or {}) and not meta.get("ownerReferences"):
        obj["spec"]["suspend"] = True


def _fill_pod_spec(spec: Object) -> None:
    spec.setdefault("restartPolicy", "Always")
    spec.setdefault("terminationGracePeriodSeconds", 30)
    spec.setdefault("dnsPolicy", "ClusterFirst")
    spec.setdefault("schedulerName", "default-scheduler")
    spec.setdefault("securityContext", {})
    for each in spec.get("containers") or []:
        each.setdefault("imagePullPolicy", "IfNotPresent")
        resources = each.setdefault("resources", {})
        if "limits" in resources:
            resources["requests"] = {**resources["limits"], **resources.get("requests", {})}


def _fill_pod(obj: Object) -> None:
    spec = obj["spec"]
    _fill_pod_spec(spec)
    account = spec.setdefault("serviceAccountName", "default")
    spec["serviceAccount"] = account
    spec.setdefault("priority", 0)
    for taint in ("not-ready", "unreachable"):
        each = {"key": f"node.kubernetes.io/{taint}", "operator": "Exists", "effect": "NoExecute"}
        if not any(old.get("key") == each["key"] for old in spec.get("tolerations") or []):
            spec.setdefault("tolerations", []).append({**each, "tolerationSeconds": 300})
    if spec.get("automountServiceAccountToken", True):
        name = f"kube-api-access-{random_name()}"
        token = {"serviceAccountToken": {"path": "token", "expirationSeconds": 3607}}
        spec.setdefault("volumes", []).append({"name": name, "projected": {"sources": [token]}})
        for each in spec["containers"]:
            mount = {"name": name, "mountPath": TOKENS, "readOnly": True}
            each.setdefault("volumeMounts", []).append(mount)
    obj["status"] = {"phase": "Pending", "qosClass": "Burstable"}
    if spec.get("schedulingGates"):
        why = "Scheduling is blocked due to non-empty scheduling gates"
        blocked = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}
        obj["status"]["conditions"] = [{**blocked, "message": why, "lastTransitionTime": now()}]


def _fill_job(obj: Object, spec: Object) -> None:
    if spec.get("completions") is None and spec.get("parallelism") is None:
        spec["completions"] = spec["parallelism"] = 1
    if spec.get("parallelism") is None:
        spec["parallelism"] = 1
    limit = 6 if spec.get("backoffLimitPerIndex") is None else FOR_EVER
    spec.setdefault("backoffLimit", limit)
    spec.setdefault("completionMode", "NonIndexed")
    spec.setdefault("suspend", False)
    policy = "Failed" if "podFailurePolicy" in spec else "TerminatingOrFailed"
    spec.setdefault("podReplacementPolicy", policy)
    for rule in (spec.get("podFailurePolicy") or {}).get("rules") or []:
        for each in rule.get("onPodConditions") or []:
            each.setdefault("status", "True")
    template = spec.setdefault("template", {})
    meta, name = obj["metadata"], obj["metadata"]["name"]
    labels = template.setdefault("metadata", {}).setdefault("labels", {})
    uid = {"batch.kubernetes.io/controller-uid": meta["uid"]}
    labels |= {**uid, "controller-uid": meta["uid"], "job-name": name}
    labels["batch.kubernetes.io/job-name"] = name
    if not spec.get("manualSelector"):
        spec["selector"] = {"matchLabels": uid}
    _fill_pod_spec(template.setdefault("spec", {}))
    obj["status"] = {}


def fill_by_schema(spec: Object) -> None:
    """What the schema of JobSets fills in at each write, where the webhook does it at the first
    alone: an update that leaves out completionMode or restartPolicy is one that changes them."""
    if "failurePolicy" in spec:
        spec["failurePolicy"].setdefault("restartStrategy", "Recreate")
    for each in spec.get("replicatedJobs") or []:
        each.setdefault("replicas", 1)
        each.setdefault("groupName", "default")


def fill_jobset(spec: Object) -> None:
    """What JobSet's webhook does."""
    spec.setdefault("successPolicy", {}).setdefault("operator", "All")
    spec.setdefault("startupPolicy", {}).setdefault("startupPolicyOrder", "AnyOrder")
    network = spec.setdefault("network", {})
    network.setdefault("enableDNSHostnames", True)
    network.setdefault("publishNotReadyAddresses", True)
    for number, rule in enumerate((spec.get("failurePolicy") or {}).get("rules") or []):
        rule.setdefault("name", f"failurePolicyRule{number}")
    fill_by_schema(spec)
    for each in spec.get("replicatedJobs") or []:
        job = each.setdefault("template", {}).setdefault("spec", {})
        job.setdefault("completionMode", "Indexed")
        pod = job.setdefault("template", {}).setdefault("spec", {})
        pod.setdefault("restartPolicy", "OnFailure")
