"""What is reported of a step: the files stay readable whatever the numbers are."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any, cast

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.train.support import new_run, tiny_job
from trainkit.runs.folder import RunFolder
from trainkit.runs.metrics import MetricsRow, read_rows
from trainkit.runs.sample_windows import (
    SampleWindow,
    SampleWindowLog,
    find_sample_window,
    windows_path,
)
from trainkit.runs.summary import summarize_run
from trainkit.train.metrics.reporter import LineFile, Reporter, finite

ROW: dict[str, Any] = {
    "step": 3,
    "consumed_samples": 24,
    "global_batch_size": 8,
    "lm_loss": 5.5,
    "grad_norm": 1.25,
    "learning_rate": 0.00015,
    "loss_scale": 4096.0,
    "skipped_iterations": 1,
    "nan_iterations": 0,
    "rollbacks": 0,
    "elapsed_ms": 250.0,
    "tokens_per_second": 512.0,
    "samples_per_second": 32.0,
    "model_tflops": 406.5,
    "hardware_tflops": 500.25,
    "mfu": 0.4109,
    "hfu": 0.5056,
    "peak": "989.4 TFLOP/s (H100 SXM5 80 GB, bf16)",
    "batch_checksum": 12345678901,
    "times_ms": {"data": 0.5, "forward": 80.125, "optimizer": 9.0},
    "memory_bytes": {"parameters": 400, "gradients": 400, "max_allocated": 3000},
}
LINE = (
    " iteration        3/      12 | consumed samples:           24 | elapsed time per iteration"
    " (ms): 250.0 | learning rate: 1.500000E-04 | global batch size:     8 | lm loss: 5.500000E+00"
    " | loss scale: 4096.0 | grad norm: 1.250 | number of skipped iterations:   1 | number of nan"
    " iterations:   0 | throughput per device (TFLOP/s): 406.500 | MFU: 41.1% | HFU: 50.6% |"
)


def record(row: dict[str, Any]) -> MetricsRow:
    """With the type of a row."""
    return cast(MetricsRow, row)


def rows(run: RunFolder) -> list[dict[str, Any]]:
    """Strictly: JSON has no NaN."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} in metrics.jsonl")

    return [
        json.loads(line, parse_constant=refuse) for line in run.metrics.read_text().splitlines()
    ]


def board(run: RunFolder) -> dict[str, list[tuple[int, Any]]]:
    loaded = EventAccumulator(str(run.tensorboard)).Reload()
    return {
        tag: [(event.step, event.value) for event in loaded.Scalars(tag)]
        for tag in loaded.Tags()["scalars"]
    }


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return new_run(tiny_job(1, tmp_path))


def test_one_step(run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reporter = Reporter(run, tiny_job(1, tmp_path), -1)
    reporter.step(record(ROW))
    reporter.step(record({**ROW, "step": 4}))
    reporter.close()
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        " MFU is measured against 989.4 TFLOP/s (H100 SXM5 80 GB, bf16)",
        LINE,
        " time (ms) | data: 0.50 | forward: 80.12 | optimizer: 9.00 |",
    ]
    assert len(lines) == 5  # the peak is named once
    assert rows(run) == [ROW, {**ROW, "step": 4}]
    tags = board(run)
    expected = {
        "lm loss": 5.5,
        "learning-rate": 0.00015,
        "grad-norm": 1.25,
        "loss-scale": 4096.0,
        "batch-size": 8,
        "throughput": 406.5,
        "tokens-per-second": 512.0,
        "mfu": 0.4109,
        "hfu": 0.5056,
        "iteration-time": 0.25,
        "data-time": 0.0005,
        "forward-time": 0.080125,
        "optimizer-time": 0.009,
        "mem-parameters-bytes": 400,
        "mem-gradients-bytes": 400,
        "mem-max-allocated-bytes": 3000,
    }
    assert set(tags) == set(expected)
    for tag, value in expected.items():
        assert tags[tag] == [(3, pytest.approx(value)), (4, pytest.approx(value))], tag


