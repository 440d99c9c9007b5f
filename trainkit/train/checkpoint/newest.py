"""Which checkpoint all ranks go on from: they look for it together, and have one view of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from trainkit.base.errors import TrainkitError
from trainkit.base.locks import LockBusy
from trainkit.runs.checkpoints import (
    PINNED,
    Checkpoint,
    DamagedCheckpoint,
    NewerCheckpoint,
    UnreadableCheckpoint,
    VerifyLevel,
    files_to_hash,
    newest_valid,
    published_folders,
    raise_if_damaged,
    read_valid_manifest,
    set_aside,
    step_of,
    wrong_hashes,
)
from trainkit.runs.manifest import Manifest
from trainkit.train.checkpoint.save_load import writer_lock


def newest_valid_together(
    checkpoints: Path,
    how: VerifyLevel,
    warn: Callable[[str], None],
    passed_over: set[int] | None = None,
) -> Checkpoint | None:
    """What `newest_valid` finds, by all ranks together, which have one view of it: rank 0 reads
    the manifest and looks at the sizes, all others load by what it has read. Of the files that
    `how` asks for each rank hashes its share.

    Where another one was found, what was read and is wrong is set aside: it may look whole to a
    reader that does not hash it, and must not push out what is whole.

    Args:
        checkpoints: the run's folder of them.
        how: what of them is looked at.
        warn: is called on rank 0 with what was passed over.
        passed_over: gets its steps.

    Raises:
        TrainkitError: on all ranks, as `newest_valid` does.
    """
    there: list[list[Path]] = [published_folders(checkpoints) if dist.get_rank() == 0 else []]
    dist.broadcast_object_list(there, src=0)
    wrong: list[tuple[Path, tuple[int, int]]] = []

    def opened(folder: Path) -> Checkpoint:
        seen = _identity(folder)
        try:
            return _open_together(folder, how)
        except DamagedCheckpoint as damaged:
            if not isinstance(damaged, UnreadableCheckpoint):
                wrong.append((folder, seen))
            raise

    def on_damage(message: str) -> None:
        if dist.get_rank() == 0:
            warn(f"passed over: {message}")

    found = newest_valid(checkpoints, on_damage, opened, there[0])
    if found and passed_over is not None:
        passed_over.update(step for step in map(step_of, there[0]) if step > found.manifest.step)
    if found and wrong and dist.get_rank() == 0:
        _set_aside(checkpoints, wrong, warn)
    return found


def _identity(folder: Path) -> tuple[int, int]:
    """What distinguishes a folder from another one of its name."""
    try:
        seen = folder.stat()
    except OSError:
        return 0, 0
    return seen.st_ino, seen.st_mtime_ns


def _set_aside(
    checkpoints: Path, wrong: list[tuple[Path, tuple[int, int]]], warn: Callable[[str], None]
) -> None:
    """Rename what was found damaged, but for what a person put there, and what another writer
    has put in its place since."""
    try:
        with writer_lock(checkpoints):
            for folder, seen in wrong:
                if (
                    not folder.is_symlink()
                    and not os.path.lexists(folder / PINNED)
                    and _identity(folder) == seen
                ):
                    warn(f"{folder} is now {set_aside(folder).name}")
    except (OSError, LockBusy, TrainkitError) as error:
        warn(f"{', '.join(str(folder) for folder, _ in wrong)} stay under their names: {error}")


def _open_together(folder: Path, how: VerifyLevel) -> Checkpoint:
    """Raises Damaged, and Newer, on all ranks, with what any of them found."""
    rank = dist.get_rank()
    size = dist.get_world_size()
    read: list[tuple[bytes, type[DamagedCheckpoint | NewerCheckpoint], list[str]]] = [
        (b"", DamagedCheckpoint, [])
    ]
    if rank == 0:
        try:
            read = [(read_valid_manifest(folder), DamagedCheckpoint, [])]
        except (DamagedCheckpoint, NewerCheckpoint) as error:
            read = [(b"", type(error), error.problem_list)]
    dist.broadcast_object_list(read, src=0)
    content, kind, problems = read[0]
    if problems:
        raise kind(folder, problems)
    manifest = Manifest.model_validate_json(content)
    found: list[tuple[list[str], list[str]]] = [([], [])] * size
    wrong, unread = wrong_hashes(folder, files_to_hash(manifest, how)[rank::size])
    dist.all_gather_object(found, (wrong, [f"rank {rank}: {words}" for words in unread]))
    raise_if_damaged(
        folder,
        [words for of_rank, _ in found for words in of_rank],
        [words for _, of_rank in found for words in of_rank],
    )
    return Checkpoint(folder, manifest)
