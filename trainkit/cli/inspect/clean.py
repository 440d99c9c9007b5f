"""The task `clean`: checkpoints that ended runs no longer need, with their sizes; deleted only with
--perform."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.markup import escape

from trainkit.base.documents import document
from trainkit.base.errors import TrainkitError
from trainkit.base.locks import LockBusy
from trainkit.cli.config.jobs import load_jobs
from trainkit.cli.tables import Listing
from trainkit.cli.wrapper import TaskContext, TaskResult
from trainkit.launch.scheduler_registry import current_all
from trainkit.runs.find import all_runs, find_run
from trainkit.runs.folder import RunFolder
from trainkit.runs.leftovers import Leftover, delete_leftovers, leftovers
from trainkit.runs.record import read_run_record

GIB = 2**30
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
    runs = [find_run(roots, run_name)] if run_name else all_runs(roots)
    delete = perform and not task.dry_run
    found: list[Leftover] = []
    for record in current_all([read_run_record(run) for run in runs]):
        if record.state not in ENDED:
            task.say(f"run {record.run.id} is {record.state}: nothing is deleted")
            continue
        of_run = list(leftovers(record.run, keep, damaged=damaged))
        if of_run and delete:
            of_run = _delete(task, record.run, of_run, keep, damaged=damaged)
        found += of_run
    size = sum(each.bytes for each in found)
    if delete:
        total = f"deleted: {_gib(size)}"
    else:
        total = f"would delete {_gib(size)}; to do it: {task.command} clean --perform"
    return TaskResult(
        document("clean/1", deleted=delete, bytes=size, leftovers=[asdict(each) for each in found]),
        page=[_table(found), total] if found else ["nothing to delete"],
    )


def _delete(
    task: TaskContext, run: RunFolder, found: list[Leftover], keep: int, *, damaged: bool
) -> list[Leftover]:
    """Delete; returns what is deleted, and says why not the rest."""
    from trainkit.train.checkpoint.save_load import LOCK  # imports torch

    try:
        return delete_leftovers(run, found, run.checkpoints / LOCK, keep, damaged=damaged)
    except LockBusy:
        task.say(f"run {run.id} is being written to: nothing is deleted")
    except TrainkitError as error:
        task.say(
            f"run {run.id}: nothing is deleted, because its newest checkpoint is damaged:"
            f" {error.message}"
        )
    return []


def _table(found: Sequence[Leftover]) -> Listing:
    return Listing(
        "run",
        "size",
        "what",
        "folder",
        right=["size"],
        drop=["folder"],
        rows=(
            (escape(each.run), _gib(each.bytes), each.what, escape(Path(each.path).name))
            for each in found
        ),
    )


def _gib(size: int) -> str:
    return f"{size / GIB:,.3f} GiB"
