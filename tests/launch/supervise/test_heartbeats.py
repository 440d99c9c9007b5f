"""Heartbeats: their copies on a file system that stalls, and what a rank may say of itself."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import wait_for
from trainkit.base.files import read_json, temporary_name
from trainkit.jobs.clusters import WatchLimits
from trainkit.launch.supervise.heartbeats import Heartbeats
from trainkit.runs.folder import AttemptFolder


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
