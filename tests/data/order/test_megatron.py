"""Megatron's sample order: numpy's stream, the rules of the three arrays, what is refused.
Golden arrays where they are on this machine."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

from tests.data.megatron_cases import (
    content,
    documents_of,
    request_of,
    sample_rows,
    scratch,
    write_pair,
)
from tests.data.order.beside import ticks_beside
from tests.shared import MISSING, golden
from trainkit import _index
from trainkit.base.errors import ConfigError, Exit
from trainkit.data.order.megatron_cache import split_ranges
from trainkit.data.order.megatron_index import (
    IndexRequest,
    IndexSizes,
    MegatronIndex,
    build_index,
    cache_names,
    count,
    read_index_sizes,
)

GOLDEN = golden()


needs_golden = pytest.mark.skipif(GOLDEN is None, reason=MISSING)


seeds = st.integers(0, 2**32 - 1)


def _cases(kind: str) -> list[dict[str, Any]]:
    """Golden cases of a kind; none without the files."""
    if GOLDEN is None:
        return []
    cases: list[dict[str, Any]] = [
        c for c in json.loads((GOLDEN / "manifest.json").read_text())["cases"] if c["kind"] == kind
    ]
    assert cases, kind
    return cases


def _arrays(name: str) -> Any:
    assert GOLDEN is not None
    return np.load(GOLDEN / name)


@pytest.mark.parametrize("dtype", [np.uint32, np.int64])
def test_shuffle_is_numpys_across_masks_and_batches(dtype: Any) -> None:
    sizes = [
        0,
        1,
        2,
        3,
        4,
        5,
        254,
        255,
        256,
        257,
        258,
        511,
        512,
        513,
        514,
        623,
        624,
        625,
        4095,
        4096,
        4097,
        65535,
        65536,
        65537,
        65538,
        300_007,
    ]
    ours, theirs = _index.MersenneTwister(97), np.random.RandomState(97)
    for size in sizes:  # one stream: an output too many or too few shows in the next
        a, b = np.arange(size, dtype=dtype), np.arange(size, dtype=dtype)
        ours.shuffle(a)
        theirs.shuffle(b)
        assert np.array_equal(a, b), size


@given(seeds, st.lists(st.integers(0, 3000), max_size=4))
@settings(max_examples=50, deadline=None)
def test_shuffle_is_numpys_for_every_seed(seed: int, sizes: list[int]) -> None:
    ours, theirs = _index.MersenneTwister(seed), np.random.RandomState(seed)
    for size in sizes:
        a, b = np.arange(size, dtype=np.uint32), np.arange(size, dtype=np.uint32)
        ours.shuffle(a)
        theirs.shuffle(b)
        assert np.array_equal(a, b)


@pytest.mark.parametrize("narrow", [1, 2, 100, 255, 256, 1000, 2999, 3000])
def test_draws_above_32_bits_take_two_outputs_each(narrow: int) -> None:
    """Beyond 2^32 elements numpy draws 64 bits: with a lower limit, the shuffle written out in
    Python over numpy's own outputs."""
    values = np.arange(3000, dtype=np.int64)
    _index.MersenneTwister(5).shuffle(values, narrow)
    stream = np.random.Generator(np.random.RandomState(5)._bit_generator)
    expected = list(range(3000))
    for i in range(2999, 0, -1):
        mask, drawn = 2 ** i.bit_length() - 1, i + 1
        while drawn > i:
            drawn = (
                int(
                    stream.integers(0, 2**64, dtype=np.uint64)
                    if i > narrow
                    else stream.bit_generator.random_raw()
                )
                & mask
            )
        expected[i], expected[drawn] = expected[drawn], expected[i]
    assert values.tolist() == expected


def test_the_lock_is_released() -> None:
    """Python code runs while another thread shuffles."""
    numbers = np.arange(20_000_000, dtype=np.uint32)
    assert ticks_beside(lambda: _index.MersenneTwister(1).shuffle(numbers)) > 5


