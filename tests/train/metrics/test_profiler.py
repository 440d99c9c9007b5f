"""The profiler looks at the steps it is asked for, and leaves whole files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from trainkit.jobs.schema import ProfileSettings
from trainkit.train.metrics import profiler as profiling
from trainkit.train.metrics.profiler import StepProfiler


def step(profiler: StepProfiler, number: int) -> float:
    profiler.before(number)
    torch.ones(number, 7) @ torch.ones(7, 2)
    return profiler.after(number)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def shapes(path: Path) -> list[list[list[int]]]:
    """Shapes of the matrix products in a trace."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return [event["args"]["Input Dims"] for event in events if event.get("name") == "aten::mm"]


def test_only_the_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    close = StepProfiler.close

    def slow(profiler: StepProfiler) -> None:
        close(profiler)
        clock[0] += 3.0

    monkeypatch.setattr(StepProfiler, "close", slow)
    monkeypatch.setattr(profiling, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    profiler = StepProfiler(ProfileSettings(start=2, stop=3, ranks=(1,)), 1, tmp_path / "profile")
    seconds = [step(profiler, number) for number in (1, 2, 3, 4)]
    profiler.close()
    assert names(tmp_path / "profile") == ["rank-1-step-2-3.json.gz", "rank-1-step-2-3.txt"]
    assert [product[0] for product in shapes(tmp_path / "profile" / "rank-1-step-2-3.json.gz")] == [
        [2, 7],
        [3, 7],
    ]
    assert "aten::mm" in (tmp_path / "profile" / "rank-1-step-2-3.txt").read_text()
    assert seconds == [0.0, 0.0, 3.0, 0.0]  # writing it down is told apart


@pytest.mark.parametrize("profile", [None, ProfileSettings(start=1, stop=1, ranks=(0, 2))])
def test_a_rank_that_is_not_asked(tmp_path: Path, profile: ProfileSettings | None) -> None:
    profiler = StepProfiler(profile, 1, tmp_path / "profile")
    step(profiler, 1)
    profiler.close()
    assert names(tmp_path / "profile") == []


def test_training_that_ends_or_goes_back_within_the_range(tmp_path: Path) -> None:
    profiler = StepProfiler(ProfileSettings(start=5, stop=9), 0, tmp_path)
    for number in (5, 6, 4, 5):  # rolled back to 3, and on
        step(profiler, number)
    assert names(tmp_path) == ["rank-0-step-5-6.json.gz", "rank-0-step-5-6.txt"]
    profiler.close()
    profiler.close()
    assert names(tmp_path) == [
        "rank-0-step-5-5.json.gz",
        "rank-0-step-5-5.txt",
        "rank-0-step-5-6.json.gz",
        "rank-0-step-5-6.txt",
    ]


def test_a_step_that_fails_at_once_leaves_nothing(tmp_path: Path) -> None:
    profiler = StepProfiler(ProfileSettings(start=1, stop=2), 0, tmp_path)
    profiler.before(1)
    profiler.close()
    assert names(tmp_path) == []
