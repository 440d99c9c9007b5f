"""The controllers of the stand-in: policies of Jobs and JobSets, placement, and what is lost."""

from __future__ import annotations

import json

from tests.kubernetes.cluster import NAMESPACE, KubernetesCluster
from tests.kubernetes.kinds import Object, condition, is_true
from tests.kubernetes.manifests import (
    create,
    events,
    jobset,
    name_of,
    pod_spec,
    running,
    wait_end,
    wait_running,
)
from tests.kubernetes.schema import REQUIRED


def job_spec(obj: Object) -> Object:
    """The Job of a JobSet's first replicatedJob."""
    return dict(obj)["spec"]["replicatedJobs"][0]["template"]["spec"]  # type: ignore[no-any-return]


def by_index(cluster: KubernetesCluster) -> dict[str, str]:
    """Names of running pods by their index."""
    label = "batch.kubernetes.io/job-completion-index"
    return {pod["metadata"]["labels"][label]: name_of(pod) for pod in running(cluster)}


def finish(cluster: KubernetesCluster, index: str, code: int) -> None:
    cluster.wait(lambda: index in by_index(cluster), f"index {index}")
    cluster.finish(by_index(cluster)[index], code)


def test_indexes_fail_on_their_own(paper: KubernetesCluster) -> None:
    obj = jobset()
    spec = job_spec(obj)
    del spec["backoffLimit"], spec["podFailurePolicy"]
    spec |= {"backoffLimitPerIndex": 1}
    create(paper, obj)
    first = {name_of(pod) for pod in wait_running(paper)}
    finish(paper, "1", 7)
    paper.wait(lambda: len({name_of(pod) for pod in running(paper)} - first) == 1, "another try")
    count = paper.pod(by_index(paper)["1"])["metadata"]["annotations"]
    assert count["batch.kubernetes.io/job-index-failure-count"] == "1"
    finish(paper, "1", 7)
    for index in ("0", "2"):
        finish(paper, index, 0)
    wait_end(paper, "Failed")
    job = paper.get("jobs", "run-w-0")
    assert condition(job, "Failed")["reason"] == "FailedIndexes"
    assert (job["status"]["completedIndexes"], job["status"]["failedIndexes"]) == ("0,2", "1")


def test_a_jobset_restarts_as_often_as_it_may(paper: KubernetesCluster) -> None:
    obj = jobset(backoff=0)
    obj["spec"]["failurePolicy"] = {"maxRestarts": 1}
    create(paper, obj)
    wait_running(paper)
    finish(paper, "0", 1)
    paper.wait(lambda: paper.get("jobsets", "run")["status"].get("restarts") == 1, "restart")
    again = wait_running(paper)
    label = "jobset.sigs.k8s.io/restart-attempt"
    assert {pod["metadata"]["labels"][label] for pod in again} == {"1"}
    finish(paper, "0", 1)
    assert condition(wait_end(paper, "Failed"), "Failed")["reason"] == "ReachedMaxRestarts"


def test_a_second_job_waits_for_the_first_and_the_first_decides(paper: KubernetesCluster) -> None:
    obj = jobset(hosts=1)
    second = json.loads(json.dumps(obj["spec"]["replicatedJobs"][0]))
    obj["spec"]["replicatedJobs"].append(
        {**second, "name": "s", "dependsOn": [{"name": "w", "status": "Ready"}]}
    )
    obj["spec"]["successPolicy"] = {"operator": "All", "targetReplicatedJobs": ["w"]}
    obj["spec"]["ttlSecondsAfterFinished"] = 1
    create(paper, obj)
    pods = wait_running(paper, 2)
    assert [name_of(pod)[:7] for pod in pods] == ["run-s-0", "run-w-0"]
    assert paper.get("jobsets", "run")["status"]["replicatedJobsStatus"][0]["ready"] == 1
    paper.finish(name_of(pods[1]))
    wait_end(paper, "Completed")
    paper.wait(lambda: not running(paper), "the other's end")
    paper.wait(lambda: not paper.get("jobsets", "run"), "its deletion after a second")
    paper.wait(lambda: not paper.pods(), "the deletion of its pods")


