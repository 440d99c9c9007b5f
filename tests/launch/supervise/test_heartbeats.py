"""Heartbeats: their copies on a file system that stalls, and what a rank may say of itself."""

from __future__ import annotations

import json
import os
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.conftest import wait_for
from trainkit.base.files import read_json, temporary_name
from trainkit.jobs.clusters import WatchLimits
from trainkit.launch.supervise.heartbeats import Heartbeats
from trainkit.runs.folder import AttemptFolder
from trainkit.train.metrics.heartbeat import Heartbeat


def beats(folder: Path) -> tuple[Heartbeats, AttemptFolder]:
    attempt = AttemptFolder(folder / "attempts" / "1")
    attempt.heartbeat(0).parent.mkdir(parents=True)
    return Heartbeats(attempt, WatchLimits()), attempt


def test_a_file_system_that_stalls_holds_up_nobody_and_gets_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, attempt = beats(tmp_path)
    stalled = tmp_path / "stalled"
    os.mkfifo(stalled)  # to open it for writing takes until somebody reads
    first = iter([stalled])
    monkeypatch.setattr(
        "trainkit.launch.supervise.heartbeats.temporary_name",
        lambda path: next(first, None) or temporary_name(path),
    )
    given.take(0, {"phase": "start", "step": 0})
    wait_for(lambda: not given._to_copy, "the first copy to begin")
    for number in range(1000):
        given.take(0, {"phase": f"phase {number}", "step": number})
        given.take(1, {"phase": f"phase {number}", "step": number})
    assert given.step() == 999
    assert not attempt.heartbeat(1).exists() and len(given._to_copy) == 2, (
        "copies of what is old by now wait"
    )
    with open(stalled, "rb") as reader:
        assert json.loads(reader.read())["phase"] == "start"
    wait_for(lambda: attempt.heartbeat(1).exists() and not given._to_copy, "the copies")
    wait_for(lambda: read_json(attempt.heartbeat(0))["step"] == 999, "the newest of rank 0")
    assert read_json(attempt.heartbeat(1))["step"] == 999


@pytest.mark.parametrize(
    "beat",
    [
        {"phase": "train", "step": None},
        {"phase": "train", "step": [1]},
        {"phase": 3},
        {"phase": "train", "step": "7"},
        [],
        "x",
    ],
)
def test_what_is_no_heartbeat_moves_nothing(tmp_path: Path, beat: Any) -> None:
    given, _ = beats(tmp_path)
    given.take(0, {"phase": "train", "step": 1})
    before = given.last
    given.take(0, beat)
    assert (
        given.step() == 1
        and given.last == before
        and not given.stepping
        and given.behind([0]) == []
    )


def test_an_engine_that_speaks_seldom_has_as_long_as_it_takes(tmp_path: Path) -> None:
    """Of the heartbeats of all ranks the longest silence counts, before and after the first step;
    what is not a number of seconds does not."""
    given, _ = beats(tmp_path)
    limits = given.limits
    assert given.limit == limits.start
    given.take(0, {"phase": "train", "step": 10, "quiet_seconds": 3 * limits.start})
    assert given.limit == 3 * limits.start
    given.take(1, {"phase": "train", "step": 10, "quiet_seconds": 1.0})
    given.take(1, {"phase": "train", "step": 20, "quiet_seconds": "10000000"})
    assert given.stepping
    assert given.limit == 3 * limits.start


