"""Everything that a rank asks of the disk below one folder, counted; and a disk that refuses the n-th of it, or is full from there on.

Installed in a process of its own, in place of the functions of `os` and of `open`: all that is written from Python goes through them, checkpoints,
metrics, TensorBoard's files, heartbeats and lock files alike. A rank's own output is not counted: it is a pipe to its agent.

    {"at": "writes", "root": "/run", "report": "/tmp/report", "rank": 0}                              only count
    {..., "do": ERRNO | "short", "call": 17}                                                          refuse the 17th, or take half of it
    {..., "do": ERRNO, "call": 17, "steps": 2}                                                        full from the 17th on, until two steps have begun

Every call is a line of the report, "number operation place", with "!" where it was refused.
"""

from __future__ import annotations

import builtins
import io
import itertools
import os
import re
from collections.abc import Callable
from typing import Any

from trainkit.train.step import Step

ON_PATH = ("mkdir", "rename", "replace", "unlink", "remove", "rmdir", "truncate", "link", "symlink")
ON_HANDLE = ("write", "pwrite", "writev", "pwritev", "ftruncate", "posix_fallocate", "fsync", "fdatasync")
TAKES_ROOM = {"create", "mkdir", "link", "symlink", "write", "pwrite", "writev", "pwritev", "posix_fallocate"}  # what a full disk refuses
IN_PART = {"write", "pwrite"}  # what may be taken by half
NAMES = [(r"step-\d+(\.[0-9a-f]{8})?", "step-N"), (r"\.tmp-[0-9a-z-]+", ".tmp"), (r"events\.out.*", "events"), (r"\d+\.json", "RANK.json")]


def place_of(path: str) -> str:
    """What a path is, whatever its numbers."""
    for pattern, name in NAMES:
        path = re.sub(pattern, name, path)
    return path


class Disk:
    """Looks at every call before it is made."""

    def __init__(self, fault: dict[str, Any]) -> None:
        self.root, self.fault = os.path.realpath(fault["root"]), fault
        self.count, self.full, self.begun = itertools.count(1), False, 0
        self.report = os.open(fault["report"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.write, self.readlink = os.write, os.readlink

    def under(self, what: Any, folder: int | None = None) -> str | None:
        """Where a path or an open file lies below the root; None: elsewhere."""
        try:
            path = self.readlink(f"/proc/self/fd/{what}") if isinstance(what, int) else os.fsdecode(what)
            if folder is not None:
                path = os.path.join(self.readlink(f"/proc/self/fd/{folder}"), path)
        except (OSError, TypeError):
            return None
        path = os.path.abspath(path)
        return path[len(self.root) + 1 :] if path.startswith(self.root + "/") else None

    def asks(self, operation: str, path: str) -> bool:
        """Note the call; returns whether half of it is to be taken. Raises OSError where it is refused."""
        number, do = next(self.count), self.fault.get("do", 0)
        if "steps" in self.fault:
            self.full = self.full or number >= self.fault["call"]
            refused = self.full and self.begun < self.fault["steps"] and operation in TAKES_ROOM
        else:
            refused = number == self.fault.get("call") and (do != "short" or operation in IN_PART)
        self.write(self.report, f"{number} {operation} {place_of(path)}{' !' if refused else ''}\n".encode())
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
    run = Step.run

    def begun(self: Step, *args: Any, **kwargs: Any) -> Any:
        disk.begins()
        return run(self, *args, **kwargs)

    setattr(Step, "run", begun)  # noqa: B010


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
    def call(file: Any, mode: str = "r", buffering: int = -1, encoding: Any = None, errors: Any = None, newline: Any = None, closefd: bool = True) -> Any:
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
        return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding or "utf-8", errors, newline, line_buffering=buffering == 1)

    return call
