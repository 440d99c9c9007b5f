"""The task `clean`: checkpoints of ended runs that nobody needs to go on with them, by size;
deleted only with --perform."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.markup import escape

from trainkit.base.documents import document
from trainkit.base.errors import TrainkitError
from trainkit.base.files import remove
from trainkit.base.locks import Busy, locked
from trainkit.cli.config.jobs import load_jobs
from trainkit.cli.tables import Listing
from trainkit.cli.wrapper import TaskContext, TaskResult
from trainkit.jobs.resolved import read_job
from trainkit.jobs.schema import Checkpoint as Keep
from trainkit.launch.slurm.reconcile import settled_all
from trainkit.runs.checkpoints import (
    UNFINISHED,
    open_whole,
    prune,
    set_aside_in,
    valid_by_size,
    why_kept,
)
from trainkit.runs.folder import RunFolder
from trainkit.runs.record import all_runs, find_run, read_record

GIB = 2**30
ENDED = ("succeeded", "failed", "cancelled", "preempted")


@dataclass(frozen=True)
class Leftover:
    """A folder below a run's checkpoints that can go, and what it is."""

    run: str
    path: str
    what: str
    bytes: int


def clean(
    task: TaskContext, words: str, keep: int, *, damaged: bool, performing: bool
) -> TaskResult:
    """The task `clean`.

    Args:
        words: which run; "": all that have ended. keep: so many of a run's newest checkpoints
        stay, besides those that its job keeps for other reasons. damaged: those that were set
        aside as damaged go too. performing: delete; else only say what would go.
    """
    roots = load_jobs(task).roots()
    if words:
        found = [find_run(roots, words)]
    else:
        found = all_runs(roots)
    records = settled_all([read_record(run) for run in found])
    left: list[Leftover] = []
    for record in records:
        if record.state not in ENDED:
            task.say(f"run {record.run.id} is {record.state}: nothing of it goes")
            continue
        going = list(_leftovers(record.run, keep, damaged=damaged))
        if going and performing and not task.dry_run:
            going = _deleted(task, record.run, going, keep, damaged=damaged)
        left += going
    done = performing and not task.dry_run
    if not task.json:
        _print(task, left, done=done)
    return TaskResult(
        document(
            "clean/1",
            deleted=done,
            bytes=sum(each.bytes for each in left),
            leftovers=[asdict(each) for each in left],
        )
    )


def _leftovers(run: RunFolder, keep: int, *, damaged: bool) -> Iterator[Leftover]:
    found = valid_by_size(run.checkpoints)
    if found:
        reasons = why_kept(found, _policy(run, keep), found[-1].manifest.step)
        for checkpoint in found:
            if not reasons[checkpoint.manifest.step]:
                yield Leftover(
                    run.id, str(checkpoint.folder), "an older checkpoint", _size(checkpoint.folder)
                )
    for folder in run.checkpoints.glob(f"step-*{UNFINISHED}"):
        yield Leftover(run.id, str(folder), "a save that was never finished", _size(folder))
    if damaged:
        for folder in set_aside_in(run.checkpoints):
            yield Leftover(run.id, str(folder), "a damaged checkpoint", _size(folder))


def _policy(run: RunFolder, keep: int) -> Keep:
    return read_job(run.job).checkpoint.model_copy(update={"keep_last": keep})


def _deleted(
    task: TaskContext, run: RunFolder, going: list[Leftover], keep: int, *, damaged: bool
) -> list[Leftover]:
    """Delete; returns what is gone. The checkpoint that stays is read first: without a whole
    one, older ones may be all there is."""
    from trainkit.train.checkpoint.save_load import LOCK  # imports torch

    found = valid_by_size(run.checkpoints)
    try:
        if found:
            open_whole(found[-1].folder)
        with locked(
            run.checkpoints / LOCK, {"host": os.uname().nodename, "task": "clean"}, wait=False
        ):
            if found:
                prune(run.checkpoints, _policy(run, keep), found[-1].manifest.step)
            for folder in run.checkpoints.glob(f"step-*{UNFINISHED}"):
                remove(folder)
            for folder in set_aside_in(run.checkpoints) if damaged else ():
                remove(folder)
    except Busy:
        task.say(f"run {run.id} is being written to: nothing of it goes")
        return []
    except TrainkitError as error:
        task.say(
            f"nothing of run {run.id} goes, its newest checkpoint cannot be relied on:"
            f" {error.message}"
        )
        return []
    return [each for each in going if not Path(each.path).exists()]


def _size(folder: Path) -> int:
    """Bytes of the files in a folder; of a link none: what it points to is not the run's."""
    if folder.is_symlink():
        return 0
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())


def _print(task: TaskContext, left: list[Leftover], *, done: bool) -> None:
    if not left:
        task.say("nothing is left over")
        return
    table = Listing("run", "size", "what", "folder", right=["size"], drop=["folder"])
    for each in left:
        table.add_row(
            escape(each.run),
            f"{each.bytes / GIB:,.3f} GiB",
            each.what,
            escape(Path(each.path).name),
        )
    task.console.print(table)
    size = f"{sum(each.bytes for each in left) / GIB:,.3f} GiB"
    task.say(
        f"deleted: {size}"
        if done
        else f"{size} would go: {task.command} clean --perform deletes it"
    )
