"""Checkpoints of a run as files: which are there, which are whole, which stay. Nothing here
needs torch, and nothing in a checkpoint is ever executed.

A folder step-NNNNNNNN whose manifest.json fits its files is a checkpoint; nothing else is, and
there is no pointer file that could go stale. What may be wrong with one: it was read and
is not what its writer wrote, or it could not be read, or another version wrote it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar, assert_never

import xxhash
from pydantic import ValidationError

import trainkit
from trainkit.base.errors import Exit, TrainkitError
from trainkit.base.files import fsync_folder
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.runs.manifest import (
    MANIFEST,
    DataFile,
    Manifest,
    has_valid_seal,
    state_problems,
    tensor_problems,
)

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


LOCK = "writer.lock"  # held by rank 0 while it publishes
PINNED = "pinned"  # a file of this name in a checkpoint's folder: it stays
PUBLISHED_NAME = re.compile(r"step-(\d{8,})")
UNFINISHED_SUFFIX = ".tmp"
MISSING = " is missing"
# seconds between looks at what may only seem to be gone: a stale handle, too many open files, a
# remote folder as it was
PAUSES = (0.5, 2.0)
SAMPLED = 8  # verify = "sample" hashes one file of so many
VerifyLevel = Literal["size", "sample", "full"]
Seen = TypeVar("Seen")


@dataclass(frozen=True)
class Checkpoint:
    """A folder with its checked manifest."""

    folder: Path
    manifest: Manifest

    @property
    def bytes(self) -> int:
        """Of its data files."""
        return sum(file.bytes for file in self.manifest.files)

    @property
    def pinned(self) -> bool:
        return (self.folder / PINNED).exists()


def checkpoint_folder(checkpoints: Path, step: int) -> Path:
    """Where the checkpoint of `step` lies, or will."""
    return checkpoints / f"step-{step:08d}"


def unfinished_folder(folder: Path) -> Path:
    """A name for what will be a checkpoint's folder, or was one, that no other process uses: two
    writers never share a file."""
    return folder.with_name(f"{folder.name}.{secrets.token_hex(4)}{UNFINISHED_SUFFIX}")


def set_aside(folder: Path) -> Path:
    """Rename what is damaged, so that nobody takes it for a checkpoint again; returns where it
    is now. To be called under the lock of writers.

    Raises OSError as the disk does.
    """
    aside = folder.rename(
        folder.with_name(f"{folder.name}.{secrets.token_hex(4)}{SET_ASIDE_SUFFIX}")
    )
    fsync_folder(folder.parent)
    return aside


def set_aside_in(checkpoints: Path) -> list[Path]:
    """What was set aside, oldest step first."""
    return sorted(
        (
            p
            for p in checkpoints.glob(f"step-*{SET_ASIDE_SUFFIX}")
            if PUBLISHED_NAME.fullmatch(p.name.partition(".")[0])
        ),
        key=step_of,
    )


def step_of(folder: Path) -> int:
    """The step that the name of a published folder says, or of one that was set aside."""
    return int(folder.name[5:].partition(".")[0])


def published_folders(checkpoints: Path) -> list[Path]:
    """Folders that were published, oldest first. Whether they are whole is for `open_checkpoint`
    to say."""
    if checkpoints.is_dir():
        found = [
            (int(m[1]), p) for p in checkpoints.iterdir() if (m := PUBLISHED_NAME.fullmatch(p.name))
        ]
    else:
        found = []
    return [path for _, path in sorted(found)]


def open_checkpoint(folder: Path) -> Checkpoint:
    """Read and check a checkpoint's manifest, and its files' sizes, in one look. Raises
    DamagedCheckpoint with all that is wrong, NewerCheckpoint."""
    try:
        return check_checkpoint(folder, read_manifest(folder))
    except OSError as error:
        raise UnreadableCheckpoint(folder, [describe_read_error(error)]) from None


def read_valid_manifest(folder: Path) -> bytes:
    """The content of a manifest that is right and fits its files' sizes. Raises DamagedCheckpoint
    with all that is wrong, after some pauses where it may pass; Newer."""

    def look() -> bytes:
        content = read_manifest(folder)
        check_checkpoint(folder, content)
        return content

    try:
        return _patiently(look)
    except OSError as error:
        raise UnreadableCheckpoint(folder, [describe_read_error(error)]) from None


def _patiently(look: Callable[[], Seen]) -> Seen:
    """Raises what the last of some looks has met."""
    for seconds in PAUSES:
        try:
            return look()
        except (OSError, MissingCheckpoint):
            time.sleep(seconds)
    return look()


def _hidden(path: Path) -> bool:
    """Whether its folder lists it, and it cannot be found nevertheless. A remote file system is
    asked again for a list."""
    return not os.path.lexists(path) and path.name in os.listdir(path.parent)


def read_manifest(folder: Path) -> bytes:
    """Raises DamagedCheckpoint where there is none, and OSError as the disk does."""
    path = folder / MANIFEST
    try:
        if path.exists() and not path.is_file():
            # a pipe would be waited for without end
            raise DamagedCheckpoint(folder, [f"{MANIFEST} is not a file"])
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if _hidden(path):
                raise OSError(errno.ESTALE, "it is listed and cannot be found", str(path)) from None
        raise MissingCheckpoint(folder, [f"{MANIFEST} cannot be read: {error.strerror}"]) from None


def check_checkpoint(folder: Path, content: bytes, name: str = "") -> Checkpoint:
    """A folder whose manifest has this content and fits its files' sizes. Raises DamagedCheckpoint
    with all that is wrong, NewerCheckpoint, and OSError as the disk does.

    `name`: what the folder will be called, where it has another name so far.
    """
    try:
        manifest = Manifest.model_validate_json(content)
    except ValidationError as error:
        problems = [
            f"{MANIFEST}: {'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:5]
        ]
        unknown = any(
            e["type"] == "extra_forbidden" or e["loc"] == ("schema",) for e in error.errors()
        )
        raise (NewerCheckpoint if unknown and has_valid_seal(content) else DamagedCheckpoint)(
            folder, problems
        ) from None
    problems = [
        *_manifest_problems(name or folder.name, manifest, content),
        *file_problems(folder, manifest),
        *tensor_problems(manifest),
    ]
    if problems:
        raise (
            MissingCheckpoint
            if any(problem.endswith(MISSING) for problem in problems)
            else DamagedCheckpoint
        )(folder, problems)
    return Checkpoint(folder, manifest)


def _manifest_problems(name: str, manifest: Manifest, content: bytes) -> Iterator[str]:
    if manifest.xxh128 and not has_valid_seal(content):
        yield f"{MANIFEST} does not have the hash {manifest.xxh128}"
    yield from state_problems(manifest.state)
    if name != checkpoint_folder(Path(), manifest.step).name:
        yield f"its manifest says step {manifest.step}"


def file_problems(folder: Path, manifest: Manifest) -> Iterator[str]:
    """Which of a manifest's files are not in a folder, or have other sizes. Raises OSError as
    the disk does."""
    for file in manifest.files:
        if file.path != Path(file.path).name or file.path in ("", ".", ".."):
            yield f"{file.path!r} is not a plain file name"
            continue
        path = folder / file.path
        if path.is_symlink() or not path.is_file():
            if _hidden(path):
                raise OSError(errno.ESTALE, "it is listed and cannot be found", str(path))
            yield file.path + MISSING
        elif (there := _size(path, file.bytes)) != file.bytes:
            yield f"{file.path} has {there} bytes, not {file.bytes}"


def _size(path: Path, expected: int) -> int:
    """In bytes. A remote file system may remember another size; it asks again when a file is
    opened."""
    if path.stat().st_size == expected:
        return expected
    with open(path, "rb", buffering=0) as file:
        return os.fstat(file.fileno()).st_size


def files_to_hash(manifest: Manifest, how: VerifyLevel) -> list[DataFile]:
    """Which files `verify` = how reads: all, one of every SAMPLED (by the step, so that every
    reader looks at the same), or none."""
    files = manifest.files
    match how:
        case "size":
            chosen = []
        case "sample":
            chosen = random.Random(manifest.step).sample(files, -(-len(files) // SAMPLED))
        case "full":
            chosen = list(files)
        case unknown:
            assert_never(unknown)
    return sorted(chosen, key=lambda file: file.path)


def wrong_hashes(folder: Path, files: Iterable[DataFile]) -> tuple[list[str], list[str]]:
    """Reads these files of a checkpoint and names (those that are not what their writer wrote;
    the first that could not be read, where it ends)."""
    problems: list[str] = []
    for file in files:
        try:
            if _patiently(partial(_xxh128, folder / file.path)) != file.xxh128:
                problems.append(f"{file.path} does not have the hash {file.xxh128}")
        except OSError as error:
            error.filename = error.filename or str(folder / file.path)  # a bad sector has no name
            return problems, [describe_read_error(error)]
    return problems, []


def _xxh128(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        while block := file.read(2**22):
            digest.update(block)
    return digest.hexdigest()


def open_verified(folder: Path, how: VerifyLevel = "full") -> Checkpoint:
    """A checkpoint whose manifest and sizes are right, and the hashes that `how` asks for.
    Raises DamagedCheckpoint with all that is wrong, and NewerCheckpoint."""
    manifest = Manifest.model_validate_json(read_valid_manifest(folder))
    raise_if_damaged(folder, *wrong_hashes(folder, files_to_hash(manifest, how)))
    return Checkpoint(folder, manifest)


def raise_if_damaged(folder: Path, wrong: list[str], unread: list[str]) -> None:
    """Raises DamagedCheckpoint where anything is wrong, else Unreadable where anything could not be
    read."""
    if wrong:
        raise DamagedCheckpoint(folder, [*wrong, *unread])
    if unread:
        raise UnreadableCheckpoint(folder, unread)


def verify(folder: Path, how: VerifyLevel = "full") -> list[str]:
    """Everything wrong with a checkpoint, an empty list if nothing is. Raises NewerCheckpoint."""
    try:
        open_verified(folder, how)
    except DamagedCheckpoint as damaged:
        return damaged.problem_list
    return []


def newest_valid(
    checkpoints: Path,
    on_damage: Callable[[str], None],
    opened: Callable[[Path], Checkpoint] = open_verified,
    folders: list[Path] | None = None,
) -> Checkpoint | None:
    """The newest checkpoint that is whole, None where there is none at all.

    Args:
        checkpoints: the run's folder of checkpoints; unfinished ones in it are not looked at.
        on_damage: called with a message for every newer checkpoint that had to be passed over.
        opened: opens one, or raises Damaged; by default every file is hashed here.
        folders: which there are, oldest first; by default all that are finished.

    Raises:
        UnreadableCheckpoint: exit 10, for one a disk may be to blame; the second that could not be
        read shows that it is the way to all of them. Also where no other
            is whole.
        NewerCheckpoint: exit 3, the newest is of a form that is not known here. TrainkitError: exit
        16, there are checkpoints but none is valid.
    """
    if folders is None:
        folders = published_folders(checkpoints)
    unreadable = list[UnreadableCheckpoint]()
    for folder in reversed(folders):
        try:
            return opened(folder)
        except DamagedCheckpoint as damaged:
            if isinstance(damaged, UnreadableCheckpoint):
                unreadable.append(damaged)
            if len(unreadable) > 1:
                break
            on_damage(damaged.message)
    if unreadable:
        raise unreadable[-1]
    if folders:
        raise TrainkitError(
            f"none of the {len(folders)} checkpoints in {checkpoints} is valid",
            exit=Exit.NO_CHECKPOINT,
            hint=(
                "restore one from a copy, or start a new run; removing the folder's checkpoints"
                " makes this run start from step 0"
            ),
        )
    return None


def record_evaluation(checkpoints: Path, step: int, validation: dict[str, float]) -> None:
    """The manifest of this step's checkpoint said that its evaluation is due; say that it was
    made, and what losses it found.

    What lies behind a link is not this run's and stays as it is. To be called under the lock of
    writers. Raises DamagedCheckpoint, and OSError as the disk does.
    """
    folder = checkpoint_folder(checkpoints, step)
    if not folder.is_symlink():
        manifest = open_checkpoint(folder).manifest
        manifest.model_copy(
            update={"state": {**manifest.state, "evaluation_due": False}, "validation": validation}
        ).write(folder)
