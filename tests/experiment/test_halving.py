"""Sweeps that stop early: which runs go on from a rung, that those are as if they never stopped,
and what is refused."""

from __future__ import annotations

import json
import os
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from tests.conftest import HANGS, Project, wait_for
from trainkit.experiment.sweep.halving import steps_of, survivors
from trainkit.jobs.sweeps import Halving

LOSSES = st.lists(st.none() | st.floats(width=16), min_size=1, max_size=40)


@given(LOSSES, st.integers(2, 5))
def test_survivors_are_the_best_that_did_not_fail(losses: list[float | None], factor: int) -> None:
    kept = survivors(losses, factor)
    sound = {at: loss for at, loss in enumerate(losses) if loss is not None and abs(loss) < 1e30}
    assert len(kept) == min(len(sound), max(1, len(losses) // factor))
    assert kept == sorted(set(kept)) and set(kept) <= set(sound)
    for one in set(sound) - set(kept):  # of equal ones the first go on
        assert all((sound[each], each) < (sound[one], one) for each in kept)


@given(st.integers(1, 50), st.integers(2, 5), st.integers(2, 3000), st.integers(1, 64))
def test_what_halving_costs(first: int, factor: int, last: int, settings: int) -> None:
    """No more than all runs to their end, and a rung no more than that before it, but for the last:
    the settings fall by the factor by which steps grow."""
    rungs = Halving(first_rung=first, factor=factor).rungs(last)
    assert rungs[-1] == last and all(one < other for one, other in pairwise(rungs[:-1]))
    assert all(other == factor * one for one, other in pairwise(rungs[:-1]))
    if first >= last:
        return
    total = steps_of(rungs, settings, factor)
    left, before, counted = settings, 0, 0
    for rung in rungs:
        counted += left * (rung - before)
        left, before = len(survivors([1.0] * left, factor)), rung
    assert total == counted <= settings * last
    if settings >= factor ** len(rungs):
        assert total <= settings * first * len(rungs) * (factor - 1)


def of_one_rank(project: Project, sweep: str) -> None:
    """The job on random tokens, twelve steps of one rank, with a sweep."""
    project.edit_jobs("ranks_per_node = 2", "ranks_per_node = 1")
    project.edit_jobs("training.train_iters = 30", "training.train_iters = 12")
    project.edit_jobs("eval_interval = 10\n", "eval_interval = 6\n")
    project.add_to_jobs(f"\n[jobs.random.sweep]\n{sweep}")


RATES = [1e-2, 1e18, 1e-1, 1e-3]
HALVING = f"grid.training.lr = {RATES}\nhalving = {{ first_rung = 3, factor = 2 }}\n"


def test_a_survivor_is_as_if_it_never_stopped(project: Project) -> None:
    """Killed on the way, while another asks for the same sweep: the same runs go on from the same
    rungs; one that diverges ends alone; every number of the best is that of a run never stopped."""
    of_one_rank(project, HALVING)
    first = project.start("sweep", "random")
    wait_for(lambda: len(project.runs()) == 2, "the second run", timeout=HANGS)
    assert "is being run already" in project.invoke("sweep", "random", exit=17).stderr
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    done = project.invoke("sweep", "random", "--svg", "s.svg", "--json", timeout=HANGS)
    value = json.loads(done.stdout)
    assert len(project.runs()) == 4, "none was lost, none was made twice"
    members = value["members"]
    states = [(member["state"], member["step"]) for member in members]
    assert sorted(states[:1] + states[2:]) == [("stopped", 3), ("stopped", 6), ("succeeded", 12)]
    assert members[1]["state"] == "diverged"
    assert [rung["step"] for rung in value["rungs"]] == [3, 6, 12]
    (best,) = value["rungs"][1]["kept"]
    assert members[best - 1]["state"] == "succeeded" and best in value["rungs"][0]["kept"]
    assert value["rungs"][2]["kept"] is None
    (record,) = project.path.glob("sweeps/random/*/sweep.json")
    assert json.loads(record.read_text())["rungs"] == value["rungs"]
    lines = (project.path / "s.svg").read_text().count("<polyline")
    assert lines == 4
    again = project.document("sweep", "random")
    assert again["members"] == members, "nothing is left to do"
    project.invoke("train", "random", "--set", f"training.lr={RATES[best - 1]}")
    whole = project.runs()[-1]
    survivor = project.path / "runs/random" / members[best - 1]["run"]
    assert numbers(project, survivor) == numbers(project, whole)
    assert weights(survivor) == weights(whole)


def numbers(project: Project, run: Path) -> dict[int, list[Any]]:
    """What training computed at each step, and the evaluations that both runs made."""
    found: dict[int, list[Any]] = {}
    for row in project.metrics(run):
        if "eval" not in row:
            found[row["step"]] = [row["lm_loss"], row["grad_norm"], row["learning_rate"]]
    for row in project.metrics(run):
        if "eval" in row and row["step"] in (6, 12):
            found[row["step"]].append(row["lm_loss"])
    assert len(found) == 12
    return found


def weights(run: Path) -> dict[str, bytes]:
    """The last checkpoint's tensors."""
    files = sorted((run / "checkpoints/step-00000012").glob("rank-*.bin"))
    assert files
    return {path.name: path.read_bytes() for path in files}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("halving.first_rung = 12", "first_rung 12 is not before training.train_iters 12"),
        ("grid.training.train_iters = [8, 9]\nhalving.first_rung = 2", "share no rungs"),
        ("grid.sample_order = ['megatron']\nhalving.first_rung = 2", "follow from its length"),
        ("halving.first_rung = 2\nhalving.factor = 1", "factor = 1 must be at least 2"),
    ],
)
def test_what_cannot_be_halved(project: Project, more: str, words: str) -> None:
    of_one_rank(project, f"grid.training.lr = [1e-2, 1e-3]\n{more}\n")
    assert words in project.invoke("sweep", "random", "--dry-run", exit=3).stderr
    assert project.runs() == []


def test_a_dry_run_says_what_halving_costs(project: Project) -> None:
    of_one_rank(project, HALVING + "seeds = [1, 2]\n")
    said = project.invoke("sweep", "random", "--dry-run").stdout
    # four settings to step 3, two to 6, one to 12: 12 + 6 + 6 of 48
    assert "compared at steps 3, 6" in said and "50% of the steps" in said
    assert project.document("sweep", "random", "--dry-run")["rungs"] == [3, 6, 12]


def test_where_all_fail_nothing_is_decided(project: Project) -> None:
    """Else no run would be left that `--failed` goes on with, once their cause is mended."""
    of_one_rank(project, "grid.training.lr = [1e18, 1e19]\nhalving.first_rung = 3\n")
    value = json.loads(project.invoke("sweep", "random", "--json", exit=9, timeout=HANGS).stdout)
    assert [member["state"] for member in value["members"]] == ["diverged", "diverged"]
    assert value["rungs"][0]["kept"] is None
