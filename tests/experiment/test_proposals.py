"""What a sweep with sampler = 'tpe' tries: within the ranges, better than by chance, and the same
again after a kill."""

from __future__ import annotations

import json
import math
import os
import signal

import pytest

from tests.conftest import HANGS, Project, wait_for
from tests.experiment.test_halving import of_one_rank
from trainkit.experiment.sweep.proposals import propose
from trainkit.jobs.sweeps import Point, Sweep

RANGES = {
    "training": {"lr": {"log": [1e-5, 1e-1]}, "lr_warmup_iters": {"integer": [0, 100]}},
    "model": {"hidden_size": {"choice": [32, 64, 128]}},
}


def bowl(point: Point) -> float:
    """Its lowest place: a rate of 1e-3, 20 steps, a width of 64."""
    rate = math.log10(float(str(point["training.lr"]))) + 3
    warmup = (int(str(point["training.lr_warmup_iters"])) - 20) / 50
    return rate**2 + warmup**2 + (0.0 if point["model.hidden_size"] == 64 else 1.0)


def searched(sweep: Sweep, count: int, batch: int) -> list[tuple[Point, float | None]]:
    tried: list[tuple[Point, float | None]] = []
    while len(tried) < count:
        new = propose(sweep, tried, batch)
        assert new == propose(sweep, tried, batch), "they follow from what was tried"
        tried += [(point, bowl(point)) for point in new]
    return tried


@pytest.mark.parametrize("batch", [1, 4])
def test_it_learns_from_what_was_tried(batch: int) -> None:
    table = {"random": RANGES, "samples": 40, "sampler": "tpe"}
    better = 0
    for seed in range(5):
        sweep = Sweep.model_validate({**table, "draw_seed": seed})
        tried = searched(sweep, 40, batch)
        points = [point for point, _ in tried]
        assert all(points.count(point) == 1 for point in points)
        rates = [float(str(point["training.lr"])) for point in points]
        assert min(rates) >= 1e-5 and max(rates) <= 1e-1
        late = sum(bowl(point) for point in points[20:]) / 20
        better += late < sum(bowl(point) for point in sweep.points()) / 40
    assert better == 5, "the later half lies lower than draws by chance"


def test_a_failure_is_the_worst_and_few_choices_end() -> None:
    sweep = Sweep.model_validate(
        {"random": {"nodes": {"choice": [1, 2, 3]}}, "samples": 9, "sampler": "tpe"}
    )
    tried: list[tuple[Point, float | None]] = [({"nodes": 1}, math.nan), ({"nodes": 2}, math.inf)]
    assert propose(sweep, tried, 5) == [{"nodes": 3}]


def test_one_that_was_killed_tries_the_same(project: Project) -> None:
    """Two settings at once, each with two seeds; what was tried of the first is known to the
    second."""
    sweep = "sampler = 'tpe'\nsamples = 3\nrandom.training.lr = { log = [1e-4, 1e-1] }\n"
    of_one_rank(project, sweep + "seeds = [1, 2]\n")
    first = project.start("sweep", "random")
    wait_for(lambda: len(project.runs()) == 3, "the second setting", timeout=HANGS)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    value = project.document("sweep", "random")
    assert [member["state"] for member in value["members"]] == ["succeeded"] * 6
    assert len(project.runs()) == 6
    assert [member["values"]["training.seed"] for member in value["members"]] == [1, 2] * 3
    points = value["points"]
    assert len(points) == 3 and all(point["interval"]["validation_loss"] > 0 for point in points)
    tried: list[tuple[Point, float | None]] = []
    table = json.loads((project.runs()[0] / "job.json").read_text())["job"]["sweep"]
    for point in points:
        assert propose(Sweep.model_validate(table), tried, 1) == [point["values"]]
        tried.append((point["values"], point["mean"]["validation_loss"]))
