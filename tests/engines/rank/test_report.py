"""What the lines of a foreign engine tell of its time, by a clock of the test's own."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import get_type_hints

import pytest

from tests.engines.rank.made_engine import spec_of
from tests.reports.drill import START, Drill
from trainkit.engines.rank.readings import EvaluationLine, Iteration
from trainkit.engines.rank.report import PhaseLines, RankReport
from trainkit.engines.rank.spec import read_spec
from trainkit.reports.ledger import AttemptTimes, RunTimes, build_ledger
from trainkit.runs.folder import RunFolder
from trainkit.runs.metrics import MetricsRow, read_rows
from trainkit.runs.phases import PhaseChange, phases_path, read_phases


class Engine:
    """An engine that prints a line every second iteration, each of a second; the clock of its
    lines is the test's, and it knows where every second of it went."""

    def __init__(self, drill: Drill, path: Path) -> None:
        self.drill = drill
        self.lines = PhaseLines(path, 4)

    def begin(self, step: int, seconds: float) -> None:
        self.lines.begin(step, self.drill.now)
        self.drill.spend(seconds, "start")

    def train(self, step: int, bin: str = "training") -> None:
        self.drill.spend(2.0, bin)
        self.lines.iteration(step, 1000.0, self.drill.now)


def test_the_bins_of_an_engine_that_is_killed_and_goes_on(tmp_path: Path) -> None:
    drill = Drill(RunFolder(tmp_path / "runs" / "j" / "id"))
    attempts = []
    for number, steps in ((1, (2, 4, 6)), (2, (6, 8, 10))):
        folder = drill.run.attempt(number)
        folder.path.mkdir(parents=True)
        began = drill.now
        engine = Engine(drill, phases_path(folder))
        engine.begin(0 if number == 1 else 4, 10.0)
        for step in steps:
            engine.train(step, "lost" if (number, step) == (1, 6) else "training")
            if step == 4 or step == 8:
                drill.spend(3.0, "checkpoint")
            if (number, step) == (2, 10):
                drill.spend(5.0, "evaluation")
                engine.lines.evaluated = True
        if number == 1:  # it hangs, and is killed
            drill.spend(7.0, "lost")
        else:
            engine.lines.done(drill.now)
        phases = read_phases(folder)
        attempts.append(AttemptTimes(number, began, drill.now, drill.now, began, phases))
    ledger = build_ledger(RunTimes(START, drill.now, attempts))
    found = {name: seconds for name, seconds in ledger.seconds.items() if seconds > 1e-3}
    assert found == pytest.approx(drill.bins, abs=1e-3)
    assert sum(ledger.seconds.values()) == pytest.approx(ledger.wall_seconds, rel=1e-9)
    assert ledger.goodput == pytest.approx(drill.bins["training"] / ledger.wall_seconds)


def test_lines_that_lie_between_saves_are_split_there(tmp_path: Path) -> None:
    """A save that takes no time is a boundary all the same: what comes later may be lost."""
    path = tmp_path / "phases.jsonl"
    lines = PhaseLines(path, 4)
    lines.begin(0, 0.0)
    lines.iteration(3, None, 3.0)  # a line that does not say how long it took
    lines.iteration(6, None, 6.0)
    lines.iteration(5, None, 7.0)  # printed twice
    lines.done(6.1)
    found = [PhaseChange(**json.loads(line)) for line in path.read_text().splitlines()]
    assert [(each.phase, each.step, each.time) for each in found] == [
        ("train", 0, 0.0),
        ("train", 4, 4.0),
        ("done", 6, 6.1),
    ]


def test_a_disk_that_fails_costs_the_lines(tmp_path: Path) -> None:
    lines = PhaseLines(tmp_path / "missing" / "phases.jsonl", 0)
    lines.begin(0, 0.0)
    lines.iteration(1, 100.0, 1.0)
    lines.done(2.0)


def test_its_rows_are_rows_of_ours(tmp_path: Path) -> None:
    """Beside another engine's rank the declaration of a row cannot be imported: the keys stand in
    its file again. JSON has no infinity."""
    report = RankReport(read_spec(spec_of(tmp_path, "", peak_tflops=100.0, peak="100 TFLOP/s")))
    report.take(Iteration(1, None, 250.0, 0.1, math.nan, 1.5, math.inf, 4, 4, None, 0, 1))
    report.take(EvaluationLine(1, "valid", 2.0))
    training, evaluation = read_rows(tmp_path / "metrics.jsonl")
    known = get_type_hints(MetricsRow).keys()
    assert training.keys() | evaluation.keys() <= known
    assert training["lm_loss"] is None and "loss_scale" not in training
    assert training["grad_norm"] == 1.5 and evaluation["eval"] == "valid"
