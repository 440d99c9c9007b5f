"""Every call of a rank that changes something on the disk below one folder, by address; and a
disk that refuses one of these calls, or is full from there on.

Installed in a process of its own, in place of the functions of `os` and of `open`: all that is
written from Python goes through them, checkpoints, metrics, TensorBoard's files, heartbeats and
lock files alike. A rank's own output is not counted: it is a pipe to its agent.

An address is "operation place n": the n-th call of this operation for this place. Threads that
write elsewhere meanwhile (deletion, TensorBoard's, a save behind training) do not change it, so
it is the same call in every run of one job. A place is a path without random parts; that of a
heartbeat also says which phase of which step it begins, or that it only says again what goes on,
which is a matter of time.

    {"at": "writes", "root": "/run", "report": "/tmp/report", "rank": 0}
    only list them {..., "do": ERRNO | "short", "call": ADDRESS}
    refuse this one, or take half of it {..., "do": ERRNO, "call": ADDRESS, "steps": 2}
    full from there on, until two steps have begun

Every call is a line of the report, its address, with " !" where it was refused.
"""

from __future__ import annotations

import builtins
import io
import os
import re
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from trainkit.train.metrics.heartbeat import Heartbeat
from trainkit.train.update.step import Step

ON_PATH = ("mkdir", "rename", "replace", "unlink", "remove", "rmdir", "truncate", "link", "symlink")
ON_HANDLE = (
    "write",
    "pwrite",
    "writev",
    "pwritev",
    "ftruncate",
    "posix_fallocate",
    "fsync",
    "fdatasync",
)
# what a full disk refuses
TAKES_ROOM = {
    "create",
    "mkdir",
    "link",
    "symlink",
    "write",
    "pwrite",
    "writev",
    "pwritev",
    "posix_fallocate",
}
IN_PART = {"write", "pwrite"}  # what may be taken by half
NAMES = [
    (r"(step-\d+)\.[0-9a-f]{8}", r"\1"),
    (r"\.tmp-[0-9a-z-]+", ".tmp"),
    (r"events\.out.*", "events"),
]
AGAIN = ":again"  # how the place of a heartbeat ends that only says again what goes on


def place_of(path: str) -> str:
    """What a path is, whatever is random in it."""
    for pattern, name in NAMES:
        path = re.sub(pattern, name, path)
    return path


class Disk:
    """Looks at every call before it is made."""

    def __init__(self, fault: dict[str, Any]) -> None:
        self.root, self.fault = os.path.realpath(fault["root"]), fault
        self.asked: Counter[str] = Counter()
        self.lock, self.full, self.begun = threading.Lock(), False, 0
        self.beat = ""  # what the heartbeat that is being written says
        self.report = os.open(fault["report"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.write, self.readlink = os.write, os.readlink

    def under(self, what: Any, folder: int | None = None) -> str | None:
        """Where a path or an open file lies below the root; None: elsewhere."""
        try:
            path = (
                self.readlink(f"/proc/self/fd/{what}")
                if isinstance(what, int)
                else os.fsdecode(what)
            )
            if folder is not None:
                path = os.path.join(self.readlink(f"/proc/self/fd/{folder}"), path)
        except (OSError, TypeError):
            return None
        path = os.path.abspath(path)
        return path[len(self.root) + 1 :] if path.startswith(self.root + "/") else None

    def asks(self, operation: str, path: str) -> bool:
        """Note the call; returns whether half of it is to be taken. Raises OSError where it is
        refused."""
        do, what = (
            self.fault.get("do", 0),
            f"{operation} {place_of(path)}{self.beat if 'heartbeat' in path else ''}",
        )
        with self.lock:
            self.asked[what] += 1
            address = f"{what} {self.asked[what]}"
            refused = address == self.fault.get("call")
            if "steps" in self.fault:
                self.full = self.full or refused
                refused = self.full and self.begun < self.fault["steps"] and operation in TAKES_ROOM
            self.write(self.report, f"{address}{' !' if refused else ''}\n".encode())
        if refused and do != "short":
            raise OSError(do, os.strerror(do), path)
        return refused

    def begins(self) -> None:
        """A step begins."""
        self.begun += self.full


class CountedFile(io.FileIO):
    """A file whose writes are counted."""

    disk: Disk

    def write(self, data: Any) -> int:
        path, view = self.disk.under(self.fileno()), memoryview(data).cast("B")
        half = path is not None and self.disk.asks("write", path)
        return super().write(view[: len(view) // 2] if half else view)


def install(fault: dict[str, Any]) -> None:
    """Let the disk be so, in this process."""
    disk = Disk(fault)
    for name in ON_PATH:
        setattr(os, name, _path_call(disk, name, getattr(os, name)))
    for name in ON_HANDLE:
        setattr(os, name, _handle_call(disk, name, getattr(os, name)))
    os.open = _os_open(disk, os.open)
    builtins.open = io.open = _open(disk, io.open)
    run, beat = Step.run, Heartbeat.beat

    def begun(self: Step, *args: Any, **kwargs: Any) -> Any:
        disk.begins()
        return run(self, *args, **kwargs)

    def beats(self: Heartbeat, phase: Any, step: int, **kwargs: Any) -> None:
        disk.beat = AGAIN if phase == self.phase else f":{phase}@{step}"
        beat(self, phase, step, **kwargs)

    setattr(Step, "run", begun)  # noqa: B010
    setattr(Heartbeat, "beat", beats)  # noqa: B010


def _path_call(disk: Disk, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def call(path: Any, *args: Any, **kwargs: Any) -> Any:
        where = disk.under(path, kwargs.get("dir_fd"))
        if where is not None and not (name == "mkdir" and os.path.isdir(path)):
            disk.asks(name, where)
        return real(path, *args, **kwargs)

    return call


def _handle_call(disk: Disk, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def call(handle: int, *args: Any) -> Any:
        where = disk.under(handle)
        if where is not None and disk.asks(name, where):
            args = (args[0][: max(1, len(args[0]) // 2)], *args[1:])
        return real(handle, *args)

    return call


def _os_open(disk: Disk, real: Callable[..., int]) -> Callable[..., int]:
    def call(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        where = disk.under(path, kwargs.get("dir_fd"))
        if where is not None and flags & (os.O_WRONLY | os.O_RDWR):
            disk.asks("open" if os.path.exists(path) else "create", where)
        return real(path, flags, *args, **kwargs)

    return call


def _open(disk: Disk, real: Callable[..., Any]) -> Callable[..., Any]:
    def call(
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: Any = None,
        errors: Any = None,
        newline: Any = None,
        closefd: bool = True,
    ) -> Any:
        where = disk.under(file)
        if where is None or not set(mode) & set("wax+"):
            return real(file, mode, buffering, encoding, errors, newline, closefd)
        if not isinstance(file, int):
            disk.asks("open" if os.path.exists(file) else "create", where)
        raw = CountedFile(file, mode.replace("b", "").replace("t", ""), closefd)
        raw.disk = disk
        if buffering == 0:
            return raw
        buffered = io.BufferedWriter(raw)
        return (
            buffered
            if "b" in mode
            else io.TextIOWrapper(
                buffered, encoding or "utf-8", errors, newline, line_buffering=buffering == 1
            )
        )

    return call
