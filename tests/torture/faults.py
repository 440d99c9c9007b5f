"""What goes wrong in the ranks of a torture test. Tests install it in processes of their own; no
product code knows of it.

A fault is a table that JSON can hold:
    {"do": "kill", "at": "write", "when": "before" | "after", "call": 2, "rank": 1, "all": false}
    {"do": "kill" | "short" | ERRNO, "at": "byte", "byte": 1000, "call": 1, "rank": 0, "all": false}
and those of writes.py.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import time
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.utils.tensorboard  # once, in the process that forks the ranks  # noqa: F401

import trainkit.runs.retention
import trainkit.train.checkpoint.dcp_storage
import trainkit.train.checkpoint.manager
import trainkit.train.checkpoint.memory
import trainkit.train.checkpoint.memory_slot
import trainkit.train.checkpoint.save_load
import trainkit.train.checkpoint.staging
import trainkit.train.metrics.reporter
import trainkit.train.trainer
from tests.torture import writes
from trainkit.runs.manifest import Manifest
from trainkit.train.checkpoint.dcp_storage import DcpWriter
from trainkit.train.checkpoint.memory_slot import MemorySlot
from trainkit.train.checkpoint.partner import PartnerCopy
from trainkit.train.checkpoint.staging import StagingBuffers
from trainkit.train.update.step import Step
from trainkit.train.validation import Validator

Fault = dict[str, Any]
PHASES: dict[str, tuple[Any, str]] = {
    "load": (trainkit.train.checkpoint.save_load, "load"),
    "step": (Step, "run"),
    "eval": (Validator, "measure"),
    "stage": (StagingBuffers, "stage"),
    "copy": (trainkit.train.checkpoint.staging, "copy_all"),
    "memory": (trainkit.train.checkpoint.memory, "copy_all"),
    "seal": (MemorySlot, "seal"),
    "ship": (PartnerCopy, "ship"),
    "send": (PartnerCopy, "_exchange"),
    "prepare": (trainkit.train.checkpoint.save_load, "_prepare"),
    "write": (DcpWriter, "write_data"),
    "manifest": (Manifest, "write"),
    "publish": (trainkit.train.checkpoint.save_load, "publish_folder"),
    "prune": (trainkit.train.checkpoint.manager, "prune"),
}
ON_RANK_0 = {"prepare", "manifest", "publish", "prune", "delete"}


def die(fault: Fault) -> None:
    """This rank, or with it all others of its process group, as the kernel kills them."""
    if fault.get("all"):
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def install(faults: list[Fault], rank: int) -> None:
    """Let these faults happen in this process, so far as they are this rank's."""
    for fault in faults:
        if fault.get("rank", rank) != rank:
            continue
        if fault["at"] == "byte":
            _break_files(fault)
        elif fault["at"] == "delete":
            _die_deleting(fault)
        elif fault["at"] == "clock":
            _jump(fault["seconds"])
        elif fault["at"] == "room":
            _leave_no_room()
        elif fault["at"] == "writes":
            writes.install(fault)
        elif fault["at"] == "pieces":  # as of a large model
            trainkit.train.checkpoint.memory_slot.PIECE = fault["bytes"]
        elif fault["at"] == "metrics":
            _fill_disk(fault["calls"])
        else:
            _break_calls(fault)


def _break_calls(fault: Fault) -> None:
    owner, name = PHASES[fault["at"]]
    real, calls = getattr(owner, name), iter(range(1, 10**9))

    def broken(*args: Any, **kwargs: Any) -> Any:
        now = next(calls) == fault["call"]
        if now and fault["when"] == "before":
            _happen(fault)
        result = real(*args, **kwargs)
        if now and fault["when"] == "after":
            _happen(fault)
        return result

    setattr(owner, name, broken)


def _happen(fault: Fault) -> None:
    if fault["do"] == "kill":
        die(fault)
    elif fault["do"] == "sleep":  # what takes long: a compilation, a slow disk
        Path(fault["mark"]).touch()
        while "until" in fault and not Path(fault["until"]).exists():
            time.sleep(0.01)
        time.sleep(fault["seconds"])
    elif fault["do"] == "cut":  # what gloo says
        raise RuntimeError("Connection closed by peer")
    else:
        raise OSError(fault["do"], os.strerror(fault["do"]))


class BrokenFile(FileIO):
    """A file that breaks after `byte` bytes."""

    def __init__(self, path: Path, fault: Fault) -> None:
        super().__init__(path, "xb")
        self.fault, self.room = fault, int(fault["byte"])

    def write(self, data: Any) -> int:
        view = memoryview(data)
        if len(view) <= self.room:
            self.room -= len(view)
            return super().write(view)
        done = super().write(view[: self.room])
        if self.fault["do"] == "kill":
            die(self.fault)
        if self.fault["do"] == "short":  # once: the caller must write the rest
            self.room = 2**62
            return done
        if done:
            self.room = 0
            return done
        raise OSError(self.fault["do"], os.strerror(self.fault["do"]))


def _break_files(fault: Fault) -> None:
    real, calls = trainkit.train.checkpoint.dcp_storage.create, iter(range(1, 10**9))
    broken = range(fault["call"], fault["call"] + fault.get("calls", 1))
    trainkit.train.checkpoint.dcp_storage.create = lambda path: (
        BrokenFile(path, fault) if next(calls) in broken else real(path)
    )


def _die_deleting(fault: Fault) -> None:
    """In the midst of deleting an old checkpoint: some of its files are gone."""
    calls = iter(range(1, 10**9))

    def broken(folder: Path) -> None:
        if next(calls) == fault["call"]:
            next(iter(sorted(folder.iterdir()))).unlink()
            die(fault)
        shutil.rmtree(folder)

    setattr(trainkit.runs.retention, "remove", broken)  # noqa: B010  (mypy knows of no such name there)


def _jump(seconds: float) -> None:
    """The wall clock is set back or forth at every second look at it."""
    real: Callable[[], float] = time.time
    calls = iter(range(10**9))
    time.time = lambda: real() + (seconds if next(calls) % 2 else 0.0)


def _leave_no_room() -> None:
    """The file system says that it is full."""

    class Os(Through):
        @staticmethod
        def statvfs(path: Path) -> Any:
            return SimpleNamespace(f_bavail=0, f_frsize=4096)

    setattr(trainkit.train.checkpoint.save_load, "os", Os())  # noqa: B010


class Through:
    """The module os, for a class that changes one of its functions."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


def _fill_disk(calls: list[int]) -> None:
    """The disk takes no metrics at these writes (counted from 1), of the first of them half a
    line."""
    real, count = os.write, iter(range(1, 10**9))

    class Os(Through):
        @staticmethod
        def write(handle: int, data: bytes) -> int:
            number = next(count)
            if number == calls[0]:
                return real(handle, data[: len(data) // 2])
            if number in calls:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(handle, data)

    setattr(trainkit.train.metrics.reporter, "os", Os())  # noqa: B010
