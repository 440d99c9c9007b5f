"""Beside megatron-core itself: the same arrays for random datasets, and its cache filled by us."""

from __future__ import annotations

import tempfile
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tests.data.megatron_cases import content, request_of, sample_rows, scratch, write_pair
from trainkit import _index
from trainkit.base.errors import ConfigError
from trainkit.data.order.megatron_blend import (
    Blend,
    MegatronBlend,
    blend_names,
    build_blend,
    plan_blend,
)
from trainkit.data.order.megatron_cache import split_ranges
from trainkit.data.order.megatron_index import (
    IndexRequest,
    MegatronIndex,
    build_index,
    cache_names,
    count,
    read_index_sizes,
)

# of megatron-core: filled when a test runs, for importing it (and torch) takes seconds that
# collecting need not
CORE: Any = SimpleNamespace()


@pytest.fixture(scope="module", autouse=True)
def _megatron() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it misses Apex and Transformer Engine
        pytest.importorskip(
            "megatron.core.datasets.gpt_dataset", reason="megatron-core is not installed"
        )
        from megatron.core.datasets import gpt_dataset, helpers_cpp
        from megatron.core.datasets.blended_dataset import BlendedDataset
        from megatron.core.datasets.blended_megatron_dataset_builder import (
            BlendedMegatronDatasetBuilder,
        )
        from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
        from megatron.core.datasets.indexed_dataset import IndexedDataset
        from megatron.core.datasets.utils import Split
    CORE.gpt_dataset, CORE.helpers_cpp, CORE.BlendedDataset, CORE.Split = (
        gpt_dataset,
        helpers_cpp,
        BlendedDataset,
        Split,
    )
    CORE.BlendedMegatronDatasetBuilder, CORE.GPTDataset = BlendedMegatronDatasetBuilder, GPTDataset
    CORE.GPTDatasetConfig, CORE.IndexedDataset = GPTDatasetConfig, IndexedDataset


TOKENIZER = {"class": "Words", "path": "words.json", "additional": {"eod": 0}}


class Words:
    """As much of a tokenizer as GPTDataset asks for."""

    vocab_size, eod, pad = 1000, 0, -1
    special_tokens_dict: dict[str, int] = {}  # noqa: RUF012
    unique_identifiers = TOKENIZER


def config_of(request: IndexRequest, **values: Any) -> Any:
    return CORE.GPTDatasetConfig(
        random_seed=request.seed,
        sequence_length=request.seq_length,
        tokenizer=Words(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        add_extra_token_to_sequence=request.extra_token,
        drop_last_partial_validation_sequence=request.drop_last,
        **values,
    )


def theirs(request: IndexRequest) -> Any:
    """GPTDataset over the same documents, without a cache."""
    ids = np.arange(request.first, request.last, dtype=np.int32)
    dataset = CORE.IndexedDataset(str(request.prefix))
    return CORE.GPTDataset(
        dataset,
        str(request.prefix),
        ids,
        request.num_samples,
        CORE.Split[request.split_name],
        config_of(request),
    )


def same(ours: Any, expected: Any) -> None:
    assert ours.dtype == expected.dtype
    assert np.array_equal(ours, expected)


def same_index(index: MegatronIndex, dataset: Any) -> None:
    same(index.documents, dataset.document_index)
    same(index.samples, dataset.sample_index)
    same(index.shuffle, dataset.shuffle_index)


lengths_lists = st.lists(
    st.integers(0, 40) | st.sampled_from([0, 0, 7, 8, 9, 16]), min_size=1, max_size=40
).filter(any)


@given(lengths_lists, st.data())
@settings(max_examples=40, deadline=None)
def test_random_datasets(lengths: list[int], data: st.DataObject) -> None:
    """Empty documents, exact boundaries, epochs, a last epoch by itself, with and without the
    extra token, partial last samples kept."""
    split = data.draw(st.sampled_from(["train", "valid", "test"]))
    first = data.draw(st.integers(0, len(lengths) - 1))
    last = data.draw(st.integers(first + 1, len(lengths)))
    values = {
        "seq_length": data.draw(st.integers(1, 12) | st.just(40)),
        "seed": data.draw(st.integers(0, 2**32 - 1)),
        "num_samples": data.draw(st.none() | st.integers(1, 120)),
        "extra_token": data.draw(st.booleans()),
        "drop_last": data.draw(st.booleans()) if split == "valid" else True,
    }
    with tempfile.TemporaryDirectory() as folder:
        prefix = write_pair(Path(folder) / "pair", lengths)
        request = request_of(prefix, lengths, first=first, last=last, split_name=split, **values)
        try:
            build_index(request, Path(folder), data.draw(st.integers(1, 3)))
        except ConfigError as error:
            if "puts a document of no tokens last" in str(error):
                with pytest.raises(AssertionError):
                    theirs(request)
            else:
                assert "fewer than one sample" in str(error)
                assert sum(lengths[first:last]) == 0 or len(theirs(request)) == 0
            return
        same_index(MegatronIndex(Path(folder), request), theirs(request))


@given(lengths_lists, st.integers(1, 20), st.booleans(), st.booleans())
@settings(max_examples=80, deadline=None)
def test_sample_index_in_both_widths(
    lengths: list[int], seq_length: int, extra: bool, wide: bool
) -> None:
    order = np.random.default_rng(seq_length).permutation(len(lengths)).astype(np.int32)
    sizes = np.array(lengths, np.int32)
    build = (
        CORE.helpers_cpp.build_sample_idx_int64 if wide else CORE.helpers_cpp.build_sample_idx_int32
    )
    expected = build(sizes, order, seq_length, 1, sum(lengths), True, int(extra))
    with tempfile.TemporaryDirectory() as folder:
        same(
            sample_rows(
                Path(folder), sizes[order], seq_length, extra, len(expected) - 1, wide=wide
            ),
            expected,
        )


@pytest.mark.parametrize("seq_length", [16, 1000])
@pytest.mark.parametrize("tokens", [50_000_003, 16_777_219])
def test_float32_counts(tokens: int, seq_length: int, tmp_path: Path) -> None:
    """The number of samples, partial last one included, that helpers.cpp computes in float32,
    and the rows there are then."""
    lengths = np.array([tokens - 20_000, 12_345, 0, 7655], np.int32)
    request = request_of(
        tmp_path, lengths, seq_length=seq_length, split_name="valid", drop_last=False
    )
    expected = CORE.helpers_cpp.build_sample_idx_int32(
        lengths, np.arange(4, dtype=np.int32), seq_length, 1, tokens, False, 1
    )

    samples = count(request, tokens).samples
    same(sample_rows(tmp_path, lengths, seq_length, 1, samples), expected)


@given(st.lists(st.floats(1e-5, 1.0), min_size=1, max_size=40), st.integers(0, 400))
@settings(max_examples=80, deadline=None)
def test_greedy_blends(weights: list[float], size: int) -> None:
    expected = np.zeros(size, np.int16), np.zeros(size, np.int64)
    CORE.helpers_cpp.build_blending_indices(*expected, np.array(weights), len(weights), size, False)
    _same_blend(weights, [2**30] * len(weights), size, expected)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=30))
