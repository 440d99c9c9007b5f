"""Why a run waits, in one line."""

from __future__ import annotations

import pytest

from tests.launch.kubernetes.api_stub import ApiStub
from trainkit.launch.kubernetes.documents import Document
from trainkit.launch.kubernetes.kubectl import Kubectl
from trainkit.launch.kubernetes.why_waiting import node_words, waiting_reason

HERE = Kubectl("team", "stub", patience=0.0)
QUEUED: Document = {
    "metadata": {"labels": {"kueue.x-k8s.io/queue-name": "gpus"}},
    "spec": {"suspend": True},
}
GOING: Document = {"metadata": {}, "spec": {"suspend": False}}


def workload(reason: str, message: str = "", **more: object) -> Document:
    reserved = {"type": "QuotaReserved", "status": "False", "reason": reason, "message": message}
    active = more.pop("active", True)
    return {
        "metadata": {"name": "jobset-a"},
        "spec": {"queueName": "gpus", "active": active},
        "status": {"conditions": [reserved], **more},
    }


def pod(message: str = "", *, reason: str = "Unschedulable", waiting: object = None) -> Document:
    placed = {"type": "PodScheduled", "status": "False", "reason": reason, "message": message}
    if waiting is not None:
        placed["status"] = "True"
    return {
        "metadata": {"name": "p", "uid": "7"},
        "status": {
            "phase": "Pending",
            "conditions": [placed],
            "containerStatuses": [{"state": {"waiting": waiting}}],
        },
    }


RESERVED = {"type": "QuotaReserved", "status": "True"}
PREEMPTED = {"type": "Preempted", "status": "True", "reason": "InClusterQueue"}


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (workload("ExceedsMaxQuota", "16 > 8"), "will never run: it asks for more than its queue"),
        (workload("Pending", "request > maximum capacity (16 > 8)"), "will never run"),
        (workload("WaitingForQuota"), "waits for quota that others use, as number 3 of queue gpus"),
        (workload("TopologyPlacementFailed"), "near enough to each other"),
        (workload("Suspended"), "its queue is stopped"),
        (workload("Other", "words"), "waits in its queue, as number 3 of queue gpus (words)"),
        (workload("x", active=False), "Kueue has given it up"),
        (
            workload("x", conditions=[PREEMPTED], requeueState={"requeueAt": "12:00"}),
            "was preempted (InClusterQueue), waits in its queue, not before 12:00",
        ),
        (
            workload(
                "x", conditions=[RESERVED], admissionChecks=[{"name": "nodes", "message": "m"}]
            ),
            "waits for Kueue's admission check nodes: m",
        ),
        (None, "Kueue has not seen it yet"),
    ],
)
def test_in_the_queue(found: Document | None, said: str, stub: ApiStub) -> None:
    place = {"metadata": {"name": "jobset-a"}, "positionInLocalQueue": 2}
    path = "/apis/visibility.kueue.x-k8s.io/v1beta2/namespaces/team/localqueues/gpus"
    stub.answers = {f"GET {path}/pendingworkloads": [{"items": [place]}]}
    assert said in waiting_reason(HERE, QUEUED, found, [], [])
    stub.answers = {}  # without Kueue's own server
    assert said.partition(", as number")[0] in waiting_reason(HERE, QUEUED, found, [], [])


SCHEDULER = (
    "0/12 nodes are available: 4 Insufficient nvidia.com/gpu, 7 node(s) had untolerated taint"
    " {dedicated: cpu}, 1 node(s) were unschedulable. preemption: 0/12 nodes are available: 12 No"
    " preemption victims found for incoming pod."
)
IMAGE = {"reason": "ImagePullBackOff", "message": 'Back-off pulling "r.io/x": 401 Unauthorized'}
MOUNT = {
    "reason": "FailedAttachVolume",
    "message": "Multi-Attach error for volume pvc-1",
    "involvedObject": {"uid": "7"},
}


@pytest.mark.parametrize(
    ("pods", "events", "said"),
    [
        (
            [pod(SCHEDULER)] * 2,
            [],
            "2 of 2 pods: no node has room for it: of 12, 4 with too little nvidia.com/gpu, 7 with"
            " taint dedicated, 1 cordoned",
        ),
        ([pod(reason="SchedulingGated")], [], "waits for Kueue to choose its node"),
        ([pod(waiting=IMAGE)], [], "is image_pull_secrets right?"),
        (
            [pod(waiting={"reason": "CreateContainerConfigError", "message": 'secret "hub"'})],
            [],
            'a secret that it needs is missing (secret "hub")',
        ),
        ([pod(waiting={"reason": "ContainerCreating"})], [MOUNT], "only one may have it"),
        (
            [pod(waiting={"reason": "ContainerCreating"})],
            [{**MOUNT, "message": "timed out", "involvedObject": {"uid": "8"}}],
            "its node fetches the image",
        ),
        (
            [],
            [{"reason": "FailedCreate", "message": "forbidden: exceeded quota: q"}],
            "the namespace's quota is used up",
        ),
        ([], [], "its pods are being made"),
        ([{"status": {"phase": "Running"}}], [MOUNT], ""),
    ],
)
def test_pods(pods: list[Document], events: list[Document], said: str) -> None:
    found = waiting_reason(HERE, GOING, None, pods, events)
    assert said in found and bool(said) == bool(found)


def test_other_words_stay() -> None:
    assert node_words("no nodes registered") == "no nodes registered"
