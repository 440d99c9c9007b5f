"""A host's slots ("cpu", "gpu0", ...) are locked by run: a second run on them is refused by name.

One file a slot in a folder of the host that all its users may write to. The lock is the kernel's
(flock(2)): it ends with the last process that holds it, so what a file says without a lock on it
is the word of a dead run.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainkit.base.locks import NO_LOCKS, LockBusy
from trainkit.base.old_python import without_prefix, without_suffix

PREFIX = "trainkit-"
SUFFIX = ".lock"
# slots of a host that are reported, and bytes that are read of each holder: anybody can write
# there, and all of it goes into one frame
MOST = 4096
# seconds for all slots: `slot_holders` tries a lock for a moment to see whether it is held
PATIENCE = 0.5


class SlotReservation:
    """Slots held for a run.

    Args:
        handles: open lock files; another process with a copy of them holds the slots too.
        cleared: what dead runs had written there, a holder each.
    """

    def __init__(self, handles: list[int], cleared: list[dict[str, object]]) -> None:
        self.handles = handles
        self.cleared = cleared

    def release(self) -> None:
        """Free the slots, as far as no other process holds them too."""
        for handle in self.handles:
            with contextlib.suppress(OSError):
                os.ftruncate(handle, 0)
            os.close(handle)
        self.handles = []


def reserve_slots(
    folder: Path, names: Sequence[str], holder: Mapping[str, object], *, share: bool = False
) -> SlotReservation:
    """Take all the slots or none; to share, those that are free.

    Args:
        folder: the host's folder for them, made where it is missing.
        names: of the slots; each a plain file name.
        holder: what others read about us; pid and since (Unix seconds) are added.
        share: leave the others to who holds them, and never raise Busy.

    Raises LockBusy with the slot's file and its holder; OSError where the folder cannot be used.
    """
    words = json.dumps({"pid": os.getpid(), "since": time.time(), **holder}).encode()
    handles: list[int] = []
    deadline = time.monotonic() + PATIENCE
    try:
        for name in sorted(set(names)):  # in one order, so that two runs cannot each hold half
            path = slot_path(folder, name)
            handle = _open(path)
            handles.append(handle)
            if not _locked(handle, path, deadline):
                if not share:
                    raise LockBusy(path, _holder(handle))
                os.close(handles.pop())
        cleared = [stale for handle in handles if (stale := _holder(handle))]
        for handle in handles:
            os.ftruncate(handle, 0)
            os.pwrite(handle, words, 0)
    except BaseException:
        for handle in handles:
            os.close(handle)
        raise
    return SlotReservation(handles, cleared)


def slot_holders(folder: Path) -> dict[str, dict[str, object]]:
    """The slots that are held now, each with what its holder says; of the first MOST."""
    taken = {}
    for path in sorted(folder.glob(f"{PREFIX}*{SUFFIX}"))[:MOST]:
        with contextlib.suppress(OSError):
            # anybody may put a pipe there, whose other end nobody opens
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                taken[slot_name(path)] = _holder(handle)
            finally:
                os.close(handle)
    return taken


def slot_path(folder: Path, name: str) -> Path:
    """The file of a slot. Raises ValueError for a name that is none."""
    if not name or "/" in name or "\0" in name:
        raise ValueError(f"{name!r} is not the name of a slot")
    return folder / f"{PREFIX}{name}{SUFFIX}"


def slot_name(path: Path) -> str:
    """The slot that a file is for."""
    return without_suffix(without_prefix(path.name, PREFIX), SUFFIX)


def _open(path: Path) -> int:
    """The lock file, made writable for everyone. Linux refuses O_CREAT on another user's file in
    such a folder (fs.protected_regular): so without it first."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    for _ in range(3):
        try:
            handle = os.open(path, flags)
            break
        except FileNotFoundError:
            _make_folder(path.parent)
        except OSError as error:
            raise _in_the_way(
                path, error.errno or errno.EINVAL, error.strerror or str(error)
            ) from None
        with contextlib.suppress(FileExistsError):  # another made it first
            handle = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
            os.fchmod(handle, 0o666)  # whatever the umask says
            break
    else:
        raise OSError(errno.EAGAIN, "appears and vanishes", str(path))
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise _in_the_way(path, errno.EINVAL, "no plain file")
    return handle


def _in_the_way(path: Path, number: int, why: str) -> OSError:
    what = (
        f"what is there is not a lock of trainkit's that may be written ({why}): remove it, or set"
        " clusters.NAME.node_folder to another folder of each node"
    )
    return OSError(number, what, str(path))


def _make_folder(folder: Path) -> None:
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o1777)


def _locked(handle: int, path: Path, deadline: float) -> bool:
    """Whether we hold the lock now; it is tried at least once."""
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            pass
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            what = (
                f"its file system cannot lock files ({error.strerror}); clusters.NAME.node_folder"
                " has to be on one that can, such as /dev/shm"
            )
            raise OSError(error.errno, what, str(path)) from None
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)


def _holder(handle: int) -> dict[str, object]:
    try:
        value = json.loads(os.pread(handle, MOST, 0) or b"{}")
    except ValueError:
        return {}
    if isinstance(value, dict):
        return value
    return {}
