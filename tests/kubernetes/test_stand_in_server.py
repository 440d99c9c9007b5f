"""The API server of the stand-in: what it refuses, its watches and lists, and its faults."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.kubernetes.accounts import Rule
from tests.kubernetes.cluster import NAMESPACE, KubernetesCluster
from tests.kubernetes.kinds import is_true
from tests.kubernetes.manifests import (
    FAIL,
    create,
    jobset,
    name_of,
    pod_spec,
    refusal,
    running,
    wait_running,
)
from tests.limits import HANGS


def test_bad_objects_are_refused_as_webhooks_refuse_them(paper: KubernetesCluster) -> None:
    create(paper, jobset())
    assert "AlreadyExists" in refusal(paper, jobset())
    long = jobset("a" * 55)
    assert "pod names generated for this JobSet will exceed 63" in refusal(paper, long)
    wrong = jobset("wrong")
    wrong["spec"]["replicatedJobz"] = []
    assert 'unknown field "spec.replicatedJobz"' in refusal(paper, wrong)
    paper.kubectl("apply", "-f", "-", input=json.dumps(jobset()))
    changed = jobset(command=["true"])
    said = refusal(paper, changed, "replace")
    assert "spec.replicatedJobs: Invalid value: field is immutable" in said
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}}
    bad = pod_spec() | {"restartPolicy": "OnFailure"}
    job["spec"] = {"podFailurePolicy": {"rules": [FAIL]}, "template": {"spec": bad}}
    assert 'only "Never" is supported when podFailurePolicy' in refusal(paper, job)
    paper.kubectl("patch", "jobset", "run", "--type=merge", "-p", '{"spec":{"suspend":true}}')
    paper.wait(lambda: is_true(paper.get("jobsets", "run"), "Suspended"), "the suspension")
    strategic = ("patch", "jobset", "run", "--type=strategic", "-p", "{}")
    assert paper.try_kubectl(*strategic).returncode != 0


def test_server_side_apply_knows_who_owns_what(paper: KubernetesCluster) -> None:
    manifest = jobset()
    manifest["spec"]["suspend"] = True
    apply = ("apply", "--server-side", "--field-manager=trainkit", "-f", "-")
    paper.kubectl(*apply, input=json.dumps(manifest))
    paper.kubectl(*apply, input=json.dumps(manifest))
    paper.kubectl("patch", "jobset", "run", "--type=merge", "-p", '{"spec":{"suspend":false}}')
    done = paper.try_kubectl(*apply, input=json.dumps(manifest))
    assert done.returncode != 0 and ".spec.suspend" in done.stderr
    paper.kubectl(*apply, "--force-conflicts", input=json.dumps(manifest))
    assert paper.get("jobsets", "run")["spec"]["suspend"] is True


def test_rights_are_a_tokens(paper: KubernetesCluster) -> None:
    reader = paper.user("reader", [Rule(("get", "list", "watch"), ("pods", "jobsets"), NAMESPACE)])
    assert paper.kubectl("get", "pods", kubeconfig=reader) == ""
    denied = paper.try_kubectl("get", "nodes", kubeconfig=reader)
    assert 'User "reader" cannot list resource "nodes"' in denied.stderr
    assert "yes" in paper.kubectl("auth", "can-i", "get", "pods", kubeconfig=reader)
    no = paper.try_kubectl("auth", "can-i", "create", "jobsets.jobset.x-k8s.io", kubeconfig=reader)
    assert no.stdout.strip() == "no"
    assert "reader" in paper.kubectl("auth", "whoami", kubeconfig=reader)
    stranger = paper.write_kubeconfig(paper.folder / "stranger", "wrong")
    assert paper.try_kubectl("get", "pods", kubeconfig=stranger).returncode != 0


def test_the_server_can_be_slow_deaf_and_down(paper: KubernetesCluster) -> None:
    paper.server.fail_next(429, 2, path="/namespaces")
    assert NAMESPACE in paper.kubectl("get", "namespaces")  # kubectl tries again by itself
    assert [path for *_, path in paper.server.requests if "/namespaces" in path][2:]
    paper.server.throttle(0.5)
    assert NAMESPACE in paper.kubectl("get", "namespaces")
    paper.server.fail_next(504, method="GET", path="/pods")
    assert "wants this request to fail" in paper.try_kubectl("get", "pods").stderr
    paper.server.faults.lose_reply("POST")
    assert paper.try_kubectl("create", "-f", "-", input=json.dumps(jobset())).returncode != 0
    assert paper.get("jobsets", "run")  # it was done all the same
    paper.server.stop()
    assert "refused" in paper.try_kubectl("get", "pods").stderr
    paper.server.start()
    wait_running(paper)


def test_a_watch_that_is_too_old_gets_410(paper: KubernetesCluster) -> None:
    version = json.loads(paper.kubectl("get", "--raw", f"/api/v1/namespaces/{NAMESPACE}/pods"))
    version = version["metadata"]["resourceVersion"]
    path = f"/api/v1/namespaces/{NAMESPACE}/pods?watch=true&timeoutSeconds=600&resourceVersion="
    kubectl = ["kubectl", f"--kubeconfig={paper.kubeconfig}", "get", "--raw", path + version]
    watch = subprocess.Popen(kubectl, stdout=subprocess.PIPE, text=True)
    create(paper, jobset())
    wait_running(paper)
    assert watch.stdout is not None
    seen = 0
    while seen < 3:  # it may come to the server later than the pods
        seen += json.loads(watch.stdout.readline())["type"] == "ADDED"
    paper.server.expire()
    said = [json.loads(line) for line in watch.stdout]
    watch.wait(HANGS)
    assert said[-1]["type"] == "ERROR" and said[-1]["object"]["code"] == 410
    late = paper.try_kubectl("get", "--raw", path + version)
    assert late.returncode != 0 and "too old resource version" in late.stderr
    pod = name_of(paper.pods()[0])  # the controllers have begun anew
    paper.finish(pod, 1)
    wait_running(paper)


def test_a_watch_ends_without_an_error(paper: KubernetesCluster) -> None:
    watch = subprocess.Popen(
        ["kubectl", f"--kubeconfig={paper.kubeconfig}", "get", "pods", "-w", "-o", "name"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert watch.stdout is not None
    paper.wait(lambda: any("watch=true" in path for *_, path in paper.server.requests), "it")
    create(paper, jobset())
    line = watch.stdout.readline()
    assert line.startswith("pod/run-w-0-")
    paper.server.cut_watches()
    assert watch.wait(HANGS) == 0
    watch.stdout.close()
    paper.server.events_per_watch = 2
    path = f"/api/v1/namespaces/{NAMESPACE}/pods?watch=true&resourceVersion=1"
    assert len(paper.kubectl("get", "--raw", path).splitlines()) == 2


def test_long_lists_come_in_parts(paper: KubernetesCluster) -> None:
    for number in range(7):
        paper.apply({"kind": "ConfigMap", "metadata": {"name": f"map{number}"}})
    path = f"/api/v1/namespaces/{NAMESPACE}/configmaps?limit=3"
    first = json.loads(paper.kubectl("get", "--raw", path))
    assert len(first["items"]) == 3 and first["metadata"]["remainingItemCount"] == 4
    token = first["metadata"]["continue"]
    second = json.loads(paper.kubectl("get", "--raw", f"{path}&continue={token}"))
    names = [name_of(each) for each in (*first["items"], *second["items"])]
    assert names == [f"map{number}" for number in range(6)]
    paper.server.expire()
    late = paper.try_kubectl("get", "--raw", f"{path}&continue={token}")
    assert "The provided continue parameter is too old" in late.stderr
    words = paper.kubectl("get", "configmaps", "--chunk-size=2", "-o", "name").split()
    assert len(words) == 7


def test_deletion_follows_owners_and_waits_for_finalizers(paper: KubernetesCluster) -> None:
    create(paper, jobset())
    wait_running(paper)
    finalizer = '{"metadata":{"finalizers":["test/keeps"]}}'
    paper.kubectl("patch", "jobset", "run", "--type=merge", "-p", finalizer)
    paper.kubectl("delete", "jobset", "run", "--cascade=foreground", "--wait=false")
    paper.wait(lambda: not paper.pods() and not paper.get("jobs", "run-w-0"), "their end")
    assert "deletionTimestamp" in paper.get("jobsets", "run")["metadata"]
    none = '{"metadata":{"finalizers":null}}'
    paper.kubectl("patch", "jobset", "run", "--type=merge", "-p", none)
    assert not paper.get("jobsets", "run")
    paper.wait(lambda: not paper.get("services", "run"), "the service's end")
    wrong = {"preconditions": {"uid": "another"}}
    create(paper, jobset())
    path = f"/apis/jobset.x-k8s.io/v1alpha2/namespaces/{NAMESPACE}/jobsets/run"
    done = paper.try_kubectl("delete", "--raw", path, "-f", "-", input=json.dumps(wrong))
    assert "UID in precondition: another" in done.stderr


@pytest.mark.usefixtures("kubectl")
def test_a_missing_kueue_is_seen(tmp_path: Path) -> None:
    cluster = KubernetesCluster(tmp_path / "bare", paper=True, without=("kueue.x-k8s.io",))
    try:
        assert "kueue" not in cluster.kubectl("api-resources", "-o", "name")
        assert "jobsets.jobset.x-k8s.io" in cluster.kubectl("get", "crd", "-o", "name")
        create(cluster, jobset(labels={"kueue.x-k8s.io/queue-name": "queue"}))
        paths = cluster.try_kubectl("get", "workloads")
        assert "the server doesn't have a resource type" in paths.stderr
    finally:
        cluster.close()


@pytest.mark.usefixtures("kubectl")
@pytest.mark.parametrize("hosts", [200, pytest.param(1000, marks=pytest.mark.slow)])
def test_many_pods_on_paper(tmp_path: Path, hosts: int) -> None:
    cluster = KubernetesCluster(tmp_path / "many", nodes=hosts // 8, paper=True)
    try:
        create(cluster, jobset(hosts=hosts, gpus=1))
        cluster.wait(lambda: len(running(cluster)) == hosts, "all pods")
        for pod in cluster.pods():
            cluster.finish(name_of(pod))
        cluster.wait(lambda: is_true(cluster.get("jobsets", "run"), "Completed"), "the end")
        assert cluster.get("jobs", "run-w-0")["status"]["completedIndexes"] == f"0-{hosts - 1}"
    finally:
        cluster.close()
    assert not cluster.problems()
