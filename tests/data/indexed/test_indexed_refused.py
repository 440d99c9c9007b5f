"""A wrong .idx or .bin is refused with its place, whatever bytes it has."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st

from tests.data.pairs import write_documents
from trainkit.base.errors import ConfigError, Exit
from trainkit.data import IndexedDataset
from trainkit.data.indexed.format import HEADER, MAGIC


def _pair(
    sequences: int,
    entries: int,
    lengths: list[int],
    offsets: list[int],
    documents: list[int],
    *,
    version: int = 1,
    code: int = 8,
) -> bytes:
    header = HEADER.pack(MAGIC, version, code, sequences, entries)
    return (
        header
        + np.array(lengths, "<i4").tobytes()
        + np.array(offsets, "<i8").tobytes()
        + np.array(documents, "<i8").tobytes()
    )


GOOD = _pair(2, 3, [2, 1], [0, 4], [0, 1, 2])


CORRUPTIONS = {
    "empty": (b"", "begins with b''"),
    "magic": (b"PK\x03\x04" + GOOD[4:], "begins with b'PK"),
    "older": (b"TNTIDX\0\0" + GOOD[8:], "older 'lazy'"),
    "short header": (GOOD[:20], "ends after 20 bytes, inside its header of 34"),
    "version": (_pair(2, 3, [2, 1], [0, 4], [0, 1, 2], version=2), "version 2, not 1"),
    "dtype": (_pair(2, 3, [2, 1], [0, 4], [0, 1, 2], code=99), "dtype code 99"),
    "float": (_pair(2, 3, [2, 1], [0, 4], [0, 1, 2], code=7), "dtype code 7"),
    "truncated": (GOOD[:-1], "has 81 bytes, but 2 sequences and 3 document entries .* take 82"),
    "too long": (GOOD + b"123", "has 85 bytes"),
    "huge count": (
        _pair(2**63, 2**64 - 1, [2, 1], [0, 4], [0, 1, 2]),
        "9,223,372,036,854,775,808 sequences",
    ),
    "no documents": (_pair(0, 0, [], [], []), "at least 1"),
    "negative": (_pair(2, 3, [2, -1], [0, 4], [0, 1, 2]), "sequence 1 has length -1"),
    "negative inside": (
        _pair(3, 4, [2, -1, 2], [0, 4, 2], [0, 1, 2, 3]),
        "sequence 1 has length -1",
    ),
    "offset": (
        _pair(3, 4, [2, 0, 1], [0, 6, 4], [0, 1, 2, 3]),
        "sequence 1 begins at byte 6, but the lengths before it sum to byte 4",
    ),
    "odd offset": (_pair(2, 3, [2, 1], [0, 3], [0, 1, 2]), "sequence 1 begins at byte 3"),
    "last offset": (_pair(2, 3, [2, 1], [0, -4], [0, 1, 2]), "sequence 1 begins at byte -4"),
    "huge offset": (
        _pair(2, 3, [2, 1], [0, 2**63 - 2], [0, 1, 2]),
        "describes 9,223,372,036,854,775,808",
    ),
    "first offset": (_pair(2, 3, [2, 1], [2, 4], [0, 1, 2]), "sequence 0 begins at byte 2"),
    "document start": (_pair(2, 3, [2, 1], [0, 4], [1, 1, 2]), "goes from 1 to 2, not from 0 to 2"),
    "document end": (_pair(2, 3, [2, 1], [0, 4], [0, 1, 1]), "goes from 0 to 1"),
    "document order": (
        _pair(2, 4, [2, 1], [0, 4], [0, 2, 1, 2]),
        "document 1 ends before it begins",
    ),
}


@pytest.mark.parametrize("case", CORRUPTIONS)
def test_a_wrong_index_is_refused_with_words(case: str, tmp_path: Path) -> None:
    content, words = CORRUPTIONS[case]
    (tmp_path / "x.idx").write_bytes(content)
    (tmp_path / "x.bin").write_bytes(bytes(6))
    for mmap in (True, False):
        with pytest.raises(ConfigError, match=words) as caught:
            IndexedDataset(tmp_path / "x", mmap=mmap).verify()
        assert caught.value.exit == Exit.STAGE_FAILED
        assert "x.idx" in str(caught.value)
    assert caught.value.problems()[0]["hint"]


@pytest.mark.parametrize("size", [0, 4, 5, 7, 8])
def test_a_bin_of_another_size_is_refused(size: int, tmp_path: Path) -> None:
    (tmp_path / "x.idx").write_bytes(GOOD)
    (tmp_path / "x.bin").write_bytes(bytes(size))
    with pytest.raises(ConfigError, match=rf"x\.bin: has {size} bytes, but x\.idx describes 6"):
        IndexedDataset(tmp_path / "x")


@pytest.mark.parametrize("missing", ["x.idx", "x.bin"])
def test_a_missing_half_is_named(missing: str, tmp_path: Path) -> None:
    write_documents(tmp_path / "x", [[1]])
    (tmp_path / missing).unlink()
    with pytest.raises(ConfigError, match=f"{missing}: No such file"):
        IndexedDataset(tmp_path / "x")


def test_no_tokens_at_all(tmp_path: Path) -> None:
    for documents in (0, 2):
        dataset = IndexedDataset(
            write_documents(tmp_path / str(documents), [[] for _ in range(documents)])
        )
        assert (len(dataset), dataset.num_tokens) == (0, 0)
        assert dataset.document_indices.tolist() == [0] * (documents + 1)


def _read_or_refuse(folder: Path, content: bytes, size: int) -> None:
    """Whatever the bytes: ConfigError, or a dataset that can be read; and if it is verified, it
    is whole."""
    (folder / "x.idx").write_bytes(content)
    (folder / "x.bin").write_bytes(bytes(size))
    for mmap in (True, False):
        try:
            dataset = IndexedDataset(folder / "x", mmap=mmap)
        except ConfigError:
            continue
        for read, count in ((dataset.get, len(dataset)), (dataset.document, dataset.num_documents)):
            for number in range(count):
                with contextlib.suppress(ConfigError):
                    read(number)
        try:
            dataset.verify()
        except ConfigError:
            continue
        assert (
            sum(len(sequence) for document in dataset.documents for sequence in document)
            == dataset.num_tokens
        )


LONGER = _pair(4, 5, [2, 1, 0, 3], [0, 4, 6, 6], [0, 1, 2, 2, 4])


HOSTILE = st.one_of(
    st.integers(-3, 8), st.sampled_from([2**31 - 1, 2**31, 2**63 - 1, -(2**63), 2**62])
)


def _hostile(numbers: list[int]) -> bytes:
    """A header that fits, then arrays of any numbers."""
    lengths, offsets, documents = numbers[:4], numbers[4:8], numbers[8:]
    header = HEADER.pack(MAGIC, 1, 8, 4, 5)
    return (
        header
        + np.array(lengths).astype("<i4").tobytes()
        + np.array(offsets, "<i8").tobytes()
        + np.array(documents, "<i8").tobytes()
    )


mutated = st.builds(
    lambda good, changes, end: bytes(changes.get(i, b) for i, b in enumerate(good))[:end],
    st.sampled_from([GOOD, LONGER]),
    st.dictionaries(st.integers(0, len(LONGER)), st.integers(0, 255), max_size=4),
    st.integers(30, len(LONGER)),
)


any_index = st.one_of(
    st.binary(max_size=90),
    st.binary(max_size=90).map(lambda b: MAGIC + b),
    mutated,
    st.lists(HOSTILE, min_size=13, max_size=13).map(_hostile),
)


any_bin = st.sampled_from([0, 3, 6, 12, 16])


@given(any_index, any_bin)
@example(GOOD, 6)
@example(LONGER, 12)
@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_fuzz_only_config_errors(tmp_path: Path, content: bytes, size: int) -> None:
    _read_or_refuse(tmp_path, content, size)


@pytest.mark.slow
@pytest.mark.timeout(3 * 3600)
@given(any_index, any_bin)
@settings(max_examples=200_000, deadline=None, suppress_health_check=list(HealthCheck))
def test_fuzz_for_minutes(tmp_path: Path, content: bytes, size: int) -> None:
    _read_or_refuse(tmp_path, content, size)