@needs_golden
@pytest.mark.parametrize("case", _cases("order"), ids=lambda case: str(case["key"]))
def test_golden_document_and_shuffle_index(case: dict[str, Any], tmp_path: Path) -> None:
    arrays, generator = _arrays("helpers.npz"), _index.MersenneTwister(case["seed"])
    first, documents = case["first_doc"], case["n_docs"]
    with scratch(tmp_path / "lengths") as file:
        os.pwrite(file, bytes(4 * (first + documents)), 0)
        index = _index.MegatronDocuments(file, 0, first, first + documents, case["epochs"])
    together = len(index) - documents * case["separate_last"]
    index.shuffle(generator, 0, together)
    index.shuffle(generator, together, len(index))
    with scratch(tmp_path / "out") as file:
        index.write_ids(file, 0, 1)
        assert np.array_equal(content(file, np.int32), arrays[f"{case['key']}_doc"])
    for wide in (False, True):
        with scratch(tmp_path / "out") as file:
            again = _index.MersenneTwister(case["seed"])
            documents_of(tmp_path / "lengths", np.zeros(together, np.int32)).shuffle(
                again, 0, together
            )
            documents_of(tmp_path / "lengths", np.zeros(len(index), np.int32)).shuffle(
                again, together, len(index)
            )
            _index.write_shuffle_index(
                again, case["shuffle_first"], case["shuffle_total"], wide, file, 0
            )
            assert np.array_equal(
                content(file, np.int64 if wide else np.uint32), arrays[f"{case['key']}_shuffle"]
            )


@needs_golden
@pytest.mark.parametrize("wide", [False, True])
def test_golden_sample_index(wide: bool, tmp_path: Path) -> None:
    arrays = _arrays("helpers.npz")
    for case in _cases("build_sample_idx"):
        sizes, order, out = (arrays[f"{case['key']}_{part}"] for part in ("sizes", "doc", "out"))
        rows = sample_rows(
            tmp_path, sizes[order], case["seq"], case["extra"], len(out) - 1, wide=wide
        )
        assert np.array_equal(rows, out), case
        request = request_of(
            tmp_path,
            sizes,
            seq_length=case["seq"],
            extra_token=bool(case["extra"]),
            drop_last=case["drop_last"],
            split_name="valid",
        )
        assert count(request, int(sizes[order].sum())).samples == len(out) - 1, case


@pytest.mark.parametrize("chunk", [1, 6, 7, 9, 19, 20])
def test_lengths_are_read_in_several_chunks(chunk: int, tmp_path: Path) -> None:
    """Three chunks and more, two epochs: the ids, and the rows of samples, which need each id's
    own length, as numpy makes them."""
    rng = np.random.RandomState(3)
    first, count, epochs, seq_length = 5, 20, 2, 4
    lengths = rng.randint(0, 9, first + count).astype(np.int32)
    with scratch(tmp_path / "lengths") as file:
        os.pwrite(file, b"abc" + lengths.tobytes(), 0)  # not aligned, as in .idx
        index = _index.MegatronDocuments(file, 3, first, first + count, epochs, chunk=chunk)
    index.shuffle(_index.MersenneTwister(7), 0, len(index))
    order = np.tile(np.arange(first, first + count, dtype=np.int32), epochs)
    np.random.RandomState(7).shuffle(order)
    assert (
        index.tokens == epochs * int(lengths[first:].sum())
        and index.last_length == lengths[order[-1]]
    )
    samples = (index.tokens - 1) // seq_length
    with scratch(tmp_path / "ids") as file:
        index.write_ids(file, 0, 1)
        assert np.array_equal(content(file, np.int32), order)
    with scratch(tmp_path / "rows") as file:
        index.write_samples(file, 0, seq_length, 1, samples, False, 1)
        rows = content(file, np.int32).reshape(-1, 2)
    ends = np.cumsum(lengths[order])
    documents = np.searchsorted(ends, np.arange(samples + 1) * seq_length, side="right")
    offsets = np.arange(samples + 1) * seq_length - (ends - lengths[order])[documents]
    documents[0] = offsets[0] = 0  # the first row, whatever the first document's length
    assert np.array_equal(rows, np.stack([documents, offsets], 1))


def _compare(index: MegatronIndex, documents: Any, samples: Any, shuffle: Any) -> None:
    for ours, theirs in (
        (index.documents, documents),
        (index.samples, samples),
        (index.shuffle, shuffle),
    ):
        assert ours.dtype == theirs.dtype
        assert np.array_equal(ours, theirs)


