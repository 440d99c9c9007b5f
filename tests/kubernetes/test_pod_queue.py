"""Runs that wait, are preempted, cancelled, resumed and lose their nodes on Kubernetes."""

from __future__ import annotations

import time

import pytest

from tests.conftest import HANGS, wait_for
from tests.kubernetes.kube_project import RIGHTS_IN_POD, KubeProject
from trainkit.jobs.resolved import read_job
from trainkit.launch.kubernetes.caretaker import CARE_SECONDS
from trainkit.launch.supervise.agent_pool import stop_seconds

HOURS = 1e5


def nothing_is_left(pods: KubeProject) -> bool:
    """Whether the namespace has no object of any run, and the nodes no process."""
    kinds = ("jobsets", "jobs", "pods", "services", "workloads")
    there = [each for kind in kinds for each in pods.cluster.client.all(kind, "training")]
    return not there and not pods.cluster.strangers()


def test_a_preempted_run_saves_waits_and_goes_on(pods: KubeProject) -> None:
    pods.options('queue = "queue"')
    pods.ranks_count(30)
    run = pods.submit()
    pods.wait_step(3)
    pods.cluster.preempt(pods.jobset(run), HOURS)
    seen = pods.wait_state(run, "queued")
    assert seen["kubernetes"]["name"] == pods.jobset(run) and seen["kubernetes"]["reason"]
    first = pods.events(run, 1)["ended"]
    assert first["class"] == "preempted" and first["root_cause"]["saved"] is True
    pods.may_end()
    pods.cluster.admit(pods.jobset(run))
    assert pods.wait_state(run, "succeeded")["attempt"] == 2
    assert len(pods.jobsets(run)) == 1


@pytest.mark.slow
def test_a_run_that_its_queue_has_no_room_for_says_so_and_can_be_cancelled(
    pods: KubeProject,
) -> None:
    pods.options('queue = "queue"')
    pods.ranks_count(30)
    first = pods.submit("--set", "cluster.kubernetes.resources.cpu=60")
    second = pods.submit("--set", "cluster.kubernetes.resources.cpu=60")
    pods.wait_step(3)
    seen = pods.wait_state(second, "queued")
    assert "quota" in seen["kubernetes"]["reason"]
    assert f"{second.name} (random): queued" in pods.invoke("status", second.name).stdout
    said = pods.invoke("cancel", second.name, exit=15).stdout
    assert "is out of the queue" in said
    assert pods.document("status", second.name)["state"] == "cancelled"
    pods.invoke("cancel", first.name, exit=15)
    assert nothing_is_left(pods)


