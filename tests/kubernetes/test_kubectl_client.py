"""What trainkit writes and asks, against the stand-in of a cluster: documents are taken, and
nothing is missed while the server has trouble."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.kubernetes.accounts import Rule
from tests.kubernetes.cluster import NAMESPACE, KubernetesCluster
from tests.launch.kubernetes.pod_jobs import TABLES, job_of, run_of
from trainkit.jobs.schema import Job
from trainkit.launch.kubernetes.cluster_checks import cluster_nodes, look_at_cluster
from trainkit.launch.kubernetes.documents import Document, name_of, table_at, uid_of
from trainkit.launch.kubernetes.kubectl import Kubectl, KubectlError
from trainkit.launch.kubernetes.manifest import array_manifest, jobset_manifest, jobset_name
from trainkit.launch.kubernetes.why_waiting import waiting_reason

HERE = Kubectl(NAMESPACE, patience=10.0)


@pytest.fixture
def kube(paper: KubernetesCluster, monkeypatch: pytest.MonkeyPatch) -> KubernetesCluster:
    """The one that kubectl asks."""
    monkeypatch.setenv("KUBECONFIG", str(paper.kubeconfig))
    return paper


def job_here(folder: Path, pods: str = 'queue = "queue"\n', nodes: int = 2) -> Job:
    table = f'namespace = "{NAMESPACE}"\nimage = "a"\n{pods}'
    volumes = 'volumes = [{ claim = "shared", mount = "/shared" }]\n'
    gpus = 'device = "cuda"\ngpus_per_node = 8'
    return job_of(folder, (gpus, table + volumes, f"nodes = {nodes}\nretry = {{ infra = 9 }}"))


def submitted(job: Job) -> Document:
    run = run_of(job)
    return HERE.create(jobset_manifest(job, run, jobset_name(job, run, 1)))


def eventually(holds: Callable[[], object], what: str) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end, what
        time.sleep(0.05)


@pytest.mark.parametrize("which", TABLES)
def test_the_server_takes_what_is_written(
    which: str, kube: KubernetesCluster, tmp_path: Path
) -> None:
    cluster, pods, job = TABLES[which]
    there = pods.replace('namespace = "team"\n', "") + f'namespace = "{NAMESPACE}"\n'
    made = job_of(tmp_path / "job", (cluster, there, job))
    found = submitted(made)
    assert uid_of(submitted(made)) == uid_of(found)  # the same again
    array = array_manifest(made, "prep", ["true"], 3, 2, run="x")
    assert HERE.create(array)["kind"] == "Job"
    assert HERE.delete("jobsets", name_of(found), uid=uid_of(found))
    eventually(lambda: HERE.get("jobsets", name_of(found)) is None, "deletion")
    assert not HERE.delete("jobsets", name_of(found), uid=uid_of(found))


def test_nothing_is_missed(kube: KubernetesCluster, tmp_path: Path) -> None:
    """Streams cut, history forgotten, the server away, 429, a lost answer: pods that come and go
    meanwhile are all seen."""
    job = job_here(tmp_path / "job")
    assert look_at_cluster(HERE, job) == []
    kube.server.faults.lose_reply()
    jobset = submitted(job)
    seen: dict[str, str] = {}
    stop = threading.Event()

    def follow() -> None:
        for event in HERE.watch("pods", f"trainkit/run={run_of(job).id}", tick=0.1):
            if stop.is_set():
                return
            if event is not None and event.type == "DELETED":
                assert seen.pop(uid_of(event.object)) == name_of(event.object)
            elif event is not None:
                seen[uid_of(event.object)] = name_of(event.object)

    def whole(gone: str = "") -> bool:
        there = {str(pod["metadata"]["uid"]) for pod in kube.pods()}
        return len(there) == 2 and there == set(seen) and gone not in there

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        eventually(whole, "the first pods")
        trouble: list[Callable[[], object]] = [
            kube.server.cut_watches,
            kube.server.expire,
            lambda: kube.server.restart(0.5),
            lambda: kube.server.throttle(1.0),
            lambda: kube.server.fail_next(500, 2, method="GET"),
        ]
        for number, begin in enumerate(itertools.chain(trouble, trouble)):
            gone = kube.pods()[number % 2]["metadata"]
            begin()
            kube.delete_pod(gone["name"], 0)
            eventually(partial(whole, gone["uid"]), f"trouble {number}: {seen}")
    finally:
        stop.set()
        thread.join()
    assert HERE.patch("jobsets", name_of(jobset), {"spec": {"suspend": True}})["spec"]
    assert HERE.delete("jobsets", name_of(jobset), uid=uid_of(jobset))
    eventually(lambda: not kube.pods() and not HERE.list("workloads"), "an empty cluster")


def test_what_is_refused(
    kube: KubernetesCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_here(tmp_path / "job")
    document = jobset_manifest(job, run_of(job), "a")
    spoiled = {**document, "spec": {**table_at(document, "spec"), "suspendd": True}}
    with pytest.raises(KubectlError, match="suspendd"):
        HERE.create(spoiled)
    monkeypatch.setenv("KUBECONFIG", str(kube.user("me", [Rule(("get", "list"), ("jobsets",))])))
    with pytest.raises(KubectlError) as caught:
        HERE.create(document)
    assert "--verb=create --resource=jobsets.jobset.x-k8s.io" in caught.value.hint
    assert "--user=me" in caught.value.hint
    found = look_at_cluster(HERE, job)
    said = [each.message for each in found if each.wrong]
    assert "you may not create, watch, patch, delete jobsets there" in said
    assert any("cannot list resource" in each.message and not each.wrong for each in found)


def test_why_it_waits(kube: KubernetesCluster, tmp_path: Path) -> None:
    assert [node.gres for node in cluster_nodes(HERE)] == ["nvidia.com/gpu:8"] * 3

    def reason(job: Job) -> str:
        jobset = submitted(job)
        selector = f"trainkit/run={run_of(job).id}"

        def asked() -> str:
            workloads = HERE.list("workloads", f"kueue.x-k8s.io/job-uid={uid_of(jobset)}")
            pods = HERE.list("pods", selector)
            jobs = HERE.list("jobs", selector)
            events = [event for each in (*jobs, *pods) for event in HERE.events(uid_of(each))]
            now = HERE.get("jobsets", name_of(jobset)) or jobset
            return waiting_reason(HERE, now, workloads[0] if workloads else None, pods, events)

        words = "its pods are being made"
        end = time.monotonic() + 20
        while words.startswith(("its pods are", "its node", "Kueue has not")):
            assert time.monotonic() < end, words
            words = asked()
        HERE.delete("jobsets", name_of(jobset), uid=uid_of(jobset))
        eventually(lambda: not HERE.list("pods", selector), "pods gone")
        return words

    too_many = job_here(tmp_path / "1", nodes=4)
    (wrong,) = (each for each in look_at_cluster(HERE, too_many) if each.wrong)
    assert "32 nvidia.com/gpu, and ClusterQueue everything has 24" in wrong.message
    assert reason(too_many).startswith("will never run")
    no_room = job_here(tmp_path / "2", 'resources = { "nvidia.com/gpu" = 9 }\n')
    assert "no node has room for it: of 3, 3 with too little nvidia.com/gpu" in reason(no_room)
    no_secret = job_here(tmp_path / "3", 'secrets = { A = "none/a" }\n')
    assert "a secret that it needs is missing" in reason(no_secret)
    kube.quota("small", pods="0")
    assert "the namespace's quota is used up" in reason(job_here(tmp_path / "4", ""))
