"""Micro-batches of one rank, read some time before they are asked for.

Threads, no processes: reading and widening hold no lock of Python. What comes out depends on
positions in the order of samples alone, so nothing is to be saved: after a crash, on another
layout or after going back, the same positions give the same bytes.

Shapes: B samples of a micro-batch, S = seq_length.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from trainkit.base.lazy_dataclasses import dataclass
from trainkit.data.order.native import SampleOrder
from trainkit.data.order.samples import IdRange, Numbers, Samples

Allocate = Callable[[tuple[int, int]], Numbers]


@dataclass(frozen=True)
class MicroBatch:
    """The samples at some positions: tokens [B, S + 1], and what ids they have."""

    positions: range
    tokens: Numbers
    ids: IdRange


@dataclass(frozen=True)
class ReadSchedule:
    """What is read after what.

    Args:
        parts: (consumed samples, samples of the global batch) -> positions of each micro-batch of
            this rank.
        size: consumed samples -> samples of the global batch that follows; it may grow.
        end: consumed samples at which nothing more is read ahead, None: there is no end. What is
            asked for is read beyond it, too.
    """

    parts: Callable[[int, int], list[range]]
    size: Callable[[int], int]
    end: int | None = None


def plain_memory(shape: tuple[int, int]) -> Numbers:
    """A new int64 array."""
    return np.empty(shape, np.int64)


class Loader:
    """Reads global batch after global batch, `ahead` micro-batches before they are asked for.

    A buffer is made for each micro-batch and never written again: who has it may keep views of
    it. At most `ahead` of them wait here.

    Args:
        order: which sample stands where.
        samples: what the order's datasets are, in its order.
        seq_length: S.
        plan: what is read after what.
        ahead: micro-batches; 0: none, everything is read when it is asked for.
        threads: that read.
        allocate: makes the int64 buffer of a shape, for memory of another kind (page-locked);
            called by the threads.
    """

    def __init__(
        self,
        order: SampleOrder,
        samples: Sequence[Samples],
        seq_length: int,
        plan: ReadSchedule,
        *,
        ahead: int = 4,
        threads: int = 2,
        allocate: Allocate = plain_memory,
    ) -> None:
        self.order = order
        self.samples = samples
        self.seq_length = seq_length
        self.plan = plan
        self.ahead = ahead
        self._allocate = allocate
        self._threads = threads
        self._order_lock = Lock()
        self._pool: ThreadPoolExecutor | None = None  # a thread is started with the first read
        self._waiting: deque[tuple[range, Future[MicroBatch]]] = deque()
        # of the global batch that is being begun, what no thread was given yet
        self._planned: deque[range] = deque()
        # consumed samples where the next global batch to be planned begins; None: nothing is read
        # ahead
        self._next: int | None = 0
        self._closed = False

    def read(self, consumed: int, global_batch: int) -> Iterator[MicroBatch]:
        """This rank's micro-batches of the global batch of so many samples after `consumed`;
        errors of reading are raised where theirs is asked for.

        Global batches in the plan's order were read ahead; any other drops what was, as `seek`.

        Raises:
            ConfigError: the order has no sample there (exit 3), or a file cannot be read (exit
            6). RuntimeError: the loader is closed.
        """
        wanted = self.plan.parts(consumed, global_batch)
        for number, positions in enumerate(wanted):
            if not self._expects(positions):
                self._forget()
                self._planned = deque(wanted[number:])
                self._next = consumed + global_batch
            self._fill(max(1, self.ahead))
            batch = self._waiting[0][1]
            try:
                found = batch.result()
            except BaseException:
                self.seek(consumed)  # asked again, it is tried again
                raise
            self._waiting.popleft()
            self._fill(self.ahead)
            yield found

    def at(self, position: int) -> tuple[int, int]:
        """Which dataset, and which of its samples, stands at a position."""
        dataset, number = self._window(range(position, position + 1))
        return int(dataset[0]), int(number[0])

    def seek(self, consumed: int) -> None:
        """The next global batch begins after `consumed` samples: drop what was read ahead of
        another."""
        self._forget()
        self._next = consumed

    def close(self) -> None:
        """Drop what was read ahead and end the threads; twice does no harm."""
        self._closed = True
        self._forget()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None

    def _forget(self) -> None:
        for _, batch in self._waiting:
            batch.cancel()
        self._waiting.clear()
        self._planned.clear()
        self._next = None

    def _expects(self, positions: range) -> bool:
        """Whether these positions are what comes out next."""
        if not self._waiting:
            self._plan_on()
        if self._waiting:
            following = self._waiting[0][0]
        elif self._planned:
            following = self._planned[0]
        else:
            following = None
        return following == positions

    def _plan_on(self) -> None:
        """Where the begun global batch is used up, begin the next one."""
        at = self._next
        end = self.plan.end
        if self._planned or at is None or (end is not None and at >= end):
            return
        size = self.plan.size(at)
        self._planned.extend(self.plan.parts(at, size))
        if self._planned:
            self._next = at + size
        else:
            self._next = None

    def _fill(self, count: int) -> None:
        """Have `count` micro-batches on their way."""
        if self._closed:
            raise RuntimeError("the loader is closed")
        self._pool = self._pool or ThreadPoolExecutor(self._threads, thread_name_prefix="loader")
        while len(self._waiting) < count:
            self._plan_on()
            if not self._planned:
                return
            positions = self._planned.popleft()
            self._waiting.append((positions, self._pool.submit(self.load, positions)))

    def _window(self, positions: range) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
        with self._order_lock:  # an order may keep where it was
            return self.order.window(positions.start, len(positions))

    def load(self, positions: range) -> MicroBatch:
        """Read one micro-batch, dataset by dataset: now, whatever is read ahead."""
        dataset_B, number_B = self._window(positions)
        parts = [
            (self.samples[d], rows := np.flatnonzero(dataset_B == d), number_B[rows])
            for d in np.unique(dataset_B).tolist()
        ]
        for samples, _, numbers in parts:
            samples.ahead(numbers)  # all of them are on their way before the first is waited for
        tokens = self._allocate((len(positions), self.seq_length + 1))
        found = [samples.read(numbers, rows, tokens) for samples, rows, numbers in parts]
        ids = IdRange(
            min(i.lowest for i in found),
            max(i.highest for i in found),
            sum(i.missing for i in found),
        )
        return MicroBatch(positions, tokens, ids)
