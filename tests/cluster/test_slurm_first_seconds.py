"""The first seconds of a run on a real Slurm: whatever befalls it then, it goes on by itself,
and its steps are those of a run that nobody disturbed."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.machines import HEAD
from tests.cluster.slurm_project import SlurmProject
from tests.conftest import HANGS, wait_for

# Ranks that carry a digest from step to step, in one file with the step: two of them agree only
# where each step was done once, in order. None does the last
# before the test lets it.
CHAIN = """
import hashlib, os, signal, time
path = f"{folder}/chain-{{rank}}"
step, digest = open(path).read().split() if os.path.exists(path) else (0, "")
step = int(step)
signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGTERM, signal.SIGUSR1}})
while step < {last}:
    time.sleep(0.05)
    if signal.sigpending():
        os._exit(12)
    if step == {last} - 1 and not os.path.exists("{folder}/may-end"):
        continue
    step += 1
    digest = hashlib.sha256(f"{{digest}} {{step}}".encode()).hexdigest()
    open(path + ".new", "w").write(f"{{step}} {{digest}}"); os.replace(path + ".new", path)
    beat(step)
done()
"""


def chain(last: int) -> str:
    """What every rank has written at the end."""
    digest = ""
    for step in range(1, last + 1):
        digest = hashlib.sha256(f"{digest} {step}".encode()).hexdigest()
    return f"{last} {digest}"


def preempted(slurm: SlurmProject, run: Path, id: str) -> None:
    """A job of higher priority wants all nodes, for a moment."""
    words = (
        "--parsable",
        "--partition=urgent",
        "--nodes=3",
        "--exclusive",
        "--output=/dev/null",
        "--wrap",
        "sleep 1",
    )
    urgent = slurm.cluster.on(HEAD, "sbatch", *words).strip()
    wait_for(
        lambda: slurm.job_state(urgent) in ("RUNNING", "COMPLETING", "COMPLETED"),
        "it to have them",
        timeout=HANGS,
    )


def requeued(slurm: SlurmProject, run: Path, id: str) -> None:
    slurm.cluster.on(HEAD, "scontrol", "requeue", id)


def cancelled(slurm: SlurmProject, run: Path, id: str) -> None:
    slurm.cluster.on(HEAD, "scancel", id)


def crashed(slurm: SlurmProject, run: Path, id: str) -> None:
    """A node of the job's loses its power; it is back once Slurm has noticed."""
    nodes = slurm.cluster.on(HEAD, "scontrol", "show", "hostnames", slurm.job_nodes(id)).split()
    host = random.Random(id).choice(nodes)
    slurm.cluster.crash(host)
    try:
        wait_for(
            lambda: slurm.node_state(host).startswith("down"),
            f"Slurm to miss {host}",
            timeout=HANGS,
        )
    finally:
        slurm.cluster.boot(host)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("befalls", [preempted, requeued, cancelled, crashed])
def test_a_random_instant_of_the_start(
    slurm: SlurmProject, befalls: Callable[[SlurmProject, Path, str], None], seed: int
) -> None:
    after = random.Random(f"{befalls.__name__} {seed}").uniform(0, 3)

    def instant(run: Path, id: str) -> None:
        wait_for(
            lambda: slurm.job_state(id) in ("RUNNING", "COMPLETING"),
            "the job to begin",
            timeout=HANGS,
        )
        time.sleep(after)  # by chance: nothing is waited for

    disturb(slurm, befalls, instant)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("befalls", [preempted, requeued, cancelled, crashed])
def test_a_random_instant_of_the_middle(
    slurm: SlurmProject, befalls: Callable[[SlurmProject, Path, str], None], seed: int
) -> None:
    after = random.Random(f"middle {befalls.__name__} {seed}").uniform(0, 5)

    def instant(run: Path, id: str) -> None:
        wait_for((slurm.path / "chain-0").exists, "a step", timeout=HANGS)
        time.sleep(after)  # by chance: nothing is waited for

    disturb(slurm, befalls, instant, last=200)


