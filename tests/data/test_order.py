"""The order of samples: each once an epoch, the same however it is sliced."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainkit.base.errors import ConfigError, Exit
from trainkit.data.indexed import IndexedDataset, IndexedWriter
from trainkit.data.order import MockSamples, NativeSamples, SampleOrder, SplitName, parse_split, split_bounds

SPLIT_NAMES: tuple[SplitName, ...] = ("train", "valid", "test")


def _order(num_samples: int, split: SplitName = "train", seed: int = 1) -> SampleOrder:
    return SampleOrder([MockSamples(100, 8, 0, num_samples)], None, split, 8, seed)


def _dataset(folder: Path, num_tokens: int) -> IndexedDataset:
    with IndexedWriter(folder / "data", "int32") as writer:
        writer.add_document(np.arange(num_tokens, dtype=np.int32))
    return IndexedDataset(folder / "data")


@pytest.mark.parametrize(
    ("text", "weights"),
    [("949,50,1", (949, 50, 1)), ("95,5", (95, 5, 0)), ("1", (1, 0, 0)), ("0,0,3", (0, 0, 1)), ("99.9,0.1,0", (999, 1, 0)), ("0.1,0.2,0.7", (1, 2, 7))],
)
def test_split_is_exact(text: str, weights: tuple[int, int, int]) -> None:
    assert parse_split(text) == tuple(Fraction(w, sum(weights)) for w in weights)


@pytest.mark.parametrize("text", ["", "0,0,0", "0.0", "1,2,3,4", "-1,2", "a,b", "1,,2", "1 2", "nan", "1e3", "1,", "\u0661"])
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
    assert split_bounds(parse_split("1,1,1"), 3 * 10**17 + 2) == ((0, 10**17), (10**17, 2 * 10**17 + 1), (2 * 10**17 + 1, 3 * 10**17 + 2))


@pytest.mark.parametrize("num_tokens", [81, 88, 89])
def test_native_samples_are_windows_that_share_one_token(num_tokens: int, tmp_path: Path) -> None:
    dataset, seq_length = _dataset(tmp_path, num_tokens), 8
    windows = (num_tokens - 1) // seq_length
    seen = []
    for name in SPLIT_NAMES:
        samples = NativeSamples(dataset, "5,3,2", name, seq_length)
        for number in range(samples.num_samples):
            out = np.empty(seq_length + 1, np.int64)
            samples.read(number, out)
            seen.append(int(out[0]))
            assert out.tolist() == list(range(seen[-1], seen[-1] + seq_length + 1))
        with pytest.raises(IndexError):
            samples.read(samples.num_samples, np.empty(seq_length + 1, np.int64))
    assert seen == list(range(0, windows * seq_length, seq_length))


def test_data_shorter_than_one_sample_is_refused(tmp_path: Path) -> None:
    dataset = _dataset(tmp_path, 8)
    assert NativeSamples(dataset, "1", "train", 7).num_samples == 1
    with pytest.raises(ConfigError, match=r"has 8 tokens, fewer than one sample of seq_length \+ 1 = 9") as caught:
        NativeSamples(dataset, "1", "train", 8)
    assert caught.value.exit == Exit.STAGE_FAILED


def test_an_empty_split_is_refused_when_read(tmp_path: Path) -> None:
    samples = NativeSamples(_dataset(tmp_path, 100), "95,5,0", "test", 8)
    assert samples.num_samples == 0
    with pytest.raises(ConfigError, match=r"has no test sample: split '95,5,0'"):
        samples.read(0, np.empty(9, np.int64))
    with pytest.raises(ConfigError, match="the test split has no sample"):
        SampleOrder([samples], None, "test", 8, 1).window(0, 1)


def test_reading_into_a_wrong_shape_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\(8,\), not \(9,\)"):
        NativeSamples(_dataset(tmp_path, 100), "1", "train", 8).read(0, np.empty(8, np.int64))


def test_mock_samples_depend_on_seed_and_number_only() -> None:
    def read(seed: int, number: int) -> list[int]:
        out = np.empty(33, np.int64)
        MockSamples(50, 32, seed, 1000).read(number, out)
        return [int(t) for t in out]

    assert read(2**63 - 1, 3) == read(2**63 - 1, 3)
    assert len({tuple(read(seed, number)) for seed in (0, 1) for number in range(100)}) == 200
    assert {t for number in range(100) for t in read(0, number)} == set(range(50))
    assert read(7, 9)[:6] == [16, 16, 22, 45, 2, 40], "the order of mock data changed: runs of earlier versions cannot be continued exactly"


@given(st.integers(1, 300), st.integers(1, 4), st.integers(0, 2**63 - 1), st.sampled_from(SPLIT_NAMES))
@settings(max_examples=60, deadline=None)
def test_every_sample_once_an_epoch(num_samples: int, epochs: int, seed: int, split: SplitName) -> None:
    dataset_index, numbers = _order(num_samples, split, seed).window(0, epochs * num_samples)
    assert dataset_index.dtype == np.int16
    assert numbers.dtype == np.int64
    assert not dataset_index.any()
    for epoch in numbers.reshape(epochs, num_samples):
        assert np.array_equal(np.sort(epoch), np.arange(num_samples))


@given(st.integers(1, 50), st.lists(st.integers(0, 60), max_size=12), st.integers(0, 10**12))
@settings(max_examples=100, deadline=None)
def test_the_same_samples_however_they_are_sliced(num_samples: int, slices: list[int], consumed: int) -> None:
    """Resume, another global batch and another number of ranks are all slicings of the same positions."""
    order = _order(num_samples)
    parts, position = [np.empty(0, np.int64)], consumed
    for n in slices:
        parts.append(order.window(position, n)[1])
        position += n
    assert np.array_equal(np.concatenate(parts), order.window(consumed, sum(slices))[1])


def test_epochs_splits_and_seeds_have_orders_of_their_own() -> None:
    n = 1000
    orders = [_order(n, split, seed).window(epoch * n, n)[1] for split in SPLIT_NAMES for seed in (1, 2) for epoch in (0, 1)]
    assert len({o.tobytes() for o in orders}) == len(orders)
    assert all((o == orders[0]).mean() < 0.02 for o in orders[1:])


def test_the_order_is_fixed_for_ever() -> None:
    """A run that is resumed by a later version must meet the same samples."""
    assert _order(1000, "train", 1234).window(995, 10)[1].tolist() == [184, 213, 883, 504, 777, 649, 592, 213, 678, 712]


def test_more_than_2_to_the_31_samples() -> None:
    n = 5 * 2**31 + 3
    numbers = _order(n).window(n - 500, 1000)[1]
    assert len(np.unique(numbers[:500])) == len(np.unique(numbers[500:])) == 500
    assert 2**31 < numbers.max() < n and numbers.min() >= 0


def test_several_datasets_are_to_come() -> None:
    with pytest.raises(ConfigError, match="2 datasets are given; blending several is to come"):
        SampleOrder([MockSamples(2, 1, 0, 1)] * 2, [0.5, 0.5], "train", 1, 0)
    with pytest.raises(ConfigError, match="0 datasets"):
        SampleOrder([], None, "train", 1, 0)


@given(st.integers(9, 400), st.integers(1, 8))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_order_and_samples_together_read_every_window(tmp_path: Path, num_tokens: int, seq_length: int) -> None:
    samples = NativeSamples(_dataset(tmp_path, num_tokens), "1", "train", seq_length)
    out, starts = np.empty(seq_length + 1, np.int64), set()
    for number in SampleOrder([samples], None, "train", seq_length, 0).window(0, samples.num_samples)[1]:
        samples.read(int(number), out)
        starts.add(int(out[0]))
    assert starts == set(range(0, (num_tokens - 1) // seq_length * seq_length, seq_length))
