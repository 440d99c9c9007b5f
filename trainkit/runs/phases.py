"""attempts/N/phases.jsonl: what rank 0 did when, one line a change. With the events it says where
every second of an attempt went.

A line is {"time": seconds since 1970 by the clock of rank 0's host, "phase", "step": optimizer
steps done by then, "data_seconds": how long this process has waited for data so far,
"checkpoint_seconds": for checkpoints, in steps too}. "compile" is the first step of an attempt
whose job is compiled, "compile_eval" its first evaluation: their compilation cannot be split from
the rest. "again" are steps that an attempt before had made already, and lost.

And rank-times.jsonl: how long each rank computed, for a map of ranks over time. A line is {"step",
"compute_ms": milliseconds that it computed in a step, one number a rank}. Lines get rarer as a
run goes on: the file of 1,024 ranks stays at a few megabytes.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainkit.base.lazy_dataclasses import asdict, dataclass
from trainkit.base.printable import warn
from trainkit.runs.folder import AttemptFolder, RunFolder

SECONDS = 5.0  # between two lines, at least
PART = 0.01  # of the time since the first line, at least


@dataclass(frozen=True)
class RankTimes:
    """One line."""

    step: int
    compute_ms: Sequence[float]


class PictureLines:
    """Appends lines that a picture is drawn of. A disk that fails costs the line, no training.

    Args:
        path: the file.
        what: in words, is lost then.
    """

    def __init__(self, path: Path, what: str) -> None:
        self.path = path
        self.what = what
        self._failed = False

    def append(self, line: bytes) -> None:
        """Write a line, newline and all."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        with self.warned():
            handle = os.open(self.path, flags, 0o666)
            try:
                os.write(handle, line)
            finally:
                os.close(handle)

    @contextlib.contextmanager
    def warned(self) -> Iterator[None]:
        """An OSError inside is a warning, the first one."""
        try:
            yield
        except OSError as error:
            if not self._failed:
                warn(f"no {self.what}: {error}")
            self._failed = True


class RankTimesLog(PictureLines):
    """Appends lines; rank 0's."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "times of ranks")
        self._first: float | None = None
        self._last = 0.0

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
        self.append(json.dumps(row).encode() + b"\n")


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


@dataclass(frozen=True)
class PhaseChange:
    """One line.

    Args:
        time: when the phase began, seconds since 1970.
        phase: start, load, compile, again, train, compile_eval, eval, save or done.
        step: optimizer steps done by then.
        data_seconds: seconds that the process had waited for data by then.
        checkpoint_seconds: seconds that it had waited for checkpoints by then.
    """

    time: float
    phase: str
    step: int
    data_seconds: float = 0.0
    checkpoint_seconds: float = 0.0


class PhaseLog:
    """Appends changes; rank 0's. A disk that fails costs the line, never the training.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.failed: OSError | None = None
        self._furthest: int | None = None  # step that attempts before have made
        self._phase: str | None = None
        self._handle = -1

    def note(
        self, phase: str, step: int, data_seconds: float, checkpoint_seconds: float = 0.0
    ) -> None:
        """Write a line where the phase is another than before.

        Args:
            phase: what begins now.
            step: steps done so far.
            data_seconds: waited for data so far.
            checkpoint_seconds: waited for checkpoints so far.
        """
        if phase == "train" and step < self._made_before():
            phase = "again"
        if phase == self._phase:
            return
        self._phase = phase
        waited = round(data_seconds, 6), round(checkpoint_seconds, 6)
        change = PhaseChange(time.time(), phase, step, *waited)
        try:
            if self._handle < 0:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
                self._handle = os.open(self.path, flags, 0o666)
            os.write(self._handle, json.dumps(asdict(change)).encode() + b"\n")
        except OSError as error:
            if self.failed is None:
                warn(f"no ledger of this attempt: {error}")
            self.failed = error

    def _made_before(self) -> int:
        """The furthest step of attempts before, looked up as this one is about to train."""
        if self._furthest is None:
            # not above: a rank says that it has started before it imports readers of metrics
            from trainkit.runs.sample_windows import furthest_step

            self._furthest = furthest_step(RunFolder(self.path.parents[2]))
        return self._furthest


def phases_path(attempt: AttemptFolder) -> Path:
    """The file of an attempt."""
    return attempt.path / "phases.jsonl"


def read_phases(attempt: AttemptFolder) -> list[PhaseChange]:
    """All whole lines, in order; none of an attempt that does not have the file."""
    try:
        lines = phases_path(attempt).read_bytes().split(b"\n")
    except OSError:
        return []
    found = [_parse(line) for line in lines]
    return [change for change in found if change is not None]


def _parse(line: bytes) -> PhaseChange | None:
    try:
        value = json.loads(line)
        return PhaseChange(
            float(value["time"]),
            str(value["phase"]),
            int(value["step"]),
            float(value.get("data_seconds", 0.0)),
            float(value.get("checkpoint_seconds", 0.0)),
        )
    except (ValueError, KeyError, TypeError):
        return None