@pytest.mark.parametrize(
    ("befalls", "moment"),
    [
        pytest.param(preempted, "attempts/1/events.jsonl", id="preempted-as-agents-start"),
        pytest.param(
            requeued,
            "launch/supervisor.json",
            id="requeued-as-the-supervisor-begins",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            preempted,
            "launch/supervisor.json",
            id="preempted-as-the-supervisor-begins",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            preempted,
            "launch/slurm-*.out",
            id="preempted-as-the-script-begins",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            requeued,
            "launch/slurm-*.out",
            id="requeued-as-the-script-begins",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            requeued,
            "attempts/1/events.jsonl",
            id="requeued-as-agents-start",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_moment_of_the_start(
    slurm: SlurmProject, befalls: Callable[[SlurmProject, Path, str], None], moment: str
) -> None:
    """Within a partition's GraceTime only the job's steps are told, and the scripts that start
    agents die of it: the run was lost for good."""

    def instant(run: Path, id: str) -> None:
        wait_for(lambda: next(run.glob(moment), None), f"{moment} to be there", timeout=HANGS)

    disturb(slurm, befalls, instant)


@pytest.mark.slow
def test_one_bad_node_is_left_out(slurm: SlurmProject) -> None:
    """After days in the queue: Slurm gives another, and the run begins there by itself."""
    python = slurm.path / "python"
    lines = python.read_text().splitlines()
    python.write_text(
        "\n".join(
            [
                lines[0],
                (
                    '[[ "$(hostname)" != node2 || "$*" != */agent/main.py* ]]'
                    ' || { echo "this node is broken" >&2; exit 5; }'
                ),
                *lines[1:],
            ]
        )
    )
    slurm.ranks_do(CHAIN.format(folder=slurm.path, last=5))
    slurm.may_end()
    said = slurm.invoke("train", "random", timeout=HANGS).stdout
    (run,) = slurm.runs()
    first = slurm.events(run, 1)
    assert (first["ended"]["exit"], first["ended"]["class"], first["retry"]["left_out"]) == (
        8,
        "infra",
        ["node2"],
    ), said
    assert (
        "this node is broken" in first["ended"]["root_cause"]["message"]
        and "node2 is left out" in said
    )
    ended = slurm.document("status", run.name)
    assert (ended["state"], ended["attempt"]) == ("succeeded", 2) and len(
        slurm.slurm_jobs(run)
    ) == 1


@pytest.mark.slow
def test_a_prolog_that_fails_on_the_batch_host_alone(slurm: SlurmProject) -> None:
    """It ended the script, and so the run, before there was a supervisor."""
    text = (slurm.path / "jobs.toml").read_text()
    lacks = """prolog = ['[ "$(hostname)" != node1 ] || { echo "no such module" >&2; exit 5; }']"""
    (slurm.path / "jobs.toml").write_text(
        text.replace("[clusters.queue]", f"[clusters.queue]\n{lacks}")
    )
    slurm.ranks_do(CHAIN.format(folder=slurm.path, last=5))
    slurm.may_end()
    said = slurm.invoke("train", "random", timeout=HANGS).stdout
    (run,) = slurm.runs()
    first = slurm.events(run, 1)
    assert (first["ended"]["exit"], first["retry"]["left_out"]) == (8, ["node1"]), said
    assert "no such module" in first["ended"]["root_cause"]["message"]
    assert (
        slurm.document("status", run.name)["state"] == "succeeded"
        and "failed in the batch script on node1"
        in next(run.glob("launch/slurm-*.out")).read_text()
    )


@pytest.mark.slow
@pytest.mark.parametrize("who", ["the job", "its partition"])
def test_a_time_limit_of_two_minutes_leaves_time_to_train(slurm: SlurmProject, who: str) -> None:
    """Slurm's USR1, 300 s before the end by default, came at once: three starts, none of which
    trained, and exit 14."""
    slurm.ranks_count(10_000)
    if who == "the job":
        slurm.slurm(time="2")
    else:
        slurm.cluster.on(HEAD, "scontrol", "update", "PartitionName=main", "DefaultTime=2")
    try:
        run, _ = slurm.submit()
        wait_for(
            lambda: slurm.events(run, 1).get("retry"), "the time limit to come near", timeout=HANGS
        )
    finally:
        slurm.cluster.on(HEAD, "scontrol", "update", "PartitionName=main", "DefaultTime=INFINITE")
    first = slurm.events(run, 1)
    assert (
        first["retry"]["class"] == "time-limit"
        and first["ended"]["root_cause"]["saved"] is True
        and slurm.count() > 0
    )
    slurm.invoke("cancel", run.name, exit=15)


def disturb(
    slurm: SlurmProject,
    befalls: Callable[[SlurmProject, Path, str], None],
    instant: Callable[[Path, str], None],
    last: int = 30,
) -> None:
    """Let it happen when `instant` returns; the run must end well by itself, or, where a person
    has ended it, once it is resumed."""
    slurm.ranks_do(CHAIN.format(folder=slurm.path, last=last))
    following = slurm.start("train", "random")
    run = wait_for(
        lambda: next(
            (run for run in slurm.runs() if (run / "launch" / "slurm.json").exists()), None
        ),
        "the run to be submitted",
        timeout=HANGS,
    )
    id = slurm.slurm_jobs(run)[-1]["id"]
    instant(run, id)
    steps = next((path.read_text().split()[0] for path in slurm.path.glob("chain-0")), "0")
    befalls(slurm, run, id)
    slurm.may_end()
    out, err = following.communicate()
    if befalls is cancelled and following.returncode != 0:
        assert following.returncode in (12, 15), out + err
        assert slurm.document("status", run.name)["state"] in ("preempted", "cancelled"), out + err
        slurm.invoke("resume", run.name)
    else:
        assert following.returncode == 0, out + err
    ended = slurm.document("status", run.name)
    assert ended["state"] == "succeeded"
    print(
        f"{befalls.__name__} at step {steps}, {ended['attempt']} attempts,"
        f" {len(slurm.slurm_jobs(run))} jobs"
    )
    assert {(slurm.path / f"chain-{rank}").read_text() for rank in range(4)} == {chain(last)}
    wait_for(
        lambda: not slurm.jobs() and not slurm.cluster.processes_of(run.name),
        "nothing to be left",
        timeout=HANGS,
    )
    wait_for(lambda: slurm.idle() == 3, "all nodes to be idle again", timeout=HANGS)
