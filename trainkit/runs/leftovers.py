"""Folders below a run's checkpoints that an ended run no longer needs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainkit.base.files import remove
from trainkit.base.locks import locked
from trainkit.jobs.resolved import read_job
from trainkit.jobs.schema import CheckpointSettings
from trainkit.runs.checkpoints import UNFINISHED_SUFFIX, open_verified, set_aside_in
from trainkit.runs.folder import RunFolder
from trainkit.runs.retention import prune, retention_reasons, valid_by_size


@dataclass(frozen=True)
class Leftover:
    """A folder that can be deleted, and what it is."""

    run: str
    path: str
    what: str
    bytes: int


def leftovers(run: RunFolder, keep: int, *, damaged: bool) -> Iterator[Leftover]:
    """What can be deleted of an ended run.

    Args:
        run: the run.
        keep: so many of its newest checkpoints stay, besides those that its job keeps.
        damaged: include checkpoints that were set aside as damaged.
    """
    found = valid_by_size(run.checkpoints)
    if found:
        reasons = retention_reasons(found, _policy(run, keep), found[-1].manifest.step)
        for checkpoint in found:
            if not reasons[checkpoint.manifest.step]:
                yield _leftover(run, checkpoint.folder, "an older checkpoint")
    for folder in run.checkpoints.glob(f"step-*{UNFINISHED_SUFFIX}"):
        yield _leftover(run, folder, "an unfinished save")
    if damaged:
        for folder in set_aside_in(run.checkpoints):
            yield _leftover(run, folder, "a damaged checkpoint")


def delete_leftovers(
    run: RunFolder, found: Sequence[Leftover], lock: Path, keep: int, *, damaged: bool
) -> list[Leftover]:
    """Delete what `leftovers` found, and return what is deleted. The newest checkpoint is read
    first: if it is damaged, older ones may be all there is.

    Args:
        run: the run.
        found: what is to be deleted.
        lock: the file that writers of checkpoints lock.
        keep: as for `leftovers`.
        damaged: as for `leftovers`.

    Raises:
        Busy: the run is being written to.
        TrainkitError: its newest checkpoint is damaged.
    """
    checkpoints = valid_by_size(run.checkpoints)
    if checkpoints:
        open_verified(checkpoints[-1].folder)
    with locked(lock, {"host": os.uname().nodename, "task": "clean"}, wait=False):
        if checkpoints:
            prune(run.checkpoints, _policy(run, keep), checkpoints[-1].manifest.step)
        for folder in run.checkpoints.glob(f"step-*{UNFINISHED_SUFFIX}"):
            remove(folder)
        if damaged:
            for folder in set_aside_in(run.checkpoints):
                remove(folder)
    return [each for each in found if not Path(each.path).exists()]


def _policy(run: RunFolder, keep: int) -> CheckpointSettings:
    return read_job(run.job).checkpoint.model_copy(update={"keep_last": keep})


def _leftover(run: RunFolder, folder: Path, what: str) -> Leftover:
    return Leftover(run.id, str(folder), what, _size(folder))


def _size(folder: Path) -> int:
    """Bytes of the files in a folder; 0 for a link: what it points to is not the run's."""
    if folder.is_symlink():
        return 0
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())
