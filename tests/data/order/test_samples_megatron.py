"""Reading samples by Megatron's index: across documents, and never beyond the file."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from numpy.typing import NDArray

from tests.data.order.test_samples import GOLDEN, both, needs_golden, read
from trainkit import _index
from trainkit.base.errors import ConfigError, Exit
from trainkit.data.indexed.dataset import IndexedDataset, IndexedWriter
from trainkit.data.order.samples import (
    NO_TOKEN,
    IdRange,
    MegatronSamples,
)

# Megatron's samples


def _expected(
    dataset: IndexedDataset,
    documents: list[int],
    places: list[list[int]],
    seq_length: int,
    extra: int,
) -> list[list[int]]:
    """Every sample of an index, token by token."""
    rows = []
    for (first, begin), (last, end) in pairwise(places):
        row: list[int] = []
        for position in range(first, last + 1):
            sequence = dataset[documents[position]].tolist()
            row += sequence[
                begin if position == first else 0 : (
                    end + extra if position == last else len(sequence)
                )
            ]
        rows.append(row + [NO_TOKEN] * (seq_length + 1 - len(row)))
    return rows


def _megatron_index(
    lengths: list[int], documents: list[int], seq_length: int, extra: int
) -> list[list[int]]:
    """Places of all whole samples, and of a short last one that is kept: the rule of
    helpers.build_sample_idx, token by token."""
    places, position, offset = [[0, 0]], 0, 0
    total = sum(lengths[d] for d in documents)
    for _ in range(-(-(total - extra) // seq_length)):
        left = seq_length + extra
        while left:
            rest = lengths[documents[position]] - offset
            left -= rest
            if left <= 0:
                offset += left + rest - extra
                left = 0
            elif position == len(documents) - 1:
                offset, left = lengths[documents[position]] - extra, 0
            else:
                position, offset = position + 1, 0
        places.append([position, offset])
    return places


@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=8),
    epochs=st.integers(1, 2),
    seq_length=st.integers(1, 9),
    extra=st.booleans(),
    wide=st.booleans(),
    mmap=st.booleans(),
    data=st.data(),
)
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_megatron_samples_cross_documents(
    tmp_path: Path,
    lengths: list[int],
    epochs: int,
    seq_length: int,
    extra: bool,
    wide: bool,
    mmap: bool,
    data: st.DataObject,
) -> None:
    # a last sequence of length 0 would end at token -1, which Megatron refuses
    lengths = [*lengths, 3]
    with pytest.MonkeyPatch.context() as patch, IndexedWriter(tmp_path / "x", "uint16") as writer:
        patch.setattr(os, "fsync", lambda _: None)
        writer.add_document(np.arange(1, sum(lengths) + 1, dtype=np.uint16), lengths)
    dataset = IndexedDataset(tmp_path / "x", mmap=mmap)
    documents = [
        *data.draw(st.permutations(list(range(len(lengths) - 1)))),
        *range(len(lengths)),
    ] * (epochs - 1) + list(range(len(lengths)))
    places = _megatron_index(lengths, documents, seq_length, int(extra))
    samples = MegatronSamples(
        dataset,
        np.array(documents, np.int32),
        np.array(places, np.int64 if wide else np.int32),
        seq_length,
        extra_token=extra,
        mmap=mmap,
    )
    truth = _expected(dataset, documents, places, seq_length, int(extra))
    numbers = data.draw(st.lists(st.integers(0, len(truth) - 1), max_size=6)) if truth else []
    samples.ahead(np.array(numbers, np.int64))
    out, ids = read(samples, numbers, seq_length)
    assert samples.num_samples == len(truth)
    assert out.tolist() == [truth[n] for n in numbers]
    real = [t for n in numbers for t in truth[n] if t != NO_TOKEN]
    assert ids == IdRange(
        min(real, default=0), max(real, default=-1), sum(truth[n].count(NO_TOKEN) for n in numbers)
    )


@needs_golden
@both
def test_megatron_samples_equal_its_own_rows(mmap: bool) -> None:
    """Tokens and labels of every golden GPTDataset, a short last sample that was kept too."""
    assert GOLDEN is not None
    cases = [
        c
        for c in json.loads((GOLDEN / "manifest.json").read_text())["cases"]
        if c["kind"].startswith("GPTDataset")
    ]
    arrays = np.load(GOLDEN / "gpt_dataset.npz")
    short = 0
    for case in cases:
        key, seq_length = case["key"], case["seq"]
        dataset = IndexedDataset(GOLDEN / case["prefix"], mmap=mmap)
        extra = bool(case.get("extra", True))
        samples = MegatronSamples(
            dataset,
            arrays[f"{key}_doc"],
            arrays[f"{key}_sample"],
            seq_length,
            extra_token=extra,
            mmap=mmap,
        )
        shuffle = arrays[f"{key}_shuffle"].astype(np.int64)
        assert samples.num_samples == case["len"] == len(shuffle)
        if case["kind"] == "GPTDataset":
            numbers = shuffle[:: case["row_stride"]]
            out, ids = read(samples, numbers.tolist(), seq_length)
            assert ids.missing == (0 if extra else len(numbers))
            rows = np.concatenate([out[:, :-1], out[:, 1:]], 1)
            assert np.array_equal(np.where(rows == NO_TOKEN, 0, rows), arrays[f"{key}_rows"])
        else:
            out, ids = read(samples, [int(shuffle[case["last_index"]])], seq_length)
            tokens, labels = out[0, :-1], out[0, 1:]
            assert np.array_equal(
                np.where(tokens == NO_TOKEN, 0, tokens), arrays[f"{key}_lastrow_tokens"]
            )
            assert np.array_equal(
                np.where(labels == NO_TOKEN, 0, labels), arrays[f"{key}_lastrow_labels"]
            )
            assert np.array_equal(labels != NO_TOKEN, arrays[f"{key}_lastrow_lossmask"] == 1)
            short += ids.missing > 0
    assert short == 3


HOSTILE = st.one_of(st.integers(-3, 9), st.sampled_from([2**31 - 1, -(2**31)]))


HOSTILE_64 = st.one_of(HOSTILE, st.sampled_from([2**63 - 1, -(2**63), 2**62, 12, 13]))


@given(st.data())
@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_no_index_reads_beyond_the_file(tmp_path: Path, data: st.DataObject) -> None:
    """Arrays of any numbers, unaligned as in .idx: tokens of the file, or an error; never a
    crash, never other memory."""
    prefix = tmp_path / "x.bin"
    if not prefix.exists():
        np.full(6, 7, np.uint16).tofile(prefix)
    mmap = data.draw(st.booleans())
    reader = _index.Reader(str(prefix), 8, mmap)

    def draw(numbers: st.SearchStrategy[int], dtype: str, size: int) -> NDArray[Any]:
        values = np.array(data.draw(st.lists(numbers, min_size=size, max_size=size)), dtype)
        return np.frombuffer(b"x" + values.tobytes(), dtype, size, 1)

    sequences, positions, rows = (
        data.draw(st.integers(0, 3)),
        data.draw(st.integers(0, 4)),
        data.draw(st.integers(0, 4)),
    )
    documents, lengths = draw(HOSTILE, "<i4", positions), draw(HOSTILE, "<i4", sequences)
    offsets = draw(HOSTILE_64, "<i8", sequences)
    wide = data.draw(st.booleans())
    places = draw(HOSTILE_64 if wide else HOSTILE, "<i8" if wide else "<i4", 2 * rows).reshape(
        rows, 2
    )
    number = np.array([data.draw(HOSTILE_64)])
    extra, width = data.draw(st.integers(0, 1)), data.draw(st.integers(2, 8))
    out = np.full((3, width), 99, np.int64)
    arrays = (documents, places, lengths, offsets)
    try:
        reader.ahead_of_documents(*arrays, number, width, extra)
        low, high, missing = reader.documents(*arrays, number, np.array([1]), out, extra)
    except (ValueError, IndexError):
        assert (out[[0, 2]] == 99).all()
    else:
        tokens = out[1][out[1] != NO_TOKEN].tolist()
        # read from an odd byte on, the bytes change places
        assert (out[[0, 2]] == 99).all() and set(tokens) <= {0x0007, 0x0700}
        assert (low, high, missing) == (
            min(tokens, default=0),
            max(tokens, default=-1),
            width - len(tokens),
        )
    first, count = data.draw(HOSTILE_64), data.draw(HOSTILE_64)
    wide_out = np.empty((1, data.draw(st.integers(2, 8))), np.int64)
    try:
        reader.ahead(first, count, number, wide_out.shape[1])
        reader.windows(first, count, number, np.array([0]), wide_out)
    except (ValueError, IndexError):
        pass
    else:
        assert (wide_out == 7).all() and 0 <= first + number[0] < first + count <= 5 // (
            wide_out.shape[1] - 1
        )


@both
@pytest.mark.parametrize(
    ("documents", "places", "words"),
    [
        ([0, 3], [[0, 0], [1, 1]], "has sequence 3 of 2"),
        ([0, -1], [[0, 0], [1, 1]], "has sequence -1 of 2"),
        ([0, 1], [[0, 0], [2, 1]], "goes from position 0 to 2 of 2"),
        ([0, 1], [[1, 0], [0, 1]], "goes from position 1 to 0"),
        ([0, 1], [[0, 3], [0, 1]], "has tokens from 3 or to 1 of sequence 0"),
        ([0, 1], [[0, 9], [1, 1]], "has tokens from 9"),
        ([0, 1], [[0, 0], [0, 4]], "to 4 of sequence 0, which has 4"),
        ([0, 1], [[0, 0], [1, -2]], "to -2 of sequence 1"),
        ([0, 1], [[0, 0], [1, 3]], "has more than 5 tokens"),
    ],
)
def test_an_index_of_other_data_is_named(
    documents: list[int], places: list[list[int]], words: str, mmap: bool, tmp_path: Path
) -> None:
    with IndexedWriter(tmp_path / "x", "uint16") as writer:
        writer.add_documents(np.arange(8), [4, 4])
    samples = MegatronSamples(
        IndexedDataset(tmp_path / "x"),
        np.array(documents, np.int32),
        np.array(places, np.int32),
        4,
        mmap=mmap,
    )
    for call in (lambda: read(samples, [0], 4), lambda: samples.ahead(np.array([0]))):
        with pytest.raises(ConfigError, match=words) as caught:
            call()
        assert (
            caught.value.exit == Exit.STAGE_FAILED
            and "x.bin" in str(caught.value)
            and "prep-data --force" in str(caught.value)
        )
