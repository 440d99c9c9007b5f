"""Megatron's .bin/.idx: read without copies, checked strictly; written so that the pair is whole or absent.

Layout (Megatron-LM core/datasets/indexed_dataset.py), little endian, nothing padded. S sequences, D - 1 documents:

    .idx   9 bytes   b"MMIDIDX\\0\\0"
           uint64    version 1
           uint8     dtype code of the tokens
           uint64    S
           uint64    D
           S int32   length of each sequence in tokens
           S int64   where each sequence begins in .bin, in bytes: the lengths before it, summed, times the size of a token
           D int64   first sequence of each document, and S at the end
           S int8    mode of each sequence (multimodal data only; nothing but the file's size says so)
    .bin   the tokens, one sequence after another
"""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
from array import array
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from trainkit.base.errors import ConfigError, Exit
from trainkit.base.files import fsync_folder, temporary_name

Integers = NDArray[np.integer[Any]]

MAGIC = b"MMIDIDX\0\0"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, S, D
DTYPES = {code: np.dtype(name) for code, name in ((1, "u1"), (2, "i1"), (3, "<i2"), (4, "<i4"), (5, "<i8"), (8, "<u2"))}
CODES = {dtype: code for code, dtype in DTYPES.items()}
MAX_LENGTH = 2**31 - 1  # of a sequence: an int32 in .idx
CHUNK = 2**20  # sequences or documents looked at at once: bounds memory
REBUILD = "the pair is damaged or unfinished: delete both files and prepare the data again"


def bin_path(prefix: Path) -> Path:
    """The tokens of `prefix`."""
    return prefix.with_name(prefix.name + ".bin")


def idx_path(prefix: Path) -> Path:
    """The index of `prefix`."""
    return prefix.with_name(prefix.name + ".idx")


def best_dtype(vocab_size: int) -> np.dtype[Any]:
    """The dtype Megatron chooses: uint16 for a vocabulary below 65,500 (not 65,536), else int32."""
    return np.dtype("<u2" if vocab_size < 65500 else "<i4")


def _error(path: Path, message: str, hint: str = REBUILD) -> ConfigError:
    return ConfigError(f"{path}: {message}", exit=Exit.STAGE_FAILED, hint=hint)


def _map(path: Path) -> NDArray[np.uint8]:
    """The file's bytes, mapped read-only; an empty file, which mmap refuses, as an empty array."""
    try:
        if path.stat().st_size == 0:
            return np.empty(0, np.uint8)
        return np.memmap(path, np.uint8, "r").view(np.ndarray)
    except OSError as error:
        raise _error(path, str(error.strerror or error), "prepare the data first: invoke prep-data") from None


class IndexedDataset:
    """The sequences of a .bin/.idx pair as views of the mapped files: nothing is copied.

    Args:
        prefix: path of the pair without .bin and .idx.

    Attributes:
        dtype: of the tokens.
        tokens: all tokens, shape [num_tokens].
        lengths: tokens of each sequence, int32 [S].
        document_indices: first sequence of each document and S at the end, int64 [D].
        modes: int8 [S] of multimodal data, else None.

    Raises:
        ConfigError (exit 6): a file is missing, is no .idx of version 1, or the two do not fit each other.
    """

    def __init__(self, prefix: Path) -> None:
        self.prefix = Path(prefix)
        path = idx_path(self.prefix)
        content = _map(path)
        self.dtype, sequences, entries = _read_header(path, content)
        self.lengths: NDArray[np.int32] = np.frombuffer(content, "<i4", sequences, HEADER.size)
        self._offsets: NDArray[np.int64] = np.frombuffer(content, "<i8", sequences, HEADER.size + 4 * sequences)
        self.document_indices: NDArray[np.int64] = np.frombuffer(content, "<i8", entries, HEADER.size + 12 * sequences)
        end = HEADER.size + 12 * sequences + 8 * entries
        self.modes: NDArray[np.int8] | None = content[end:].view(np.int8) if sequences and len(content) > end else None
        size = _check_sequences(path, self.lengths, self._offsets, self.dtype.itemsize)
        _check_documents(path, self.document_indices, sequences)
        tokens = _map(bin_path(self.prefix))
        if len(tokens) != size:
            raise _error(bin_path(self.prefix), f"has {len(tokens):,} bytes, but {path.name} describes {size:,}")
        self.tokens: Integers = tokens.view(self.dtype)

    def __len__(self) -> int:
        """Sequences."""
        return len(self.lengths)

    def __getitem__(self, sequence: int) -> Integers:
        """The tokens of one sequence, a read-only view. IndexError outside [0, len)."""
        if not 0 <= sequence < len(self):
            raise IndexError(f"sequence {sequence} of {len(self)} in {self.prefix}")
        start = int(self._offsets[sequence]) // self.dtype.itemsize
        return self.tokens[start : start + int(self.lengths[sequence])]

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return len(self.tokens)


