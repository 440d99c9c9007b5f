"""The tasks `checkpoints`: whether they are whole and why they are kept; and `clean`: those that
ended runs no longer need, with their sizes, deleted only with --perform."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.markup import escape

from trainkit.base.documents import document
from trainkit.base.errors import ConfigError, Exit, TrainkitError
from trainkit.base.locks import LockBusy
from trainkit.cli.config.jobs import load_jobs
from trainkit.cli.inspect.runs import readable_records
from trainkit.cli.tables import Listing, gib
from trainkit.cli.wrapper import TaskContext, TaskResult
from trainkit.engines.registry import ENGINES
from trainkit.jobs.resolved import read_job
from trainkit.launch.scheduler_registry import current_all
from trainkit.runs.find import all_runs, find_run
from trainkit.runs.folder import RunFolder
from trainkit.runs.record import read_run_record
from trainkit.runs.retention import Leftover, ListedCheckpoint, delete_leftovers, leftovers, pin

ENDED = ("succeeded", "failed", "cancelled", "preempted")


def clean(
    task: TaskContext, run_name: str, keep: int, *, damaged: bool, perform: bool
) -> TaskResult:
    """The task `clean`.

    Args:
        task: how it was called.
        run_name: which run; "": all that have ended.
        keep: so many of a run's newest checkpoints stay, besides those that its job keeps for
            other reasons.
        damaged: include checkpoints that were set aside as damaged.
        perform: delete; else only list.
    """
    roots = load_jobs(task).roots()
    one = [read_run_record(find_run(roots, run_name))] if run_name else []
    delete = perform and not task.dry_run
    found: list[Leftover] = []
    ended = Exit.DONE
    for record in current_all(one or list(readable_records(all_runs(roots)))):
        if record.state not in ENDED:
            task.say(f"run {record.run.id} is {record.state}: nothing is deleted")
            continue
        try:
            of_run = list(leftovers(record.run, keep, damaged=damaged))
        except ConfigError as error:  # its job is of another version
            if run_name:
                raise
            task.say(f"run {record.run.id}: nothing is deleted: {error}")
            continue
        if of_run and delete:
            try:
                of_run = _delete(task, record.run, of_run, keep, damaged=damaged)
            except OSError as error:
                task.say(f"run {record.run.id}: not all is deleted: {error}")
                of_run = []  # some may be gone: they are not counted
                ended = Exit.STAGE_FAILED
        found += of_run
    size = sum(each.bytes for each in found)
    if delete:
        total = f"deleted: {gib(size, 3)}"
    else:
        total = f"would delete {gib(size, 3)}; to do it: {task.command} clean --perform"
    return TaskResult(
        document("clean/1", deleted=delete, bytes=size, leftovers=[asdict(each) for each in found]),
        ended,
        page=[_leftovers_table(found), total] if found else ["nothing to delete"],
    )


def _delete(
    task: TaskContext, run: RunFolder, found: list[Leftover], keep: int, *, damaged: bool
) -> list[Leftover]:
    """Delete; returns what is deleted, and says why not the rest."""

    try:
        return delete_leftovers(run, found, keep, damaged=damaged)
    except LockBusy:
        task.say(f"run {run.id} is being written to: nothing is deleted")
    except TrainkitError as error:
        task.say(
            f"run {run.id}: nothing is deleted, because its newest checkpoint is damaged:"
            f" {error.message}"
        )
    return []


def _leftovers_table(found: Sequence[Leftover]) -> Listing:
    return Listing(
        "run",
        "size",
        "what",
        "folder",
        right=["size"],
        drop=["folder"],
        rows=(
            (escape(each.run), gib(each.bytes, 3), each.what, escape(Path(each.path).name))
            for each in found
        ),
    )


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
    keys = {**DEGREES}
    if layout.get("context_parallel_size", 1) != 1:
        keys["CP"] = "context_parallel_size"
    degrees = " x ".join(f"{name} {layout.get(key, '?')}" for name, key in keys.items())
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
