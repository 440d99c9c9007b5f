"""windows.bin: which stretch of the order of samples each of the last steps took, noted before
the step begins, so that the step that ends a run is there.

A ring of records of three int64 (step, first position, samples); that of step n lies at n modulo
SLOTS. What is written survives the process, though not a loss of power; the metrics keep
logged steps.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import NamedTuple

from trainkit.runs.folder import RunFolder
from trainkit.runs.metrics import read_rows

SLOTS = 4096
RECORD = struct.Struct("<qqq")


class SampleWindow(NamedTuple):
    """What one step took: positions [first, first + samples) of the order of samples."""

    step: int
    first: int
    samples: int


def windows_path(run: RunFolder) -> Path:
    """The ring of a run."""
    return run.path / "windows.bin"


class SampleWindowLog:
    """Notes windows; rank 0's."""

    def __init__(self, run: RunFolder) -> None:
        self._path = windows_path(run)
        self._handle = -1

    def note(self, window: SampleWindow) -> None:
        """A step begins. Costs a few microseconds; raises OSError as the disk does, and the next
        one tries again."""
        if self._handle < 0:
            self._handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        os.pwrite(self._handle, RECORD.pack(*window), window.step % SLOTS * RECORD.size)

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1  # the number may be somebody else's file soon


def furthest_step(run: RunFolder) -> int:
    """The furthest step that was ever made: the newest that began has not ended where it was killed
    in it. 0 before the first."""
    try:
        ring = windows_path(run).read_bytes()
    except OSError:
        return 0
    whole = ring[: len(ring) // RECORD.size * RECORD.size]
    return max((step - 1 for step, _, _ in RECORD.iter_unpack(whole) if step), default=0)


def find_sample_window(run: RunFolder, step: int) -> SampleWindow | None:
    """What `step` took, the last time it was made: from the ring, else from the metrics; None
    where neither knows."""
    try:
        with open(windows_path(run), "rb") as file:
            file.seek(step % SLOTS * RECORD.size)
            record = file.read(RECORD.size)
    except FileNotFoundError:
        record = b""
    if (
        len(record) == RECORD.size
        and (found := SampleWindow(*RECORD.unpack(record))).step == step
        and found.samples > 0
    ):
        return found
    for row in reversed(read_rows(run.metrics)):
        if row["step"] == step and "global_batch_size" in row:
            return SampleWindow(
                step, row["consumed_samples"] - row["global_batch_size"], row["global_batch_size"]
            )
    return None
