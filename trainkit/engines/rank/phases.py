"""What a foreign engine did when, as far as its lines tell: the same file that trainkit's own rank
0 writes (trainkit/runs/phases.py), by the rank that prints the iterations.

A line of training says how long its iterations took. Time between two lines that is none of it was
an evaluation where one was printed meanwhile, else a save: nothing else keeps an engine from its
next iteration. What it waits for data is part of its iterations.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

GAP_SECONDS = 0.5  # between two lines that is not worth a name


class PhaseLines:
    """Appends changes of phase.

    Args:
        path: phases.jsonl of the attempt; None: nothing is written.
        save_interval: iterations between two checkpoints, 0: none. A save changes the phase even
            where it took no time: what comes later may be lost.
    """

    def __init__(self, path: Path | None, save_interval: int) -> None:
        self.path = path
        self.save_interval = save_interval
        self.step = 0
        self.at = 0.0  # when the last line came, seconds since 1970
        self.began = False
        self.evaluated = False

    def begin(self, step: int, now: float) -> None:
        """The engine starts, to go on from `step`."""
        self.step = step
        self.at = now

    def iteration(self, step: int, elapsed_ms: float | None, now: float) -> None:
        """A line of training came.

        Args:
            step: its iteration.
            elapsed_ms: of one iteration since the line before, as it says.
            now: seconds since 1970.
        """
        if step <= self.step:
            return
        each = (now - self.at) / (step - self.step)
        if elapsed_ms is not None:
            each = min(each, elapsed_ms / 1000.0)
        begin = now - each * (step - self.step)
        if not self.began:
            self.began = True
            self._note(begin, "train", self.step)
        elif begin - self.at > GAP_SECONDS:
            self._note(self.at, self._pause(), self.step)
            self._note(begin, "train", self.step)
        elif self._saves_at(self.step):
            self._note(begin, "train", self.step)
        if self.save_interval:
            saved = step // self.save_interval * self.save_interval
            if self.step < saved < step:
                self._note(now - each * (step - saved), "train", saved)
        self.step = step
        self.at = now
        self.evaluated = False

    def done(self, now: float) -> None:
        """All iterations are done, and the engine has ended."""
        if not self.began:
            return
        if now - self.at > GAP_SECONDS:
            self._note(self.at, self._pause(), self.step)
        self._note(now, "done", self.step)

    def _pause(self) -> str:
        if self.evaluated:
            return "eval"
        return "save"

    def _saves_at(self, step: int) -> bool:
        return self.save_interval > 0 and step > 0 and step % self.save_interval == 0

    def _note(self, at: float, phase: str, step: int) -> None:
        """One write a line. A disk that fails costs the line."""
        if self.path is None:
            return
        row = {"time": at, "phase": phase, "step": step, "data_seconds": 0.0}
        try:
            handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            try:
                os.write(handle, (json.dumps(row) + "\n").encode())
            finally:
                os.close(handle)
        except OSError:
            self.path = None
