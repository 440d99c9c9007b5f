"""Every second of a run is in one bin: a drill with a clock of its own, and what may be missing."""

from __future__ import annotations

import itertools
import json
import os
import random
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.reports.drill import START, three_kills
from trainkit.reports.ledger import BINS, AttemptTimes, RunTimes, build_ledger
from trainkit.reports.read import read_run_times, seconds_of
from trainkit.runs.attempt_report import report_attempts
from trainkit.runs.phases import PhaseChange, PhaseLog, read_phases
from trainkit.runs.record import read_run_record


@pytest.mark.parametrize("ahead", [0.0, 37.5])
def test_each_bin_is_the_drills_own(tmp_path: Path, ahead: float) -> None:
    """Three kills, a resume on another layout, a rollback to a checkpoint and evaluations; the
    clock of rank 0's host may be another one."""
    drill = three_kills(tmp_path, ahead)
    ledger = build_ledger(read_run_times(read_run_record(drill.run)))
    assert ledger.seconds == pytest.approx(drill.bins, abs=0.002)
    assert sum(ledger.seconds.values()) == pytest.approx(drill.now - START, rel=1e-6)
    assert ledger.wall_seconds == pytest.approx(drill.now - START, rel=1e-6)
    assert ledger.goodput == pytest.approx(drill.bins["training"] / (drill.now - START))


def test_a_run_that_failed_has_lost_what_no_checkpoint_holds(tmp_path: Path) -> None:
    drill = three_kills(tmp_path)
    last = drill.run.attempt(4).path
    lines = (last / "phases.jsonl").read_text().splitlines(keepends=True)
    (last / "phases.jsonl").write_text("".join(lines[:-2]))  # its last save never began
    events = (last / "events.jsonl").read_text().replace('"success"', '"infra"')
    (last / "events.jsonl").write_text(events.replace('"exit": 0', '"exit": 10'))
    (drill.run.checkpoints / "step-00000040").mkdir(parents=True)
    record = read_run_record(drill.run)
    assert record.state == "failed"
    seconds = build_ledger(read_run_times(record)).seconds
    assert seconds["training"] == pytest.approx(drill.bins["training"] - 115)
    assert seconds["data"] == pytest.approx(drill.bins["data"] - 5)
    assert sum(seconds.values()) == pytest.approx(drill.now - START)


def test_a_lost_supervisor_is_known_by_its_last_signs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its attempt is over although the run goes on, and lasted as long as rank 0 wrote its log."""
    drill = three_kills(tmp_path, ahead=37.5)
    third = drill.run.attempt(3)
    events = third.events.read_text().splitlines(keepends=True)
    killed = seconds_of(json.loads(events.pop())["time"])
    assert killed is not None
    third.events.write_text("".join(events))
    third.log(0).parent.mkdir()
    third.log(0).write_text("step 33\n")
    os.utime(third.log(0), (killed + 37.5, killed + 37.5))
    monkeypatch.setattr(time, "time", lambda: drill.now)
    record = replace(read_run_record(drill.run), state="running")
    assert build_ledger(read_run_times(record)).seconds == pytest.approx(drill.bins, abs=0.002)
    os.utime(third.log(0), (drill.now, drill.now))  # as a copy has it
    seconds = build_ledger(read_run_times(record)).seconds
    assert seconds["training"] == pytest.approx(drill.bins["training"], abs=0.002)
    assert sum(seconds.values()) == pytest.approx(drill.now - START)
    ends = [each.failure_class for each in report_attempts(drill.run, record)]
    assert ends == ["infra", "infra", "infra", "success"]


def test_half_written_and_missing_files_cost_no_second(tmp_path: Path) -> None:
    drill = three_kills(tmp_path)
    for attempt in drill.run.attempts():
        path = attempt.path / "phases.jsonl"
        path.write_bytes(path.read_bytes() + b'{"time": 18000\xff')
    ledger = build_ledger(read_run_times(read_run_record(drill.run)))
    assert ledger.seconds == pytest.approx(drill.bins, abs=0.002)
    (drill.run.attempt(2).path / "phases.jsonl").unlink()
    ledger = build_ledger(read_run_times(read_run_record(drill.run)))
    assert "attempt 2" in ledger.notes[0] and len(ledger.notes) == 1
    assert ledger.goodput is None  # not all of what counts as training was
    assert sum(ledger.seconds.values()) == pytest.approx(drill.now - START)


def test_a_run_that_never_began(tmp_path: Path) -> None:
    drill = three_kills(tmp_path)
    for name in ("origin.json", "launch/slurm.json"):
        (drill.run.path / name).unlink()
    (drill.run.path / "attempts").rename(tmp_path / "elsewhere")
    ledger = build_ledger(read_run_times(read_run_record(drill.run)))
    assert ledger.wall_seconds == 0 and ledger.goodput is None
    drill.run.origin.write_text(json.dumps({"schema": "origin/1", "started": ["no", "time"]}))
    assert build_ledger(read_run_times(read_run_record(drill.run))).wall_seconds == 0


def test_whatever_clocks_say_the_bins_sum_up() -> None:
    """Times in any order: no span overlaps another, none is negative."""
    dice = random.Random(5)
    phases = ("start", "load", "compile", "train", "eval", "save", "done", "unknown")
    for _ in range(300):
        attempts = []
        for number in range(dice.randrange(4)):
            changes = [
                PhaseChange(dice.uniform(-9, 99), dice.choice(phases), dice.randrange(9), 1.0)
                for _ in range(dice.randrange(9))
            ]
            at = [dice.uniform(-9, 99) for _ in range(4)]
            again = dice.random() < 0.3
            attempts.append(AttemptTimes(number, at[0], at[1], at[2], at[3], changes, again))
        queued = [dice.uniform(-9, 99) for _ in range(dice.randrange(3))]
        ledger = build_ledger(RunTimes(0.0, 90.0, attempts, queued, dice.choice([None, 4])))
        assert sum(ledger.seconds.values()) == pytest.approx(90.0)
        assert set(ledger.seconds) == set(BINS)
        assert min(ledger.seconds.values()) >= 0
        for one, other in itertools.pairwise(ledger.spans):
            assert one.end == other.begin


def test_the_log_of_phases_says_each_change_once(tmp_path: Path) -> None:
    drill = three_kills(tmp_path)
    attempt = drill.run.attempt(9)
    log = PhaseLog(attempt.path / "phases.jsonl")
    for phase, step in (("load", 0), ("train", 0), ("train", 1), ("save", 2), ("train", 2)):
        log.note(phase, step, 0.5)
    found = [(each.phase, each.step) for each in read_phases(attempt)]
    assert found == [("load", 0), ("train", 0), ("save", 2), ("train", 2)]
    lost = PhaseLog(tmp_path / "runs" / "job" / "x" / "phases.jsonl")
    lost.path.parent.parent.joinpath("x").write_text("a file where the folder should be")
    lost.note("load", 0, 0.0)  # costs the line, not the training
    assert lost.failed is not None
