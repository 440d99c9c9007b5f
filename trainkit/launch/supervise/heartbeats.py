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
        self.last = self.clock()

    def begin(self) -> None:
        """The ranks have just been started."""
        self.last = self.clock()

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
    def limit(self) -> float:
        """Seconds that nobody need move now."""
        if self.stepping:
            return max(self.limits.heartbeat, self.quiet_seconds)
        return max(self.limits.start, self.quiet_seconds)

    def stalled(self) -> float:
        """Seconds that nobody has moved beyond what is allowed; 0 while all is well."""
        still = self.clock() - self.last
        if still > self.limit:
            return still
        return 0.0

    def step(self) -> int:
        """The furthest step of any rank."""
        return max((beat["step"] for beat in self.beats.values()), default=0)

    def behind(self, ranks: Collection[int]) -> list[int]:
        """Of these ranks, those that are not as far as the furthest; those that never said
        anything are."""
        steps = {rank: self.beats[rank]["step"] if rank in self.beats else -1 for rank in ranks}
        furthest = max(steps.values(), default=0)
        return sorted(rank for rank, step in steps.items() if step < furthest)
