"""The task `checkpoints`: a run's checkpoints, whether they are whole and why they are kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from rich.markup import escape

from trainkit.base.documents import document
from trainkit.base.errors import ConfigError, Exit
from trainkit.cli.config.jobs import load_jobs
from trainkit.cli.tables import Listing
from trainkit.cli.wrapper import TaskContext, TaskResult
from trainkit.engines.registry import ENGINES
from trainkit.jobs.resolved import read_job
from trainkit.runs.checkpoint_list import ListedCheckpoint
from trainkit.runs.find import find_run
from trainkit.runs.retention import pin

DEGREES = {
    "TP": "tensor_model_parallel_size",
    "PP": "pipeline_model_parallel_size",
    "DP": "data_parallel_size",
}


def checkpoints(
    task: TaskContext, run_name: str, *, hashes: bool, pinned: int | None, unpinned: int | None
) -> TaskResult:
    """The task `checkpoints`. Exit 16 if there are checkpoints and none is whole.

    Args:
        task: how it was called.
        run_name: which run.
        hashes: read every file and compare its checksum.
        pinned: the step to pin first.
        unpinned: the step to unpin first.

    Raises:
        ConfigError: both are the same step; TrainkitError as `pin` does.
    """
    if pinned is not None and pinned == unpinned:
        raise ConfigError(f"--pin and --unpin both name step {pinned}")
    run = find_run(load_jobs(task).roots(), run_name)
    for step, stays in ((pinned, True), (unpinned, False)):
        if step is not None:
            pin(run.checkpoints, step, pinned=stays)
    listed = ENGINES[read_job(run.job).engine].checkpoints(run, hashes=hashes)
    none_whole = bool(listed) and all(checkpoint.problems for checkpoint in listed)
    return TaskResult(
        document("checkpoints/1", run=run.id, checkpoints=[asdict(each) for each in listed]),
        Exit.NO_CHECKPOINT if none_whole else Exit.DONE,
        [_table(listed) if listed else f"run {run.id} has no checkpoint yet"],
    )


def _table(listed: Sequence[ListedCheckpoint]) -> Listing:
    return Listing(
        "step",
        "size",
        "layout",
        "validation loss",
        "kept because",
        "integrity",
        right=("step", "size"),
        drop=("layout", "validation loss", "kept because"),
        rows=map(_cells, listed),
    )


def _cells(checkpoint: ListedCheckpoint) -> tuple[str, ...]:
    losses = ", ".join(f"{name} {loss:.4f}" for name, loss in checkpoint.validation.items())
    return (
        str(checkpoint.step),
        "?" if checkpoint.bytes is None else f"{checkpoint.bytes / 1e9:,.3f} GB",
        _layout_cell(checkpoint.layout),
        escape(losses),
        _kept_cell(checkpoint),
        _integrity_cell(checkpoint),
    )


def _layout_cell(layout: Mapping[str, int | str]) -> str:
    """2 ranks: TP 1 x PP 1 x DP 2, ZeRO 1."""
    if "world_size" not in layout:
        return ""
    degrees = " x ".join(f"{name} {layout.get(key, '?')}" for name, key in DEGREES.items())
    return f"{layout['world_size']} ranks: {degrees}, ZeRO {layout.get('zero_stage', '?')}"


def _kept_cell(checkpoint: ListedCheckpoint) -> str:
    if checkpoint.kept:
        return ", ".join(checkpoint.kept)
    if checkpoint.problems:
        return "damaged ones are kept"
    return "until the next save"


def _integrity_cell(checkpoint: ListedCheckpoint) -> str:
    if checkpoint.problems:
        return f"[red]{escape('; '.join(checkpoint.problems))}[/]"
    if checkpoint.checked == "full":
        return "[green]checksums match[/]"
    return "sizes match"
