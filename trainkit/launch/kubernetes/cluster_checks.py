"""What can be known of a cluster before anything is made there: each check is a function, CHECKS is
their order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

from trainkit.jobs.kubernetes import KubernetesToleration, quantity
from trainkit.jobs.schema import Job
from trainkit.launch.kubernetes.documents import (
    Document,
    condition,
    is_true,
    name_of,
    rows_at,
    table_at,
    text_at,
    value_at,
)
from trainkit.launch.kubernetes.kubectl import APIS, Kubectl, KubectlError, group_of
from trainkit.launch.kubernetes.manifest import options_of, pod_resources
from trainkit.launch.scheduler_contract import ClusterNode
from trainkit.launch.supervise.host_consistency import Finding

OLDEST = (1, 28)  # of kubectl
INSTALL = "https://github.com/kubernetes-sigs/jobset/releases/download/v0.12.0/manifests.yaml"
# what `train`, `status` and `cancel` do
RIGHTS = {
    "jobsets": ("create", "get", "list", "watch", "patch", "delete"),
    "jobs": ("create", "get", "list", "watch", "delete"),
    "pods": ("get", "list", "watch", "patch", "delete"),
    "pods/log": ("get",),
    "services": ("get", "list"),
    "events": ("list",),
}
QUEUE_RIGHTS = {"workloads": ("get", "list")}
FATAL = ("", "Login", "Unauthorized", "Unreachable")  # nothing else can be asked then


def look_at_cluster(kubectl: Kubectl, job: Job) -> list[Finding]:
    """What would keep a job from running, and what is worth knowing; nothing is made. What the
    caller may not look at is a note."""
    found: list[Finding] = []
    for check in CHECKS:
        try:
            found += check(kubectl, job)
        except KubectlError as error:
            unseen = error.reason == "Forbidden"
            found.append(_finding(kubectl.namespace, error.message, error.hint, wrong=not unseen))
            if error.reason in FATAL:
                break
    return found


def cluster_nodes(kubectl: Kubectl) -> list[ClusterNode]:
    """The cluster's nodes, with what pods can have of them."""
    return [_row(node) for node in kubectl.list("nodes")]


def _finding(about: str, message: str, advice: str, *, wrong: bool = True) -> Finding:
    return Finding(about, "cluster", message, advice, wrong)


def _kubectl(kubectl: Kubectl, job: Job) -> Iterator[Finding]:
    version = kubectl.version()
    if version < OLDEST:
        words = ".".join(map(str, version))
        yield _finding("kubectl", f"kubectl {words} is too old", "install 1.28 or newer")


def _jobset(kubectl: Kubectl, job: Job) -> Iterator[Finding]:
    if kubectl.raw(f"/apis/{APIS['jobsets']}") is None:
        advice = (
            f"the cluster's administrator installs it: kubectl apply --server-side -f {INSTALL}"
        )
        yield _finding("JobSet", f"the cluster does not serve {APIS['jobsets']}", advice)


def _namespace(kubectl: Kubectl, job: Job) -> Iterator[Finding]:
    name = kubectl.namespace
    if kubectl.get("namespaces", name) is None:
        yield _finding(f"namespace {name}", "there is none", f"kubectl create namespace {name}")


def _rights(kubectl: Kubectl, job: Job) -> Iterator[Finding]:
    rights = RIGHTS | (QUEUE_RIGHTS if options_of(job).queue else {})
    rules = kubectl.rights()
    pairs = [(kind, verb) for kind, verbs in rights.items() for verb in verbs]
    asked = [pair for pair in pairs if not any(_lets(rule, *pair) for rule in rules)]
    with ThreadPoolExecutor(8) as pool:
        given = pool.map(lambda right: kubectl.can_i(right[1], right[0]), asked)
        missing = [right for right, may in zip(asked, given, strict=True) if not may]
    for kind in dict.fromkeys(kind for kind, _ in missing):
        verbs = ",".join(verb for other, verb in missing if other == kind)
        resource, slash, part = kind.partition("/")
        group = group_of(kind)
        whole = resource + (f".{group}" if group else "") + slash + part
        role = f"trainkit-{kind.replace('/', '-')}"
        yield _finding(
            kubectl.namespace,
            f"you may not {verbs.replace(',', ', ')} {kind} there",
            f"the cluster's administrator can let you: kubectl create role {role} --verb={verbs}"
            f" --resource={whole} --namespace={kubectl.namespace}; kubectl create rolebinding"
            f" {role} --role={role} --user=YOU --namespace={kubectl.namespace}",
        )