@pytest.mark.parametrize("save", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_cancelled_run_leaves_nothing_and_can_be_resumed(pods: KubeProject, save: bool) -> None:
    pods.ranks_count(30)
    run = pods.submit()
    pods.wait_step(3)
    pods.invoke("cancel", run.name, *(["--save"] if save else []), exit=12 if save else 15)
    assert nothing_is_left(pods)
    state = pods.document("status", run.name)["state"]
    assert state == ("preempted" if save else "cancelled")
    pods.may_end()
    pods.invoke("resume", run.name)
    assert pods.wait_state(run, "succeeded")["attempt"] == 2
    assert [each["first_attempt"] for each in pods.jobsets(run)] == [1, 2]


@pytest.mark.slow
def test_a_jobset_that_somebody_else_deletes_is_no_end_without_a_word(pods: KubeProject) -> None:
    pods.ranks_count(30)
    run = pods.submit()
    pods.wait_step(3)
    pods.cluster.client.delete(pods.cluster.get("jobsets", pods.jobset(run)), policy="Background")
    wait_for(lambda: not pods.cluster.pods(), "pods to end", timeout=HANGS)
    seen = pods.document("status", run.name)
    assert seen["state"] in ("preempted", "cancelled")
    pods.may_end()
    pods.invoke("resume", run.name)
    assert pods.wait_state(run, "succeeded")["attempt"] == 2


@pytest.mark.parametrize("index", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_lost_node_is_given_up_by_who_has_rights(pods: KubeProject, index: int) -> None:
    """By the supervisor; that of its own pod by a worker, and the next pod has the supervisor."""
    pods.cluster.service_account("trainer", RIGHTS_IN_POD)
    pods.options('service_account = "trainer"')
    pods.ranks_count(30)
    run = pods.submit()
    pods.wait_step(3)
    node = pods.node(pods.pod(run, index))
    pods.cluster.lose_node(node)
    wait_for((run / "attempts" / "2").exists, "the next attempt", timeout=HANGS)
    assert pods.node(pods.pod(run, index)) != node
    pods.may_end()
    assert pods.wait_state(run, "succeeded")["attempt"] == 2


@pytest.mark.slow
def test_a_pod_that_lives_is_not_given_up_for_its_kubelet(pods: KubeProject) -> None:
    pods.cluster.service_account("trainer", RIGHTS_IN_POD)
    pods.options('service_account = "trainer"')
    pods.ranks_count(30)
    run = pods.submit()
    pods.wait_step(3)
    pod = pods.pod(run, 1)
    node = pods.node(pod)
    pods.cluster.nodes[node].silent = True
    pods.cluster.controllers.nodes.silent(node)
    time.sleep(stop_seconds(read_job(run / "job.json")) + 3 * CARE_SECONDS)
    assert pods.cluster.get("pods", pod) and not (run / "attempts" / "2").exists()
    pods.cluster.return_node(node)
    pods.may_end()
    pods.wait_state(run, "succeeded")


@pytest.mark.slow
def test_a_lost_node_that_returns_frees_the_place(pods: KubeProject) -> None:
    pods.ranks_count(30)
    run = pods.submit()
    pods.wait_step(3)
    node = pods.node(pods.pod(run, 1))
    pods.cluster.lose_node(node)
    wait_for((run / "attempts" / "2").exists, "the next attempt", timeout=HANGS)
    pods.cluster.return_node(node)
    pods.may_end()
    assert pods.wait_state(run, "succeeded")["attempt"] == 2


@pytest.mark.slow
def test_an_image_that_is_missing_is_said_while_the_run_waits(pods: KubeProject) -> None:
    pods.ranks_count(5)
    pods.may_end()
    pods.cluster.kubelet.missing_images.add("example.org/trainkit:1")
    run = pods.submit()

    def said() -> bool:
        seen = pods.document("status", run.name)
        return seen["state"] == "queued" and "image" in seen["kubernetes"]["reason"]

    wait_for(said, "word of the image", timeout=HANGS)
    pods.cluster.kubelet.missing_images.clear()
    pods.wait_state(run, "succeeded")


@pytest.mark.slow
def test_a_node_that_is_to_blame_is_left_out_of_the_next_jobset(pods: KubeProject) -> None:
    pods.cluster.service_account("trainer", RIGHTS_IN_POD)
    pods.options('service_account = "trainer"')
    pods.edit_jobs(
        "[clusters.here]",
        '[clusters.pods.failures.memory]\nmatch = "uncorrectable"\nfailure_class = "infra"\n'
        "suspect = true\n\n[clusters.here]",
    )
    pods.ranks_do(
        "import sys, time; beat(1); time.sleep(0.3)\n"
        "if attempt == 1: print('uncorrectable error', rank) if rank == 3 else time.sleep(86400)\n"
        "sys.exit(1) if attempt == 1 else done()"
    )
    run = pods.submit()
    ended = pods.wait_state(run, "succeeded")
    first, second = pods.jobsets(run)
    assert ended["attempt"] == 2 and first["left_out"] == []
    assert second["left_out"] == [pods.events(run, 1)["host_left_out"]["host"]]
    nodes = {str(pod["spec"]["nodeName"]) for pod in pods.cluster.pods()}
    assert len(nodes) == 2 and nodes.isdisjoint(second["left_out"])
    assert pods.cluster.get("jobsets", first["name"]) == {}
