"""Files that are either whole or absent: write to a temporary name beside the target, fsync,
rename, fsync the folder."""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import json
import os
import pwd
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

TEMPORARY = ".tmp-"  # what every unfinished file or folder has in its name
BLOCK = 2**20  # bytes of a file that are hashed at a time
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # of a write, which names no file


def temporary_name(path: Path) -> Path:
    """A name beside `path` that no other process of any host uses; `remove_leftovers` finds it
    after a crash."""
    return path.with_name(f"{path.name}{TEMPORARY}{os.getpid()}-{secrets.token_hex(4)}")


def fsync_folder(folder: Path) -> None:
    """Make renames inside `folder` durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def names_full_file(path: Path) -> Iterator[None]:
    """An error inside of it that says there is no room, and not for which file, names this one."""
    try:
        yield
    except OSError as error:
        if error.errno in NO_ROOM and not error.filename:
            error.filename = str(path)
        raise


@contextlib.contextmanager
def atomic_open(path: Path, mode: str = "wb", permissions: int = 0o666) -> Iterator[IO[Any]]:
    """Open a file that appears under `path` only if the block ends without an exception.

    Raises OSError as the write does; then the temporary file is gone and `path` is as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_name(path)
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, permissions)
    try:
        encoding = None if "b" in mode else "utf-8"
        with names_full_file(path), os.fdopen(handle, mode, encoding=encoding) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    fsync_folder(path.parent)


def write_text(path: Path, text: str, permissions: int = 0o666) -> None:
    """Write a small text file whole or not at all."""
    with atomic_open(path, "w", permissions) as file:
        file.write(text)


def write_beat(path: Path, text: str, *, durable: bool) -> None:
    """Write a small text file that is written again and again, whole. On a full disk, which others
    may fill, there is room where the last text stands. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_name(path)
    try:
        if durable:
            write_text(path, text)
        else:
            temporary.write_text(text)
            temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        with open(path, "r+b", buffering=0) as file:
            rest = text.encode().ljust(os.fstat(file.fileno()).st_size)
            while rest:  # torn, a run that has succeeded would count as failed
                rest = rest[file.write(rest) :]
            os.fsync(file.fileno())


def write_json(path: Path, value: object, permissions: int = 0o666) -> None:
    """Write one JSON document, indented for people, whole or not at all.

    Texts from the system may hold bytes that are not UTF-8 (surrogates in Python); only then
    everything is escaped.
    """
    text = json.dumps(value, indent=1, ensure_ascii=False)
    if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
        text = json.dumps(value, indent=1)
    write_text(path, text + "\n", permissions)


def read_json(path: Path) -> Any:
    """Read one JSON document. Raises FileNotFoundError or json.JSONDecodeError."""
    return json.loads(path.read_text(encoding="utf-8"))


def publish_folder(temporary: Path, target: Path) -> None:
    """Rename a finished folder into place and make that durable. `target` must not exist."""
    fsync_folder(temporary)
    os.rename(temporary, target)
    fsync_folder(target.parent)


def remove(path: Path) -> None:
    """Delete a folder with all that is in it, or a file; of a link only the link. Raises OSError
    as the disk does, not where nothing is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_leftovers(path: Path) -> None:
    """Delete what crashed writers of `path` left beside it (call it under the lock of its
    writers)."""
    for leftover in path.parent.glob(f"{glob.escape(path.name)}{TEMPORARY}*"):
        remove(leftover)


def rotated_log(log: Path) -> Path:
    """Where the part of a log goes that was full; nothing is there while the log is short."""
    return log.with_name(f"{log.name}.1")


def restrict_umask() -> None:
    """Whatever the umask allows, nothing that this process and its children make from now on is
    for everybody to write: who can replace `code`, job.json or a prolog's script runs as us. A
    group may write where the umask lets it."""
    os.umask(os.umask(0o002) | 0o002)


def make_private_folder(path: Path) -> None:
    """Make a folder whose name others know, such as one in /tmp, or take it where it is ours: then
    nobody else may write to it. Raises PermissionError where it is another user's."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(handle).st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "this folder is another user's", str(path))
        os.fchmod(handle, 0o700)
    finally:
        os.close(handle)


def blocking_owner(path: Path) -> tuple[Path, str]:
    """(the file or folder on the way to `path` that another user than us owns, that user) where
    there is one; else (`path`, ""). Of those that can be seen, it is the last."""
    for place in (path, *path.parents):
        with contextlib.suppress(OSError):
            owner = os.lstat(place).st_uid
            if owner == os.geteuid():
                return path, ""
            return place, user_name(owner)
    return path, ""


def user_name(number: int) -> str:
    """What a user is called, by the number."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"the user {number}"


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def sha256_tree(root: Path, names: Iterable[str]) -> str:
    """Hex SHA-256 over names and contents of files below `root`, independent of times and
    owners."""
    return sha256_files({name: root / name for name in names})


def sha256_files(files: Mapping[str, Path]) -> str:
    """The same over files that lie anywhere, by the names they will have."""
    digest = hashlib.sha256()
    for name in sorted(files):
        content = files[name].read_bytes()
        digest.update(name.encode("utf-8", "surrogateescape") + f"\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()
