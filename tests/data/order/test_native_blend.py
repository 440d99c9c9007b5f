"""trainkit._index.Blend against a reference in fractions, and within 2 samples of the weights;
trainkit._index.gather."""

from __future__ import annotations

import heapq
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st
from numpy.typing import NDArray

from tests.data.order.beside import ticks_beside
from trainkit import _index
from trainkit.base.errors import ConfigError
from trainkit.data.order.native import MAX_DATASETS, SCALE, integer_weights

Numbers = NDArray[np.int64]
MAX = 2**62
# weight, when it was made, dataset or -1, children
Node = tuple[int, int, int, "Node | None", "Node | None"]


def _blend(weights: list[int]) -> _index.Blend:
    return _index.Blend(np.array(weights, np.int64))


def at(blend: _index.Blend, start: int, n: int) -> tuple[NDArray[np.int16], Numbers]:
    datasets, counts = np.empty(n, np.int16), np.empty(n, np.int64)
    blend.at(start, datasets, counts)
    return datasets, counts


def _tree(weights: list[int]) -> Node:
    """Huffman's tree; of equal weights those made first are joined first."""
    nodes: list[Node] = [(weight, d, d, None, None) for d, weight in enumerate(weights) if weight]
    heapq.heapify(nodes)
    for made in range(len(weights), len(weights) + len(nodes) - 1):
        left, right = heapq.heappop(nodes), heapq.heappop(nodes)
        heapq.heappush(nodes, (left[0] + right[0], made, -1, left, right))
    return nodes[0]


def reference(weights: list[int], position: int) -> list[int]:
    """How many of the first `position` samples each dataset gives, as csrc/index/blend.h
    describes it."""
    counts = [0] * len(weights)
    open_nodes = [(_tree(weights), position)]
    while open_nodes:
        (weight, _, dataset, left, right), n = open_nodes.pop()
        if left is None or right is None:
            counts[dataset] = n
            continue
        here = int(Fraction(n * left[0], weight) + Fraction(1, 2))
        open_nodes += [(left, here), (right, n - here)]
    return counts


def _fibonacci(count: int) -> list[int]:
    values = [1, 1]
    while len(values) < count:
        values.append(values[-1] + values[-2])
    return values


