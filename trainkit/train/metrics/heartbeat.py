"""What a rank says about itself while it lives: a small file that is replaced, never half
written."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from trainkit.base.documents import document
from trainkit.base.errors import Exit, TrainkitError
from trainkit.base.files import write_beat
from trainkit.base.printable import warn
from trainkit.runs.phases import PhaseLog

if TYPE_CHECKING:
    from trainkit.train.metrics.timers import Timers

Phase = Literal["start", "load", "train", "eval", "save", "done"]
INTERVAL = 0.5  # seconds between two beats of one phase
PARTS = 10  # of a phase, whose times are known, say how long the next ones take


class _Pace:
    """How long the parts of a phase take, on this rank: its steps, the batches of an evaluation."""

    def __init__(self) -> None:
        self._longest: dict[str, float] = {}
        self._known: dict[str, int] = {}
        self._part: tuple[str, float] | None = None  # which is under way, and since when

    def begin(self, phase: str, *, regular: bool) -> None:
        """A part of a phase begins, and the one before has ended. One that is not regular says
        nothing of others."""
        now = time.monotonic()
        if self._part is not None:
            last, since = self._part
            self._longest[last] = max(self._longest.get(last, 0.0), now - since)
            self._known[last] = self._known.get(last, 0) + 1
        if phase == "load":  # what follows may take longer at first
            self._known.clear()
        self._part = (phase, now) if regular else None

    def longest(self, phase: str) -> float | None:
        """Seconds of the longest so far; None while too few are known."""
        return self._longest[phase] if self._known.get(phase, 0) >= PARTS else None


class Heartbeat:
    """Where this rank is. "done" is its word of success and durable; the rest may be lost with
    the machine.

    `usual_seconds` of a beat: no part of what goes on took longer so far. None where that is not
    known, as of everything that is done for the first time, and of the last save.

    Args:
        path: the file, None for a rank that nobody watches.
        rank: this rank.
    """

    def __init__(self, path: Path | None, rank: int) -> None:
        self.path = path
        self.rank = rank
        self.step = 0
        self.phase: Phase | None = None
        # what a stop needs for its checkpoint, by the saves so far
        self.save_seconds: float | None = None
        self.unsaved = False  # training went on with steps that no checkpoint holds
        self._first: int | None = None
        self._evaluated = False
        self._last = float("-inf")
        self._pace = _Pace()
        self._regular = True
        self._failed = False
        self.phases: PhaseLog | None = None  # rank 0's, of a run that is recorded
        self._timers: Timers | None = None
        self._compiled = False

    def watch(self, timers: Timers, *, compiled: bool) -> Timers:
        """From now on phases are noted with what these timers say of waiting for data.

        Args:
            timers: of this rank; returned.
            compiled: the first step compiles the model, and the first evaluation what it needs.
        """
        self._timers = timers
        self._compiled = compiled
        return timers

    def _note_phase(self, phase: Phase, step: int) -> None:
        """For the ledger of where time went."""
        if self.phase == "eval" and phase != "eval":
            self._evaluated = True
        if self.phases is None:
            return
        waited = 0.0, 0.0
        if self._timers is not None:
            waited = self._timers.data_seconds, self._timers.checkpoint_seconds
        noted: str = phase
        if self._compiled and phase == "train" and step == self._first:
            noted = "compile"
        elif self._compiled and phase == "eval" and not self._evaluated:
            noted = "compile_eval"
        self.phases.note(noted, step, *waited)

    @property
    def nothing_new(self) -> bool:
        """Whether nothing was trained yet that a checkpoint could hold: from the start through
        the first step, with its compilation."""
        return not self.unsaved and (self._first is None or self.step <= self._first)

    @property
    def may_leave(self) -> bool:
        """Whether a rank that shall stop may leave as it stands: there is nothing new, and
        it is not saving what a run begins with."""
        return self.nothing_new and self.phase != "save"

    def on_saved(self, stop_seconds: float) -> None:
        """A stop needs so long for its checkpoint; the next beat says so."""
        self.save_seconds = stop_seconds

    def refresh(self) -> None:
        """Say that what was begun goes on: to be called at every part of a long save or
        evaluation, and only there, so that a hang stays one."""
        if self.phase is not None:
            self.beat(self.phase, self.step, regular=self._regular)

    def surprise(self) -> None:
        """What has begun may take longer than ever before: a compilation, the end of a run."""
        if self.phase is not None:
            self.beat(self.phase, self.step, regular=False)

    def beat(self, phase: Phase, step: int, *, regular: bool = True) -> None:
        """Say it; at most two times a second while it is the same.

        Args:
            phase: what begins, or goes on with another part of it.
            step: optimizer steps done so far.
            regular: it takes as long as the parts of this phase before it.
        """
        self.step = step
        now = time.monotonic()
        if phase == "train" and self._first is None:
            self._first = step
        self._note_phase(phase, step)
        first = step == self._first if phase == "train" else not self._evaluated
        self._pace.begin(phase, regular=regular and phase in ("train", "eval") and not first)
        if (phase, regular) == (self.phase, self._regular) and now - self._last < INTERVAL:
            return
        self.phase = phase
        self._regular = regular
        self._last = now
        if self.path is None:
            return
        text = json.dumps(
            document(
                "heartbeat/1",
                rank=self.rank,
                pid=os.getpid(),
                step=step,
                phase=phase,
                time=time.time(),
                save_seconds=self.save_seconds,
                usual_seconds=self._usual(phase) if regular else None,
            )
        )
        if phase == "done":
            self._say_done(self.path, text)
            return
        try:
            write_beat(self.path, text, durable=False)
        except OSError as error:  # training matters more than being watched
            if not self._failed:
                warn(f"no heartbeat: {error}")
            self._failed = True

    def _usual(self, phase: Phase) -> float | None:
        if phase == "save":
            return self.save_seconds
        return self._pace.longest(phase)

    def _say_done(self, path: Path, text: str) -> None:
        """Durable. Raises TrainkitError (exit 10): this rank would look as if it had failed."""
        try:
            write_beat(path, text, durable=True)
        except OSError as error:
            raise TrainkitError(
                f"training is done and its checkpoint saved, but rank {self.rank} could not say so"
                f" in {path}: {error}",
                exit=Exit.RANK_INFRA,
                hint="make room or mend the file system; `resume` then finds nothing left to do",
            ) from error
