"""The order of samples: each once an epoch, the same however it is sliced, each dataset by its
weight."""

from __future__ import annotations

import time
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st
from numpy.typing import NDArray

from trainkit import _index
from trainkit.base.errors import ConfigError, Exit
from trainkit.data.order.native import (
    NativeOrder,
    SampleOrder,
    SplitName,
    integer_weights,
    parse_split,
    split_bounds,
)

SPLIT_NAMES: tuple[SplitName, ...] = ("train", "valid", "test")
FUZZ_SECONDS = 600.0


def _order(num_samples: int, split: SplitName = "train", seed: int = 1) -> NativeOrder:
    return NativeOrder([num_samples], None, split, seed, ["data"])


def _blend(sizes: dict[str, int], weights: list[float] | None = None, seed: int = 1) -> NativeOrder:
    return NativeOrder(list(sizes.values()), weights, "train", seed, list(sizes))


def _pairs(order: SampleOrder, consumed: int, n: int) -> list[tuple[int, int]]:
    datasets, numbers = order.window(consumed, n)
    return list(zip(datasets.tolist(), numbers.tolist(), strict=True))


@pytest.mark.parametrize(
    ("text", "weights"),
    [
        ("949,50,1", (949, 50, 1)),
        ("95,5", (95, 5, 0)),
        ("1", (1, 0, 0)),
        ("0,0,3", (0, 0, 1)),
        ("99.9,0.1,0", (999, 1, 0)),
        ("0.1,0.2,0.7", (1, 2, 7)),
    ],
)
def test_split_is_exact(text: str, weights: tuple[int, int, int]) -> None:
    assert parse_split(text) == tuple(Fraction(w, sum(weights)) for w in weights)


@pytest.mark.parametrize(
    "text",
    ["", "0,0,0", "0.0", "1,2,3,4", "-1,2", "a,b", "1,,2", "1 2", "nan", "1e3", "1,", "\u0661"],
)
def test_a_wrong_split_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_split(text)
    assert caught.value.exit == Exit.CONFIG
    assert repr(text) in str(caught.value)


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=3).filter(any), st.integers(0, 2**50))
def test_splits_partition_the_windows(weights: list[int], windows: int) -> None:
    bounds = split_bounds(parse_split(",".join(map(str, weights))), windows)
    assert bounds[0][0] == 0 and bounds[2][1] == windows
    assert bounds[0][1] == bounds[1][0] and bounds[1][1] == bounds[2][0]
    total = 0
    for weight, (_, high) in zip(weights, bounds, strict=False):
        total += weight
        assert high == total * windows // sum(weights)


def test_bounds_where_floats_would_be_one_off() -> None:
    assert split_bounds(parse_split("0.1,0.2,0.7"), 10) == ((0, 1), (1, 3), (3, 10))
    assert split_bounds(parse_split("1,1,1"), 3 * 10**17 + 2) == (
        (0, 10**17),
        (10**17, 2 * 10**17 + 1),
        (2 * 10**17 + 1, 3 * 10**17 + 2),
    )


@given(
    st.integers(1, 300), st.integers(1, 4), st.integers(0, 2**63 - 1), st.sampled_from(SPLIT_NAMES)
)
@settings(max_examples=60, deadline=None)
def test_every_sample_once_an_epoch(
    num_samples: int, epochs: int, seed: int, split: SplitName
) -> None:
    dataset_index, numbers = _order(num_samples, split, seed).window(0, epochs * num_samples)
    assert dataset_index.dtype == np.int16
    assert numbers.dtype == np.int64
    assert not dataset_index.any()
    for epoch in numbers.reshape(epochs, num_samples):
        assert np.array_equal(np.sort(epoch), np.arange(num_samples))


def test_epochs_splits_and_seeds_have_orders_of_their_own() -> None:
    n = 1000
    orders = [
        _order(n, split, seed).window(epoch * n, n)[1]
        for split in SPLIT_NAMES
        for seed in (1, 2)
        for epoch in (0, 1)
    ]
    assert len({o.tobytes() for o in orders}) == len(orders)
    assert all((o == orders[0]).mean() < 0.02 for o in orders[1:])


def test_the_order_is_fixed_for_ever() -> None:
    """A run that is resumed by a later version must meet the same samples."""
    assert _order(1000, "train", 1234).window(995, 10)[1].tolist() == [
        184,
        213,
        883,
        504,
        777,
        649,
        592,
        213,
        678,
        712,
    ]
    blend = _blend({"web": 1000, "code": 10**10}, [0.7, 0.3], 1234)
    assert _pairs(blend, 1426, 6) == [
        (0, 96),
        (0, 960),
        (1, 5757129689),
        (0, 969),
        (0, 220),
        (1, 9679989356),
    ]


