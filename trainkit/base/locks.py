"""Locks between processes: flock on a file that says who holds it. The kernel frees it when the
holder dies."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from trainkit.base.errors import Exit, TrainkitError

FULL = (errno.ENOSPC, errno.EDQUOT)
# what a file system without locks answers
NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


class LockBusy(Exception):
    """The lock is held; `holder` is what its holder wrote about itself (empty if it wrote
    nothing yet)."""

    def __init__(self, path: Path, holder: Mapping[str, object]) -> None:
        super().__init__(f"{path} is locked by {holder or 'another process'}")
        self.path = path
        self.holder = holder


class LocksUnsupported(TrainkitError):
    """The file system has no locks (exit 3): Lustre mounted without them, NFS without its lock
    service."""

    def __init__(self, path: Path, why: OSError) -> None:
        words = f"the file system of {path.parent} cannot lock files: {why.strerror}"
        super().__init__(
            words,
            exit=Exit.CONFIG,
            hint=(
                "mount it with locks (Lustre: -o flock; NFS: with its lock service), or set"
                " clusters.NAME.root to another"
            ),
        )


def _flock(handle: int, path: Path, how: int) -> None:
    try:
        fcntl.flock(handle, how)
    except OSError as error:
        if error.errno in NO_LOCKS:
            raise LocksUnsupported(path, error) from None
        raise


def _read_holder(handle: int) -> dict[str, object]:
    try:
        value = json.loads(os.pread(handle, 65536, 0) or b"{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _hide_from_readers(handle: int) -> None:
    """Who may read a file may lock it with flock(2): another user, who may not write to it, could
    hold the lock for as long as that user likes."""
    mode = stat.S_IMODE(os.fstat(handle).st_mode)
    readers = mode & 0o044 & ~(mode << 1)  # group or others who may not write
    if readers:
        with contextlib.suppress(PermissionError):  # its owner does
            os.fchmod(handle, mode & ~readers)


def _held(path: Path, *, wait: bool, on_wait: Callable[[dict[str, object]], None] | None) -> int:
    """A locked handle of the file that has the name now: its holder may have removed the one
    that was waited for."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o660)
        try:
            _hide_from_readers(handle)
            try:
                _flock(handle, path, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                current = _read_holder(handle)
                if not wait:
                    raise LockBusy(path, current) from None
                if on_wait:
                    on_wait(current)
                    on_wait = None
                _flock(handle, path, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(handle), os.stat(path)):
                    return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


@contextlib.contextmanager
def locked(
    path: Path,
    holder: Mapping[str, object],
    *,
    wait: bool = True,
    on_wait: Callable[[dict[str, object]], None] | None = None,
    remove: bool = False,
) -> Iterator[None]:
    """Hold an exclusive lock for the block.

    Args:
        path: the lock file; it is left behind, empty.
        holder: what a waiter reads about us, pid added.
        wait: wait for the holder, or raise LockBusy.
        on_wait: called once with the holder's words before waiting.
        remove: delete the file at the end, however the block ends. Who waits for it then sees that
            it is gone, and locks the new one.

    Raises:
        LockBusy: somebody else holds it.
        LocksUnsupported: the file system knows no locks.
        OSError: as the disk does, until it is held; a full one has no room for the holder's words,
            and locks. What it does not take of letting go is of no account, the kernel frees the
            lock.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = _held(path, wait=wait, on_wait=on_wait)
    try:
        words = {"pid": os.getpid(), "since": time.time(), **holder}
        try:
            os.ftruncate(handle, 0)
            os.pwrite(handle, json.dumps(words).encode(), 0)
        except OSError as error:
            if error.errno not in FULL:  # who waits will not know for whom; the lock holds
                raise
        yield
        with contextlib.suppress(OSError):
            os.ftruncate(handle, 0)
    finally:
        if remove:
            with contextlib.suppress(OSError):
                path.unlink()
        # a remote file system may say only now that it did not take the holder's words
        with contextlib.suppress(OSError):
            os.close(handle)
