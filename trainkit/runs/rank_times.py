"""rank-times.jsonl: how long each rank computed, for a map of ranks over time.

A line is {"step", "compute_ms": milliseconds of forward and backward a step, one number a rank}.
Lines get rarer as a run goes on: the file of 1,024 ranks stays at a few megabytes.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainkit.runs.folder import RunFolder

SECONDS = 5.0  # between two lines, at least
PART = 0.01  # of the time since the first line, at least


@dataclass(frozen=True)
class RankTimes:
    """One line."""

    step: int
    compute_ms: Sequence[float]


class RankTimesLog:
    """Appends lines; rank 0's. A disk that fails costs the line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._first: float | None = None
        self._last = 0.0
        self._failed = False

    def note(self, step: int, compute_ms: Sequence[float]) -> None:
        """Write a line, if one is due."""
        now = time.monotonic()
        if self._first is not None:
            if now - self._last < max(SECONDS, PART * (now - self._first)):
                return
        else:
            self._first = now
        self._last = now
        row = {"step": step, "compute_ms": [round(each, 2) for each in compute_ms]}
        try:
            handle = os.open(
                self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666
            )
            try:
                os.write(handle, json.dumps(row).encode() + b"\n")
            finally:
                os.close(handle)
        except OSError as error:  # a picture's loss, no training's
            if not self._failed:
                print(f"WARNING: no times of ranks: {error}", file=sys.stderr, flush=True)
            self._failed = True


def rank_times_path(run: RunFolder) -> Path:
    """The file of a run."""
    return run.path / "rank-times.jsonl"


def read_rank_times(run: RunFolder) -> list[RankTimes]:
    """All whole lines, in order."""
    try:
        lines = rank_times_path(run).read_bytes().split(b"\n")[:-1]
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            value = json.loads(line)
            found.append(RankTimes(int(value["step"]), list(map(float, value["compute_ms"]))))
        except (ValueError, KeyError, TypeError):
            continue
    return found
