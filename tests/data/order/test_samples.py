"""Reading samples: windows, Megatron's index and random tokens, all at once and within the file."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.shared import MISSING, golden
from trainkit import _index
from trainkit.base.errors import ConfigError, Exit
from trainkit.data.indexed.dataset import IndexedDataset, IndexedWriter
from trainkit.data.indexed.format import DTYPES, HEADER, MAGIC
from trainkit.data.order import samples as module
from trainkit.data.order.native import SplitName
from trainkit.data.order.samples import (
    IdRange,
    MegatronSamples,
    MockSamples,
    NativeSamples,
    Samples,
)

SPLIT_NAMES: tuple[SplitName, ...] = ("train", "valid", "test")


GOLDEN = golden()


needs_golden = pytest.mark.skipif(GOLDEN is None, reason=MISSING)


both = pytest.mark.parametrize("mmap", [True, False])


Numbers = NDArray[np.int64]


def _dataset(folder: Path, tokens: int | NDArray[Any], dtype: str = "int32") -> IndexedDataset:
    with IndexedWriter(folder / "data", dtype) as writer:
        writer.add_document(np.arange(tokens, dtype=dtype) if isinstance(tokens, int) else tokens)
    return IndexedDataset(folder / "data")


def read(samples: Samples, numbers: list[int], seq_length: int) -> tuple[Numbers, IdRange]:
    out = np.full((len(numbers), seq_length + 1), 99, np.int64)
    return out, samples.read(np.array(numbers, np.int64), np.arange(len(numbers)), out)


@both
@pytest.mark.parametrize("num_tokens", [81, 88, 89])
def test_native_samples_are_windows_that_share_one_token(
    num_tokens: int, mmap: bool, tmp_path: Path
) -> None:
    dataset, seq_length = _dataset(tmp_path, num_tokens), 8
    windows, seen = (num_tokens - 1) // seq_length, []
    for name in SPLIT_NAMES:
        samples = NativeSamples(dataset, "5,3,2", name, seq_length, mmap)
        numbers = list(range(samples.num_samples))
        samples.ahead(np.array(numbers, np.int64))
        out, ids = read(samples, numbers, seq_length)
        assert np.array_equal(out, out[:, :1] + np.arange(seq_length + 1))
        assert ids == IdRange(int(out[0, 0]), int(out[-1, -1]), 0)
        seen += out[:, 0].tolist()
        for wrong in ([samples.num_samples], [-1], [0, samples.num_samples]):
            with pytest.raises(IndexError, match=f"of {samples.num_samples}"):
                read(samples, wrong, seq_length)
            with pytest.raises(IndexError):
                samples.ahead(np.array(wrong))
    assert seen == list(range(0, windows * seq_length, seq_length))


@both
@pytest.mark.parametrize("dtype", sorted(d.name for d in DTYPES.values()))
def test_every_dtype_is_widened_exactly(dtype: str, mmap: bool, tmp_path: Path) -> None:
    # more bytes than one block of pread, and no multiple of a vector's
    limits, length = np.iinfo(dtype), 40_000
    tokens = np.random.default_rng(0).integers(
        limits.min, limits.max, 3 * length + 1, dtype, endpoint=True
    )
    tokens[5], tokens[2 * length + 7] = limits.max, limits.min
    samples = NativeSamples(_dataset(tmp_path, tokens, dtype), "1", "train", length, mmap)
    out, ids = read(samples, [2, 0], length)
    assert np.array_equal(out[0], tokens[2 * length :]) and np.array_equal(
        out[1], tokens[: length + 1]
    )
    assert ids == IdRange(limits.min, limits.max, 0)
    assert read(samples, [1], length)[1] == IdRange(
        int(tokens[length : 2 * length + 1].min()), int(tokens[length : 2 * length + 1].max()), 0
    )


@both
def test_rows_say_where_a_sample_goes(mmap: bool, tmp_path: Path) -> None:
    samples, out = (
        NativeSamples(_dataset(tmp_path, 50), "1", "train", 4, mmap),
        np.full((5, 5), 99, np.int64),
    )
    assert samples.read(np.array([3, 0]), np.array([4, 1]), out) == IdRange(0, 16, 0)
    assert out.tolist() == [[99] * 5, [0, 1, 2, 3, 4], [99] * 5, [99] * 5, [12, 13, 14, 15, 16]]
    nothing = np.empty(0, np.int64)
    assert samples.read(nothing, nothing, out) == IdRange(0, -1, 0)


@pytest.mark.parametrize(
    ("numbers", "rows", "out", "words"),
    [
        ([0], [2], np.empty((2, 5), np.int64), "row 2 of out, which has 2"),
        ([0], [-1], np.empty((2, 5), np.int64), "row -1 of out"),
        ([0, 1], [0], np.empty((2, 5), np.int64), "2 samples, but 1 rows"),
        ([0], [0], np.empty((2, 4), np.int64), r"\(2, 4\), not \(B, 5\)"),
        ([0], [0], np.empty(5, np.int64), r"\(5,\), not \(B, 5\)"),
        ([0], [0], np.empty((2, 5), np.int32), "int64"),
        ([0], [0], np.empty((5, 2), np.int64).T, "contiguous"),
        ([0], [0], np.frombuffer(bytes(80), np.int64).reshape(2, 5), "writable"),
        ([0], [0], np.empty(81, np.uint8)[1:].view(np.int64).reshape(2, 5), "aligned"),
        (np.array([0], np.int32), [0], np.empty((2, 5), np.int64), "rows must be"),
    ],
)
def test_wrong_arrays_are_refused(
    numbers: Any, rows: Any, out: Numbers, words: str, tmp_path: Path
) -> None:
    dataset = _dataset(tmp_path, 50)
    index = (np.zeros(1, np.int32), np.array([[0, 4 * i] for i in range(10)], np.int32))
    wrong_rows: Any = np.array(rows, np.int32 if words == "rows must be" else np.int64)
    for samples in (NativeSamples(dataset, "1", "train", 4), MegatronSamples(dataset, *index, 4)):
        with pytest.raises(ValueError, match=words):
            samples.read(np.array(numbers, np.int64), wrong_rows, out)


def test_data_shorter_than_one_sample_is_refused(tmp_path: Path) -> None:
    dataset = _dataset(tmp_path, 8)
    assert NativeSamples(dataset, "1", "train", 7).num_samples == 1
    with pytest.raises(
        ConfigError, match=r"has 8 tokens, fewer than one sample of seq_length \+ 1 = 9"
    ) as caught:
        NativeSamples(dataset, "1", "train", 8)
    assert caught.value.exit == Exit.STAGE_FAILED


def test_an_empty_split_is_refused_whenread(tmp_path: Path) -> None:
    samples = NativeSamples(_dataset(tmp_path, 100), "95,5,0", "test", 8)
    assert samples.num_samples == 0
    with pytest.raises(ConfigError, match=r"has no test sample: split '95,5,0'"):
        read(samples, [0], 8)


def test_mock_samples_depend_on_seed_and_number_only() -> None:
    def rows(seed: int, *numbers: int) -> list[list[int]]:
        out, ids = read(MockSamples(50, 32, seed, 1000), list(numbers), 32)
        assert ids.lowest <= out.min() <= out.max() <= ids.highest < 50
        return [[int(token) for token in row] for row in out]

    assert rows(2**63 - 1, 3) == rows(2**63 - 1, 5, 3)[1:]
    assert len({tuple(row) for seed in (0, 1) for row in rows(seed, *range(100))}) == 200
    assert {token for row in rows(0, *range(100)) for token in row} == set(range(50))
    assert rows(7, 9)[0][:6] == [
        16,
        16,
        22,
        45,
        2,
        40,
    ], "the order of mock data changed: runs of earlier versions cannot be continued exactly"
    with pytest.raises(IndexError, match="sample 1000 of 1000"):
        rows(0, 1000)


# The file


@both
def test_a_file_that_becomes_shorter_is_an_error(mmap: bool, tmp_path: Path) -> None:
    samples = NativeSamples(_dataset(tmp_path, 200_000), "1", "train", 1000, mmap)
    os.truncate(tmp_path / "data.bin", 4096)
    with pytest.raises(
        ConfigError, match=r"data\.bin had 800000 bytes when it was opened and has 4096 now"
    ) as caught:
        read(samples, [0, 198], 1000)
    assert caught.value.exit == Exit.STAGE_FAILED


def test_what_changed_between_idx_and_bin_is_refused(tmp_path: Path) -> None:
    dataset = _dataset(tmp_path, 100)
    os.truncate(tmp_path / "data.bin", 40)
    with pytest.raises(ConfigError, match="has 10 tokens now, and had 100"):
        NativeSamples(dataset, "1", "train", 8)
    (tmp_path / "data.bin").unlink()
    with pytest.raises(ConfigError, match=r"data\.bin: open: No such file"):
        NativeSamples(dataset, "1", "train", 8)


def test_an_unknown_dtype_code_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(8))
    for code in (0, 6, 7, 9, 99, -1):
        with pytest.raises(ValueError, match=f"dtype code {code} "):
            _index.Reader(str(tmp_path / "x"), code)


def _resident_kib() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


@both
def test_resident_memory_stays_flat(mmap: bool, tmp_path: Path) -> None:
    """Through 700 MB in random order: never more than the 256 MiB that a reader keeps mapped,
    and what one call adds."""
    seq_length, tokens = 2**15, 350_000_000
    with open(tmp_path / "data.idx", "wb") as file:
        file.write(HEADER.pack(MAGIC, 1, 8, 1, 2))
        file.write(np.array([tokens], "<i4").tobytes() + np.array([0, 0, 1], "<i8").tobytes())
    (tmp_path / "data.bin").touch()
    # a hole: its pages are pages of the page cache like any other
    os.truncate(tmp_path / "data.bin", 2 * tokens)
    samples = NativeSamples(IndexedDataset(tmp_path / "data"), "1", "train", seq_length, mmap)
    order = np.random.default_rng(0).permutation(samples.num_samples).astype(np.int64)
    out, rows = np.zeros((8, seq_length + 1), np.int64), np.arange(8)
    before = highest = _resident_kib()
    for first in range(0, len(order) - 8, 8):
        samples.read(order[first : first + 8], rows, out)
        highest = max(highest, _resident_kib())
    assert highest - before < (256 + 8 * 2 * 2 + 16 if mmap else 16) * 1024


def test_mapped_index_arrays_are_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DROP_EVERY", 10)
    with IndexedWriter(tmp_path / "data", "uint16") as writer:
        writer.add_documents(np.arange(4000) % 50000, [4] * 1000)
    np.save(tmp_path / "doc.npy", np.arange(1000, dtype=np.int32))
    np.save(tmp_path / "sample.npy", np.array([[i, 0] for i in range(1000)], np.int32))
    arrays = [np.load(tmp_path / name, mmap_mode="r") for name in ("doc.npy", "sample.npy")]
    samples = MegatronSamples(IndexedDataset(tmp_path / "data"), arrays[0], arrays[1], 4)
    assert len(samples._maps) == 4, "two of .npy, two of .idx"
    for first in range(0, 900, 5):
        assert read(samples, list(range(first, first + 5)), 4)[0][:, 0].tolist() == [
            4 * n for n in range(first, first + 5)
        ]
    in_memory = MegatronSamples(
        IndexedDataset(tmp_path / "data", mmap=False),
        np.array(arrays[0]),
        np.load(tmp_path / "sample.npy"),
        4,
    )
    assert in_memory._maps == []
    assert (
        MegatronSamples(
            IndexedDataset(tmp_path / "data"),
            np.load(tmp_path / "doc.npy", mmap_mode="c"),
            arrays[1],
            4,
        )._maps.__len__()
        == 3
    )


@both
def test_many_threads_read_the_same(mmap: bool, tmp_path: Path) -> None:
    """While maps are renewed under them."""
    tokens = np.random.default_rng(0).integers(0, 2**16, 200 * 2**20, np.uint16)
    samples = NativeSamples(_dataset(tmp_path, tokens, "uint16"), "1", "train", 500, mmap)
    wrong: list[int] = []

    def work(seed: int) -> None:
        chosen = np.random.default_rng(seed).integers(0, samples.num_samples, (40, 32))
        for numbers in chosen:
            out, _ = read(samples, numbers.tolist(), 500)
            wrong.extend(
                int(n)
                for n, row in zip(numbers, out, strict=True)
                if not np.array_equal(row, tokens[n * 500 : n * 500 + 501])
            )

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