@needs_golden
def test_golden_gpt_datasets(tmp_path: Path) -> None:
    assert GOLDEN is not None
    arrays = _arrays("gpt_dataset.npz")
    for case in _cases("GPTDataset"):
        prefix = GOLDEN / case["prefix"]
        sequences = len(np.unique(arrays[f"{case['key']}_doc"]))
        request = request_of(
            prefix,
            range(sequences),
            seq_length=case["seq"],
            seed=case["seed"],
            num_samples=case["num_samples"],
            extra_token=case["extra"],
        )
        counts = build_index(request, tmp_path, threads=1)
        assert (counts.epochs, counts.samples) == (case["epochs"], case["len"])
        _compare(
            MegatronIndex(tmp_path, request),
            *(arrays[f"{case['key']}_{part}"] for part in ("doc", "sample", "shuffle")),
        )
    for case in _cases("GPTDataset_valid_keep_last"):
        prefix, documents = GOLDEN / case["prefix"], range(case["docs"])
        request = request_of(
            prefix,
            documents,
            seq_length=case["seq"],
            seed=case["seed"],
            split_name="valid",
            drop_last=False,
        )
        assert build_index(request, tmp_path, threads=2).samples == case["len"]
        _compare(
            MegatronIndex(tmp_path, request),
            *(arrays[f"{case['key']}_{part}"] for part in ("doc", "sample", "shuffle")),
        )


@needs_golden
def test_rows_that_megatron_fails_on_are_refused(tmp_path: Path) -> None:
    """A partial last sample before a last document of no tokens."""
    assert GOLDEN is not None
    for case in json.loads((GOLDEN / "manifest.json").read_text())["megatron_asserts"]:
        prefix = write_pair(tmp_path / "pair", [1] * 9 + [0])
        rows = sample_rows(tmp_path, np.array(case["sizes"])[case["doc"]], case["seq"], 1, 1)
        assert rows[0].tolist() == [0, 0]
        seed = next(s for s in range(1000) if np.random.RandomState(s).permutation(10)[-1] == 9)
        request = request_of(
            prefix, range(10), seed=seed, seq_length=5, split_name="valid", drop_last=False
        )
        with pytest.raises(
            ConfigError, match=f"seed {seed} puts a document of no tokens last"
        ) as caught:
            build_index(request, tmp_path, 1)
        assert caught.value.exit == Exit.STAGE_FAILED
        assert not cache_names(request).path(tmp_path, "description.txt").exists()
        assert read_index_sizes(replace(request, drop_last=True)).samples == 1


lengths_list = st.lists(st.integers(0, 40) | st.sampled_from([0, 8, 16]), min_size=1, max_size=60)


def _rows_by_definition(
    lengths: list[int], seq_length: int, extra: int, samples: int
) -> list[list[int]]:
    ends = np.cumsum(lengths).tolist()
    rows = [[0, 0]]
    for k in range(1, samples + 1):
        token = k * seq_length
        found = [d for d, end in enumerate(ends) if (token < end if extra else token <= end)]
        rows.append(
            [found[0], token - ends[found[0]] + lengths[found[0]]]
            if found
            else [len(lengths) - 1, lengths[-1] - extra]
        )
    return rows