HALF_AND_127_SMALL = [127] + [1] * 127
NASTY = [
    HALF_AND_127_SMALL,
    [10**12, 1],
    [1] * 128,
    [1] * 300,
    _fibonacci(85),  # the deepest tree
    [2**61, 2**61],
    [2**62],
    [2**62 - 299] + [1] * 299,
    [3, 0, 1, 0, 0, 5],
    list(range(1, 301)),
    [6, 5, 5] * 40,
    [2 * 3**k for k in range(38)],  # edges that lead to almost all
]
few_or_many = st.one_of(st.integers(1, 8), st.integers(1, 300))
weight_lists = few_or_many.flatmap(
    lambda count: st.one_of(
        st.lists(st.integers(0, 10), min_size=count, max_size=count),
        st.lists(st.integers(1, MAX // 300), min_size=count, max_size=count),
        st.lists(st.integers(0, 53).map(lambda bits: 2**bits), min_size=count, max_size=count),
        st.lists(st.sampled_from([1, 10**3, 10**15]), min_size=count, max_size=count),
    )
).filter(any)
positions = st.one_of(
    st.integers(0, 3000), st.integers(2**40 - 1000, 2**40 + 1000), st.integers(0, MAX - 1000)
)


@given(weight_lists, positions, st.integers(0, 40))
@settings(max_examples=60, deadline=None)
def test_equals_the_reference(weights: list[int], start: int, n: int) -> None:
    blend = _blend(weights)
    datasets, counts = at(blend, start, n)
    before = reference(weights, start)
    assert blend.counts(start).tolist() == before
    for dataset, count in zip(datasets.tolist(), counts.tolist(), strict=True):
        assert count == before[dataset]
        before[dataset] += 1
    assert reference(weights, start + n) == before


def _worst(weights: list[int], start: int, n: int) -> float:
    """The largest distance of a dataset from its share at any of n prefixes after `start`, which
    is near 0: in float64."""
    datasets, _ = at(_blend(weights), start, n)
    counts = _blend(weights).counts(start) + np.cumsum(
        datasets[:, None] == np.arange(len(weights)), axis=0
    )
    shares = np.array([float(Fraction(weight, sum(weights))) for weight in weights])
    return float(np.abs(counts - np.arange(start + 1, start + n + 1)[:, None] * shares).max())


@pytest.mark.parametrize("weights", NASTY, ids=lambda weights: f"{len(weights)}_from_{weights[0]}")
def test_within_2_samples_of_nasty_weights_at_every_prefix(weights: list[int]) -> None:
    assert _worst(weights, 0, 10_000) < 2


@given(weight_lists)
@settings(max_examples=60, deadline=None)
def test_within_2_samples_at_every_prefix(weights: list[int]) -> None:
    assert _worst(weights, 0, 2000) < 2


@given(weight_lists, st.integers(0, MAX))
@example(_fibonacci(85), MAX // 3)
@settings(max_examples=200, deadline=None)
def test_within_2_samples_however_far(weights: list[int], position: int) -> None:
    total = sum(weights)
    counts = _blend(weights).counts(position).tolist()
    assert sum(counts) == position
    assert all(
        abs(total * count - position * weight) < 2 * total
        for count, weight in zip(counts, weights, strict=True)
    )


def test_the_blend_is_fixed_for_ever() -> None:
    """A run that is resumed by a later version must meet the same samples."""
    assert at(_blend([5, 1, 3]), 0, 12)[0].tolist() == [0, 2, 0, 1, 0, 2, 0, 2, 0, 0, 2, 0]
    assert at(_blend(HALF_AND_127_SMALL), 2**40, 12)[0].tolist() == [
        0,
        67,
        0,
        35,
        0,
        99,
        0,
        19,
        0,
        83,
        0,
        51,
    ]


def test_as_many_datasets_as_can_be() -> None:
    blend = _blend([1] * MAX_DATASETS)
    datasets, counts = at(blend, 7 * MAX_DATASETS, MAX_DATASETS)
    assert np.array_equal(np.sort(datasets), np.arange(MAX_DATASETS)) and (counts == 7).all()


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ([], "no dataset has a weight above 0"),
        ([0, 0], "no dataset has a weight above 0"),
        ([1, -1], "weight -1 of dataset 1"),
        ([MAX + 1], "weight 4611686018427387905 of dataset 0"),
        ([MAX, 1], "weight 1 of dataset 1: weights are 0 or more and sum to"),
        ([2**63 - 1, 2**63 - 1], "of dataset 0"),
        ([1] * (MAX_DATASETS + 1), "32767 datasets, but at most 32766"),
    ],
)
def test_wrong_weights_are_refused(weights: list[int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        _blend(weights)


@pytest.mark.parametrize(
    ("start", "datasets", "counts", "words"),
    [
        (-1, np.empty(1, np.int16), np.empty(1, np.int64), "positions -1 and 1 on"),
        (
            MAX,
            np.empty(1, np.int16),
            np.empty(1, np.int64),
            "positions 4611686018427387904 and 1 on",
        ),
        (0, np.empty(2, np.int16), np.empty(1, np.int64), "dataset has 2 elements and count 1"),
        (0, np.empty(1, np.int32), np.empty(1, np.int64), "dataset must be .* int16 array"),
        (0, np.empty(1, np.int16), np.empty(1, np.int32), "count must be .* int64 array"),
        (0, np.empty((1, 1), np.int16), np.empty(1, np.int64), "one-dimensional"),
        (0, np.empty(4, np.int16)[::2], np.empty(2, np.int64), "contiguous"),
        (0, np.empty(2, np.int16), np.frombuffer(bytes(16), np.int64), "writable"),
    ],
)
def test_wrong_arguments_are_refused(
    start: int, datasets: NDArray[np.int16], counts: Numbers, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        _blend([1, 2]).at(start, datasets, counts)


def test_wrong_arrays_of_weights_and_positions_are_refused() -> None:
    with pytest.raises(ValueError, match=r"weights must be .* int64 array"):
        _index.Blend(np.ones(2))  # type: ignore[arg-type]
    for position in (-1, MAX + 1):
        with pytest.raises(ValueError, match=r"not within 0\.\.2\*\*62"):
            _blend([1]).counts(position)
    assert _blend([1, 1]).counts(MAX).tolist() == [MAX // 2, MAX // 2]
    assert len(at(_blend([1]), MAX, 0)[0]) == 0


def test_the_lock_is_released() -> None:
    """Python code runs while another thread asks for many positions."""
    assert ticks_beside(lambda: at(_blend(list(range(1, 301))), 0, 4_000_000)) > 5


finite = st.floats(0, allow_nan=False, allow_infinity=False)


@given(st.lists(finite, min_size=1, max_size=50).filter(any))
@example([1.0, 1e-12])
@example([1.7e308] * 3)
@example([5e-324, 1.7e308])
@example([5e-324])
def test_float_weights_keep_their_proportion(weights: list[float]) -> None:
    values = integer_weights(weights, [str(i) for i in range(len(weights))]).tolist()
    total = sum(map(Fraction, weights))
    assert sum(values) <= MAX
    for value, weight in zip(values, weights, strict=True):
        exact = SCALE * Fraction(weight) / total
        assert value == (max(1, int(exact)) if weight else 0)


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ([0.5, -0.5], "dataset 'b' has the weight -0.5"),
        ([float("nan"), 1.0], "dataset 'a' has the weight nan"),
        ([1.0, float("inf")], "dataset 'b' has the weight inf"),
        ([0.0, -0.0], "every dataset has the weight 0: a, b"),
        ([1.0], "1 weights are given for 2 datasets"),
        ([1.0] * 3, "3 weights are given for 2 datasets"),
    ],
)
def test_wrong_float_weights_are_refused(weights: list[float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        integer_weights(weights, ["a", "b"])


@given(
    st.binary(max_size=60), st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=8)
)
def test_gather_puts_pieces_one_behind_another(
    source: bytes, bounds: list[tuple[int, int]]
) -> None:
    pieces = [(min(a, b, len(source)), min(max(a, b), len(source))) for a, b in bounds]
    starts, lengths = (
        np.array(values, np.int64)
        for values in ([a for a, _ in pieces], [b - a for a, b in pieces])
    )
    out = np.empty(int(lengths.sum()), np.uint8)
    _index.gather(np.frombuffer(source, np.uint8), starts, lengths, out)
    assert out.tobytes() == b"".join(source[a:b] for a, b in pieces)


@pytest.mark.parametrize(
    ("starts", "lengths", "size"),
    [
        ([0], [11], 11),
        ([-1], [2], 2),
        ([11], [0], 0),
        ([5], [6], 6),
        ([0, 4], [4, -4], 0),
        ([0], [4], 5),
        ([0], [5], 4),
        ([0, 0], [2**63 - 1, 2**63 - 1], 10),
        ([2**63 - 1], [2], 2),
    ],
)
def test_gather_reads_and_writes_nothing_outside(
    starts: list[int], lengths: list[int], size: int
) -> None:
    with pytest.raises(ValueError, match="a piece lies outside source"):
        _index.gather(
            np.zeros(10, np.uint8),
            np.array(starts, np.int64),
            np.array(lengths, np.int64),
            np.empty(size, np.uint8),
        )


def test_gather_refuses_wrong_arrays() -> None:
    one = np.zeros(1, np.int64)
    with pytest.raises(ValueError, match="starts has 2 elements and lengths 1"):
        _index.gather(np.zeros(10, np.uint8), np.zeros(2, np.int64), one, np.empty(0, np.uint8))
    with pytest.raises(ValueError, match=r"source must be .* uint8 array"):
        _index.gather(np.zeros(10, np.int8), one, one, np.empty(0, np.uint8))
    with pytest.raises(ValueError, match=r"out must be .* writable uint8 array"):
        _index.gather(np.zeros(10, np.uint8), one, one, np.frombuffer(b"", np.uint8))
