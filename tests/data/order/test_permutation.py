"""trainkit._index.permute against a reference in Python, and as a permutation."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st
from numpy.typing import NDArray

from tests.data.order.beside import ticks_beside
from trainkit import _index
from trainkit.base.install import csrc_sha256

Words = NDArray[np.uint64]
ROUNDS = 10
MAX_SIZE = 2**62
MASK32 = np.uint64(2**32 - 1)
sizes = st.one_of(
    st.integers(1, 300), st.integers(1, MAX_SIZE), st.integers(0, 62).map(lambda b: 2**b)
)
keys = st.integers(0, 2**64 - 1)


def _mix13(x: Words) -> Words:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _high_word(a: Words, size: int) -> Words:
    """(a * size) >> 64 for size < 2^32, in two halves."""
    b = np.uint64(size)
    return ((a >> np.uint64(32)) * b + (((a & MASK32) * b) >> np.uint64(32))) >> np.uint64(32)


def _encrypt(n: int, key: int, positions: Words) -> Words:
    """One pass of the network over positions of the grid, as csrc/index/permutation.h describes
    it."""
    rows = max(4, math.isqrt(n - 1) + 1)
    rows += rows % 2
    cols = max(4, -(-n // rows))
    states = np.array(
        [(key + (r + 1) * 0x9E3779B97F4A7C15) % 2**64 for r in range(ROUNDS)], np.uint64
    )
    left, right = positions // np.uint64(cols), positions % np.uint64(cols)
    for number, round_key in enumerate(_mix13(states)):
        if number % 2 == 0:
            left = (left + _high_word(_mix13(right ^ round_key), rows)) % np.uint64(rows)
        else:
            right = (right + _high_word(_mix13(left ^ round_key), cols)) % np.uint64(cols)
    return left * np.uint64(cols) + right


def reference(n: int, key: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Encrypt, and again those that landed outside [0, n)."""
    values = _encrypt(n, key, positions.astype(np.uint64))
    while (outside := values >= n).any():
        values[outside] = _encrypt(n, key, values[outside])
    return values.astype(np.int64)


def permute(n: int, key: int, start: int = 0, count: int | None = None) -> NDArray[np.int64]:
    out = np.empty(n - start if count is None else count, np.int64)
    _index.permute(n, key, start, out)
    return out


@given(sizes, keys, st.data())
@example(MAX_SIZE, 2**64 - 1, None)
@example(MAX_SIZE - 1, 0, None)
@settings(max_examples=200, deadline=None)
def test_equals_the_reference(n: int, key: int, data: st.DataObject | None) -> None:
    count = min(n, 100)
    start = n - count if data is None else data.draw(st.integers(0, n - count))
    assert np.array_equal(
        permute(n, key, start, count), reference(n, key, np.arange(start, start + count))
    )


@pytest.mark.parametrize(
    "n", [2**31 - 1, 2**31 + 11, (2**31 - 1) ** 2, (2**31 - 1) ** 2 + 1, 10**12]
)
def test_equals_the_reference_at_both_ends(n: int) -> None:
    for start in (0, n - 1000):
        values = permute(n, 99, start, 1000)
        assert np.array_equal(values, reference(n, 99, np.arange(start, start + 1000)))
        assert values.min() >= 0 and values.max() < n


def test_is_a_permutation_for_every_small_size() -> None:
    for n in range(1, 700):
        assert np.array_equal(np.sort(permute(n, n * 7919)), np.arange(n))


@pytest.mark.parametrize("n", [3, 4, 5, 6])
def test_all_orders_of_a_few_come_up_equally_often(n: int) -> None:
    """Chi-square over the n! orders under consecutive keys; below mean + 5 standard deviations."""
    orders, expected = math.factorial(n), 40
    counts = Counter(permute(n, key).tobytes() for key in range(orders * expected))
    chi_square = (
        sum((counts[o] - expected) ** 2 / expected for o in counts)
        + (orders - len(counts)) * expected
    )
    assert chi_square < (orders - 1) + 5 * math.sqrt(2 * (orders - 1))


def test_values_look_random() -> None:
    """No correlation of a value with its position, its neighbour or the same position under the
    next key (each below 5 / sqrt(n))."""
    n = 100_003
    a, b = permute(n, 1).astype(float), permute(n, 2).astype(float)
    for left, right in ((a, np.arange(n)), (a[1:], a[:-1]), (a, b)):
        assert abs(np.corrcoef(left, right)[0, 1]) < 5 / math.sqrt(n)
    fixed = int((a == np.arange(n)).sum())
    assert fixed < 10  # Poisson of mean 1


def test_the_lock_is_released() -> None:
    """Python code runs while another thread permutes."""
    assert ticks_beside(lambda: permute(10**9, 1, 0, 8_000_000)) > 5


@pytest.mark.parametrize(
    ("n", "start", "out", "words"),
    [
        (0, 0, np.empty(0, np.int64), "n is 0"),
        (-5, 0, np.empty(1, np.int64), "n is -5"),
        (MAX_SIZE + 1, 0, np.empty(1, np.int64), "n is 4611686018427387905"),
        (10, -1, np.empty(1, np.int64), "start is -1"),
        (10, 11, np.empty(0, np.int64), "start is 11"),
        (10, 5, np.empty(6, np.int64), "start is 5 and out holds 6, but n is only 10"),
        (10, 0, np.empty(2, np.int32), "int64"),
        (10, 0, np.empty(2, np.uint64), "int64"),
        (10, 0, np.empty(2, ">i8"), "int64"),
        (10, 0, np.empty((2, 2), np.int64), "one-dimensional"),
        (10, 0, np.empty(8, np.int64)[::2], "contiguous"),
        (10, 0, np.frombuffer(bytes(16), np.int64), "writable"),
        (10, 0, np.empty(17, np.uint8)[1:].view(np.int64), "aligned"),
    ],
)
def test_wrong_arguments_are_refused(
    n: int, start: int, out: NDArray[np.int64], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        _index.permute(n, 0, start, out)


@pytest.mark.parametrize(("n", "key"), [(2**63, 0), (10, -1), (10, 2**64), (1.5, 0)])
def test_what_is_no_64_bit_integer_is_a_type_error(n: int, key: int) -> None:
    with pytest.raises(TypeError):
        _index.permute(n, key, 0, np.empty(1, np.int64))


def test_an_empty_window_at_the_end_is_fine() -> None:
    assert len(permute(10, 0, 10, 0)) == 0


def test_the_extension_knows_its_source() -> None:
    root = Path(__file__).resolve().parents[3]
    assert _index.csrc_sha256 == csrc_sha256(root), (
        "csrc changed since the extension was built: run ./inv build"
    )
