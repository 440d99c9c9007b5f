"""The heartbeats of all ranks: who is how far, when anybody moved last, and the copies in the run folder."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping
from typing import Any

from trainkit.base.files import temporary_name
from trainkit.jobs.clusters import WatchLimits
from trainkit.runs.folder import AttemptFolder

COPY_SECONDS = 5.0  # between copies of one rank's heartbeat while its phase stays the same: a thousand ranks share one file system


class Pulse:
    """What the ranks of one attempt have said of themselves.

    Args:
        attempt: where copies go.
        limits: how long nobody may move.
    """

    def __init__(self, attempt: AttemptFolder, limits: WatchLimits) -> None:
        self.attempt, self.limits = attempt, limits
        self.beats: dict[int, Mapping[str, Any]] = {}
        self._first_step: dict[int, int] = {}
        self._copied: dict[int, tuple[float, str]] = {}
        self.stepping = False  # whether any rank has made a step
        self.last = time.monotonic()

    def begin(self) -> None:
        """The ranks have just been started."""
        self.last = time.monotonic()

    def take(self, rank: int, beat: Mapping[str, Any]) -> None:
        """A rank has said how far it is."""
        self.beats[rank], self.last = beat, time.monotonic()
        if beat.get("phase") == "train":
            step = int(beat.get("step", 0))
            self.stepping = self.stepping or step > self._first_step.setdefault(rank, step)
        before, phase = self._copied.get(rank, (0.0, ""))
        if beat.get("phase") != phase or self.last - before > COPY_SECONDS:
            self._copied[rank] = self.last, str(beat.get("phase"))
            self._copy(rank, beat)

    def _copy(self, rank: int, beat: Mapping[str, Any]) -> None:
        """For people and `status`; nothing is decided by it, so it need not be durable."""
        path = self.attempt.heartbeat(rank)
        temporary = temporary_name(path)
        try:
            temporary.write_text(json.dumps(beat))
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)

    @property
    def limit(self) -> float:
        """Seconds that nobody need move now."""
        return self.limits.heartbeat if self.stepping else self.limits.start

    def stalled(self) -> float:
        """Seconds that nobody has moved beyond what is allowed; 0 while all is well."""
        still = time.monotonic() - self.last
        return still if still > self.limit else 0.0

    def step(self) -> int:
        """The furthest step of any rank."""
        return max((int(beat.get("step", 0)) for beat in self.beats.values()), default=0)

    def behind(self, ranks: Collection[int]) -> list[int]:
        """Of these ranks, those that are not as far as the furthest; those that never said anything are."""
        steps = {rank: int(self.beats[rank].get("step", 0)) if rank in self.beats else -1 for rank in ranks}
        furthest = max(steps.values(), default=0)
        return sorted(rank for rank, step in steps.items() if step < furthest)