class Simulated:
    """A rank of our own trainer and its supervisor, in a time of their own: the agent reports once
    a second, the supervisor looks as often at least."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.word = ""
        self.reported = 0.0
        self.longest_save = 0.0
        self.alarms: list[float] = []  # seconds without a move
        monkeypatch.setattr("time.monotonic", lambda: self.now)
        monkeypatch.setattr(
            "trainkit.train.metrics.heartbeat.write_beat",
            lambda path, text, durable: setattr(self, "word", text),
        )
        attempt = AttemptFolder(folder / "attempts" / "1")
        attempt.heartbeat(0).parent.mkdir(parents=True)
        self.pulse = Heartbeats(attempt, WatchLimits(), lambda: self.now)
        self.rank = Heartbeat(folder / "0.json", 0)
        self.pulse.begin()

    def spend(self, seconds: float) -> None:
        """Nothing is said for so long."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 1.0)
            if self.now - self.reported >= 1.0:
                self.reported = self.now
                if self.word:
                    self.pulse.take(0, json.loads(self.word))
                self.word = ""
            if still := self.pulse.stalled():
                self.alarms.append(still)

    def train(self, steps: int, median: float, sigma: float, dice: Random) -> None:
        """Steps, evaluations and saves of random lengths, the first of each kind long."""

        def some(times: float) -> float:
            return median * times * dice.lognormvariate(0.0, sigma)

        for step in range(steps):
            self.rank.beat("train", step)
            self.spend(300.0 if step == 0 else some(1.0))
            if step % 50 == 49:
                for part in range(4):
                    self.rank.beat("eval", step)
                    self.spend(200.0 if step == 49 and part == 0 else some(0.3))
            if step % 100 == 99:
                self.rank.beat("save", step)
                seconds = some(3.0) + (100.0 if step == 99 else 0.0)
                self.spend(seconds)
                self.longest_save = max(self.longest_save, seconds)
                self.rank.on_saved(self.longest_save)
        self.rank.beat("save", steps, regular=False)
        self.spend(500.0)


@pytest.mark.parametrize(
    ("steps", "median", "sigma"), [(10_000, 0.01, 1.0), (10_000, 1.0, 1.0), (1000, 20.0, 0.5)]
)
def test_no_step_of_random_length_is_taken_for_a_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int, median: float, sigma: float
) -> None:
    """The longest of 10,000 steps takes forty times the median, with sigma 1."""
    run = Simulated(tmp_path, monkeypatch)
    run.train(steps, median, sigma, Random(7))
    assert not run.alarms


def test_a_hang_is_found_by_the_times_of_the_run_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Simulated(tmp_path, monkeypatch)
    dice = Random(7)
    run.train(300, 1.0, 0.1, dice)
    assert not run.alarms
    run.rank.beat("train", 300)
    run.spend(23)
    assert run.alarms and run.alarms[0] < 22, "steps of 1 s"


def test_longer_steps_have_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Simulated(tmp_path, monkeypatch)
    for step in range(300, 320):
        run.rank.beat("train", step)
        run.spend(8)
    run.rank.beat("train", 320)
    run.spend(78)
    assert not run.alarms
    run.spend(5)
    assert run.alarms


def test_a_supervisor_that_was_stopped_first_reads_what_ranks_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Simulated(tmp_path, monkeypatch)
    run.train(100, 1.0, 0.1, Random(7))
    run.rank.beat("train", 100)
    run.spend(2)
    run.now += 400
    assert run.pulse.stalled() == 0.0
    run.spend(15)
    assert not run.alarms
    run.spend(6)
    assert run.alarms


def test_what_may_pass_has_longer_and_not_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Simulated(tmp_path, monkeypatch)
    run.train(100, 1.0, 0.1, Random(7))
    run.rank.beat("train", 100)
    run.spend(22)
    assert run.pulse.bear(run.alarms[0])
    run.alarms.clear()
    run.spend(18)
    assert not run.alarms
    run.spend(4)
    assert run.alarms and run.pulse.bear(run.alarms[0])
    assert not run.pulse.bear(WatchLimits().heartbeat)


def test_other_ranks_and_programs_keep_the_old_limits(tmp_path: Path) -> None:
    given, _ = beats(tmp_path)
    for step in (1, 2):
        given.take(0, {"phase": "train", "step": step, "usual_seconds": 1.0})
    assert given.limit == 20
    given.take(0, {"phase": "train", "step": 3, "usual_seconds": 3.0})
    assert given.limit == 30
    given.take(1, {"phase": "train", "step": 3})  # a rank of another program
    assert given.limit == given.limits.heartbeat
    given.take(1, {"phase": "done", "step": 3})
    assert given.limit == 30
    given.take(1, {"phase": "save", "step": 3, "usual_seconds": 1e9})
    assert given.limit == given.limits.heartbeat


def test_what_an_agent_may_be_silent_is_no_hang(tmp_path: Path) -> None:
    attempt = AttemptFolder(tmp_path)
    given = Heartbeats(attempt, WatchLimits(lease=60, hang_floor=5))
    for step in (1, 2):
        given.take(0, {"phase": "train", "step": step, "usual_seconds": 0.1})
    assert given.limit > 60