def test_nodes_are_chosen_by_affinity_and_taints(paper: KubernetesCluster) -> None:
    taint = {"key": "reserved", "value": "x", "effect": "NoSchedule"}
    paper.client.patch(paper.get("nodes", "node1"), {"spec": {"taints": [taint]}})
    expression = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["node2"]}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}
    create(paper, jobset(hosts=2, affinity={"nodeAffinity": {REQUIRED: terms}}))
    assert wait_running(paper, 1)[0]["spec"]["nodeName"] == "node3"
    waits = next(pod for pod in paper.pods() if pod["status"]["phase"] == "Pending")

    def message() -> str:
        return str(condition(paper.pod(name_of(waits)), "PodScheduled").get("message", ""))

    paper.wait(message, "why it waits")
    assert message().startswith(
        "0/3 nodes are available: 1 Insufficient nvidia.com/gpu,"
        " 1 node(s) didn't match Pod's node affinity/selector,"
        " 1 node(s) had untolerated taint {reserved: x}."
    )
    tolerated = jobset("other", hosts=1, tolerations=[{"key": "reserved", "operator": "Exists"}])
    job_spec(tolerated)["template"]["spec"]["nodeSelector"] = {"kubernetes.io/hostname": "node1"}
    create(paper, tolerated)
    wait_running(paper, 2)


def test_pods_keep_away_from_each_other(paper: KubernetesCluster) -> None:
    labels = {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": "run"}}
    term = {"topologyKey": "kubernetes.io/hostname", "labelSelector": labels}
    affinity = {"podAntiAffinity": {REQUIRED: [term]}}
    create(paper, jobset(hosts=4, gpus=1, affinity=affinity))
    pods = wait_running(paper, 3)
    assert len({pod["spec"]["nodeName"] for pod in pods}) == 3
    paper.add_node("node4")
    wait_running(paper, 4)


def test_a_node_that_is_deleted_takes_its_pods(paper: KubernetesCluster) -> None:
    """PodGC says that they have failed, so the Job replaces them: nobody has to force anything."""
    create(paper, jobset(hosts=2, backoff=0))
    pods = wait_running(paper, 2)
    paper.lose_node("node1")
    name = next(name_of(pod) for pod in pods if pod["spec"]["nodeName"] == "node1")
    paper.wait(lambda: "deletionTimestamp" in paper.pod(name)["metadata"], "deletion")
    paper.kubectl("delete", "node", "node1")
    again = wait_running(paper, 2)
    assert "node1" not in {pod["spec"]["nodeName"] for pod in again}
    assert paper.get("jobs", "run-w-0")["status"].get("failed", 0) == 0


def test_a_forced_pod_is_replaced_when_its_finalizer_is_gone(paper: KubernetesCluster) -> None:
    create(paper, jobset(hosts=2, backoff=0))
    pods = wait_running(paper, 2)
    paper.lose_node("node1")
    name = next(name_of(pod) for pod in pods if pod["spec"]["nodeName"] == "node1")
    paper.wait(lambda: "deletionTimestamp" in paper.pod(name)["metadata"], "deletion")
    paper.kubectl("delete", "pod", name, "--grace-period=0", "--force", "--wait=false")
    paper.kubectl("patch", "pod", name, "--type=merge", "-p", '{"metadata":{"finalizers":null}}')
    assert not paper.get("pods", name)
    again = wait_running(paper, 2)
    assert "node1" not in {pod["spec"]["nodeName"] for pod in again}


def test_the_out_of_service_taint_frees_pods(paper: KubernetesCluster) -> None:
    create(paper, jobset(hosts=2, backoff=0))
    wait_running(paper, 2)
    paper.lose_node("node1")
    paper.kubectl(
        "taint", "node", "node1", "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"
    )
    paper.wait(lambda: "node1" not in {pod["spec"]["nodeName"] for pod in running(paper)}, "it")
    wait_running(paper, 2)


def test_kueue_takes_plain_jobs_too(paper: KubernetesCluster) -> None:
    job: Object = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "data"}}
    job["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "queue"}
    job["spec"] = {"parallelism": 2, "completions": 2, "completionMode": "Indexed"}
    job["spec"]["template"] = {"spec": pod_spec()}
    create(paper, job)
    first = {name_of(pod) for pod in wait_running(paper, 2)}
    workload = paper.client.all("workloads")[0]
    assert name_of(workload).startswith("job-data-")
    paper.preempt("data", plural="jobs")
    paper.wait(lambda: len({name_of(pod) for pod in running(paper)} - first) == 2, "its return")
    evicted = condition(paper.get("workloads", name_of(workload)), "Evicted")
    assert evicted["status"] == "False" and evicted["message"].startswith("Previously: Preempted")
    for index in ("0", "1"):
        finish(paper, index, 0)
    paper.wait(lambda: is_true(paper.get("jobs", "data"), "Complete"), "its end")
    paper.wait(lambda: is_true(paper.get("workloads", name_of(workload)), "Finished"), "it")


def test_a_workload_that_is_made_inactive_waits(paper: KubernetesCluster) -> None:
    create(paper, jobset(labels={"kueue.x-k8s.io/queue-name": "queue"}))
    wait_running(paper)
    name = name_of(paper.client.all("workloads")[0])
    active = '{{"spec":{{"active":{}}}}}'
    patch = ("patch", "workload", name, "--type=merge", "-p")
    paper.kubectl(*patch, active.format("false"))
    paper.wait(lambda: not paper.pods(), "the end of its pods")
    evicted = condition(paper.get("workloads", name), "Evicted")
    assert evicted["reason"] == "Deactivated" and paper.get("jobsets", "run")["spec"]["suspend"]
    paper.kubectl(*patch, active.format("true"))
    wait_running(paper)


def test_a_namespace_is_emptied_before_it_goes(paper: KubernetesCluster) -> None:
    create(paper, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "other"}})
    paper.server.add_namespace("other")
    obj = jobset(hosts=1)
    obj["metadata"]["namespace"] = "other"
    create(paper, obj)
    paper.wait(lambda: paper.pods("other"), "a pod")
    paper.kubectl("delete", "namespace", "other")
    assert not paper.pods("other") and not paper.get("jobsets", "run", "other")


