"""A host's slots ("cpu", "gpu0", ...) are locked by run: a second run on them is refused by name.

One file a slot in a folder of the host that all its users may write to, and nothing in it: the
lock is the kernel's (flock(2)), and it ends with the last process that holds it. What a run says of
itself lies beside it, in a file of its user's that nobody else may write. So what a user's own file
says while that user holds the slot's lock is the word of a dead run; of another user's word, only
what people read is taken, with the user's name.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from trainkit.base.files import user_name
from trainkit.base.locks import NO_LOCKS, LockBusy
from trainkit.base.old_python import without_prefix, without_suffix

PREFIX = "trainkit-"
SUFFIX = ".lock"
# slots of a host that are reported, and bytes that are read of each holder: anybody can write
# there, and all of it goes into one frame
MOST = 4096
SHOWN = ("run", "attempt", "pid", "folder", "since")  # of another user's words
# seconds for all slots: `slot_holders` tries a lock for a moment to see whether it is held
PATIENCE = 0.5


class SlotReservation:
    """Slots held for a run.

    Args:
        handles: open files, locks and our words; another process with a copy of them holds the
            slots too.
        names: of the slots.
        cleared: what dead runs of this user had written there, a holder each.
    """

    def __init__(
        self, handles: list[int], names: list[str], cleared: list[dict[str, object]]
    ) -> None:
        self.handles = handles
        self.names = names
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
    own = {"pid": os.getpid(), "since": time.time(), "user": user_name(os.geteuid())}
    words = json.dumps({**own, **holder}).encode()
    locks: list[tuple[Path, int]] = []
    notes: list[int] = []
    deadline = time.monotonic() + PATIENCE
    try:
        for name in sorted(set(names)):  # in one order, so that two runs cannot each hold half
            path = slot_path(folder, name)
            try:
                locks.append((path, _take(path, deadline)))
            except LockBusy:
                if not share:
                    raise
        notes = [note for path, _ in locks if (note := _open_own_words(path)) is not None]
        cleared = [stale for note in notes if (stale := _read_words(note))]
        for note in notes:
            os.ftruncate(note, 0)
            with contextlib.suppress(OSError):  # a full disk: our run is not named
                os.pwrite(note, words, 0)
    except BaseException:
        for handle in (*(lock for _, lock in locks), *notes):
            os.close(handle)
        raise
    held = [slot_name(path) for path, _ in locks]
    return SlotReservation([*(lock for _, lock in locks), *notes], held, cleared)


def slot_holders(folder: Path) -> dict[str, dict[str, object]]:
    """The slots that are held now, each with what is known of its holder; of the first MOST."""
    taken = {}
    for path in sorted(folder.glob(f"{PREFIX}*{SUFFIX}"))[:MOST]:
        with contextlib.suppress(OSError):
            # anybody may put a pipe there, whose other end nobody opens
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                taken[slot_name(path)] = _holder(path, handle)
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


def _take(path: Path, deadline: float) -> int:
    """A handle of the slot's file, locked. What another user has put in its place holds the slot
    for that user. Raises LockBusy; OSError where the folder cannot be used."""
    try:
        handle = _open(path)
    except FileExistsError as error:
        with contextlib.suppress(OSError):
            owner = path.lstat().st_uid
            if owner != os.geteuid():
                words = {"user": user_name(owner), "why": error.strerror}
                raise LockBusy(path, words) from None
        raise
    try:
        if not _locked(handle, path, deadline):
            raise LockBusy(path, _holder(path, handle))
    except BaseException:
        os.close(handle)
        raise
    return handle


def _open(path: Path) -> int:
    """The lock file, which everyone may open. Linux refuses O_CREAT on another user's file in
    such a folder (fs.protected_regular): so without it first. Raises FileExistsError for what is
    not a lock."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    for _ in range(3):
        try:
            handle = os.open(path, flags)
            break
        except FileNotFoundError:
            _make_folder(path.parent)
        except OSError as error:
            raise _in_the_way(path, error.strerror or str(error)) from None
        with contextlib.suppress(FileExistsError):  # another made it first
            handle = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
            os.fchmod(handle, 0o666)  # whatever the umask says
            break
    else:
        raise OSError(errno.EAGAIN, "appears and vanishes", str(path))
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise _in_the_way(path, "no plain file")
    return handle


def _in_the_way(path: Path, why: str) -> FileExistsError:
    what = (
        f"what is there is not a lock of trainkit's that may be written ({why}): remove it, or set"
        " clusters.NAME.node_folder to another folder of each node"
    )
    return FileExistsError(errno.EEXIST, what, str(path))


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
            raise OSError(
                error.errno,
                f"its file system cannot lock files ({error.strerror}); clusters.NAME.node_folder"
                " has to be on one that can, such as /dev/shm",
                str(path),
            ) from None
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)


def _open_own_words(path: Path) -> int | None:
    """The file beside a slot's lock in which this user says who holds it; None where another user
    has taken its name, so that our run is not named there."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        handle = os.open(_words_path(path, str(os.geteuid())), flags, 0o644)
    except OSError:
        return None
    status = os.fstat(handle)
    if status.st_uid != os.geteuid() or not _is_owners_alone(status):
        os.close(handle)
        return None
    os.fchmod(handle, 0o644)  # for others to read, whatever the umask says
    return handle


def _words_path(path: Path, user: str) -> Path:
    return path.with_name(f"{without_suffix(path.name, SUFFIX)}.holder-{user}")


def _holder(path: Path, handle: int) -> dict[str, object]:
    """Who holds a slot: the process that the kernel names and its user, with what this user says
    of it. Where the kernel names nobody (its process is in another namespace, or is dead and its
    keeper holds on), what was said last."""
    pid = _locker(os.fstat(handle))
    user = None
    with contextlib.suppress(OSError):
        user = os.stat(f"/proc/{pid}").st_uid if pid else None
    said = [words for owner, words in _all_words(path) if user in (None, owner)]
    newest = max(said, key=lambda words: str(words.get("since")), default={})
    kernel: dict[str, object] = {}
    if pid:
        kernel["pid"] = pid
    if user is not None:
        kernel["user"] = user_name(user)
    return {**newest, **kernel}


def _locker(lock: os.stat_result) -> int | None:
    """The process that has locked a file, from /proc/locks (proc_locks(5)). None: unknown here."""
    device = f"{os.major(lock.st_dev):02x}:{os.minor(lock.st_dev):02x}:{lock.st_ino}"
    with contextlib.suppress(OSError), open("/proc/locks", "rb") as table:
        for line in table:
            fields = line.split()
            if fields[1] == b"FLOCK" and fields[5] == device.encode():
                return int(fields[4])
    return None


def _all_words(path: Path) -> Iterator[tuple[int, dict[str, object]]]:
    """What users say of a slot, each in a file that nobody else may write."""
    for each in sorted(path.parent.glob(_words_path(path, "*").name))[:MOST]:
        with contextlib.suppress(OSError):
            handle = os.open(each, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                status = os.fstat(handle)
                words = _read_words(handle)
            finally:
                os.close(handle)
            if not words or not _is_owners_alone(status):
                continue
            if status.st_uid != os.geteuid():
                words = {key: words[key] for key in SHOWN if key in words}
            yield status.st_uid, {**words, "user": user_name(status.st_uid)}


def _is_owners_alone(status: os.stat_result) -> bool:
    """Whether it is a plain file that nobody but its owner can have written."""
    return stat.S_ISREG(status.st_mode) and not status.st_mode & 0o022


def _read_words(handle: int) -> dict[str, object]:
    try:
        value = json.loads(os.pread(handle, MOST, 0) or b"{}")
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