@settings(max_examples=80, deadline=None)
def test_exhaustive_blends(sizes: list[int]) -> None:
    total = sum(sizes)
    expected = np.zeros(total, np.int16), np.zeros(total, np.int64)
    CORE.helpers_cpp.build_exhaustive_blending_indices(*expected, np.array(sizes), len(sizes))
    _same_blend([n / float(total) for n in sizes], sizes, total, expected)


def _same_blend(
    weights: list[float], sizes: list[int], total: int, expected: tuple[Any, Any]
) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        scratch(Path(folder) / "d") as datasets,
        scratch(Path(folder) / "n") as numbers,
    ):
        _index.write_blend(weights, sizes, total, datasets, 0, numbers, 0)
        same(content(datasets, np.int16), expected[0])
        same(content(numbers, np.int64), expected[1])


def test_ten_thousand_documents(tmp_path: Path) -> None:
    """Several batches of draws and masks in one stream, through all three arrays."""
    lengths = np.random.default_rng(1).integers(0, 90, 10_000).tolist()
    prefix = write_pair(tmp_path / "pair", lengths)
    for asked in (None, 100_000, 150_000):
        request = request_of(prefix, lengths, num_samples=asked)
        build_index(request, tmp_path, 2)
        same_index(MegatronIndex(tmp_path, request), theirs(request))


@pytest.fixture
def pairs(tmp_path: Path) -> list[Path]:
    rng = np.random.default_rng(2)
    return [
        write_pair(tmp_path / f"pair{n}", rng.integers(0, 50, size).tolist())
        for n, size in enumerate((300, 40, 111))
    ]


