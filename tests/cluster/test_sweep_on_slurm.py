"""A sweep through a real Slurm: one array, a member killed, one that diverges, resumed, the right
table, and nothing left."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest

from tests.cluster.slurm_project import SlurmProject
from tests.conftest import HANGS, wait_for
from tests.programs import put_program

RATES = [1e-2, 1e18, 5e-3, 2e-3, 1e-3, 5e-4]
# one node and one rank each; three at once, as the cluster has nodes
SWEEP = f"\n[jobs.random.sweep]\ngrid.training.lr = {RATES}\nat_once = 3\n"


@pytest.mark.slow  # six runs, each with an interpreter and a torch of its own on its node
def test_a_sweep_of_six_is_gone_on_with(slurm: SlurmProject) -> None:
    text = (slurm.path / "jobs.toml").read_text().replace("nodes = 2\n", "nodes = 1\n")
    text = text.replace("ranks_per_node = 2", "ranks_per_node = 1", 1)
    (slurm.path / "jobs.toml").write_text(text + 'resume = "never"\n' + SWEEP)
    slurm.invoke("sweep", "random", "--detach")
    value = slurm.document("sweep", "random", "--show")
    runs = [slurm.path / "runs" / "random" / member["run"] for member in value["members"]]
    ids = [slurm.slurm_jobs(run)[0]["id"] for run in runs]
    array = ids[0].partition("_")[0]
    assert ids == [f"{array}_{index}" for index in range(6)], "one array, an element a member"
    killed = runs[0]
    wait_for((killed / "metrics.jsonl").exists, "the first member", timeout=HANGS)
    slurm.cluster.kill(*slurm.cluster.processes_of(killed.name))
    slurm.wait_state(killed, "failed")
    assert slurm.document("status", ids[1])["run"] == runs[1].name, "by the element's number"
    # goes on with the killed one, and follows those of the array that have not ended
    done = slurm.invoke("sweep", "random", "--best", "training_loss", "--json", timeout=HANGS)
    value = json.loads(done.stdout)
    states = [member["state"] for member in value["members"]]
    assert states == ["succeeded", "diverged", *["succeeded"] * 4]
    assert [slurm.path / "runs" / "random" / m["run"] for m in value["members"]] == runs
    assert len(slurm.runs()) == 6, "gone on with, not made again"
    assert len(slurm.slurm_jobs(runs[0])) == 2 and len(slurm.slurm_jobs(runs[1])) == 1
    for member, rate, run in zip(value["members"], RATES, runs, strict=True):
        assert member["values"] == {"training.lr": rate}
        if member["state"] == "succeeded":
            losses = slurm.losses(run)
            assert len(losses) == 30 and member["step"] == 30
            tail = [losses[step] for step in (28, 29, 30)]
            assert member["training_loss"] == pytest.approx(sum(tail) / 3)
    best = min(
        (m for m in value["members"] if m["state"] == "succeeded"), key=lambda m: m["training_loss"]
    )
    written = slurm.document("show", "random-best")["job"]["training"]["lr"]
    assert written == best["values"]["training.lr"]
    slurm.wait_over()
    assert not slurm.cluster.processes_of(killed.name)


@pytest.mark.slow  # four runs, two of which go on from rung to rung
def test_a_sweep_that_stops_early(slurm: SlurmProject) -> None:
    """An array a rung: the one that is gone on with to the end has every step once."""
    text = (slurm.path / "jobs.toml").read_text().replace("nodes = 2\n", "nodes = 1\n")
    text = text.replace("ranks_per_node = 2", "ranks_per_node = 1", 1)
    sweep = "grid.training.lr = [1e-2, 1e18, 1e-1, 1e-3]\n"
    sweep += "halving = { first_rung = 8, factor = 2 }\n"
    (slurm.path / "jobs.toml").write_text(text + "\n[jobs.random.sweep]\n" + sweep)
    slurm.invoke("sweep", "random", "--detach")
    assert len(slurm.runs()) == 4
    value = json.loads(slurm.invoke("sweep", "random", "--json", timeout=HANGS).stdout)
    assert [rung["step"] for rung in value["rungs"]] == [8, 16, 30]
    assert [len(rung["kept"]) for rung in value["rungs"][:2]] == [2, 1]
    states = [member["state"] for member in value["members"]]
    assert states[1] == "diverged" and sorted(states) == [
        "diverged",
        "stopped",
        "stopped",
        "succeeded",
    ]
    run = slurm.path / "runs/random" / value["members"][states.index("succeeded")]["run"]
    assert len(slurm.losses(run)) == 30 and len(slurm.slurm_jobs(run)) == 3
    slurm.wait_over()


# Each stands for one of Slurm's programs, and kills who called it: before the real one, after it,
# in its place.
KILLED = {
    "sbatch-before": 'kill -9 "$PPID"; {real} "$@"',
    "sbatch-after": 'said=$({real} "$@"); kill -9 "$PPID"',
    "scontrol-instead": 'kill -9 "$PPID"',
}


@pytest.mark.parametrize(
    "when", [pytest.param("sbatch-before", marks=pytest.mark.slow), *list(KILLED)[1:]]
)
def test_a_sweep_killed_while_it_submits(slurm: SlurmProject, when: str) -> None:
    """No array stays held in the queue, no run is lost and none is made twice."""
    text = (slurm.path / "jobs.toml").read_text().replace("nodes = 2\n", "nodes = 1\n")
    text = text.replace("ranks_per_node = 2", "ranks_per_node = 1", 1)
    sweep = "\n[jobs.random.sweep]\ngrid.training.lr = [1e-2, 1e-3]\n"
    (slurm.path / "jobs.toml").write_text(text)
    slurm.ranks_do("beat(1); done()")
    (slurm.path / "jobs.toml").write_text((slurm.path / "jobs.toml").read_text() + sweep)
    program = when.partition("-")[0]
    path = kills_its_caller(slurm.path / "bin", program, KILLED[when])
    killed = slurm.start("sweep", "random", "--detach", PATH=path)
    out, err = killed.communicate()
    assert killed.returncode == -signal.SIGKILL, out + err
    (held,) = wait_for(lambda: {id.partition("_")[0] for id in slurm.jobs()}, "the array")
    assert slurm.job_state(held).split()[0] == "PENDING"
    said = slurm.invoke("sweep", "random", timeout=HANGS).stdout
    if program == "scontrol":
        assert f"job {held}, which a killed process has left held, is released" in said
    else:
        assert f"job {held}, which a killed process has left held, is out of the queue" in said
    value = slurm.document("sweep", "random", "--show")
    assert [member["state"] for member in value["members"]] == ["succeeded"] * 2
    assert {member["run"] for member in value["members"]} == {run.name for run in slurm.runs()}
    slurm.wait_over()
    assert not list((slurm.path / "sweeps").rglob("*.held.json"))


def kills_its_caller(folder: Path, program: str, does: str) -> str:
    """A PATH with such a program first."""
    folder.mkdir()
    text = does.format(real=shutil.which(program))
    put_program(folder, program, f"#!/bin/bash\n{text}\n")
    return f"{folder}:/usr/sbin:/usr/bin:/sbin:/bin"
