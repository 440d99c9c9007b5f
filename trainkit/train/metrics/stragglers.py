"""Which rank computes longer than the others that do the same."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trainkit.base.lazy_dataclasses import dataclass
from trainkit.jobs.ranks import ParallelDegrees, coordinates_of

STEPS = 50  # that are looked at
ROWS = 5  # of them with numbers of their own, at least: longer logging intervals take more steps
SLOWER = 1.07  # times its peers: of a rank that is 10 % slower, noise may take some
OFTEN = 0.8  # of the rows, and more


@dataclass(frozen=True)
class Straggler:
    """A rank and how many times the median of its peers it computes."""

    rank: int
    times: float


class Stragglers:
    """Compares each rank with those of its stage and tensor-parallel rank, over the last steps.

    One is slow whose time over the median of its peers is `SLOWER` in the median of the rows, and
    more than 1 in most of them: a few long steps make nobody slow, however long they are.

    Args:
        degrees: how ranks are laid out.
    """

    def __init__(self, degrees: ParallelDegrees) -> None:
        alike: dict[tuple[int, int], list[int]] = {}
        for rank in range(degrees.world):
            at = coordinates_of(rank, degrees)
            alike.setdefault((at.pipeline, at.tensor), []).append(rank)
        self._alike = [ranks for ranks in alike.values() if len(ranks) > 1]
        self._rows: deque[tuple[int, NDArray[np.float64]]] = deque()

    def add(self, steps: int, compute_ms: Sequence[float]) -> Straggler | None:
        """The slowest rank by now, if one is slow.

        Args:
            steps: since the row before.
            compute_ms: each rank's own milliseconds a step in them, without waiting.
        """
        ratios = np.ones(len(compute_ms))
        for ranks in self._alike:
            own = np.array([compute_ms[rank] for rank in ranks])
            middle = (len(ranks) - 1) // 2  # of two the faster
            ratios[ranks] = own / max(1e-9, float(np.partition(own, middle)[middle]))
        self._rows.append((steps, ratios))
        covered = sum(count for count, _ in self._rows)
        while len(self._rows) > ROWS and covered - self._rows[0][0] >= STEPS:
            covered -= self._rows.popleft()[0]
        if covered < STEPS or len(self._rows) < ROWS:
            return None
        window = np.stack([row for _, row in self._rows])
        times = np.median(window, axis=0)
        times[(window > 1).mean(axis=0) <= OFTEN] = 1.0
        slowest = int(times.argmax())
        return Straggler(slowest, float(times[slowest])) if times[slowest] >= SLOWER else None