def _read_header(path: Path, content: NDArray[np.uint8]) -> tuple[np.dtype[Any], int, int]:
    """Token dtype, S and D, after checking that the file is as long as they say."""
    start = content[: HEADER.size].tobytes()
    if not start.startswith(MAGIC):
        older = start.startswith(b"TNTIDX\0\0")
        what = "is in GPT-NeoX's older 'lazy' or 'cached' format" if older else f"begins with {start[: len(MAGIC)]!r}, not {MAGIC!r}"
        raise _error(path, what, "give the prefix of a Megatron .bin/.idx pair (GPT-NeoX: --dataset-impl mmap)")
    if len(start) < HEADER.size:
        raise _error(path, f"ends after {len(start)} bytes, inside its header of {HEADER.size}")
    _, version, code, sequences, entries = HEADER.unpack(start)
    if version != VERSION:
        raise _error(path, f"has version {version}, not {VERSION}", "write it again with a current preprocess_data.py or invoke prep-data")
    if code not in DTYPES:
        raise _error(path, f"has dtype code {code}, which is not one of an integer: {', '.join(f'{c} = {d.name}' for c, d in DTYPES.items())}")
    plain = HEADER.size + 12 * sequences + 8 * entries
    if entries < 1 or len(content) not in (plain, plain + sequences):
        raise _error(path, f"has {len(content):,} bytes, but {sequences:,} sequences and {entries:,} document entries (at least 1) take {plain:,}")
    return DTYPES[code], sequences, entries


def _check_sequences(path: Path, lengths: NDArray[np.int32], offsets: NDArray[np.int64], itemsize: int) -> int:
    """Check that offsets are the summed lengths; return the bytes .bin must have."""
    position = 0
    for first in range(0, len(lengths), CHUNK):
        part = lengths[first : first + CHUNK]
        if part.min() < 0:
            worst = first + int(part.argmin())
            raise _error(path, f"sequence {worst} has length {lengths[worst]}")
        ends = position + np.cumsum(part, dtype=np.int64) * itemsize
        wrong = np.flatnonzero(offsets[first : first + CHUNK] != np.concatenate(([position], ends[:-1])))
        if len(wrong):
            sequence = first + int(wrong[0])
            expected = int(ends[wrong[0] - 1]) if wrong[0] else position
            raise _error(path, f"sequence {sequence} begins at byte {offsets[sequence]}, but the lengths before it sum to byte {expected}")
        position = int(ends[-1])
    return position


def _check_documents(path: Path, indices: NDArray[np.int64], sequences: int) -> None:
    """Check that the document index rises from 0 to S."""
    if indices[0] != 0 or indices[-1] != sequences:
        raise _error(path, f"its document index goes from {indices[0]} to {indices[-1]}, not from 0 to {sequences}")
    for first in range(0, len(indices), CHUNK):
        part = indices[first : first + CHUNK + 1]
        falls = np.flatnonzero(part[1:] < part[:-1])
        if len(falls):
            raise _error(path, f"document {first + int(falls[0])} ends before it begins, at sequence {part[falls[0] + 1]}")


