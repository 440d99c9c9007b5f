"""Which checkpoints of a run stay, and the deletion of the others."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path

from trainkit.base.errors import Exit, TrainkitError
from trainkit.base.files import fsync_folder, remove
from trainkit.jobs.schema import CheckpointSettings
from trainkit.runs.checkpoints import (
    PINNED,
    Checkpoint,
    checkpoint_folder,
    open_checkpoint,
    published_folders,
    step_of,
    unfinished_folder,
)


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
    found: list[Checkpoint], keep: CheckpointSettings, newest: int
) -> dict[int, list[str]]:
    """Why each of these checkpoints stays, by step; an empty list: it goes.

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
            reasons = retention_reasons(found, keep, newest)
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
