"""A run in numbers: which rows count for what, from metrics written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainkit.runs.folder import RunFolder
from trainkit.runs.summary import RunSummary, summarize_run


def training(step: int, loss: float | None, **more: Any) -> dict[str, Any]:
    return {"step": step, "consumed_samples": 4 * step, "lm_loss": loss, "elapsed_ms": 500.0} | more


def evaluation(step: int, loss: float | None, name: str = "valid") -> dict[str, Any]:
    return {"step": step, "consumed_samples": 4 * step, "eval": name, "lm_loss": loss}


def summary_of(folder: Path, *rows: dict[str, Any]) -> RunSummary:
    run = RunFolder(folder / "runs" / "job" / "20260101-000000-aaaa")
    run.path.mkdir(parents=True)
    run.job.write_text("{}")
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return summarize_run(run)


def test_nothing_logged(tmp_path: Path) -> None:
    found = summary_of(tmp_path)
    assert found.training_loss() is None and found.validation_loss() is None
    assert found.tokens_per_second is None and found.peak_bytes is None and found.peak is None
    assert found.training_seconds == 0 and found.skipped_iterations == 0
    assert found.to_json()["consumed_samples"] == 0


def test_losses_first_and_last(tmp_path: Path) -> None:
    """Of training the last is the mean of the last tenth; losses that are not finite (null) do
    not count, nor do evaluations."""
    losses = [9.0, *(5.0 for _ in range(17)), 4.0, 2.0]
    rows = [training(step, loss) for step, loss in enumerate(losses, 1)]
    found = summary_of(
        tmp_path,
        evaluation(0, 8.0),
        training(0, None),
        *rows,
        evaluation(10, None),
        evaluation(20, 3.0),
        evaluation(10, 7.0, "books"),
        evaluation(20, 6.0, "books"),
        evaluation(20, None, "code"),
    )
    assert found.training_loss() == (9.0, 3.0)
    assert found.validation_loss() == (8.0, 3.0)
    assert found.further_validation_losses() == {"books": (7.0, 6.0)}
    report = found.to_json()
    assert report["schema"] == "report/1"
    assert report["training_loss"] == {"first": 9.0, "last": 3.0}
    assert report["further_validation_losses"] == {"books": {"first": 7.0, "last": 6.0}}
    assert report["consumed_samples"] == 80


def test_time_and_speed(tmp_path: Path) -> None:
    """A row has the mean time of the steps since the row before."""
    found = summary_of(
        tmp_path,
        training(1, 1.0, tokens_per_second=100.0, mfu=None),
        evaluation(5, 1.0),
        training(5, 1.0, tokens_per_second=300.0, mfu=0.5),
        training(6, 1.0, tokens_per_second=200.0, mfu=None, elapsed_ms=1000.0),
    )
    assert found.training_seconds == pytest.approx(0.5 + 4 * 0.5 + 1.0)
    assert found.tokens_per_second == 200.0
    assert found.median("mfu") == 0.5 and found.median("hfu") is None


def test_counts_and_peaks(tmp_path: Path) -> None:
    found = summary_of(
        tmp_path,
        training(1, 1.0, skipped_iterations=2, nan_iterations=1, peak="A100 bf16"),
        training(2, 1.0, memory_bytes={"max_resident": 70, "resident": 90}),
        training(
            3,
            1.0,
            skipped_iterations=1,
            peak="H100 bf16",
            memory_bytes={"max_reserved": 50, "max_resident": 99},
        ),
        training(4, 1.0, peak=None, memory_bytes={}),
    )
    assert (found.skipped_iterations, found.nan_iterations) == (3, 1)
    assert found.peak_bytes == 70 and found.peak == "H100 bf16"
