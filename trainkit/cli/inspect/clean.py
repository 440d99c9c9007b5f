"""The task `clean`: checkpoints that ended runs no longer need, with their sizes; deleted only with
--perform."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.markup import escape

from trainkit.base.documents import document
from trainkit.base.errors import TrainkitError
<<<<<<< HEAD
from trainkit.base.locks import Busy
from trainkit.cli.config.jobs import load_jobs
from trainkit.cli.tables import Listing
from trainkit.cli.wrapper import TaskContext, TaskResult
from trainkit.launch.slurm.reconcile import settled_all
from trainkit.runs.folder import RunFolder
from trainkit.runs.leftovers import Leftover, delete_leftovers, leftovers
from trainkit.runs.record import all_runs, find_run, read_record
=======
from trainkit.base.files import remove
from trainkit.base.locks import LockBusy, locked
from trainkit.cli.config.jobs import load_jobs
from trainkit.cli.tables import Listing
from trainkit.cli.wrapper import TaskContext, TaskResult
from trainkit.jobs.resolved import read_job
from trainkit.jobs.schema import CheckpointSettings
from trainkit.launch.slurm.reconcile import settled_all
from trainkit.runs.checkpoints import (
    UNFINISHED_SUFFIX,
    open_verified,
    prune,
    retention_reasons,
    set_aside_in,
    valid_by_size,
)
from trainkit.runs.folder import RunFolder
from trainkit.runs.record import all_runs, find_run, read_run_record
>>>>>>> 93498ab (Name what base, jobs and runs export in the field's words)

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
    if run_name:
        runs = [find_run(roots, run_name)]
    else:
<<<<<<< HEAD
        runs = all_runs(roots)
    delete = perform and not task.dry_run
    found: list[Leftover] = []
    for record in settled_all([read_record(run) for run in runs]):
=======
        found = all_runs(roots)
    records = settled_all([read_run_record(run) for run in found])
    left: list[Leftover] = []
    for record in records:
>>>>>>> 93498ab (Name what base, jobs and runs export in the field's words)
        if record.state not in ENDED:
            task.say(f"run {record.run.id} is {record.state}: nothing is deleted")
            continue
        of_run = list(leftovers(record.run, keep, damaged=damaged))
        if of_run and delete:
            of_run = _delete(task, record.run, of_run, keep, damaged=damaged)
        found += of_run
    if not task.json:
        _print(task, found, deleted=delete)
    return TaskResult(
        document(
            "clean/1",
            deleted=delete,
            bytes=sum(each.bytes for each in found),
            leftovers=[asdict(each) for each in found],
        )
    )


<<<<<<< HEAD
def _delete(
    task: TaskContext, run: RunFolder, found: list[Leftover], keep: int, *, damaged: bool
=======
def _leftovers(run: RunFolder, keep: int, *, damaged: bool) -> Iterator[Leftover]:
    found = valid_by_size(run.checkpoints)
    if found:
        reasons = retention_reasons(found, _policy(run, keep), found[-1].manifest.step)
        for checkpoint in found:
            if not reasons[checkpoint.manifest.step]:
                yield Leftover(
                    run.id, str(checkpoint.folder), "an older checkpoint", _size(checkpoint.folder)
                )
    for folder in run.checkpoints.glob(f"step-*{UNFINISHED_SUFFIX}"):
        yield Leftover(run.id, str(folder), "a save that was never finished", _size(folder))
    if damaged:
        for folder in set_aside_in(run.checkpoints):
            yield Leftover(run.id, str(folder), "a damaged checkpoint", _size(folder))


def _policy(run: RunFolder, keep: int) -> CheckpointSettings:
    return read_job(run.job).checkpoint.model_copy(update={"keep_last": keep})


def _deleted(
    task: TaskContext, run: RunFolder, going: list[Leftover], keep: int, *, damaged: bool
>>>>>>> 93498ab (Name what base, jobs and runs export in the field's words)
) -> list[Leftover]:
    """Delete; returns what is deleted, and says why not the rest."""
    from trainkit.train.checkpoint.save_load import LOCK  # imports torch

    try:
<<<<<<< HEAD
        return delete_leftovers(run, found, run.checkpoints / LOCK, keep, damaged=damaged)
    except Busy:
        task.say(f"run {run.id} is being written to: nothing is deleted")
=======
        if found:
            open_verified(found[-1].folder)
        with locked(
            run.checkpoints / LOCK, {"host": os.uname().nodename, "task": "clean"}, wait=False
        ):
            if found:
                prune(run.checkpoints, _policy(run, keep), found[-1].manifest.step)
            for folder in run.checkpoints.glob(f"step-*{UNFINISHED_SUFFIX}"):
                remove(folder)
            for folder in set_aside_in(run.checkpoints) if damaged else ():
                remove(folder)
    except LockBusy:
        task.say(f"run {run.id} is being written to: nothing of it goes")
        return []
>>>>>>> 93498ab (Name what base, jobs and runs export in the field's words)
    except TrainkitError as error:
        task.say(
            f"run {run.id}: nothing is deleted, because its newest checkpoint is damaged:"
            f" {error.message}"
        )
    return []


def _print(task: TaskContext, found: Sequence[Leftover], *, deleted: bool) -> None:
    if not found:
        task.say("nothing to delete")
        return
    table = Listing("run", "size", "what", "folder", right=["size"], drop=["folder"])
    for each in found:
        table.add_row(escape(each.run), _gib(each.bytes), each.what, escape(Path(each.path).name))
    task.console.print(table)
    size = _gib(sum(each.bytes for each in found))
    if deleted:
        task.say(f"deleted: {size}")
    else:
        task.say(f"would delete {size}; to do it: {task.command} clean --perform")


def _gib(size: int) -> str:
    return f"{size / GIB:,.3f} GiB"
