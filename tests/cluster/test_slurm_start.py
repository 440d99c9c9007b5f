"""The first seconds of a run on a real Slurm: whatever befalls it then, it goes on by itself, and its steps are those of a run that nobody disturbed."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.machines import HEAD
from tests.cluster.slurm_project import SlurmProject
from tests.conftest import wait_for

LAST = 30
# Ranks that carry a digest from step to step, in one file with the step: two of them agree only where each step was done once, in order.
CHAIN = """
import hashlib, os, signal, time
path = f"{folder}/chain-{{rank}}"
step, digest = open(path).read().split() if os.path.exists(path) else (0, "")
step = int(step)
signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGTERM, signal.SIGUSR1}})
while step < {last}:
    time.sleep(0.05)
    step += 1
    digest = hashlib.sha256(f"{{digest}} {{step}}".encode()).hexdigest()
    open(path + ".new", "w").write(f"{{step}} {{digest}}"); os.replace(path + ".new", path)
    beat(step)
    if signal.sigpending():
        os._exit(12)
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
    slurm.cluster.on(HEAD, "sbatch", "--partition=urgent", "--nodes=3", "--exclusive", "--output=/dev/null", "--wrap", "sleep 1")


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
        wait_for(lambda: slurm.node_state(host).startswith("down"), f"Slurm to miss {host}")
    finally:
        slurm.cluster.boot(host)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("befalls", [preempted, requeued, cancelled, crashed])
def test_a_random_instant_of_the_start(slurm: SlurmProject, befalls: Callable[[SlurmProject, Path, str], None], seed: int) -> None:
    disturb(slurm, befalls, random.Random(f"{befalls.__name__} {seed}").uniform(0, 3))


def disturb(slurm: SlurmProject, befalls: Callable[[SlurmProject, Path, str], None], after: float) -> None:
    """Let it happen some seconds after the job has begun; the run must end well by itself, or, where a person has ended it, once it is resumed."""
    slurm.ranks_do(CHAIN.format(folder=slurm.path, last=LAST))
    following = slurm.start("train", "random")
    run = wait_for(lambda: next((run for run in slurm.runs() if (run / "launch" / "slurm.json").exists()), None), "the run to be submitted")
    id = slurm.slurm_jobs(run)[-1]["id"]
    wait_for(lambda: slurm.job_state(id) in ("RUNNING", "COMPLETING"), "the job to begin")
    time.sleep(after)  # an instant by chance: nothing is waited for
    befalls(slurm, run, id)
    out, err = following.communicate()
    if befalls is cancelled and following.returncode != 0:
        assert following.returncode in (12, 15), out + err
        assert slurm.document("status", run.name)["state"] in ("preempted", "cancelled"), out + err
        slurm.invoke("resume", run.name)
    else:
        assert following.returncode == 0, out + err
    assert slurm.document("status", run.name)["state"] == "succeeded"
    assert {(slurm.path / f"chain-{rank}").read_text() for rank in range(4)} == {chain(LAST)}
    wait_for(lambda: not slurm.jobs() and not slurm.cluster.processes_of(run.name), "nothing to be left")
    wait_for(lambda: slurm.idle() == 3, "all nodes to be idle again")
