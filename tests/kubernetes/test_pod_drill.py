"""Runs of the real trainer, disturbed at random instants: each ends by itself, with the losses of a
run that nobody disturbed, and leaves nothing."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import wait_for
from tests.kubernetes.kube_project import RIGHTS_IN_POD, KubeProject

STEPS = 60
BUDGETS = """
retry.infra = 30
retry.hang = 30
retry.preemption = 100
retry.same_step = 30
checkpoint.keep_last = 100
"""


def kill_one(pods: KubeProject, word: str) -> None:
    """SIGKILL to one of the processes on the nodes whose command line has this word."""
    found = [each for each in pods.cluster.strangers() if any(word in part for part in each.argv)]
    if found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(random.choice(found).pid, signal.SIGKILL)


def on_a_pod(do: Callable[[str], object]) -> Callable[[KubeProject], None]:
    def disturb(pods: KubeProject) -> None:
        names = [
            str(pod["metadata"]["name"])
            for pod in pods.cluster.pods()
            if pod["status"].get("phase") == "Running"
            and "deletionTimestamp" not in pod["metadata"]
        ]
        if names:
            with contextlib.suppress(AssertionError, ProcessLookupError):  # it has just ended
                do(random.choice(names))

    return disturb


def lose_a_node(pods: KubeProject) -> None:
    names = [str(pod["spec"].get("nodeName", "")) for pod in pods.cluster.pods()]
    if nodes := [name for name in names if name and not pods.cluster.nodes[name].silent]:
        node = random.choice(nodes)
        pods.cluster.lose_node(node, frozen=random.random() < 0.5)
        time.sleep(random.uniform(1, 8))
        pods.cluster.return_node(node)


def disturbances(pods: KubeProject, run: Path) -> dict[str, Callable[[], object]]:
    cluster = pods.cluster
    return {
        "a rank": lambda: kill_one(pods, "/trainkit/train/"),
        "an agent": lambda: kill_one(pods, "/trainkit/launch/agent/main.py"),
        "the supervisor": lambda: kill_one(pods, "/trainkit/launch/main.py"),
        "a pod": lambda: on_a_pod(cluster.kill_pod)(pods),
        "out of memory": lambda: on_a_pod(cluster.mark_oom)(pods),
        "evicted": lambda: on_a_pod(cluster.evict)(pods),
        "preempted": lambda: cluster.preempt(pods.jobset(run), random.uniform(0, 3)),
        "a node": lambda: lose_a_node(pods),
        "the API server": lambda: cluster.server.restart(random.uniform(0.5, 4)),
        "too many requests": lambda: cluster.server.throttle(5.0),
        "history": cluster.server.expire,
        "watches": cluster.server.cut_watches,
    }


@pytest.fixture
def trained(pods: KubeProject) -> dict[int, float]:
    """The losses of a run that nobody disturbs."""
    pods.cluster.service_account("trainer", RIGHTS_IN_POD)
    pods.options('queue = "queue"\nservice_account = "trainer"')
    pods.edit_jobs("training.train_iters = 30", f"training.train_iters = {STEPS}")
    pods.add_to_jobs(BUDGETS)
    pods.invoke("train", "random")
    found = pods.losses(pods.runs()[-1])
    assert list(found) == list(range(1, STEPS + 1))
    return found


def wait_for_the_same_end(
    pods: KubeProject, run: Path, losses: dict[int, float], done: object
) -> None:
    """Until the run is over: it has succeeded, with the losses of one that nobody disturbed."""

    def over() -> bool:
        return pods.document("status", run.name)["state"] in ("succeeded", "failed", "cancelled")

    wait_for(over, f"the end after {done}", timeout=300)
    state = pods.document("status", run.name)
    assert state["state"] == "succeeded", (done, state["root_cause"])
    assert pods.losses(run) == losses, done


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_a_run_survives_four_disturbances(
    pods: KubeProject, trained: dict[int, float], seed: int
) -> None:
    random.seed(seed)
    run = pods.submit()
    done = []
    for number in range(4):
        # while it starts, mostly: that is where it lives longest
        time.sleep(random.uniform(0, 12 if number else 6))
        kinds = disturbances(pods, run)
        kind = random.choice(list(kinds))
        done.append(kind)
        kinds[kind]()
        if pods.document("status", run.name)["state"] == "succeeded":
            break

    wait_for_the_same_end(pods, run, trained, done)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["throttled", "cut", "drained"])
def test_a_run_survives_what_lasts(pods: KubeProject, trained: dict[int, float], what: str) -> None:
    """30 s without an answer, watches cut all the time, a node that is drained."""
    run = pods.submit()
    cluster = pods.cluster
    if what == "throttled":
        cluster.server.throttle(30.0)
    elif what == "drained":
        wait_for((run / "metrics.jsonl").exists, "a step", timeout=120)
        node = pods.node(pods.pod(run, 1))
        cluster.drain(node)
        wait_for(lambda: pods.node(pods.pod(run, 1)) != node, "another node", timeout=120)
        cluster.cordon(node, unschedulable=False)
    else:
        end = time.monotonic() + 30
        while time.monotonic() < end:
            cluster.server.cut_watches()
            time.sleep(0.1)
    wait_for_the_same_end(pods, run, trained, what)