class IndexedWriter:
    """Writes a .bin/.idx pair, byte for byte as Megatron's IndexedDatasetBuilder does. Use it as a context manager.

    The files appear under their names when the block ends without an exception, .bin first; a former .idx is gone before that.
    So an .idx always belongs to its .bin, also after SIGKILL. Memory: 12 bytes a sequence or document.

    Args:
        prefix: path of the pair without .bin and .idx.
        dtype: of the tokens, see `best_dtype`. ValueError if .idx has no code for it.
    """

    def __init__(self, prefix: Path, dtype: DTypeLike) -> None:
        self.prefix = Path(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        if self.dtype not in CODES:
            raise ValueError(f"tokens of dtype {self.dtype} have no code in .idx; choose one of {', '.join(d.name for d in CODES)}")
        self._lengths, self._documents = array("i"), array("q", [0])
        self._temporary = temporary_name(bin_path(self.prefix)), temporary_name(idx_path(self.prefix))
        self._file: IO[bytes]

    def __enter__(self) -> Self:
        self.prefix.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self._temporary[0], "wb")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            with self._file as file:
                if kind is None:
                    _sync(file)
            if kind is None:
                self._publish()
        finally:
            for path in self._temporary:
                path.unlink(missing_ok=True)

    def add_document(self, tokens: Integers, lengths: Sequence[int] | None = None) -> None:
        """Append one document.

        Args:
            tokens: ids of the whole document, [n]. Empty: no sequence, but an entry in the document index.
            lengths: tokens of each of its sequences, summing to n; by default it is one sequence.

        Raises:
            ValueError: lengths do not sum to n. TypeError: tokens are no integers.
            ConfigError (exit 6): an id does not fit the dtype, a sequence is longer than 2^31 - 1 tokens.
        """
        parts = np.asarray([n for n in [len(tokens)] if n] if lengths is None else lengths, np.int64)
        self._append(tokens, parts)
        self._documents.append(len(self._lengths))

    def add_documents(self, tokens: Integers, lengths: Sequence[int] | NDArray[np.integer[Any]], sequences: NDArray[np.integer[Any]] | None = None) -> None:
        """Append many documents; errors as `add_document`.

        Args:
            tokens: ids of all of them, [sum(lengths)].
            lengths: tokens of each sequence; those of none are left out.
            sequences: how many of `lengths` belong to each document, summing to len(lengths); by default it is one each.
        """
        parts = np.asarray(lengths, np.int64)
        there = parts != 0
        if sequences is not None and np.sum(sequences) != len(parts):
            raise ValueError(f"the documents have {np.sum(sequences)} sequences, but there are {len(parts)} lengths")
        before = len(self._lengths)
        self._append(tokens, parts[there])
        ends = np.cumsum(there, dtype=np.int64)  # sequences written up to and with each
        if sequences is not None:
            ends = np.concatenate(([0], ends))[np.cumsum(sequences, dtype=np.int64)]
        self._documents.frombytes((before + ends).tobytes())

    def add_index(self, prefix: Path) -> None:
        """Append another pair, as Megatron's add_index does.

        Raises ConfigError (exit 6): it cannot be read, has another dtype, or is multimodal.
        """
        other = IndexedDataset(prefix)
        if other.dtype != self.dtype:
            raise _error(idx_path(prefix), f"holds {other.dtype.name}, but {self.prefix.name} is of {self.dtype.name}", "merge files of one tokenizer only")
        if other.modes is not None:
            raise _error(idx_path(prefix), "is multimodal", "trainkit merges text only")
        shift = len(self._lengths)
        for first in range(0, len(other), CHUNK):
            self._lengths.frombytes(other.lengths[first : first + CHUNK].tobytes())
        for first in range(1, len(other.document_indices), CHUNK):
            self._documents.frombytes((other.document_indices[first : first + CHUNK] + shift).tobytes())
        with open(bin_path(prefix), "rb") as source:
            shutil.copyfileobj(source, self._file, 2**20)

    def _append(self, tokens: Integers, lengths: NDArray[np.int64]) -> None:
        if len(lengths) and not 0 <= lengths.min() <= lengths.max() <= MAX_LENGTH:
            wrong = lengths.min() if lengths.min() < 0 else lengths.max()
            raise _error(self.prefix, f"a sequence of {wrong:,} tokens does not fit .idx, whose lengths are int32", "split the document")
        if tokens.ndim != 1 or lengths.sum() != len(tokens):
            raise ValueError(f"lengths sum to {lengths.sum()}, tokens have the shape {tokens.shape}")
        self._file.write(self._converted(tokens).data)
        self._lengths.frombytes(lengths.astype("=i4").tobytes())

    def _converted(self, tokens: Integers) -> Integers:
        """The tokens in the file's dtype; nothing wraps around."""
        if not np.can_cast(tokens.dtype, self.dtype, "safe") and len(tokens):
            if tokens.dtype.kind not in "iu":
                raise TypeError(f"tokens are of {tokens.dtype}, not of an integer dtype")
            limits = np.iinfo(self.dtype)
            low, high = int(tokens.min()), int(tokens.max())
            if low < limits.min or high > limits.max:
                wrong = low if low < limits.min else high
                raise _error(self.prefix, f"the id {wrong} does not fit {self.dtype.name}", "choose the dtype by best_dtype(vocab_size)")
        return np.ascontiguousarray(tokens, self.dtype)

    def _write_index(self, file: IO[bytes]) -> None:
        lengths = np.frombuffer(self._lengths, "=i4")
        file.write(HEADER.pack(MAGIC, VERSION, CODES[self.dtype], len(lengths), len(self._documents)))
        file.write(lengths.astype("<i4", copy=False).data)
        position = 0
        for first in range(0, len(lengths), CHUNK):
            ends = position + np.cumsum(lengths[first : first + CHUNK], dtype=np.int64) * self.dtype.itemsize
            file.write(np.concatenate(([position], ends[:-1])).astype("<i8", copy=False).data)
            position = int(ends[-1])
        file.write(np.frombuffer(self._documents, "=i8").astype("<i8", copy=False).data)
        _sync(file)

    def _publish(self) -> None:
        target_bin, target_idx = bin_path(self.prefix), idx_path(self.prefix)
        with open(self._temporary[1], "wb") as file:
            self._write_index(file)
        with contextlib.suppress(FileNotFoundError):
            target_idx.unlink()
            fsync_folder(target_idx.parent)  # or a crash could show the former .idx beside the new .bin
        os.replace(self._temporary[0], target_bin)
        fsync_folder(target_bin.parent)
        os.replace(self._temporary[1], target_idx)
        fsync_folder(target_idx.parent)


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def merge(prefixes: Sequence[Path], out_prefix: Path) -> None:
    """Join pairs in the given order into one; tokens are streamed, the index takes 12 bytes a sequence or document.

    Raises ConfigError (exit 6): no prefix is given, or see `IndexedWriter.add_index`.
    """
    if not prefixes:
        raise _error(out_prefix, "there is nothing to merge", "the dataset has no shard")
    with IndexedWriter(out_prefix, IndexedDataset(prefixes[0]).dtype) as writer:
        for prefix in prefixes:
            writer.add_index(prefix)