def test_what_is_not_finite_or_not_known(
    run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unknown = {"mfu": None, "hfu": None, "peak": None, "hardware_tflops": 406.5}
    reporter = Reporter(run, tiny_job(1, tmp_path), -1)
    row = {**ROW, **unknown, "lm_loss": math.nan, "grad_norm": math.inf, "nan_iterations": 1}
    reporter.step(record(row))
    reporter.evaluation(3, 24, "valid", math.nan)
    reporter.step(record({**ROW, **unknown, "step": 4}))
    reporter.close()
    first, evaluation, second = rows(run)
    assert (first["lm_loss"], first["grad_norm"], first["nan_iterations"], first["mfu"]) == (
        None,
        None,
        1,
        None,
    )
    assert evaluation["lm_loss"] is None and second["lm_loss"] == 5.5
    tags = board(run)
    assert [step for step, _ in tags["lm loss"]] == [step for step, _ in tags["grad-norm"]] == [4]
    assert [step for step, _ in tags["learning-rate"]] == [3, 4]
    assert not {"mfu", "hfu", "lm loss validation", "lm loss validation ppl"} & set(tags)
    out = capsys.readouterr().out
    assert "measured against n/a: no peak is known of device 'cpu' in fp32" in out
    assert (
        "| lm loss: NAN |" in out
        and "number of nan iterations:   1 | throughput per device (TFLOP/s): 406.500"
        " | MFU: n/a |\n"
        in out
    )
    assert (
        summarize_run(run).training_loss() == (5.5, 5.5)
        and summarize_run(run).validation_loss() is None
    )


def test_validation_sets(
    run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reporter = Reporter(run, tiny_job(1, tmp_path), -1)
    reporter.evaluation(0, 0, "valid", 2.0)
    reporter.evaluation(0, 0, "books", 1000.0)
    reporter.close()
    assert capsys.readouterr().out.splitlines() == [
        (
            " validation loss at iteration 0 | lm loss value: 2.000000E+00 | lm loss PPL:"
            " 7.389056E+00 |"
        ),
        (
            " validation loss at iteration 0 on books | lm loss value: 1.000000E+03 | lm loss PPL:"
            " 4.851652E+08 |"
        ),
    ]
    tags = board(run)
    assert tags["lm loss validation"] == [(0, 2.0)] and tags["lm loss validation books"] == [
        (0, 1000.0)
    ]
    assert tags["lm loss validation ppl"] == [(0, pytest.approx(math.exp(2)))]
    assert tags["lm loss validation ppl books"] == [(0, pytest.approx(math.exp(20)))]
    assert summarize_run(run).validation_loss() == (2.0, 2.0)
    assert summarize_run(run).further_validation_losses() == {"books": (1000.0, 1000.0)}


def test_going_on_takes_later_rows_back(run: RunFolder, tmp_path: Path) -> None:
    reporter = Reporter(run, tiny_job(1, tmp_path), -1)
    for step in (1, 2, 3):
        reporter.step(record({**ROW, "step": step}))
    reporter.close()
    reporter = Reporter(run, tiny_job(1, tmp_path), 1)
    reporter.step(record({**ROW, "step": 2, "lm_loss": 4.0}))
    reporter.close()
    assert [(row["step"], row["lm_loss"]) for row in read_rows(run.metrics)] == [(1, 5.5), (2, 4.0)]


def test_finite() -> None:
    assert finite({"a": math.nan, "b": {"c": -math.inf, "d": 1.0}, "e": 2**70, "f": "nan"}) == {
        "a": None,
        "b": {"c": None, "d": 1.0},
        "e": 2**70,
        "f": "nan",
    }


def test_a_report_sums_up(run: RunFolder, tmp_path: Path) -> None:
    reporter = Reporter(run, tiny_job(1, tmp_path), -1)
    for step, tflops in ((5, 100.0), (10, 300.0), (12, 200.0)):
        reporter.step(record({**ROW, "step": step, "model_tflops": tflops, "mfu": tflops / 1000}))
    reporter.close()
    report = summarize_run(run).to_json()
    assert (report["model_tflops"], report["mfu"], report["peak"]) == (200.0, 0.2, ROW["peak"])
    assert report["seconds"] == 0.25 * 12  # a row stands for all the steps since the last
    assert report["skipped_iterations"] == 3
    # an older one
    run.metrics.write_text(
        '{"step": 1, "lm_loss": 1.0, "elapsed_ms": 1.0, "tokens_per_second": 3.0,'
        ' "consumed_samples": 8}\n'
    )
    report = summarize_run(run).to_json()
    assert (
        report["tokens_per_second"],
        report["model_tflops"],
        report["mfu"],
        report["nan_iterations"],
    ) == (3.0, None, None, 0)


def test_files_that_cannot_be_opened_now_are_opened_later(
    run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """TensorBoard's and that of windows, as on a disk that is full when a run goes on; what was
    taken back of them stays so."""
    reporter = Reporter(run, tiny_job(1, tmp_path), -1)
    for step in (1, 2, 3):
        reporter.step(record({**ROW, "step": step}))
    reporter.close()
    shutil.move(run.tensorboard, tmp_path / "elsewhere")
    run.tensorboard.touch()
    windows_path(run).mkdir()
    reporter = Reporter(run, tiny_job(1, tmp_path), 2)
    for step in (3, 4):
        reporter.on_step_begin(SampleWindow(step, 8 * step, 8))
        reporter.step(record({**ROW, "step": step}))
    run.tensorboard.unlink()
    shutil.move(tmp_path / "elsewhere", run.tensorboard)
    windows_path(run).rmdir()
    reporter.sync()
    reporter.on_step_begin(SampleWindow(5, 40, 8))
    reporter.step(record({**ROW, "step": 5}))
    reporter.close()
    errors = capsys.readouterr().err
    assert (
        errors.count("TensorBoard's files cannot be written") == 1
        and errors.count("samples of step 3 cannot be noted") == 1
    )
    assert [step for step, _ in board(run)["lm loss"]] == [1, 2, 5]
    assert find_sample_window(run, 5) == (5, 40, 8) and len(rows(run)) == 5


def test_what_ended_a_run_is_not_hidden_by_a_full_disk(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for failed in (True, False):
        reporter = Reporter(run, tiny_job(1, tmp_path), -1)
        reporter.step(record(ROW))
        expected = (
            contextlib.nullcontext() if failed else pytest.raises(OSError, match="No space left")
        )
        with monkeypatch.context() as broken, expected:
            broken.setattr(os, "fsync", full)
            reporter.close(failed=failed)


def test_closed_twice_nobody_elses_file_is_closed(run: RunFolder, tmp_path: Path) -> None:
    """A handle's number is given to what is opened next."""
    run.path.mkdir(parents=True, exist_ok=True)
    lines, windows = LineFile(tmp_path / "lines"), SampleWindowLog(run)
    lines.append("one")
    windows.note(SampleWindow(1, 0, 8))
    for closed in (lines, windows):
        closed.close()
        with open(tmp_path / "another", "wb", buffering=0) as another:
            closed.close()
            assert another.write(b"x") == 1
    assert (tmp_path / "lines").read_text() == "one\n"
