"""What is left of a run's agents after a loss goes on, and a spare's agent is there already."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.cluster.machines import Cluster
from tests.cluster.on_head import ClusterProject
from tests.cluster.test_endings import begun, events, nothing_left, of_agent
from tests.conftest import wait_for

STEPS = "steps(10_000, 0.1)"


def agents(cluster: Cluster, run: Path) -> set[tuple[str, int]]:
    """(host, pid) of a run's agents and their keepers."""
    return {
        (process.host, process.pid)
        for process in cluster.processes_of(run.name)
        if "/agents/" in process.mark
    }


def hosts_of_ranks(run: Path, attempt: int) -> dict[int, str]:
    told = events(run, attempt)
    return {event["rank"]: event["host"] for event in told if event["event"] == "rank_started"}


def hosts_of_agents(run: Path, attempt: int = 1) -> set[str]:
    told = events(run, attempt)
    return {event["host"] for event in told if event["event"] == "agent_joined"}


@pytest.mark.parametrize("launcher", ["ssh", pytest.param("pdsh", marks=pytest.mark.slow)])
def test_a_spare_takes_the_place_of_a_lost_host(
    head: ClusterProject, cluster: Cluster, launcher: str
) -> None:
    head.hosts("node1 slots=2", "node2 slots=2", "node3 slots=2")
    options = ["cluster.spares=1", f"cluster.launcher={launcher}", "cluster.watch.lease=3"]
    forked = launcher == "ssh"
    if forked:  # the project's interpreter is a script, from which nothing is forked
        options += [f"cluster.python={sys.executable}", "training.train_iters=1000000"]
    else:
        head.ranks_do(STEPS)
    process = head.start("train", "random", *(f"--set={each}" for each in options))
    run = begun(head, process, ranks=4)
    wait_for(lambda: "node3" in hosts_of_agents(run), "the spare's agent", timeout=600)
    before = agents(cluster, run)
    cluster.cut("node1")
    try:
        begun(head, process, attempt=2, ranks=4)
        assert hosts_of_ranks(run, 2) == {0: "node3", 1: "node3", 2: "node2", 3: "node2"}
        assert agents(cluster, run) == {each for each in before if each[0] != "node1"}
        cold = [event for event in events(run, 2) if "program of its own" in event.get("text", "")]
        assert bool(cold) != forked, cold
    finally:
        cluster.heal("node1")
        head.invoke("cancel", "last", exit=15)
        process.communicate()
    nothing_left(cluster, run.name)


def test_a_lost_agent_is_the_only_one_to_start_again(
    head: ClusterProject, cluster: Cluster
) -> None:
    head.ranks_do(STEPS)
    process = head.start("train", "random", "--set=retry.shrink=false")
    run = begun(head, process, ranks=4)
    before = agents(cluster, run)
    cluster.kill(*(p for p in cluster.processes_of(run.name) if of_agent(p) and p.host == "node2"))
    begun(head, process, attempt=2, ranks=4)
    after = agents(cluster, run)
    assert {each for each in after if each[0] == "node1"} == {
        each for each in before if each[0] == "node1"
    }
    assert not {each for each in after if each[0] == "node2"} & before
    assert hosts_of_ranks(run, 2) == {0: "node1", 1: "node1", 2: "node2", 3: "node2"}
    head.invoke("cancel", "last", exit=15)
    process.communicate()
    nothing_left(cluster, run.name)


def test_a_host_left_out_by_hand_gives_its_place_to_a_spare(
    head: ClusterProject, cluster: Cluster
) -> None:
    """The run keeps it until it is resumed, and other runs never begin on it."""
    head.ranks_do(STEPS)
    head.hosts("node1 slots=1", "node2 slots=1", "node3 slots=1")
    process = head.start("train", "random", "--set=cluster.spares=1")
    run = begun(head, process)
    refused = head.invoke("nodes", "--cluster=pair", "--leave-out=node2,node9", exit=3)
    assert "no host 'node9' in cluster 'pair'" in refused.stderr
    shown = head.invoke("nodes", "--cluster=pair", "--leave-out=node2").stdout
    assert "resume RUN" in shown
    assert not run.joinpath("attempts/0002").exists()
    head.invoke("cancel", "last", exit=15)
    process.communicate()
    process = head.start("resume", "last")
    begun(head, process, attempt=2)
    assert hosts_of_ranks(run, 2) == {0: "node1", 1: "node3"}
    head.invoke("cancel", "last", exit=15)
    process.communicate()
    told = head.invoke("train", "random", "--nodes=1", "--include=node2", "--dry-run", exit=8)
    assert "node2" in told.stderr and "left out by hand, until" in told.stderr + told.stdout
    nothing_left(cluster, run.name)
