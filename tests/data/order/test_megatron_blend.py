"""Megatron's blends: the greedy rule, what each dataset is asked for, what is refused; the order
of samples over them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

from tests.data.megatron_cases import content, request_of, scratch, write_pair
from tests.shared import MISSING, golden
from trainkit import _index
from trainkit.base.errors import ConfigError, Exit
from trainkit.data.indexed.dataset import IndexedDataset
from trainkit.data.order.megatron import MegatronOrder
from trainkit.data.order.megatron_blend import (
    Blend,
    MegatronBlend,
    blend_names,
    build_blend,
    plan_blend,
)
from trainkit.data.order.megatron_cache import split_ranges
from trainkit.data.order.megatron_index import IndexRequest, build_index, read_index_sizes

GOLDEN = golden()
needs_golden = pytest.mark.skipif(GOLDEN is None, reason=MISSING)
MANY = 2**44


def blended(
    folder: Path, weights: Sequence[float], sizes: Sequence[int], total: int
) -> tuple[NDArray[Any], NDArray[Any], list[int]]:
    """(datasets, numbers, drawn) of a blend."""
    with scratch(folder / "datasets") as datasets, scratch(folder / "numbers") as numbers:
        drawn = _index.write_blend(list(weights), list(sizes), total, datasets, 0, numbers, 0)
        return content(datasets, np.int16), content(numbers, np.int64), drawn


@needs_golden
def test_golden_blends(tmp_path: Path) -> None:
    assert GOLDEN is not None
    arrays = np.load(GOLDEN / "helpers.npz")
    for name in (
        key for key in arrays.files if key.startswith("blend_") and key.endswith("_weights")
    ):
        base = name.removesuffix("_weights")
        expected = arrays[f"{base}_ds"]
        datasets, numbers, drawn = blended(
            tmp_path, arrays[name], [MANY // 64] * len(arrays[name]), len(expected)
        )
        assert np.array_equal(datasets, expected) and np.array_equal(
            numbers, arrays[f"{base}_sample"]
        )
        assert drawn == np.bincount(expected, minlength=len(drawn)).tolist()
    for name in (key for key in arrays.files if key.startswith("exh_") and key.endswith("_sizes")):
        base, sizes = name.removesuffix("_sizes"), arrays[name].tolist()
        datasets, numbers, drawn = blended(
            tmp_path, [n / sum(sizes) for n in sizes], sizes, sum(sizes)
        )
        assert np.array_equal(datasets, arrays[f"{base}_ds"]) and np.array_equal(
            numbers, arrays[f"{base}_sample"]
        )
        assert drawn == sizes


def _requests(
    prefixes: list[Path], name: str, position: int, split: str, **values: Any
) -> list[IndexRequest]:
    """The part of each pair that a split gives it."""
    requests = []
    for prefix in prefixes:
        bounds = split_ranges(split, len(IndexedDataset(prefix)))[position]
        assert bounds is not None
        requests.append(
            request_of(
                prefix, [], first=bounds[0], last=bounds[1], split_name=name, split=split, **values
            )
        )
    return requests


@needs_golden
def test_golden_blended_datasets(tmp_path: Path) -> None:
    """Document ranges, what is asked of each dataset, sizes and arrays, as
    BlendedMegatronDatasetBuilder left them; and the first token of every sample."""
    assert GOLDEN is not None
    arrays = np.load(GOLDEN / "blended.npz")
    cases = [
        c
        for c in json.loads((GOLDEN / "manifest.json").read_text())["cases"]
        if c["kind"] == "blended"
    ]
    for case in cases:
        for position, name in enumerate(("train", "valid", "test")):
            if (truth := case["splits"].get(name)) is None:
                assert split_ranges(case["split"], 1000)[position] is None
                continue
            prefixes = [GOLDEN / p for p in case["prefixes"]]
            requests = _requests(
                prefixes, name, position, case["split"], seq_length=case["seq"], seed=case["seed"]
            )
            blend = plan_blend(requests, case["weights"], case["sizes"][position])
            assert [[r.first, r.last] for r in blend.requests] == truth["sub_docs"]
            assert [r.num_samples for r in blend.requests] == truth["sub_num_samples"]
            assert [build_index(r, tmp_path, 1).samples for r in blend.requests] == truth["sub_len"]
            build_blend(blend, tmp_path)
            made = MegatronBlend(tmp_path, blend)
            key = f"{case['key']}_{name}"
            assert np.array_equal(made.datasets, arrays[f"{key}_ds"]) and np.array_equal(
                made.numbers, arrays[f"{key}_sample"]
            )
            datasets, numbers = MegatronOrder(made.indexes, made.datasets, made.numbers).window(
                0, truth["len"]
            )
            for row, dataset, number in zip(arrays[f"{key}_rows"], datasets, numbers, strict=True):
                index, pair = made.indexes[dataset], IndexedDataset(prefixes[dataset])
                place, offset = index.samples[number]
                tokens = np.concatenate(
                    [pair[d] for d in index.documents[place : place + case["seq"] + 1]]
                )[offset : offset + case["seq"]]
                assert np.array_equal(tokens, row)


def _greedy(weights: list[float], sizes: list[int], total: int) -> list[int]:
    """The rule in Python's floats: float64, no fused multiply-add."""
    drawn, picks = [0] * len(weights), []
    for i in range(total):
        left = [d for d in range(len(weights)) if drawn[d] < sizes[d]]
        pick = max(left, key=lambda d: (weights[d] * max(i, 1.0) - drawn[d], -d))
        drawn[pick] += 1
        picks.append(pick)
    return picks


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.booleans(), st.data())
@settings(max_examples=100, deadline=None)
def test_the_furthest_behind_is_drawn(
    sizes: list[int], exhaustive: bool, data: st.DataObject
) -> None:
    weights = (
        [n / float(sum(sizes)) for n in sizes]
        if exhaustive
        else data.draw(st.lists(st.floats(1e-6, 1), min_size=len(sizes), max_size=len(sizes)))
    )
    limits, total = (
        (sizes, sum(sizes))
        if exhaustive
        else ([MANY // 64] * len(sizes), data.draw(st.integers(0, 200)))
    )
    with tempfile.TemporaryDirectory() as folder:
        datasets, numbers, drawn = blended(Path(folder), weights, limits, total)
    assert datasets.tolist() == _greedy(weights, limits, total)
    for dataset, count in enumerate(drawn):
        assert numbers[datasets == dataset].tolist() == list(range(count))


def test_a_long_blend_is_written_in_pieces(tmp_path: Path) -> None:
    """More than one buffer of 65,536 samples; equal weights tie at every step."""
    datasets, numbers, drawn = blended(tmp_path, [0.25] * 4, [MANY // 64] * 4, 200_000)
    assert np.array_equal(datasets, np.arange(200_000) % 4) and np.array_equal(
        numbers, np.arange(200_000) // 4
    )
    assert drawn == [50_000] * 4


@pytest.fixture
def three(tmp_path: Path) -> list[IndexRequest]:
    """Three datasets of 99, 12 and 49 samples."""
    requests = []
    for number, lengths in enumerate(([50, 0, 750], [99], [80] * 5)):
        requests.append(request_of(write_pair(tmp_path / f"pair{number}", lengths), lengths))
    return requests


def _built(blend: Blend, folder: Path) -> MegatronBlend:
    for request in blend.requests:
        build_index(request, folder, 1)
    build_blend(blend, folder)
    return MegatronBlend(folder, blend)


def test_requested_sizes() -> None:
    requests = [request_of(Path(f"p{n}"), [1]) for n in range(3)]
    blend = plan_blend(requests, [2, 1, 1], 1001)
    assert blend.weights == (0.5, 0.25, 0.25)
    assert blend.size == 501 + 251 + 251
    assert [r.num_samples for r in blend.requests] == [504, 253, 253]
    free = plan_blend([replace(r, num_samples=9) for r in requests], None, None)
    assert (free.weights, free.size, [r.num_samples for r in free.requests]) == (
        None,
        None,
        [None] * 3,
    )


@pytest.mark.parametrize("size", [None, 70, 10**6])
def test_without_weights(three: list[IndexRequest], size: int | None, tmp_path: Path) -> None:
    blend = plan_blend(three, None, size)
    sizes = [read_index_sizes(request).samples for request in blend.requests]
    assert sizes == [99, 12, 49]
    made = _built(blend, tmp_path / "out")
    assert made.num_samples == (70 if size == 70 else 160)
    order = MegatronOrder(made.indexes, made.datasets, made.numbers)
    datasets, numbers = order.window(0, made.num_samples)
    pairs = set(zip(datasets.tolist(), numbers.tolist(), strict=True))
    assert len(pairs) == made.num_samples and all(
        0 <= number < sizes[dataset] for dataset, number in pairs
    )
    if size is None:
        blend_names(blend).path(tmp_path / "out", "trainkit.json").unlink()
        with pytest.raises(
            ConfigError, match=r"the sample order of a blend of 3 datasets \(train\) is not built"
        ):
            MegatronBlend(tmp_path / "out", blend)


@given(st.integers(0, 160), st.integers(0, 160))
def test_windows_join(a: int, b: int) -> None:
    low, high = sorted((a, b))
    rng = np.random.default_rng(1)
    indexes = [_Index(rng.permutation(n)) for n in (99, 12, 49)]
    datasets = rng.permutation(np.repeat(np.arange(3), [99, 12, 49])).astype(np.int16)
    places = np.empty(160, np.int64)
    for dataset in range(3):
        places[datasets == dataset] = np.arange((datasets == dataset).sum())
    order = MegatronOrder(indexes, datasets, places)  # type: ignore[arg-type]
    whole = order.window(0, 160)
    part = order.window(low, high - low)
    assert np.array_equal(whole[0][low:high], part[0]) and np.array_equal(
        whole[1][low:high], part[1]
    )
    assert part[0].dtype == np.int16 and part[1].dtype == np.int64
    single = MegatronOrder(indexes[:1]).window(5, 20)  # type: ignore[arg-type]
    assert (
        np.array_equal(single[1], indexes[0].shuffle[5:25])
        and not single[0].any()
        and single[1].dtype == np.int64
    )
    assert whole[1][7] == indexes[datasets[7]].shuffle[places[7]]


class _Index:
    """As much of a MegatronIndex as an order needs."""

    def __init__(self, shuffle: NDArray[Any]) -> None:
        self.shuffle, self.num_samples = shuffle.astype(np.uint32), len(shuffle)
        self.request = IndexRequest(Path("x"), 0, 1, "train", 4, 1)


def test_the_order_ends_with_its_index() -> None:
    order = MegatronOrder([_Index(np.arange(10))])  # type: ignore[list-item]
    assert order.num_samples == 10
    assert len(order.window(10, 0)[0]) == 0
    with pytest.raises(
        ConfigError,
        match=r"samples 8\.\.10 are asked for, but Megatron's sample order was built with 10",
    ) as caught:
        order.window(8, 3)
    assert caught.value.exit == Exit.STAGE_FAILED
    with pytest.raises(ValueError, match="several indices"):
        MegatronOrder([_Index(np.arange(10))] * 2)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="2 entries, dataset_sample_index 3"):
        MegatronOrder([_Index(np.arange(10))], np.zeros(2, np.int16), np.zeros(3, np.int64))  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("datasets", "weights", "size", "words"),
    [
        (0, None, None, "0 datasets are to be blended"),
        (32767, None, None, "32,767 datasets are to be blended"),
        (2, [1.0], 5, "1 weights are given for 2 datasets"),
        (2, [1.0, -0.5], 5, "weight -0.5 of dataset 1"),
        (2, [float("nan"), 1.0], 5, "weight nan of dataset 0"),
        (2, [float("inf"), 1.0], 5, "weight inf of dataset 0"),
        (2, [1e308, 1e308], 5, "too large to be added"),
        (2, [0.0, 0.0], 5, "all weights of the blend are 0"),
        (2, [1.0, 0.0], 5, "dataset 1 has the weight 0"),
        (2, [1.0, 1.0], None, "needs the number of its samples"),
        (2, [1.0, 1.0], 0, "a blend of 0 samples"),
        (2, None, -1, "a blend of -1 samples"),
    ],
)
def test_wrong_blends_are_refused(
    datasets: int, weights: list[float] | None, size: int | None, words: str
) -> None:
    requests = [request_of(Path("p"), [1])] * datasets
    for make in (plan_blend, lambda r, w, s: Blend(tuple(r), None if w is None else tuple(w), s)):
        with pytest.raises(ConfigError, match=words) as caught:
            make(requests, weights, size)
        assert caught.value.exit == Exit.CONFIG


def test_a_blend_is_of_one_split() -> None:
    with pytest.raises(ConfigError, match="not of train, valid"):
        plan_blend(
            [request_of(Path("p"), [1]), request_of(Path("p"), [1], split_name="valid")], None, None
        )


def test_a_blend_that_overdraws_is_refused(three: list[IndexRequest], tmp_path: Path) -> None:
    blend = Blend(tuple(three), (0.1, 0.8, 0.1), 30)
    with pytest.raises(
        ConfigError, match=r"draws 24 samples of .*pair1, whose train index has 12"
    ) as caught:
        build_blend(blend, tmp_path / "out")
    assert caught.value.exit == Exit.STAGE_FAILED
    assert not list((tmp_path / "out").iterdir())


def test_a_blend_of_other_data_is_refused(three: list[IndexRequest], tmp_path: Path) -> None:
    blend = plan_blend(three, [1, 1, 1], 30)
    made = _built(blend, tmp_path)
    assert made.num_samples == 30
    names = blend_names(blend)
    assert json.loads(names.description)["weights"] == [1 / 3] * 3
    names.path(tmp_path, "dataset_index.npy").unlink()
    with pytest.raises(ConfigError, match="dataset_index"):
        MegatronBlend(tmp_path, blend)
