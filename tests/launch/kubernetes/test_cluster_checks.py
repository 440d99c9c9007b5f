"""What `doctor`, `rehearse` and `train` know of a cluster before anything is made."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch.kubernetes.api_stub import ApiStub
from tests.launch.kubernetes.pod_jobs import pod_job
from trainkit.launch.kubernetes.cluster_checks import cluster_nodes, look_at_cluster
from trainkit.launch.kubernetes.kubectl import Kubectl

HERE = Kubectl("team", "stub", patience=0.0)
CORE = "GET /api/v1/namespaces/team"
KUEUE = "GET /apis/kueue.x-k8s.io/v1beta2"
REVIEW = "POST /apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
RULES = REVIEW.replace("access", "rules")
RULE = {"verbs": ["get", "list"], "apiGroups": ["*"], "resources": ["jobsets", "jobs", "pods"]}
CLAIM = {"spec": {"accessModes": ["ReadWriteMany"]}, "status": {"phase": "Bound"}}
ALLOCATABLE = {"cpu": "96", "memory": "2Ti", "nvidia.com/gpu": "8", "rdma/ib": "1"}
THERE: dict[str, object] = {"metadata": {}}


def node(name: str, **has: object) -> dict[str, object]:
    """A node that the job `gpus` fits on."""
    spec = {"taints": [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}], **has}
    return {
        "metadata": {"name": name, "labels": {"cloud.com/pool": "h100"}},
        "spec": spec,
        "status": {
            "allocatable": ALLOCATABLE,
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


def quota(gpus: str, **more: object) -> dict[str, object]:
    resources: list[object] = [{"name": "nvidia.com/gpu", "nominalQuota": gpus, **more}]
    resources += [{"name": name, "nominalQuota": "10Ti"} for name in ("cpu", "memory", "rdma/ib")]
    flavors = [{"name": "h100", "resources": resources}]
    return {"spec": {"resourceGroups": [{"flavors": flavors}], "cohortName": "all"}}


def well() -> dict[str, list[object]]:
    """A cluster that the job `gpus` runs on, which has 4 nodes."""
    return {
        "GET /apis/jobset.x-k8s.io/v1alpha2": [THERE],
        KUEUE: [THERE],
        "GET /api/v1/namespaces/team": [THERE],
        RULES: [{"status": {"resourceRules": [RULE]}}],
        REVIEW: [{"status": {"allowed": True}}],
        f"{CORE}/secrets/hub": [THERE],
        f"{CORE}/secrets/wandb.team": [THERE],
        f"{CORE}/secrets/registry": [THERE],
        f"{CORE}/serviceaccounts/trainkit": [THERE],
        f"{KUEUE}/workloadpriorityclasses/high": [THERE],
        f"{CORE}/persistentvolumeclaims/shared": [CLAIM],
        f"{KUEUE}/namespaces/team/localqueues/gpus": [{"spec": {"clusterQueue": "all-gpus"}}],
        f"{KUEUE}/clusterqueues/all-gpus": [quota("32", borrowingLimit="0")],
        "GET /api/v1/nodes": [{"items": [node(f"n{number}") for number in range(4)]}],
    }


def test_a_cluster_that_is_well(stub: ApiStub, tmp_path: Path) -> None:
    stub.answers = well()
    assert look_at_cluster(HERE, pod_job(tmp_path, "gpus")) == []
    (first, *_others) = cluster_nodes(HERE)
    assert (first.host, first.state, first.cpus, first.gres, first.reason) == (
        "n0",
        "ready",
        "96",
        "nvidia.com/gpu:8,rdma/ib:1",
        "nvidia.com/gpu",
    )
    assert {f"POST {asked.path}" for asked in stub.asked if asked.method != "GET"} == {
        REVIEW,
        RULES,
    }


INACTIVE = {"type": "Active", "status": "False", "message": "the queue is stopped"}
FORBIDDEN = 'nodes is forbidden: User "me" cannot list resource "nodes" in API group ""'
SMALL = node("n0") | {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}
CLAIMS = f"{CORE}/persistentvolumeclaims/shared"
QUEUES = f"{KUEUE}/namespaces/team/localqueues/gpus"
ABSENT = (404, "no")
WRONG: list[dict[str, tuple[object, str]]] = [
    {
        "GET /apis/jobset.x-k8s.io/v1alpha2": (ABSENT, "JobSet: the cluster does not serve"),
        "GET /api/v1/namespaces/team": (ABSENT, "namespace team: there is none"),
        f"{CORE}/secrets/hub": (ABSENT, "secrets/hub: clusters.here.kubernetes.secrets names it"),
        CLAIMS: (ABSENT, "shared: there is none"),
        KUEUE: (ABSENT, "queue gpus: Kueue is not there, or older"),
    },
    {
        f"{CORE}/secrets/registry": (ABSENT, "kubernetes.image_pull_secrets names it"),
        CLAIMS: (CLAIM | {"status": {"phase": "Pending"}}, "it is Pending, and pods would wait"),
        QUEUES: (ABSENT, "queue gpus: there is no such LocalQueue"),
    },
    {
        REVIEW: (
            {"status": {}},
            "team: you may not create, watch, patch, delete jobsets there",
        ),
        f"{CORE}/serviceaccounts/trainkit": (ABSENT, "serviceaccounts/trainkit"),
        f"{KUEUE}/workloadpriorityclasses/high": (ABSENT, "kubernetes.priority_class names it"),
        CLAIMS: (
            CLAIM | {"spec": {"accessModes": ["ReadWriteOnce"]}},
            "its access mode is ReadWriteOnce: only one node could mount it",
        ),
        QUEUES: (
            {"spec": {"clusterQueue": "all-gpus"}, "status": {"conditions": [INACTIVE]}},
            "it takes no jobs: the queue is stopped",
        ),
        f"{KUEUE}/clusterqueues/all-gpus": (
            quota("16", borrowingLimit="8"),
            "the job asks for 32 nvidia.com/gpu, and ClusterQueue all-gpus has 24",
        ),
    },
]


@pytest.mark.parametrize("spoiled", WRONG)
def test_what_is_wrong(
    spoiled: dict[str, tuple[object, str]], stub: ApiStub, tmp_path: Path
) -> None:
    assert set(spoiled) < set(well())
    stub.answers = well() | {place: [answer] for place, (answer, _) in spoiled.items()}
    found = look_at_cluster(HERE, pod_job(tmp_path, "gpus"))
    for _, said in spoiled.values():
        (one,) = (each for each in found if said in f"{each.host}: {each.message}")
        assert one.wrong and one.advice


def test_what_is_only_worth_knowing(stub: ApiStub, tmp_path: Path) -> None:
    stub.answers = well() | {
        "GET /api/v1/nodes": [(403, FORBIDDEN)],
        f"{KUEUE}/clusterqueues/all-gpus": [{"spec": {}}],
    }
    found = look_at_cluster(HERE, pod_job(tmp_path / "1", "gpus"))
    assert not any(each.wrong for each in found)
    said = " ".join(each.message for each in found)
    assert "no quota of nvidia.com/gpu" in said and 'cannot list resource "nodes"' in said
    nodes = [node("n1"), SMALL, node("n2", unschedulable=True), node("n3") | {"metadata": {}}]
    stub.answers["GET /api/v1/nodes"] = [{"items": nodes}]
    (last,) = look_at_cluster(HERE, pod_job(tmp_path / "2", "gpus"))[-1:]
    assert not last.wrong and last.message == (
        "1 of 4 nodes could have a pod of the job, which needs 4: 1 with too little cpu; 1 not"
        " ready, or cordoned; 1 without label cloud.com/pool=h100"
    )
    taints = [[{"key": key, "effect": "NoExecute"}] for key in ("x/y", "z")]
    stub.answers["GET /api/v1/nodes"] = [{"items": [node("n", taints=each) for each in taints]}]
    (last,) = look_at_cluster(HERE, pod_job(tmp_path / "3", "taints"))[-1:]
    assert "1 of 2 nodes" in last.message and "1 with taint z" in last.message


def test_without_a_cluster_there_is_one_finding(
    stub: ApiStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = pod_job(tmp_path / "job", "gpus")
    (found,) = look_at_cluster(Kubectl("team", "other"), job)
    assert "does not exist" in found.message and found.wrong
    (tmp_path / "kubectl").write_text('#!/bin/sh\necho \'{"gitVersion": "v1.27.1"}\'\n')
    (tmp_path / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    old = look_at_cluster(HERE, job)
    assert old[0].message == "kubectl 1.27 is too old"
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    (found,) = look_at_cluster(HERE, job)
    assert found.message == "there is no kubectl here" and "1.28" in found.advice
