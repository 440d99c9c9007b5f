"""Folders of converted weights: whole, or not there."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from trainkit.base.errors import ConfigError, Exit, TrainkitError
from trainkit.base.files import fsync_folder, names_full_file, publish_folder, temporary_name

HINT = "convert to a new folder or an empty one"


def refuse_occupied(target: Path) -> None:
    """Raise ConfigError where anything is there but an empty folder."""
    if not os.path.lexists(target):
        return
    if target.is_symlink() or not target.is_dir():
        raise ConfigError(f"{target} is there already, and is not a folder", hint=HINT)
    if any(target.iterdir()):
        raise ConfigError(f"{target} is there already, and is not empty", hint=HINT)


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A name for a folder beside `target`, to be made and filled; it becomes `target` when the
    block ends, and goes away where the block raises.

    Raises:
        ConfigError: exit 3, `target` is there and not an empty folder.
    """
    refuse_occupied(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_name(target)
    try:
        with names_full_file(target):
            yield temporary
        for folder, _, _ in os.walk(temporary):
            fsync_folder(Path(folder))
        refuse_occupied(target)
        publish_folder(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def save_pickle(content: object, path: Path) -> None:
    """Write a new file of torch.save and fsync it. Raises OSError as the disk does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "xb") as file:
        try:
            torch.save(content, file)
        except RuntimeError as error:  # torch cannot end the file after what has interrupted it
            raise error.__context__ or error from None
        file.flush()
        os.fsync(file.fileno())


def tracked_name(tracker: Path) -> str:
    """What an engine's tracker names. Raises TrainkitError (exit 16) where there is none."""
    try:
        return tracker.read_text(errors="replace").strip()
    except FileNotFoundError:
        raise TrainkitError(
            f"there is no {tracker}: the engine has finished no checkpoint",
            exit=Exit.NO_CHECKPOINT,
            hint="--step N takes one that is there",
        ) from None


def existing(folder: Path) -> Path:
    """A checkpoint's folder. Raises TrainkitError (exit 16) where it is not there."""
    if folder.is_dir():
        return folder
    there = sorted(path.name for path in folder.parent.glob("*") if path.is_dir())
    raise TrainkitError(
        f"there is no checkpoint {folder}",
        exit=Exit.NO_CHECKPOINT,
        hint=f"there are: {', '.join(there) or 'none'}",
    )
