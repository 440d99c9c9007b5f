"""Runs as JobSets: submitted, followed, disturbed in every way, and ended, with real processes as
pods and the real kubectl."""

from __future__ import annotations

import itertools
import json
import os
import signal
from pathlib import Path

import pytest

from tests.conftest import HANGS, wait_for
from tests.kubernetes.kube_project import KubeProject


def test_a_run_ends_and_so_do_its_pods(pods: KubeProject) -> None:
    pods.ranks_count(5)
    pods.may_end()
    said = pods.invoke("train", "random").stdout
    (run,) = pods.runs()
    assert f"is JobSet {pods.jobset(run)} of namespace" in said
    assert pods.document("status", run.name)["state"] == "succeeded"
    name = pods.jobset(run)
    pods.cluster.wait(
        lambda: pods.cluster.get("jobsets", name)["status"].get("terminalState") == "Completed",
        "end of the JobSet",
    )
    world = json.loads((run / "launch" / "world.json").read_text())
    assert [node["host"] for node in world["nodes"]] == [f"{name}-w-0-0", f"{name}-w-0-1"]


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_jobset_with_its_code(pods: KubeProject) -> None:
    pods.ranks_do(
        "import sys, time; beat(1); time.sleep(0.3 if rank == 3 else 86400); print('no such luck');"
        " sys.exit(3)"
    )
    pods.invoke("train", "random", exit=9)
    (run,) = pods.runs()
    why = pods.document("why", run.name)["root_cause"]
    assert why["rank"] == 3 and why["code"] == 3 and "no such luck" in why["last"]
    pods.cluster.wait(
        lambda: (
            pods.cluster.get("jobsets", pods.jobset(run))["status"].get("terminalState") == "Failed"
        ),
        "end of the JobSet",
    )


@pytest.mark.slow
def test_a_killed_rank_is_started_again_in_the_same_pods(pods: KubeProject) -> None:
    pods.ranks_count(30)
    run = pods.submit()
    pods.wait_step(3)
    before = [pods.pod(run, index) for index in (0, 1)]
    kill_rank(pods, 3)
    wait_for((run / "attempts" / "2").exists, "the next attempt", timeout=HANGS)
    pods.may_end()
    assert pods.wait_state(run, "succeeded")["attempt"] == 2
    assert [pod.rpartition("-")[0] for pod in before] == [
        f"{pods.jobset(run)}-w-0-{index}" for index in (0, 1)
    ]
    names = {pod["metadata"]["name"] for pod in pods.cluster.pods()}
    assert set(before) <= names


def kill_rank(pods: KubeProject, rank: int) -> None:
    """SIGKILL to the process of a rank."""
    found = [
        each.pid
        for each in pods.cluster.strangers()
        if any(word.endswith("rank.py") for word in each.argv)
        and f"RANK={rank}".encode() in Path(f"/proc/{each.pid}/environ").read_bytes().split(b"\0")
    ]
    assert len(found) == 1
    os.kill(found[0], signal.SIGKILL)


@pytest.mark.parametrize(
    ("how", "index"),
    [
        case if case == ("kill", 0) else pytest.param(*case, marks=pytest.mark.slow)
        for case in itertools.product(("kill", "evict", "delete"), (0, 1))
    ],
)
def test_a_pod_that_is_gone_is_replaced_and_the_run_goes_on(
    pods: KubeProject, index: int, how: str
) -> None:
    pods.ranks_count(30)
    run = pods.submit()
    pods.wait_step(3)
    pod = pods.pod(run, index)
    other = pods.pod(run, 1 - index)
    {
        "kill": pods.cluster.kill_pod,
        "evict": pods.cluster.evict,
        "delete": pods.cluster.delete_pod,
    }[how](pod)
    wait_for((run / "attempts" / "2").exists, "the next attempt", timeout=HANGS)
    assert pods.pod(run, index) != pod and pods.pod(run, 1 - index) == other
    pods.may_end()
    ended = pods.wait_state(run, "succeeded")
    assert ended["attempt"] == 2
    assert len(pods.jobsets(run)) == 1
    first = pods.events(run, 1)
    if how == "kill":
        assert index == 0 or first["ended"]["class"] == "infra"
    else:
        assert first["ended"]["class"] == "preempted"
        assert first["ended"]["root_cause"]["saved"] is True


@pytest.mark.slow
def test_a_supervisor_that_is_killed_is_started_again(pods: KubeProject) -> None:
    pods.ranks_count(30)
    run = pods.submit()
    pods.wait_step(3)
    pod = pods.pod(run, 0)
    (supervisor,) = [
        each.pid
        for each in pods.cluster.strangers()
        if any(word.endswith("/trainkit/launch/main.py") for word in each.argv)
    ]
    os.kill(supervisor, signal.SIGKILL)
    wait_for((run / "attempts" / "2").exists, "the next attempt", timeout=HANGS)
    pods.may_end()
    assert pods.wait_state(run, "succeeded")["attempt"] == 2
    assert pods.cluster.get("pods", pod)
