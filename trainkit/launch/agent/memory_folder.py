"""A run's private folder in the memory of a host, where its ranks keep copies of their state. It
outlives ranks and agents; docs/checkpoints.md says who removes it.

Standard library only: the agent imports this on nodes that may have nothing else.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import stat
from collections.abc import Collection
from pathlib import Path

from trainkit.base.files import write_text

VARIABLE = "TRAINKIT_MEMORY_FOLDER"  # of each rank that keeps copies
PREFIX = "trainkit-memory-"
SLOTS = "slots.json"  # of the host, which the run held


def memory_folder(node_folder: Path, run: str) -> Path:
    """Where a run's is, on each of its hosts."""
    return node_folder / f"{PREFIX}{run}"


def open_memory_folder(
    node_folder: Path, run: str, slots: Collection[str], keys: Collection[str]
) -> Path:
    """The run's folder, made where it is missing.

    Args:
        node_folder: the node's own, which all users may write to.
        run: its id.
        slots: that it holds on this host.
        keys: of the processes that begin here; what others kept goes.

    Raises OSError where it cannot be made, or where something else has its name.
    """
    folder = memory_folder(node_folder, run)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(0o700)
    if not _is_private(folder):
        raise OSError(
            errno.EPERM,
            "what is there is not a folder of this user's alone: remove it, or set"
            " clusters.NAME.node_folder to another folder of each node",
            str(folder),
        )
    write_text(folder / SLOTS, json.dumps(sorted(slots)))
    for each in folder.iterdir():
        if each.suffix in (".state", ".partner") and each.stem not in keys:
            each.unlink()
    return folder


def remove_memory_folder(node_folder: Path, run: str) -> None:
    """The run has ended. What another user has put there stays."""
    if _is_private(folder := memory_folder(node_folder, run)):
        shutil.rmtree(folder, ignore_errors=True)


def remove_of_slots(node_folder: Path, run: str, slots: Collection[str]) -> None:
    """What other runs of this user have kept: who holds their slots now may remove it.

    Args:
        node_folder: the node's own.
        run: whose folder stays.
        slots: that it holds.
    """
    for folder in node_folder.glob(f"{PREFIX}*"):
        if folder == memory_folder(node_folder, run) or not _is_private(folder):
            continue
        with contextlib.suppress(OSError, ValueError):
            if set(json.loads((folder / SLOTS).read_text())) & set(slots):
                shutil.rmtree(folder, ignore_errors=True)


def _is_private(folder: Path) -> bool:
    """Whether it is a folder that nobody but this user can have written to."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    owner = status.st_uid == os.geteuid()
    return stat.S_ISDIR(status.st_mode) and owner and not status.st_mode & 0o077
