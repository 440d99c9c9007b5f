"""What may be wrong with a checkpoint: it was read and is not what its writer wrote, or it could
not be read, or another version wrote it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import trainkit
from trainkit.base.errors import Exit, TrainkitError

# what stood in a checkpoint's place and was none: it neither counts nor goes, a person may want to
# look
SET_ASIDE_SUFFIX = ".damaged"


class DamagedCheckpoint(TrainkitError):
    """A checkpoint that must not be read (exit 16): it was looked at, and is wrong."""

    def __init__(
        self,
        folder: Path,
        problems: list[str],
        *,
        words: str = "is damaged",
        exit: Exit = Exit.NO_CHECKPOINT,
        hint: str = "",
    ) -> None:
        self.problem_list = problems
        super().__init__(
            f"checkpoint {folder} {words}: {'; '.join(problems)}", exit=exit, hint=hint
        )


class MissingCheckpoint(DamagedCheckpoint):
    """Its manifest or one of its files is not there (exit 16), or is not shown yet."""


class UnreadableCheckpoint(DamagedCheckpoint):
    """A disk does not say what is in it (exit 10): it may be whole."""

    def __init__(self, folder: Path, problems: list[str]) -> None:
        hint = (
            "`resume` once more when the file system is well; to do without it, rename it by hand"
            f" to {folder.name}{SET_ASIDE_SUFFIX}"
        )
        super().__init__(
            folder,
            problems,
            words="could not be read and may be whole",
            exit=Exit.RANK_INFRA,
            hint=hint,
        )


class NewerCheckpoint(TrainkitError):
    """A checkpoint that another version of trainkit wrote, in a form that this one does not know
    (exit 3): what is not known may matter."""

    def __init__(self, folder: Path, problems: list[str]) -> None:
        self.problem_list = problems
        words = (
            f"checkpoint {folder} is whole, and has a form that trainkit {trainkit.__version__}"
            f" does not know: {'; '.join(problems)}"
        )
        super().__init__(
            words,
            exit=Exit.CONFIG,
            hint="resume with the version that wrote it; to do without it, move it away by hand",
        )


def describe_read_error(error: OSError) -> str:
    """Which file could not be read where, and why."""
    if isinstance(error.filename, str | bytes | os.PathLike):
        name = Path(os.fsdecode(error.filename)).name
    else:
        name = "a file"
    return (
        f"{name} cannot be read on {os.uname().nodename}: {error.strerror}"
        f" ({errno.errorcode.get(error.errno or 0, error.errno)})"
    )