def test_more_than_2_to_the_31_samples() -> None:
    n = 5 * 2**31 + 3
    numbers = _order(n).window(n - 500, 1000)[1]
    assert len(np.unique(numbers[:500])) == len(np.unique(numbers[500:])) == 500
    assert 2**31 < numbers.max() < n and numbers.min() >= 0
    datasets, numbers = _blend({"a": n, "b": 3 * n}).window(4 * n - 1000, 1000)
    assert Counter(datasets.tolist()) == {0: 250, 1: 750}
    assert (
        len(set(zip(datasets.tolist(), numbers.tolist(), strict=True))) == 1000
        and numbers.max() > 2**33
    )


@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=12).filter(any),
    st.integers(0, 2**63 - 1),
    st.integers(0, 3),
)
@settings(max_examples=60, deadline=None)
def test_a_blend_without_weights_holds_every_sample_once_a_round(
    sizes: list[int], seed: int, rounds: int
) -> None:
    order = _blend({f"d{i}": size for i, size in enumerate(sizes)}, None, seed)
    total = sum(sizes)
    assert sorted(_pairs(order, rounds * total, total)) == [
        (d, k) for d, size in enumerate(sizes) for k in range(size)
    ]


datasets_and_weights = st.lists(
    st.tuples(st.integers(1, 40), st.floats(0, 10)), min_size=2, max_size=12
).filter(lambda parts: any(w for _, w in parts))