def test_a_new_pod_waits_after_a_failure_as_long_as_it_is_told(paper: KubernetesCluster) -> None:
    paper.controllers.jobs.pod_backoff = 1000.0
    create(paper, jobset(hosts=1))
    wait_running(paper, 1)
    finish(paper, "0", 1)
    paper.wait(lambda: paper.get("jobs", "run-w-0")["status"].get("failed") == 1, "it")
    assert len(paper.pods()) == 1
    paper.controllers.jobs.pod_backoff = 0.0
    wait_running(paper, 1)


def test_containers_are_started_again_in_their_place(paper: KubernetesCluster) -> None:
    """What JobSet does where restartPolicy is left out."""
    obj = jobset(hosts=1)
    spec = job_spec(obj)
    del spec["podFailurePolicy"], spec["template"]["spec"]["restartPolicy"]
    create(paper, obj)
    pod = name_of(wait_running(paper, 1)[0])
    finish(paper, "0", 1)

    def restarts() -> object:
        return paper.pod(pod)["status"]["containerStatuses"][0]["restartCount"]

    paper.wait(lambda: restarts() == 1 and running(paper), "its restart")
    assert len(paper.pods()) == 1


def test_events_of_an_object_are_asked_for_by_name(paper: KubernetesCluster) -> None:
    create(paper, jobset(hosts=1))
    pod = name_of(wait_running(paper, 1)[0])
    assert {reason for reason, _ in events(paper, pod)} >= {"Scheduled", "Started"}
    said = paper.kubectl("events", "--for", f"pod/{pod}", "-n", NAMESPACE)
    assert f"Successfully assigned {NAMESPACE}/{pod} to node1" in said
