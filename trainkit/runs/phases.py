"""attempts/N/phases.jsonl: what rank 0 did when, one line a change. With the events it says where
every second of an attempt went.

A line is {"time": seconds since 1970 by the clock of rank 0's host, "phase", "step": optimizer
steps done by then, "data_seconds": how long this process has waited for data so far,
"checkpoint_seconds": for checkpoints, in steps too}. "compile" is the first step of an attempt
whose job is compiled, "compile_eval" its first evaluation: their compilation cannot be told from
the rest.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from trainkit.runs.folder import AttemptFolder


@dataclass(frozen=True)
class PhaseChange:
    """One line.

    Args:
        time: when the phase began, seconds since 1970.
        phase: start, load, compile, train, compile_eval, eval, save or done.
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
                print(f"WARNING: no ledger of this attempt: {error}", file=sys.stderr, flush=True)
            self.failed = error


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
