"""The heartbeats of all ranks: who is how far, when anybody moved last, and the copies in the
run folder."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from trainkit.base.files import temporary_name
from trainkit.jobs.clusters import WatchLimits
from trainkit.runs.folder import AttemptFolder

# between copies of one rank's heartbeat while its phase stays the same: a thousand ranks share one
# file system
COPY_SECONDS = 5.0
# A hang is so many times what took longest so far. With steps of 1 s whose lengths are lognormal
# with sigma 1 (the longest of 10,000 is forty times the median) 1 run of 400 had a false alarm in
# 10,000 steps; with 5 times it were 17.
TIMES = 10.0
# beyond the lease: while an agent is not heard, nobody says how far its ranks are
BEYOND_LEASE = 5.0
LOOK_SECONDS = 1.0  # between two looks, at most, unless this process did not run meanwhile


class Heartbeats:
    """What the ranks of one attempt have said of themselves.

    Args:
        attempt: where copies go.
        limits: how long nobody may move.
        clock: seconds, by which that is counted.
    """

    def __init__(
        self,
        attempt: AttemptFolder,
        limits: WatchLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.attempt = attempt
        self.limits = limits
        self.clock = clock
        self.beats: dict[int, Mapping[str, Any]] = {}
        self._first_step: dict[int, int] = {}
        self._copied: dict[int, tuple[float, str]] = {}
        # the newest of each rank, however long the file system takes
        self._to_copy: dict[int, Mapping[str, Any]] = {}
        self._lock = threading.Lock()
        self._copier = ThreadPoolExecutor(1, "heartbeats")
        self.stepping = False  # whether any rank has made a step
        # that a rank whose engine speaks seldom may be silent
        self.quiet_seconds = 0.0
        self._borne = 0.0  # seconds without a move that were found to be no hang
        self.last = self._looked = self.clock()

    def begin(self) -> None:
        """The ranks have just been started."""
        self.last = self._looked = self.clock()

    def take(self, rank: int, said: Any) -> None:
        """A rank has said how far it is. It can be any program, whose mistakes are not ours:
        what is not a heartbeat is not taken for one."""
        beat = {"phase": "", "step": 0, **said} if isinstance(said, Mapping) else {}
        phase = beat.get("phase")
        step = beat.get("step")
        if not isinstance(phase, str) or not isinstance(step, int):
            return
        self.beats[rank] = beat
        self.last = self.clock()
        self._borne = 0.0
        quiet = beat.get("quiet_seconds")
        if isinstance(quiet, int | float):
            self.quiet_seconds = max(self.quiet_seconds, quiet)
        if phase == "train":
            self.stepping = self.stepping or step > self._first_step.setdefault(rank, step)
        before, copied = self._copied.get(rank, (0.0, ""))
        if phase != copied or self.last - before > COPY_SECONDS:
            self._copied[rank] = self.last, phase
            with self._lock:
                waiting = rank in self._to_copy
                self._to_copy[rank] = beat
            if not waiting:
                self._copier.submit(self._copy, rank)

    def _copy(self, rank: int) -> None:
        """For people and `status`; nothing is decided by it, so it need not be durable, and
        nobody waits for it."""
        with self._lock:
            beat = self._to_copy.pop(rank)
        path = self.attempt.heartbeat(rank)
        temporary = temporary_name(path)
        try:
            temporary.write_text(json.dumps(beat))
            temporary.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)

    @property
    def longest(self) -> float:
        """Seconds that nobody need move, whatever ranks say of their usual times."""
        limits = self.limits
        return max(limits.heartbeat if self.stepping else limits.start, self.quiet_seconds)

    @property
    def limit(self) -> float:
        """Seconds that nobody need move now."""
        usual = [_usual_seconds(beat) for beat in self.beats.values() if beat["phase"] != "done"]
        if not usual or None in usual:
            return self.longest
        floor = max(self.limits.hang_floor, self.limits.lease + BEYOND_LEASE, self._borne)
        return min(self.longest, max(floor, TIMES * max(filter(None, usual), default=0.0)))

    def stalled(self) -> float:
        """Seconds that nobody has moved beyond what is allowed; 0 while all is well. To be called
        again and again: what it is not called for counts as time in which this process was
        stopped, and what ranks said meanwhile is not read yet."""
        now = self.clock()
        asleep = max(0.0, now - self._looked - LOOK_SECONDS)
        self.last = min(now, self.last + asleep)
        self._looked = now
        still = now - self.last
        if still > self.limit:
            return still
        return 0.0

    def bear(self, seconds: float) -> bool:
        """Nobody has moved for so long, for a reason that may pass, such as a disk: ranks have
        as long again. Returns False where the longest limit is over too."""
        self._borne = 2 * seconds
        return seconds < self.longest

    def step(self) -> int:
        """The furthest step of any rank."""
        return max((beat["step"] for beat in self.beats.values()), default=0)

    def behind(self, ranks: Collection[int]) -> list[int]:
        """Of these ranks, those that are not as far as the furthest; those that never said
        anything are."""
        steps = {rank: self.beats[rank]["step"] if rank in self.beats else -1 for rank in ranks}
        furthest = max(steps.values(), default=0)
        return sorted(rank for rank, step in steps.items() if step < furthest)


def _usual_seconds(beat: Mapping[str, Any]) -> float | None:
    """What the rank says of the times so far of what it does; None where it cannot, as of what it
    does for the first time, or its engine never does."""
    usual = beat.get("usual_seconds")
    return float(usual) if isinstance(usual, int | float) else None
