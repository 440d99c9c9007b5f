"""Why a run on Kubernetes waits, in one line for people."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from trainkit.launch.kubernetes.documents import (
    Document,
    condition,
    is_true,
    name_of,
    rows_at,
    text_at,
    uid_of,
    value_at,
)
from trainkit.launch.kubernetes.kubectl import Kubectl, KubectlError
from trainkit.launch.kubernetes.manifest import QUEUE_LABEL

JOB_UID_LABEL = "kueue.x-k8s.io/job-uid"  # of a Workload
LOOKED_AT = 3  # objects of a kind whose events are read

VISIBILITY = "/apis/visibility.kueue.x-k8s.io/v1beta2"  # Kueue's own API server, where it has one
# reasons of the condition QuotaReserved (Kueue, workload_types.go); older versions say Pending
QUEUED = {
    "ExceedsMaxQuota": "will never run: it asks for more than its queue could ever give",
    "WaitingForQuota": "waits for quota that others use",
    "NoMatchingFlavor": "will not run as it is: no flavor of its queue has such nodes",
    "TopologyPlacementFailed": "waits for nodes that are near enough to each other",
    "WaitingForPreemptedWorkloads": "waits until those that make room for it have ended",
    "Misconfigured": "its queue is not set up",
    "Inadmissible": "its queue is not set up, or stopped",
    "Suspended": "its queue is stopped",
    "WaitingForPodsReady": "waits until the pods of an earlier one are ready",
}
NEVER = "maximum capacity"  # in the message of older versions
# what kubelet says of a container that waits, the worst first
CONTAINERS = {
    "InvalidImageName": "the image's name is none",
    "ImageInspectError": "the image is broken on the node",
    "ErrImageNeverPull": "the image is not on the node, which may not pull it",
    "ErrImagePull": "the image cannot be pulled",
    "ImagePullBackOff": "the image cannot be pulled",
    "CreateContainerConfigError": "a secret that it needs is missing",
    "CreateContainerError": "its container cannot be made",
    "RunContainerError": "its container cannot be started",
}
DENIED = re.compile(r"denied|unauthorized|forbidden|authentication|\b401\b|\b403\b", re.IGNORECASE)
_NODES = re.compile(r"^0/(\d+) nodes are available: (.*?)\.?(?: preemption: .*)?$", re.DOTALL)
# words of kube-scheduler
NODE_WORDS = (
    (r"Insufficient (\S+)", r"with too little \1"),
    (r"node\(s\) had untolerated taint(?:\(s\)|s)? ?\{([^}:]+)[^}]*\}", r"with taint \1"),
    (r"node\(s\) had untolerated taint(?:\(s\)|s)?", "with taints"),
    (r"node\(s\) didn't match Pod's node affinity/selector", "of another kind, or left out"),
    (r"node\(s\) didn't match pod anti-affinity rules", "with a pod of the run already"),
    (r"node\(s\) were unschedulable", "cordoned"),
    (r"node\(s\) had volume node affinity conflict", "that its volume cannot be mounted on"),
)


def ask_why_waiting(
    kubectl: Kubectl, seen: Document, pods: Sequence[Document], others: Sequence[Document]
) -> str:
    """Why a JobSet, or a Job of a stage, waits; "" where nothing waits. Raises KubectlError.

    Args:
        kubectl: its namespace.
        seen: it.
        pods: of it, that are pending.
        others: further objects whose events may tell it.
    """
    workload = None
    if text_at(seen, "metadata", "labels", QUEUE_LABEL):
        selector = f"{JOB_UID_LABEL}={uid_of(seen)}"
        workload = next(iter(kubectl.list("workloads", selector)), None)
    asked = (*pods[:LOOKED_AT], *others[:LOOKED_AT])
    events = [event for each in asked for event in kubectl.events(uid_of(each))]
    return waiting_reason(kubectl, seen, workload, pods, events)


def waiting_reason(
    kubectl: Kubectl,
    jobset: Document,
    workload: Document | None,
    pods: Sequence[Document],
    events: Sequence[Document],
) -> str:
    """Why a JobSet waits; "" where nothing waits.

    Args:
        kubectl: asked for its place in the queue, once, where it has one.
        jobset: it.
        workload: what Kueue has made of it; None: nothing, or there is no Kueue.
        pods: of the JobSet.
        events: of the JobSet's Jobs and pods.
    """
    if workload is not None and not is_true(workload, "Admitted"):
        return _in_queue(kubectl, workload)
    if value_at(jobset, "spec", "suspend"):
        queued = workload is None and text_at(jobset, "metadata", "labels", QUEUE_LABEL)
        if queued:
            return "Kueue has not seen it yet; if that stays so, it does not manage JobSets here"
        return "it is suspended"
    reasons = Counter(filter(None, (_of_pod(pod, events) for pod in pods)))
    if reasons:
        reason, count = reasons.most_common(1)[0]
        return f"{count} of {len(pods)} pods: {reason}" if len(pods) > 1 else reason
    if not pods:
        return _not_made(events)
    return ""


def _in_queue(kubectl: Kubectl, workload: Document) -> str:
    reserved = condition(workload, "QuotaReserved")
    if value_at(workload, "spec", "active") is False:
        why = text_at(condition(workload, "Evicted"), "message")
        return f"Kueue has given it up: {why}; `resume` puts it into the queue again"
    if reserved.get("status") == "True":
        checks = rows_at(workload, "status", "admissionChecks")
        open_ones = [each for each in checks if each.get("state") != "Ready"]
        named = [f"{text_at(each, 'name')}: {text_at(each, 'message')}" for each in open_ones]
        return f"it has quota, and waits for Kueue's admission check {'; '.join(named) or '...'}"
    message = text_at(reserved, "message")
    words = QUEUED.get(text_at(reserved, "reason"), "waits in its queue")
    if NEVER in message:
        words = QUEUED["ExceedsMaxQuota"]
    if is_true(workload, "Preempted"):
        words = f"was preempted ({text_at(condition(workload, 'Preempted'), 'reason')}), {words}"
    if at := text_at(workload, "status", "requeueState", "requeueAt"):
        words += f", not before {at}"
    place = _place(kubectl, workload) if words != QUEUED["ExceedsMaxQuota"] else ""
    return f"{words}{place}" + (f" ({message})" if message else "")


def _place(kubectl: Kubectl, workload: Document) -> str:
    """Its place among those that wait, where Kueue tells."""
    queue = text_at(workload, "spec", "queueName")
    there = f"{VISIBILITY}/namespaces/{kubectl.namespace}/localqueues/{queue}/pendingworkloads"
    try:
        rows = rows_at(kubectl.raw(there), "items")
    except KubectlError:
        return ""  # it is only a number
    found = [row for row in rows if name_of(row) == name_of(workload)]
    place = value_at(found[0], "positionInLocalQueue") if found else None
    return f", as number {place + 1} of queue {queue}" if isinstance(place, int) else ""


def _of_pod(pod: Document, events: Sequence[Document]) -> str:
    """Why a pod does not run; "" where it does, or is over."""
    if text_at(pod, "status", "phase") != "Pending":
        return ""
    placed = condition(pod, "PodScheduled")
    if placed.get("status") != "True":
        if text_at(placed, "reason") == "SchedulingGated":
            return "waits for Kueue to choose its node"
        return node_words(text_at(placed, "message")) or "waits for the scheduler"
    for status in rows_at(pod, "status", "containerStatuses"):
        reason = text_at(status, "state", "waiting", "reason")
        message = text_at(status, "state", "waiting", "message")
        if reason in CONTAINERS:
            asks = "; is image_pull_secrets right?" if DENIED.search(message) else ""
            return f"{CONTAINERS[reason]} ({message or reason}){asks}"
    own = [each for each in events if text_at(each, "involvedObject", "uid") == uid_of(pod)]
    for event in reversed(own):
        message = text_at(event, "message")
        if "Multi-Attach" in message:
            return f"its volume is mounted on another node, and only one may have it ({message})"
        if text_at(event, "reason") in ("FailedMount", "FailedAttachVolume"):
            return f"a volume cannot be mounted ({message})"
        if text_at(event, "reason").startswith("Failed"):
            return message
    return "its node fetches the image, and starts it"


def node_words(message: str) -> str:
    """kube-scheduler's count of nodes in words: "no node has room: of 12, 4 with too little
    cpu, ..."; other messages as they are."""
    found = _NODES.match(message)
    if found is None:
        return message
    words = found[2]
    for pattern, meant in NODE_WORDS:
        words = re.sub(pattern, meant, words)
    return f"no node has room for it: of {found[1]}, {words}"


def _not_made(events: Sequence[Document]) -> str:
    """Why there are no pods, as events of their Job say."""
    failed = [text_at(each, "message") for each in events if each.get("reason") == "FailedCreate"]
    if not failed:
        return "its pods are being made"
    quota = "exceeded quota" in failed[-1]
    words = "the namespace's quota is used up" if quota else "its pods cannot be made"
    return f"{words} ({failed[-1]})"
