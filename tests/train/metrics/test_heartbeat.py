"""A rank's word on where it is."""

from __future__ import annotations

import errno
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

from trainkit.base import files
from trainkit.base.errors import TrainkitError
from trainkit.launch.agent.process import BEAT_BYTES
from trainkit.train.metrics.heartbeat import Heartbeat


def full(path: Path, text: str) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def test_beats_are_whole_files_at_most_two_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "new" / "0.json"
    beats = Heartbeat(path, rank=3)
    now = 1000.0
    monkeypatch.setattr("time.time", lambda: now)
    monkeypatch.setattr("time.monotonic", lambda: now)

    def said() -> dict[str, Any]:
        return dict(json.loads(path.read_text()))

    beats.beat("train", 7)
    assert said() == {
        "schema": "heartbeat/1",
        "rank": 3,
        "pid": os.getpid(),
        "step": 7,
        "phase": "train",
        "time": 1000.0,
        "save_seconds": None,
        "usual_seconds": None,
    }
    now += 0.4
    beats.beat("train", 8)
    assert (said()["step"], beats.step) == (7, 8)
    beats.beat("eval", 8)
    assert (said()["step"], said()["phase"]) == (8, "eval")
    now += 0.6
    beats.beat("eval", 9)
    assert said()["step"] == 9
    now += 0.6
    beats.refresh()
    assert said() == {
        "schema": "heartbeat/1",
        "rank": 3,
        "pid": os.getpid(),
        "step": 9,
        "phase": "eval",
        "time": now,
        "save_seconds": None,
        "usual_seconds": None,
    }
    beats.beat("done", 9)
    assert said()["phase"] == "done"
    assert [p.name for p in path.parent.iterdir()] == ["0.json"]


def test_a_full_disk_has_room_for_the_last_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the last beat stands. A run that has done everything must not end as a failed one."""
    path = tmp_path / "0.json"
    beats = Heartbeat(path, rank=3)
    beats.beat("save", 123456)
    longest = path.stat().st_size
    monkeypatch.setattr(files, "write_text", full)
    beats.beat("done", 7)
    said = json.loads(path.read_text())
    assert (said["phase"], said["step"]) == ("done", 7) and path.stat().st_size == longest


def test_a_full_disk_has_room_for_every_beat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the agent left some: a rank that cannot say that it moves is stopped as one that
    hangs."""

    def full_for_others(path: Path, text: str) -> None:
        path.touch()
        full(path, text)

    path = tmp_path / "0.json"
    path.write_text(" " * BEAT_BYTES)
    monkeypatch.setattr(Path, "write_text", full_for_others)
    Heartbeat(path, rank=3).beat("train", 7)
    assert json.loads(path.read_text())["step"] == 7 and path.stat().st_size == BEAT_BYTES
    assert [each.name for each in tmp_path.iterdir()] == ["0.json"]


def test_the_last_word_is_whole_where_the_disk_takes_it_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Parts(io.FileIO):
        def write(self, data: Any) -> int:
            return super().write(data[:7])

    path = tmp_path / "0.json"
    beats = Heartbeat(path, rank=3)
    beats.beat("save", 123456)
    monkeypatch.setattr(files, "write_text", full)
    monkeypatch.setattr(
        files, "open", lambda path, mode, buffering: Parts(path, mode), raising=False
    )
    beats.beat("done", 7)
    assert json.loads(path.read_text())["phase"] == "done"


def test_where_nothing_can_be_written_training_goes_on_to_the_last_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    beats = Heartbeat(tmp_path / "file/0.json", rank=3)
    for phase in ("train", "eval", "save"):
        beats.beat(phase, 7)
    assert capsys.readouterr().err.count("WARNING: no heartbeat") == 1
    with pytest.raises(
        TrainkitError,
        match="training is done and its checkpoint saved, but rank 3 could not say so",
    ) as error:
        beats.beat("done", 7)
    assert error.value.exit == 10


def test_a_clock_that_is_set_back_silences_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beats = Heartbeat(tmp_path / "0.json", rank=3)
    for number, (wall, since_boot) in enumerate([(9000.0, 1.0), (5000.0, 2.0)]):
        monkeypatch.setattr("time.time", lambda wall=wall: wall)
        monkeypatch.setattr("time.monotonic", lambda now=since_boot: now)
        beats.beat("train", number)
        assert json.loads((tmp_path / "0.json").read_text())["time"] == wall


def test_a_beat_says_how_long_parts_took_so_far_once_that_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beats = Heartbeat(tmp_path / "0.json", rank=3)
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)

    def usual(seconds: float, phase: Any, *, regular: bool = True) -> float | None:
        nonlocal now
        now += seconds
        beats.beat(phase, 7 + int(now), regular=regular)
        found: float | None = json.loads((tmp_path / "0.json").read_text())["usual_seconds"]
        return found

    assert usual(1, "load") is None
    # the first step compiles; then too few are known
    assert [usual(seconds, "train") for seconds in (1, 900, 2, 3, *[2] * 7)] == [None] * 11
    assert [usual(seconds, "train") for seconds in (2, 4, 1)] == [3, 4, 4]
    # the first evaluation takes long, and what is called a surprise does
    assert [usual(seconds, "eval") for seconds in (1, *[300] * 12)] == [None] * 13
    assert usual(1, "train") == 4
    beats.surprise()
    assert json.loads((tmp_path / "0.json").read_text())["usual_seconds"] is None
    assert usual(50, "train") == 4
    assert [usual(seconds, "eval") for seconds in (1, 2, 2, 3, *[2] * 6)] == [None] * 10
    assert usual(2, "eval") == 3
    # a save by the saves before it, unless it is the last
    assert usual(1, "save") is None
    beats.on_saved(20.0)
    assert usual(1, "train") == 4
    assert usual(1, "save") == 20
    beats.refresh()
    assert usual(1, "save", regular=False) is None
    now += 1
    beats.refresh()
    assert json.loads((tmp_path / "0.json").read_text())["usual_seconds"] is None
    # after a rollback nothing is known again
    usual(1, "load")
    assert usual(1, "train") is None