def _no_building(patch: pytest.MonkeyPatch) -> None:
    """Whoever builds an index from now on fails."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("Megatron builds an index itself")

    for name in ("_build_document_index", "_build_shuffle_index"):
        patch.setattr(CORE.gpt_dataset, name, refuse)
    from megatron.core.datasets import helpers

    for name in ("build_sample_idx", "build_blending_indices", "build_exhaustive_blending_indices"):
        patch.setattr(helpers, name, refuse)


def _requests(pairs: list[Path], split: str, name: str) -> list[IndexRequest]:
    requests = []
    for pair in pairs:
        bounds = split_ranges(split, len(CORE.IndexedDataset(str(pair))))[
            ("train", "valid", "test").index(name)
        ]
        assert bounds is not None
        requests.append(
            request_of(pair, [], first=bounds[0], last=bounds[1], split_name=name, split=split)
        )
    return requests


@pytest.mark.parametrize("asked", [None, 30, 5000])
def test_megatron_uses_the_index_of_one_dataset(
    asked: int | None, pairs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, made = tmp_path / "cache", []
    for name in ("train", "valid", "test"):
        (request,) = _requests(pairs[:1], "90,8,2", name)
        request = replace(request, num_samples=asked)
        build_index(request, folder, 1, TOKENIZER)
        made.append(MegatronIndex(folder, request, TOKENIZER))
    _no_building(monkeypatch)
    config = config_of(
        made[0].request, blend=([str(pairs[0])], None), split="90,8,2", path_to_cache=str(folder)
    )
    before = sorted(path.name for path in folder.iterdir())
    for index, dataset in zip(
        made,
        CORE.BlendedMegatronDatasetBuilder(
            CORE.GPTDataset, [asked] * 3, lambda: True, config
        ).build(),
        strict=True,
    ):
        assert cache_names(index.request, TOKENIZER).base.startswith(
            dataset.unique_description_hash
        )
        assert (
            dataset.unique_description
            == cache_names(index.request, TOKENIZER).path(folder, "description.txt").read_text()
        )
        same_index(index, dataset)
        assert len(dataset[0]["tokens"]) == 8
    assert sorted(path.name for path in folder.iterdir()) == before


BLENDS: list[tuple[list[float] | None, int | None]] = [
    ([0.2, 0.1, 0.7], 400),
    ([3, 1, 2], 5000),
    (None, None),
    (None, 100),
]


@pytest.mark.parametrize(("weights", "size"), BLENDS)
@pytest.mark.parametrize("per_split", [False, True])
def test_megatron_uses_the_blend(
    weights: list[float] | None,
    size: int | None,
    per_split: bool,
    pairs: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it builds by itself is what we build; and in our folder it builds nothing."""
    if per_split:
        requests = [
            request_of(pair, range(len(CORE.IndexedDataset(str(pair)))), split_name="valid")
            for pair in pairs
        ]
        blends: dict[str, Any] = {
            "blend_per_split": [None, ([str(p) for p in pairs], weights), None]
        }
        sizes: list[int | None] = [0, size, 0]
    else:
        requests = _requests(pairs, "90,8,2", "valid")
        blends = {"blend": ([str(p) for p in pairs], weights), "split": "90,8,2"}
        sizes = [size] * 3
    blend = plan_blend(requests, weights, size)

    def megatrons(cache: str | None) -> Any:
        return CORE.BlendedMegatronDatasetBuilder(
            CORE.GPTDataset,
            sizes,
            lambda: True,
            config_of(requests[0], **blends, path_to_cache=cache),
        ).build()[1]

    built = megatrons(None)
    folder = tmp_path / "cache"
    made = _made(blend, folder)
    _compare_blend(made, built)
    if not per_split:
        for name in ("train", "test"):
            _made(plan_blend(_requests(pairs, "90,8,2", name), weights, size), folder)
    _no_building(monkeypatch)
    before = sorted(path.name for path in folder.iterdir())
    used = megatrons(str(folder))
    _compare_blend(made, used)
    assert used.unique_description == blend_names(blend, TOKENIZER).description
    assert sorted(path.name for path in folder.iterdir()) == before


def _made(blend: Blend, folder: Path) -> MegatronBlend:
    for request in blend.requests:
        build_index(request, folder, 1, TOKENIZER)
    build_blend(blend, folder, TOKENIZER)
    return MegatronBlend(folder, blend, TOKENIZER)


def _compare_blend(made: MegatronBlend, dataset: Any) -> None:
    assert isinstance(dataset, CORE.BlendedDataset)
    assert [index.num_samples for index in made.indexes] == [len(d) for d in dataset.datasets]
    for index, part in zip(made.indexes, dataset.datasets, strict=True):
        same_index(index, part)
    same(made.datasets, dataset.dataset_index)
    same(made.numbers, dataset.dataset_sample_index)


@given(
    st.sampled_from(["949,50,1", "1", "90,8,2", "1,1,1", "0.3,0.3,0.4", "50,50", "99,1,0"]),
    st.integers(1, 2**31),
)
@settings(max_examples=100, deadline=None)
def test_splits(split: str, sequences: int) -> None:
    config = config_of(request_of(Path("x"), [1]), blend=(["x"], None), split=split)
    for ours, bounds in zip(split_ranges(split, sequences), config.split_matrix, strict=True):
        assert ours == (bounds and tuple(int(round(b * float(sequences))) for b in bounds))  # noqa: RUF046


def test_overdraws_are_refused_where_megatron_does(pairs: list[Path], tmp_path: Path) -> None:
    """A blend that asks for more than its indices hold: IndexError there, a ConfigError here."""
    requests = [request_of(pair, range(len(CORE.IndexedDataset(str(pair))))) for pair in pairs]
    blend = Blend(tuple(requests), (0.1, 0.8, 0.1), 2000)
    assert read_index_sizes(requests[1]).samples < 1600
    with pytest.raises(ConfigError, match="draws"):
        build_blend(blend, tmp_path)
    with pytest.raises(IndexError, match="oversamples"):
        CORE.BlendedDataset(
            [theirs(request) for request in requests], [0.1, 0.8, 0.1], 2000, config_of(requests[0])
        )
