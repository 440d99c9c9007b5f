"""The checkpoints of a run with what a person asks about each: is it whole, and why is it kept; the
deletion of the others, and what an ended run leaves below its checkpoints that nobody needs."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from trainkit.base.errors import Exit, TrainkitError
from trainkit.base.files import fsync_folder, remove
from trainkit.base.lazy_dataclasses import dataclass, field
from trainkit.base.locks import locked
from trainkit.jobs.resolved import read_job
from trainkit.jobs.schema import CheckpointSettings
from trainkit.runs.checkpoints import (
    LOCK,
    PINNED,
    UNFINISHED_SUFFIX,
    Checkpoint,
    DamagedCheckpoint,
    NewerCheckpoint,
    checkpoint_folder,
    open_checkpoint,
    open_verified,
    published_folders,
    set_aside_in,
    step_of,
    unfinished_folder,
    verify,
)
from trainkit.runs.evaluations import unread_steps
from trainkit.runs.folder import RunFolder


def valid_by_size(checkpoints: Path) -> list[Checkpoint]:
    """Those whose manifest and sizes are right, oldest first: what retention goes by. Hashes
    would cost reading everything.

    One that cannot be looked at neither counts nor goes: else retention would end with it, and
    the disk be full some day.
    """
    found = []
    for folder in published_folders(checkpoints):
        try:
            found.append(open_checkpoint(folder))
        except (TrainkitError, OSError):
            continue
    return found


def retention_reasons(
    found: list[Checkpoint],
    keep: CheckpointSettings,
    newest: int,
    unread: Collection[int] = (),
) -> dict[int, list[str]]:
    """Why each of these checkpoints stays, by step; an empty list: it goes.

    Those of the steps `unread` stay: an evaluation has still to read them.

    Only those up to step `newest`, which was saved last, are judged. Later ones neither count
    nor go: training went on from an earlier one because they were found damaged, perhaps by
    their hashes alone; counted, they would push out what is whole.
    """
    judged = [c for c in found if c.manifest.step <= newest]
    last = {c.manifest.step for c in judged[-keep.keep_last :]}
    measured = sorted(
        (c.manifest.validation["valid"], c.manifest.step)
        for c in judged
        if "valid" in c.manifest.validation
    )
    best = {step: loss for loss, step in measured[: keep.keep_best]}
    reasons = {}
    for c in found:
        step = c.manifest.step
        messages = {
            f"newest {keep.keep_last}": step in last,
            f"every {keep.keep_every}": bool(
                keep.keep_every and step % keep.keep_every == 0 and step
            ),
            f"validation loss {best.get(step, math.nan):.4f}": step in best,
            "pinned": c.pinned,
            "to be evaluated": step in unread,
            f"after step {newest}": step > newest,
        }
        reasons[step] = [reason for reason, true in messages.items() if true]
    return reasons


def prune(
    checkpoints: Path,
    keep: CheckpointSettings,
    newest: int,
    alone: contextlib.AbstractContextManager[object] | None = None,
) -> list[int]:
    """Delete what `retention_reasons` gives no reason for; returns those steps. The checkpoint of
    step `newest` was just saved and stays.

    Damaged ones neither count nor go: a person may want to look. Those that go are renamed
    first, within `alone` (the lock of writers), so that none is ever half there. Where the
    newest is not there any more, others have gone on with the run, perhaps from what would go:
    nothing is deleted. Raises OSError where one cannot be deleted; all others that go are gone
    then.
    """
    gone: list[int] = []
    failures: list[OSError] = []
    going: list[tuple[int, Path]] = []
    with alone or contextlib.nullcontext():
        found = valid_by_size(checkpoints)
        if any(c.manifest.step == newest for c in found):
            unread = unread_steps(RunFolder(checkpoints.parent))
            reasons = retention_reasons(found, keep, newest, unread)
        else:
            reasons = {}
        for c in found:
            if reasons.get(c.manifest.step, ["stays"]) or c.manifest.step == newest:
                continue
            try:
                renamed = c.folder.rename(unfinished_folder(c.folder))
                if (renamed / PINNED).exists():  # a moment ago
                    renamed.rename(c.folder)
                else:
                    going.append((c.manifest.step, renamed))
            except OSError as error:
                failures.append(error)
    for step, renamed in going:
        try:
            remove(renamed)
        except OSError as error:
            failures.append(error)
        else:
            gone.append(step)
    if failures:
        raise failures[0]
    return gone


def pin(checkpoints: Path, step: int, *, pinned: bool) -> None:
    """Let the checkpoint of `step` stay until it is unpinned, or unpin it. Raises TrainkitError
    (exit 16) where there is none."""
    folder = checkpoint_folder(checkpoints, step)
    try:
        (folder / PINNED).touch() if pinned else (folder / PINNED).unlink(missing_ok=True)
        fsync_folder(folder)
    except (FileNotFoundError, NotADirectoryError):
        there = ", ".join(str(step_of(f)) for f in published_folders(checkpoints)) or "none"
        raise TrainkitError(
            f"there is no checkpoint of step {step} in {checkpoints}",
            exit=Exit.NO_CHECKPOINT,
            hint=f"those of steps: {there}",
        ) from None


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
        newest = found[-1].manifest.step
        reasons = retention_reasons(found, _policy(run, keep), newest, unread_steps(run))
        for checkpoint in found:
            if not reasons[checkpoint.manifest.step]:
                yield _leftover(run, checkpoint.folder, "an older checkpoint")
    for folder in run.checkpoints.glob(f"step-*{UNFINISHED_SUFFIX}"):
        yield _leftover(run, folder, "an unfinished save")
    if damaged:
        for folder in set_aside_in(run.checkpoints):
            yield _leftover(run, folder, "a damaged checkpoint")


def delete_leftovers(
    run: RunFolder, found: Sequence[Leftover], keep: int, *, damaged: bool
) -> list[Leftover]:
    """Delete what `leftovers` found, and return what is deleted. The newest checkpoint is read
    first: if it is damaged, older ones may be all there is.

    Args:
        run: the run.
        found: what is to be deleted.
        keep: as for `leftovers`.
        damaged: as for `leftovers`.

    Raises:
        Busy: the run is being written to.
        TrainkitError: its newest checkpoint is damaged.
    """
    checkpoints = valid_by_size(run.checkpoints)
    if checkpoints:
        open_verified(checkpoints[-1].folder)
    with locked(run.checkpoints / LOCK, {"host": os.uname().nodename, "task": "clean"}, wait=False):
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


@dataclass(frozen=True)
class ListedCheckpoint:
    """One folder: an entry of the document checkpoints/1.

    Args:
        step: of its name.
        folder: where it is.
        bytes: of its data files; None where its manifest cannot be read.
        layout: the manifest's.
        validation: losses by validation set, where they were measured at this step.
        kept: why it is not deleted; none where the next save may delete it.
        problems: what is wrong with it; none where it is whole.
        checked: "full": every byte was read; "size": only the files' sizes.
    """

    step: int
    folder: str
    bytes: int | None = None
    layout: Mapping[str, int | str] = field(default_factory=dict)
    validation: Mapping[str, float] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    checked: Literal["full", "size"] = "size"


def list_checkpoints(run: RunFolder, *, hashes: bool) -> list[ListedCheckpoint]:
    """Every published checkpoint, oldest first; then those that were set aside as damaged.

    Args:
        run: the run.
        hashes: read every file and compare its checksum.
    """
    return [*_published(run, hashes=hashes), *_set_aside(run)]


def _published(run: RunFolder, *, hashes: bool) -> Iterator[ListedCheckpoint]:
    valid = valid_by_size(run.checkpoints)
    newest = valid[-1].manifest.step if valid else 0
    keep = read_job(run.job).checkpoint
    reasons = retention_reasons(valid, keep, newest, unread_steps(run))
    for folder in published_folders(run.checkpoints):
        yield _listed(folder, reasons.get(step_of(folder), []), hashes=hashes)


def _listed(folder: Path, kept: list[str], *, hashes: bool) -> ListedCheckpoint:
    step = step_of(folder)
    checked: Literal["full", "size"] = "full" if hashes else "size"
    problems: list[str] = []
    try:
        checkpoint = open_checkpoint(folder)
        if hashes:
            problems = verify(folder)
    except (DamagedCheckpoint, NewerCheckpoint) as damaged:
        return ListedCheckpoint(
            step, str(folder), kept=kept, problems=damaged.problem_list, checked=checked
        )
    manifest = checkpoint.manifest
    return ListedCheckpoint(
        step,
        str(folder),
        checkpoint.bytes,
        manifest.layout,
        manifest.validation,
        kept,
        problems,
        checked,
    )


def _set_aside(run: RunFolder) -> Iterator[ListedCheckpoint]:
    for folder in set_aside_in(run.checkpoints):
        problem = f"damaged; set aside as {folder.name}"
        yield ListedCheckpoint(step_of(folder), str(folder), problems=[problem])
