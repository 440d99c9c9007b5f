"""The rank's program itself: killed and started again, told to save, told to stop, and fed what
it cannot train on."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.conftest import wait_for
from tests.distributed import finish
from tests.ops.op_cases import why_no_kernels
from tests.train.support import new_run, start_ranks, tiny_job
from trainkit.runs.checkpoints import published_folders, verify
from trainkit.runs.folder import RunFolder
from trainkit.runs.metrics import MetricsRow, read_rows

HANGS = 600  # seconds; only against hanging
TIMED = {
    "elapsed_ms",
    "tokens_per_second",
    "samples_per_second",
    "model_tflops",
    "hardware_tflops",
    "times_ms",
    "memory_bytes",
    "ranks",
    "pipeline",
}
LOG_LINE = re.compile(
    r" iteration +(\d+)/ +12 \| consumed samples: +\d+ \| elapsed time per iteration \(ms\):"
    r" \d+\.\d \| learning rate: \d\.\d{6}E[+-]\d\d \|"
    r" global batch size: +8 \| lm loss: \d\.\d{6}E[+-]\d\d \| loss scale: 1\.0 \| grad norm:"
    r" \d+\.\d{3} \|"
    r" number of skipped iterations: +0 \| number of nan iterations: +0 \|"
)


def facts(run: RunFolder) -> list[dict[str, Any]]:
    """Rows without what time decides."""
    return [{k: v for k, v in row.items() if k not in TIMED} for row in read_rows(run.metrics)]


def steps(run: RunFolder) -> list[int]:
    return [row["step"] for row in read_rows(run.metrics) if "eval" not in row]


def beats(run: RunFolder, ranks: int) -> list[dict[str, Any]]:
    return [json.loads(run.attempt(1).heartbeat(rank).read_text()) for rank in range(ranks)]


def test_killed_and_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    """Every row, bit for bit, evaluations too; a torn line and rows of lost steps are taken
    back."""
    times = {"eval_interval": 4, "save_interval": 5}
    whole = new_run(tiny_job(2, tmp_path / "whole", **times))
    assert finish(start_ranks(whole, 2), HANGS) == [0, 0]
    assert steps(whole) == list(range(1, 13))
    assert [row["step"] for row in read_rows(whole.metrics) if "eval" in row] == [0, 4, 8, 12]
    keys = set(get_type_hints(MetricsRow)) - {"eval", "pipeline", "experts", "mtp_loss", "phase"}
    assert all(set(row) == keys for row in read_rows(whole.metrics) if "eval" not in row)
    assert [p.name for p in published_folders(whole.checkpoints)] == [
        "step-00000010",
        "step-00000012",
    ]
    assert all(verify(p) == [] for p in published_folders(whole.checkpoints))
    log = whole.attempt(1).log(0).read_text()
    used = "reference" if why_no_kernels() else "fused"
    assert json.loads(whole.attempt(1).kernels.read_text())["used"] == used
    assert f" kernels: {used}" in log
    assert [int(m[1]) for m in LOG_LINE.finditer(log)] == list(range(1, 13)), log
    assert [(b["schema"], b["phase"], b["step"]) for b in beats(whole, 2)] == [
        ("heartbeat/1", "done", 12)
    ] * 2

    broken = new_run(tiny_job(2, tmp_path / "broken", **times))
    children = start_ranks(broken, 2)
    wait_for(lambda: steps(broken)[-1:] >= [7], "step 7")
    for child in children:
        child.kill()
    finish(children, HANGS)
    assert [b["phase"] for b in beats(broken, 2)] != ["done", "done"]
    with open(broken.metrics, "a") as file:
        file.write('{"step": 99, "lm_loss": 1')
    (broken.checkpoints / "step-00000011.tmp").mkdir(exist_ok=True)
    assert finish(start_ranks(broken, 2), HANGS) == [0, 0]
    assert facts(broken) == facts(whole)
    assert not list(broken.checkpoints.glob("*.tmp"))
    board = EventAccumulator(str(broken.tensorboard)).Reload()
    assert [event.step for event in board.Scalars("lm loss")] == list(range(1, 13))
    assert [event.step for event in board.Scalars("lm loss validation")] == [0, 4, 8, 12]


def test_usr1_saves_at_the_step_and_term_from_the_parent_does_not(tmp_path: Path) -> None:
    run = new_run(tiny_job(2, tmp_path, train_iters=100_000))
    children = start_ranks(run, 2)
    wait_for(lambda: len(steps(run)) > 3, "step 4")
    children[1].send_signal(signal.SIGUSR1)
    assert finish(children, HANGS) == [12, 12]
    reached = steps(run)[-1]
    assert [p.name for p in published_folders(run.checkpoints)] == [f"step-{reached:08d}"]
    assert [b["phase"] for b in beats(run, 2)] == ["save", "save"]

    children = start_ranks(run, 2, subprocess.Popen)
    wait_for(lambda: steps(run)[-1] > reached, "another step")
    for child in children:
        child.terminate()
    assert finish(children, HANGS) == [143, 143]
    assert steps(run) == list(range(1, len(steps(run)) + 1))
    assert [p.name for p in published_folders(run.checkpoints)] == [f"step-{reached:08d}"]


@pytest.mark.parametrize(
    ("training", "code", "words"),
    [
        ({"lr": 1e30, "lr_warmup_iters": 0}, 9, r"step [23]: lm loss .* gradient norm"),
        ({"global_batch_size": 7}, 3, "7 does not divide"),
    ],
)
def test_what_cannot_be_trained_stops_with_words(
    tmp_path: Path, training: dict[str, Any], code: int, words: str
) -> None:
    run = new_run(tiny_job(1, tmp_path, **training))
    assert finish(start_ranks(run, 1), HANGS) == [code]
    error = json.loads(run.attempt(1).error(0).read_text())
    assert (error["schema"], error["rank"], error["exit"]) == ("rank-error/1", 0, code)
    assert re.search(words, error["message"]) and "Traceback" in error["traceback"]
    log = run.attempt(1).log(0).read_text()
    assert re.search(words, log) and "Traceback" not in log
    assert not published_folders(run.checkpoints)