@given(lengths_list, st.integers(1, 20), st.integers(0, 1), st.integers(0, 3), st.booleans())
@settings(max_examples=150, deadline=None)
def test_sample_index_is_what_it_is_defined_as(
    lengths: list[int], seq_length: int, extra: int, more: int, wide: bool
) -> None:
    samples = max(0, (sum(lengths) - extra) // seq_length) + more
    with tempfile.TemporaryDirectory() as folder:
        rows = sample_rows(Path(folder), lengths, seq_length, extra, samples, wide=wide)
    assert rows.tolist() == _rows_by_definition(lengths, seq_length, extra, samples)


@pytest.mark.parametrize("seq_length", [1, 7, 2048])
def test_sample_index_over_blocks_and_threads(seq_length: int, tmp_path: Path) -> None:
    """Blocks of 65,536 documents and buffers of 16,384 rows: as the definition by numpy,
    whatever the threads."""
    lengths = (
        np.random.default_rng(3)
        .integers(0, 12 if seq_length == 1 else 50, 200_000)
        .astype(np.int32)
    )
    lengths[[70_000, 199_999]] = 100_000, 5
    for extra in (0, 1):
        ends = np.cumsum(lengths, dtype=np.int64)
        samples = int((ends[-1] - extra) // seq_length)
        tokens = np.arange(1, samples + 1) * seq_length
        documents = np.searchsorted(ends, tokens, "right" if extra else "left")
        expected = np.vstack(
            [[0, 0], np.stack([documents, tokens - ends[documents] + lengths[documents]], 1)]
        )
        for threads in (1, 2, 3):
            assert np.array_equal(
                sample_rows(tmp_path, lengths, seq_length, extra, samples, threads=threads),
                expected,
            )


def test_the_last_partial_sample_is_counted_in_float32() -> None:
    request = IndexRequest(Path("x"), 0, 1, "valid", 16, 1, extra_token=True, drop_last=False)
    assert count(request, 50_000_003).samples == 3_125_000  # 3,125,001 hold a token
    assert count(replace(request, drop_last=True), 50_000_003).samples == 3_125_000
    assert count(request, 50_003).samples == 3126


def test_rows_beyond_the_tokens_point_to_the_end(tmp_path: Path) -> None:
    """Where float32 counts more samples than there are: float32(2^24 + 3) is 2^24 + 4."""
    lengths = [2**24, 4]
    request = IndexRequest(Path("x"), 0, 2, "valid", 1, 1, extra_token=True, drop_last=False)
    samples = count(request, sum(lengths)).samples
    assert samples == 2**24 + 4
    rows = sample_rows(tmp_path, lengths, 1, 1, samples)
    assert rows[-3:].tolist() == [[1, 2], [1, 3], [1, 3]]


@given(st.integers(1, 400), st.integers(1, 30), st.booleans(), st.integers(1, 300))
def test_epochs_are_the_fewest_that_suffice(
    tokens: int, seq_length: int, extra: bool, asked: int
) -> None:
    request = request_of(
        Path("x"), [1], seq_length=seq_length, extra_token=extra, num_samples=asked
    )
    if tokens < seq_length + extra:  # epochs are joined, so that samples come of it all the same
        assert count(request, tokens).samples >= asked
        request = replace(request, num_samples=None)
        with pytest.raises(ConfigError, match="fewer than one sample of"):
            count(request, tokens)
        return
    counts = count(request, tokens)
    assert counts.samples >= asked
    assert counts.epochs == 1 or ((counts.epochs - 1) * tokens - extra) // seq_length < asked
    assert counts.separate_last == (
        counts.epochs > 1
        and asked - ((counts.epochs - 1) * tokens - extra) // seq_length
        < int(0.8 * ((tokens - extra) // seq_length))
    )


def test_files_are_those_numpy_would_save(tmp_path: Path) -> None:
    lengths = [5, 0, 30, 7, 7, 1, 22]
    request = request_of(write_pair(tmp_path / "pair", lengths), lengths, num_samples=20)
    counts = build_index(request, tmp_path / "out", threads=2)
    index = MegatronIndex(tmp_path / "out", request)
    assert counts == IndexSizes(72, 3, True, 17, 26)
    for name, array in (
        ("document", index.documents),
        ("sample", index.samples),
        ("shuffle", index.shuffle),
    ):
        np.save(tmp_path / "saved.npy", array)
        assert (
            cache_names(request).path(tmp_path / "out", f"{name}_index.npy").read_bytes()
            == (tmp_path / "saved.npy").read_bytes()
        )
    assert sorted(index.shuffle[:17]) == list(range(17)) and sorted(index.shuffle) == list(
        range(26)
    )
    assert len(list((tmp_path / "out").iterdir())) == 5


def test_progress_reaches_its_total(tmp_path: Path) -> None:
    lengths = [5, 9, 30]
    request = request_of(write_pair(tmp_path / "pair", lengths), lengths)
    seen: list[tuple[int, int]] = []
    build_index(request, tmp_path, 1, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (1, 1) and seen[:-1] == sorted(seen[:-1]) and len(seen) > 3
    assert all(0 < done <= total for done, total in seen)


@pytest.mark.parametrize(
    ("split", "sequences", "ranges"),
    [
        ("949,50,1", 1000, [(0, 949), (949, 999), (999, 1000)]),
        ("1", 7, [(0, 7), None, None]),
        ("0,1,0", 7, [None, (0, 7), None]),
        ("50,50", 5, [(0, 2), (2, 5), None]),  # 2.5 rounds to even
        ("50,50", 7, [(0, 4), (4, 7), None]),
        ("99,1", 10, [(0, 10), (10, 10), None]),
    ],
)
def test_splits(split: str, sequences: int, ranges: list[Any]) -> None:
    assert split_ranges(split, sequences) == ranges


def test_numbers_stay_in_their_dtype() -> None:
    values: NDArray[np.uint32] = np.arange(5, dtype=np.uint32)
    _index.MersenneTwister(1).shuffle(values)
    assert values.dtype == np.uint32 and sorted(values.tolist()) == [0, 1, 2, 3, 4]
    with pytest.raises(TypeError):
        _index.MersenneTwister(1).shuffle(np.arange(5, dtype=np.int32))  # type: ignore[arg-type]
