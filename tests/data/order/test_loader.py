"""Batches read ahead: the same bytes as without, bounded, and errors where they belong."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

from tests.conftest import wait_for
from trainkit.base.errors import ConfigError
from trainkit.data.order.loader import Loader, MicroBatch, ReadSchedule
from trainkit.data.order.samples import IdRange, MockSamples, Numbers

LENGTH = 4


def parts_of(rank: int, ranks: int, micro: int) -> Callable[[int, int], list[range]]:
    """As training splits a global batch."""
    return lambda consumed, n: [
        range(start, start + micro)
        for start in range(consumed + rank * micro, consumed + n, micro * ranks)
    ]


class Counting:
    """Samples whose first token is their number; they say who reads, and wait or fail where
    told."""

    num_samples = 10**9

    def __init__(self) -> None:
        self.read_numbers: list[int] = []
        self.hinted: list[int] = []
        self.threads: set[int] = set()
        self.broken: set[int] = set()
        self.gate = threading.Event()
        self.gate.set()

    def read(self, numbers: Numbers, rows: Numbers, out: Numbers) -> IdRange:
        assert self.gate.wait(20)
        self.threads.add(threading.get_ident())
        self.read_numbers += numbers.tolist()
        if self.broken & set(numbers.tolist()):
            raise ConfigError("broken")
        out[rows] = numbers[:, None] + np.arange(LENGTH + 1)
        return IdRange(int(numbers.min()), int(numbers.max()) + LENGTH, 0)

    def ahead(self, numbers: Numbers) -> None:
        self.hinted += numbers.tolist()


class Turns:
    """Position p is sample p of dataset p % datasets."""

    def __init__(self, datasets: int = 1) -> None:
        self.datasets = datasets

    def window(self, consumed: int, n: int) -> tuple[NDArray[np.int16], Numbers]:
        positions = np.arange(consumed, consumed + n)
        return (positions % self.datasets).astype(np.int16), positions


@pytest.fixture
def samples() -> Iterator[Counting]:
    made = Counting()
    yield made
    made.gate.set()


def _numbers(batches: Iterator[MicroBatch]) -> list[list[int]]:
    found = []
    for batch in batches:
        assert (
            np.array_equal(batch.tokens, batch.tokens[:, :1] + np.arange(LENGTH + 1))
            and batch.tokens.dtype == np.int64
        )
        assert batch.ids == IdRange(int(batch.tokens.min()), int(batch.tokens.max()), 0)
        assert batch.tokens[:, 0].tolist() == list(batch.positions)
        found.append(batch.tokens[:, 0].tolist())
    return found


def _settled(loader: Loader) -> None:
    """All that was given to the threads has been read."""
    for _, batch in loader._waiting:
        batch.result()


@given(
    micro=st.integers(1, 3),
    ranks=st.integers(1, 3),
    datasets=st.integers(1, 4),
    ahead=st.integers(0, 5),
    threads=st.integers(1, 3),
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=5),
    jumps=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 3), st.integers(0, 3)), max_size=8),
)
@settings(max_examples=60, deadline=None)
def test_what_comes_out_depends_on_positions_only(
    micro: int,
    ranks: int,
    datasets: int,
    ahead: int,
    threads: int,
    sizes: list[int],
    jumps: list[tuple[int, int, int]],
) -> None:
    """Whatever is read ahead, asked for out of turn, left half read, or of another size than
    planned."""
    for rank in range(ranks):
        parts = parts_of(rank, ranks, micro)
        plan = ReadSchedule(parts, lambda at: sizes[at % len(sizes)] * micro * ranks, end=100)
        loader = Loader(
            Turns(datasets),
            [Counting() for _ in range(datasets)],
            LENGTH,
            plan,
            ahead=ahead,
            threads=threads,
        )
        consumed = 0
        for jump, count, taken in [(0, 3, 9), *jumps, (90, 3, 9)]:
            consumed = jump or consumed  # 0: straight on
            for size in (plan.size(consumed), count * micro * ranks):
                expected = [list(positions) for positions in parts(consumed, size)]
                batches = loader.read(consumed, size)
                assert (
                    _numbers(batch for batch, _ in zip(batches, range(taken), strict=False))
                    == expected[:taken]
                )
                consumed += size
        loader.close()


def test_reads_ahead_as_far_as_told_and_no_further(samples: Counting) -> None:
    loader = Loader(
        Turns(),
        [samples],
        LENGTH,
        ReadSchedule(parts_of(1, 2, 2), lambda at: 8),
        ahead=3,
        threads=1,
    )
    assert _numbers(loader.read(0, 8)) == [[2, 3], [6, 7]]
    ahead = [2, 3, 6, 7, 10, 11, 14, 15, 18, 19]
    _settled(loader)
    assert samples.read_numbers == samples.hinted == ahead
    assert _numbers(loader.read(8, 8)) == [[10, 11], [14, 15]]
    _settled(loader)
    assert len(samples.read_numbers) == len(ahead) + 4
    assert threading.get_ident() not in samples.threads
    loader.close()


def test_nothing_is_read_ahead_beyond_the_end(samples: Counting) -> None:
    loader = Loader(
        Turns(), [samples], LENGTH, ReadSchedule(parts_of(0, 1, 2), lambda at: 4, end=8), ahead=10
    )
    for consumed in (0, 4):
        _numbers(loader.read(consumed, 4))
    _settled(loader)
    assert sorted(samples.read_numbers) == list(range(8))
    assert _numbers(loader.read(8, 4)) == [[8, 9], [10, 11]], "who asks is given"
    loader.close()


def test_a_growing_global_batch_is_read_ahead_in_its_sizes(samples: Counting) -> None:
    def size(at: int) -> int:
        return 2 if at < 4 else 6

    loader = Loader(Turns(), [samples], LENGTH, ReadSchedule(parts_of(0, 1, 2), size), ahead=2)
    consumed, seen = 0, []
    while consumed < 22:
        seen += _numbers(loader.read(consumed, size(consumed)))
        consumed += size(consumed)
    assert [n for batch in seen for n in batch] == list(range(22))
    _settled(loader)
    assert len(samples.read_numbers) == 26
    assert sorted(samples.read_numbers) == list(range(26)), "none was read twice"
    loader.close()


def test_going_back_drops_what_was_read_ahead(samples: Counting) -> None:
    loader = Loader(
        Turns(), [samples], LENGTH, ReadSchedule(parts_of(0, 1, 1), lambda at: 2), ahead=2
    )
    _numbers(loader.read(100, 2))
    loader.seek(50)
    assert _numbers(loader.read(50, 2)) == [[50], [51]]
    assert _numbers(loader.read(20, 2)) == [[20], [21]], "by reading elsewhere, too"
    loader.close()


def test_an_error_is_raised_where_its_batch_is_asked_for(samples: Counting) -> None:
    samples.broken = {5}
    loader = Loader(
        Turns(), [samples], LENGTH, ReadSchedule(parts_of(0, 1, 2), lambda at: 2), ahead=4
    )
    assert _numbers(loader.read(0, 2)) == [[0, 1]]
    wait_for(lambda: 5 in samples.read_numbers, "number 5 to be read")
    assert _numbers(loader.read(2, 2)) == [[2, 3]]
    with pytest.raises(ConfigError, match="broken"):
        _numbers(loader.read(4, 2))
    assert _numbers(loader.read(6, 2)) == [[6, 7]]
    samples.broken = set()
    assert _numbers(loader.read(4, 2)) == [[4, 5]], "it is tried again"
    loader.close()


def test_memory_is_bounded_and_buffers_are_the_callers(samples: Counting) -> None:
    alive, most = 0, 0
    lock = threading.Lock()

    class Memory(np.ndarray):
        def __del__(self) -> None:
            nonlocal alive
            with lock:
                alive -= self.base is None

    def allocate(shape: tuple[int, int]) -> Numbers:
        nonlocal alive, most
        with lock:
            alive += 1
            most = max(most, alive)
        return Memory(shape, np.int64)

    loader = Loader(
        Turns(),
        [samples],
        LENGTH,
        ReadSchedule(parts_of(0, 1, 2), lambda at: 40),
        ahead=3,
        threads=2,
        allocate=allocate,
    )
    for consumed in range(0, 400, 40):
        for batch in loader.read(consumed, 40):
            assert batch.tokens[:, 0].tolist() == list(batch.positions)
    assert most <= 3 + 2, "those read ahead, the caller's, and one on its way to it"
    kept = list(loader.read(400, 40))
    assert [n for batch in kept for n in batch.tokens[:, 0].tolist()] == list(range(400, 440)), (
        "who keeps batches keeps what is in them"
    )
    loader.close()
    del kept, batch
    gc.collect()
    assert alive == 0


def test_close_ends_the_threads(samples: Counting) -> None:
    before = threading.active_count()
    loader = Loader(
        Turns(),
        [samples],
        LENGTH,
        ReadSchedule(parts_of(0, 1, 2), lambda at: 4),
        ahead=4,
        threads=3,
    )
    assert threading.active_count() == before, "none is started before it is needed"
    batches = loader.read(0, 4)
    next(batches)
    samples.gate.clear()
    opened = threading.Timer(0.05, samples.gate.set)
    opened.start()
    loader.close()
    opened.join()
    assert threading.active_count() == before
    loader.close()
    with pytest.raises(RuntimeError, match="the loader is closed"):
        next(loader.read(4, 4))


ABANDONED = """
import numpy as np
from trainkit.data.order.loader import Loader, ReadSchedule
from trainkit.data.order.native import NativeOrder
from trainkit.data.order.samples import MockSamples

plan = ReadSchedule(lambda consumed, n: [range(consumed, consumed + n)], lambda at: 2)
order = NativeOrder([100], None, "train", 0, ["mock"])
loader = Loader(order, [MockSamples(50, 8, 0, 100)], 8, plan)
next(loader.read(0, 2))
raise RuntimeError("somewhere else")
"""


def test_an_abandoned_loader_does_not_keep_the_process(samples: Counting) -> None:
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(
        [sys.executable, "-c", ABANDONED], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and done.stderr.endswith("RuntimeError: somewhere else\n")


def test_datasets_of_a_blend_fill_their_rows() -> None:
    kinds = [MockSamples(2**40, LENGTH, seed, 10**6) for seed in range(3)]
    loader = Loader(Turns(3), kinds, LENGTH, ReadSchedule(parts_of(0, 1, 7), lambda at: 7))
    (batch,) = loader.read(70, 7)
    for row, position in enumerate(batch.positions):
        alone = np.empty((1, LENGTH + 1), np.int64)
        kinds[position % 3].read(np.array([position]), np.array([0]), alone)
        assert np.array_equal(batch.tokens[row], alone[0])
    loader.close()