def _lets(rule: Document, kind: str, verb: str) -> bool:
    wanted = {"verbs": verb, "apiGroups": group_of(kind), "resources": kind}
    lists = {key: value_at(rule, key) for key in wanted}
    return not rule.get("resourceNames") and all(
        isinstance(found, list) and not {wanted[key], "*"}.isdisjoint(found)
        for key, found in lists.items()
    )


def _named(kubectl: Kubectl, job: Job) -> Iterator[Finding]:
    """What the table names is there."""
    options = options_of(job)
    classes = "workloadpriorityclasses" if options.queue else "priorityclasses"
    secrets = dict.fromkeys(place.partition("/")[0] for place in options.secrets.values())
    named = [
        *(("secrets", name, "secrets") for name in secrets),
        *(("secrets", name, "image_pull_secrets") for name in options.image_pull_secrets),
        ("serviceaccounts", options.service_account, "service_account"),
        (classes, options.priority_class, "priority_class"),
    ]
    for kind, name, key in named:
        if name is not None and _seen(kubectl, kind, name) is None:
            yield _finding(
                f"{kind}/{name}",
                f"clusters.{job.cluster.name}.kubernetes.{key} names it, and there is none",
                f"`kubectl get {kind} --namespace={kubectl.namespace}` lists those there are",
            )


def _seen(kubectl: Kubectl, kind: str, name: str) -> Document | None:
    """An object, or an empty one where the caller may not look at it."""
    try:
        return kubectl.get(kind, name)
    except KubectlError as error:
        if error.reason != "Forbidden":
            raise
        return {}


def _claims(kubectl: Kubectl, job: Job) -> Iterator[Finding]:
    options = options_of(job)
    several = job.nodes > 1 or options.supervisor == "pod"
    for volume in options.volumes:
        if volume.claim is None:
            continue
        about = f"persistentvolumeclaims/{volume.claim}"
        claim = kubectl.get("persistentvolumeclaims", volume.claim)
        if claim is None:
            yield _finding(about, "there is none", "make it, with access mode ReadWriteMany")
            continue
        if (phase := text_at(claim, "status", "phase")) != "Bound":
            advice = f"kubectl describe pvc {volume.claim} --namespace={kubectl.namespace}"
            yield _finding(about, f"it is {phase or 'not bound'}, and pods would wait", advice)
        modes = value_at(claim, "spec", "accessModes")
        good = {"ReadWriteMany"} | ({"ReadOnlyMany"} if volume.read_only else set())
        if several and isinstance(modes, list) and good.isdisjoint(modes):
            yield _finding(
                about,
                f"its access mode is {', '.join(map(str, modes))}: only one node could mount it",
                "a volume that many nodes mount is ReadWriteMany: NFS, Lustre, FSx, Filestore",
            )


def _queue(kubectl: Kubectl, job: Job) -> Iterator[Finding]:
    """Kueue is there, and the queue could ever hold the job."""
    options = options_of(job)
    if options.queue is None:
        return
    about = f"queue {options.queue}"
    if kubectl.raw(f"/apis/{APIS['localqueues']}") is None:
        yield _finding(about, "Kueue is not there, or older than 0.15", "install it; or no queue")
        return
    queue = kubectl.get("localqueues", options.queue)
    if queue is None:
        advice = f"`kubectl get localqueues --namespace={kubectl.namespace}` lists them"
        yield _finding(about, "there is no such LocalQueue", advice)
        return
    if condition(queue, "Active").get("status") == "False":
        why = text_at(condition(queue, "Active"), "message")
        yield _finding(
            about, f"it takes no jobs: {why}", "the cluster's administrator can start it"
        )
    name = text_at(queue, "spec", "clusterQueue")
    quotas = kubectl.get("clusterqueues", name)
    for resource, asked in pod_resources(job).items():
        needed = (quantity(asked) or 0.0) * job.nodes
        most = _most(quotas, resource)
        if most is None:
            message = f"its ClusterQueue {name} has no quota of {resource}"
            advice = f"unless Kueue's own configuration leaves {resource} out, the job never starts"
            yield _finding(about, message, advice, wrong=False)
        elif needed > most:
            message = (
                f"the job asks for {needed:g} {resource}, and ClusterQueue {name} has {most:g}"
            )
            yield _finding(
                about, message, "fewer nodes, or another queue: it would wait without end"
            )


