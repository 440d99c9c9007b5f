"""A rank's word on where it is."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from trainkit.train.heartbeat import Heartbeat


def test_beats_are_whole_files_at_most_two_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new" / "0.json"
    beats = Heartbeat(path, rank=3)
    now = 1000.0
    monkeypatch.setattr("time.time", lambda: now)

    def said() -> dict[str, Any]:
        return dict(json.loads(path.read_text()))

    beats.beat("train", 7)
    assert said() == {"schema": "heartbeat/1", "rank": 3, "pid": os.getpid(), "step": 7, "phase": "train", "time": 1000.0, "save_seconds": None}
    now += 0.4
    beats.beat("train", 8)
    assert (said()["step"], beats.step) == (7, 8)
    beats.beat("eval", 8)
    assert (said()["step"], said()["phase"]) == (8, "eval")
    now += 0.6
    beats.beat("eval", 9)
    assert said()["step"] == 9
    now += 0.6
    beats.again()
    assert said() == {"schema": "heartbeat/1", "rank": 3, "pid": os.getpid(), "step": 9, "phase": "eval", "time": now, "save_seconds": None}
    beats.beat("done", 9)
    assert said()["phase"] == "done"
    assert [p.name for p in path.parent.iterdir()] == ["0.json"]


def test_nobody_watches() -> None:
    Heartbeat(None, rank=0).beat("done", 1)