@given(datasets_and_weights, st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_every_dataset_of_a_blend_walks_through_its_own_epochs(
    parts: list[tuple[int, float]], seed: int
) -> None:
    sizes, weights = [size for size, _ in parts], [weight for _, weight in parts]
    order = _blend({f"d{i}": size for i, size in enumerate(sizes)}, weights, seed)
    datasets, numbers = order.window(0, 400)
    for dataset, size in enumerate(sizes):
        own = numbers[datasets == dataset]
        assert (len(own) == 0) == (weights[dataset] == 0) or abs(
            len(own) - 400 * weights[dataset] / sum(weights)
        ) < 2
        for first in range(0, len(own), size):
            epoch = own[first : first + size]
            assert len(np.unique(epoch)) == len(epoch) and epoch.min() >= 0 and epoch.max() < size
    assert order.epochs(400).tolist() == [
        (datasets == d).sum() / size for d, size in enumerate(sizes)
    ]


def test_another_dataset_beside_it_does_not_change_a_datasets_order() -> None:
    """And neither do its weight and its place in the list."""
    size = 500
    few, many = (
        _blend({"a": size, "b": 70}, [1, 1]),
        _blend({"c": 10**9, "b": 71, "a": size}, [3, 1, 1e-3]),
    )
    orders = []
    for order, place, n in ((few, 0, 2 * size), (many, 2, 4100 * size)):
        datasets, numbers = order.window(0, n)
        orders.append(numbers[datasets == place][:size])
    assert len(orders[0]) == size and np.array_equal(*orders)
    datasets, numbers = few.window(0, 140)
    assert not np.array_equal(numbers[datasets == 1], numbers[datasets == 0]), (
        "datasets of a blend share their order"
    )


def test_a_window_asks_once_a_dataset_and_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    permute = _index.permute

    def count(n: int, key: int, start: int, out: NDArray[np.int64]) -> None:
        asked.append((n, key))
        permute(n, key, start, out)

    monkeypatch.setattr(_index, "permute", count)
    _blend({"a": 1000, "b": 300, "c": 10**6}, [1, 1, 1]).window(150, 1200)
    assert len(asked) == len(set(asked)) == 1 + 2 + 1


def test_how_often_each_dataset_is_seen() -> None:
    order = _blend({"a": 100, "b": 50, "none": 0}, [1, 3, 0])
    assert order.epochs(0).tolist() == [0, 0, 0]
    assert order.epochs(400).tolist() == [1, 6, 0]
    assert _order(8).epochs(20).tolist() == [2.5]


def test_a_split_without_samples_is_refused() -> None:
    for order in (
        _order(0, "test"),
        NativeOrder([0, 0], None, "test", 1, ["a", "b"]),
        NativeOrder([0, 0], [1, 2], "test", 1, ["a", "b"]),
    ):
        with pytest.raises(ConfigError, match="the test split has no sample"):
            order.window(0, 1)
        assert len(order.window(0, 0)[0]) == 0
    with pytest.raises(ConfigError, match="dataset 'b' has a weight above 0, but no valid sample"):
        NativeOrder([5, 0], [1, 1e-9], "valid", 1, ["a", "b"]).window(0, 1)
    with pytest.raises(ConfigError, match="dataset 'b' has a weight above 0, but no valid sample"):
        NativeOrder([5, 0], [1, 1e-9], "valid", 1, ["a", "b"]).epochs(1)
    assert not NativeOrder([5, 0], [1, 0], "valid", 1, ["a", "b"]).window(0, 100)[0].any()
    assert not NativeOrder([5, 0], None, "valid", 1, ["a", "b"]).window(0, 100)[0].any()


@pytest.mark.parametrize(
    ("sizes", "weights", "names", "words"),
    [
        ([], None, [], "0 datasets are to be blended, but 1 to 32,766 can be"),
        ([1] * 32_767, None, [str(i) for i in range(32_767)], "32,767 datasets are to be blended"),
        ([1, 1, 1], None, ["a", "b", "a"], "two datasets of a blend are called 'a'"),
        ([1, 1], [1.0], ["a", "b"], "1 weights are given for 2 datasets"),
        ([1, 1], [1.0, -1.0], ["a", "b"], "dataset 'b' has the weight -1.0"),
        ([1, 1], [float("nan"), 1.0], ["a", "b"], "dataset 'a' has the weight nan"),
        ([1, 1], [0.0, 0.0], ["a", "b"], "every dataset has the weight 0"),
        ([2**62, 1], None, ["a", "b"], "4,611,686,018,427,387,905 samples together"),
    ],
)
def test_a_wrong_blend_is_refused(
    sizes: list[int], weights: list[float] | None, names: list[str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        NativeOrder(sizes, weights, "train", 1, names)
    assert caught.value.exit == Exit.CONFIG and caught.value.problems()[0]["hint"]


def test_what_cannot_be_is_an_error_of_the_caller() -> None:
    with pytest.raises(ValueError, match="do not fit the datasets"):
        NativeOrder([1, 1], None, "train", 1, ["a"])
    with pytest.raises(ValueError, match="do not fit the datasets"):
        NativeOrder([-1], None, "train", 1, ["a"])
    for consumed, n in ((-1, 1), (2**62, 1)):
        with pytest.raises(ValueError, match="positions"):
            _order(5).window(consumed, n)


def _check_anything(
    sizes: list[int], weights: list[float] | None, seed: int, consumed: int, n: int
) -> None:
    """Whatever is asked: words, or samples that are there, the same in two halves, and none
    twice in a dataset's epoch."""
    names = [str(i) for i in range(len(sizes))]
    try:
        order = NativeOrder(sizes, weights, "valid", seed, names)
        datasets, numbers = order.window(consumed, n)
    except ConfigError:
        bad = weights is not None and (
            len(weights) != len(sizes)
            or not all(0 <= w < float("inf") for w in weights)
            or not any(weights)
        )
        empty = not any(sizes) or any(
            size == 0 and weight > 0 for size, weight in zip(sizes, weights or [], strict=False)
        )
        assert bad or empty or (weights is None and sum(sizes) > 2**62)
        return
    halves = [order.window(consumed, n // 2), order.window(consumed + n // 2, n - n // 2)]
    assert np.array_equal(datasets, np.concatenate([half[0] for half in halves]))
    assert np.array_equal(numbers, np.concatenate([half[1] for half in halves]))
    shares = sizes if weights is None else integer_weights(weights, names).tolist()
    for dataset in np.unique(datasets).tolist():
        own, seen = (
            numbers[datasets == dataset],
            int(order._checked_blend().counts(consumed)[dataset]),
        )
        assert shares[dataset] > 0 and own.min() >= 0 and own.max() < sizes[dataset]
        assert abs(seen * sum(shares) - consumed * shares[dataset]) < 2 * sum(shares)
        epochs = (seen + np.arange(len(own))) // sizes[dataset]
        assert len(set(zip(epochs.tolist(), own.tolist(), strict=True))) == len(own)


anything = given(
    st.lists(
        st.one_of(st.integers(0, 5), st.integers(0, 2**31), st.integers(0, 2**56)),
        min_size=1,
        max_size=150,
    ),
    st.one_of(
        st.none(),
        st.lists(st.floats(), max_size=4),
        st.lists(st.floats(0, 1e300), min_size=150, max_size=150),
    ),
    st.integers(-(2**70), 2**70),
    st.one_of(st.integers(0, 5000), st.integers(0, 2**62 - 600)),
    st.integers(0, 600),
)


def _cut(sizes: list[int], weights: list[float] | None, seed: int, consumed: int, n: int) -> None:
    """As many weights as datasets, where there are enough."""
    _check_anything(
        sizes, weights[: len(sizes)] if weights is not None else None, seed, consumed, n
    )


@anything
@example([1], None, 0, 2**62 - 600, 600)
@example([2**56] * 64, None, 0, 2**62 - 600, 600)
@settings(max_examples=100, deadline=None)
def test_any_order_that_can_be_asked_for(
    sizes: list[int], weights: list[float] | None, seed: int, consumed: int, n: int
) -> None:
    _cut(sizes, weights, seed, consumed, n)


@pytest.mark.slow
@pytest.mark.timeout(FUZZ_SECONDS + 120)
def test_fuzz_the_order_for_ten_minutes() -> None:
    fuzz = settings(max_examples=1000, deadline=None, database=None)(anything(_cut))
    end = time.monotonic() + FUZZ_SECONDS
    while time.monotonic() < end:
        fuzz()