def _most(queue: Document | None, resource: str) -> float | None:
    """What a ClusterQueue can give one job of a resource, borrowed of its cohort too; None where
    it has no quota of it."""
    found: list[float] = []
    for group in rows_at(queue, "spec", "resourceGroups"):
        for flavor in rows_at(group, "flavors"):
            for each in rows_at(flavor, "resources"):
                if each.get("name") == resource:
                    borrowed = 0.0
                    if text_at(queue, "spec", "cohortName"):
                        limit = each.get("borrowingLimit")
                        borrowed = float("inf") if limit is None else quantity(limit) or 0.0
                    found.append((quantity(each.get("nominalQuota")) or 0.0) + borrowed)
    return max(found, default=None)


def _room(kubectl: Kubectl, job: Job) -> Iterator[Finding]:
    """There are nodes that a pod fits on."""
    nodes = kubectl.list("nodes")
    why = [_misfit(node, job) for node in nodes]
    fitting = why.count("")
    if fitting < job.nodes:
        reasons = Counter(filter(None, why)).most_common()
        words = "; ".join(f"{count} {reason}" for reason, count in reasons)
        yield _finding(
            "nodes",
            f"{fitting} of {len(nodes)} nodes could have a pod of the job, which needs {job.nodes}"
            + (f": {words}" if words else ""),
            "pods wait until there are more, unless nodes are added on demand",
            wrong=False,
        )


def _misfit(node: Document, job: Job) -> str:
    """Why a node cannot have a pod of the job, even if it were idle; "" where it can."""
    options = options_of(job)
    if not is_true(node, "Ready") or value_at(node, "spec", "unschedulable"):
        return "not ready, or cordoned"
    labels = table_at(node, "metadata", "labels")
    for key, value in options.node_selector.items():
        if labels.get(key) != value:
            return f"without label {key}={value}"
    for taint in rows_at(node, "spec", "taints"):
        hard = taint.get("effect") in ("NoSchedule", "NoExecute")
        if hard and not any(_tolerates(each, taint) for each in options.tolerations):
            return f"with taint {text_at(taint, 'key')}"
    for name, asked in pod_resources(job).items():
        has = quantity(value_at(node, "status", "allocatable", name)) or 0.0
        if has < (quantity(asked) or 0.0):
            return f"with too little {name}"
    return ""


def _tolerates(given: KubernetesToleration, taint: Mapping[str, object]) -> bool:
    pairs = ((given.key, "key"), (given.value, "value"), (given.effect, "effect"))
    return all(wanted is None or wanted == taint.get(key) for wanted, key in pairs)


def _row(node: Document) -> ClusterNode:
    cordoned = bool(value_at(node, "spec", "unschedulable"))
    ready = is_true(node, "Ready")
    has = table_at(node, "status", "allocatable")
    state = ("ready" if ready else "not ready") + (", cordoned" if cordoned else "")
    pool = table_at(node, "metadata", "labels").get("node.kubernetes.io/instance-type", "")
    taints = [text_at(taint, "key") for taint in rows_at(node, "spec", "taints")]
    return ClusterNode(
        name_of(node),
        state,
        str(pool),
        str(has.get("cpu", "")),
        ",".join(f"{name}:{count}" for name, count in has.items() if "/" in name),
        text_at(condition(node, "Ready"), "message") if not ready else ", ".join(taints),
    )


CHECKS: tuple[Callable[[Kubectl, Job], Iterator[Finding]], ...] = (
    _kubectl,
    _jobset,
    _namespace,
    _rights,
    _named,
    _claims,
    _queue,
    _room,
)
