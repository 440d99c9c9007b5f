"""An image file is under its name only when it is whole and on the disk."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from trainkit.base.errors import Exit, TrainkitError
from trainkit.base.files import fsync_folder, remove_leftovers, temporary_name
from trainkit.images.contract import ImageRecord, record_path
from trainkit.images.squashfs import SUFFIXES, fingerprint, squashfs_problem


def file_problem(path: Path) -> str:
    """Why a file is not a whole image, as a sentence; "" where it is one, as far as can be seen."""
    if path.name.endswith(SUFFIXES):
        return squashfs_problem(path)
    if not path.is_file():
        return f"{path} is not there"
    if path.stat().st_size == 0:
        return f"{path} is empty"
    return ""


def other_image(file: Path, record: ImageRecord) -> str:
    """Why a file is not the one of its record, as a sentence; "" where it is."""
    if file.stat().st_size == record.size and fingerprint(file) == record.fingerprint:
        return ""
    return f"{file} is another image than {record_path(file).name} beside it records"


@contextlib.contextmanager
def published(file: Path) -> Iterator[Path]:
    """A name to make the file under, which is not there. Where the block ends well it is read
    back, written to the disk and renamed; else nothing of it is left. Call it under the lock of
    the file's writers.

    Raises:
        TrainkitError: (exit 6) what was made is not whole.
        OSError: as the disk does.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    # not the name itself: stages take away what looks like a leftover of their outputs, and another
    # project may be making this one
    hidden = file.with_name(f".{file.name}")
    remove_leftovers(hidden)
    temporary = temporary_name(hidden)
    made = temporary.with_name(f"{temporary.name}{file.suffix}")
    try:
        yield made
        if problem := file_problem(made):
            raise TrainkitError(
                f"{file.name} was not made whole: {problem}",
                exit=Exit.STAGE_FAILED,
                hint="the unit's log has what its program said",
            )
        with open(made, "rb") as reader:
            os.fsync(reader.fileno())
        os.replace(made, file)
        fsync_folder(file.parent)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            made.unlink()
        raise
