"""Megatron's .bin/.idx (the layout: trainkit/data/indexed/format.py): read without copies,
checked strictly; written so that the pair is whole or absent."""

from __future__ import annotations

import contextlib
import errno
import io
import operator
import os
from array import array
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self, overload

import numpy as np
from numpy.typing import DTypeLike, NDArray

from trainkit.base.errors import ConfigError
from trainkit.base.files import fsync_folder, names_full_file, temporary_name
from trainkit.data.indexed.format import (
    CHUNK,
    CODES,
    HEADER,
    MAGIC,
    MAX_LENGTH,
    VERSION,
    Integers,
    best_dtype,
    check_documents,
    check_ends,
    check_sequences,
    data_error,
    read_header,
)
from trainkit.data.indexed.paths import bin_path, idx_path

__all__ = [
    "CODES",
    "IndexedDataset",
    "IndexedWriter",
    "Integers",
    "best_dtype",
]


def _unreadable(path: Path, error: OSError) -> ConfigError:
    if error.errno == errno.EMFILE:
        hint = "raise the limit of open files: ulimit -n"
    else:
        hint = "prepare the data first: invoke prep-data"
    return data_error(path, str(error.strerror or error), hint)


def _map(path: Path, size: int) -> NDArray[np.uint8]:
    """The file's bytes, mapped read-only; an empty file, which mmap refuses, as an empty array.
    ConfigError: it has another size by now."""
    try:
        if path.stat().st_size:
            content = np.memmap(path, np.uint8, "r").view(np.ndarray)
        else:
            content = np.empty(0, np.uint8)
    except OSError as error:
        raise _unreadable(path, error) from None
    if len(content) != size:
        raise data_error(
            path,
            f"had {size:,} bytes when it was opened and has {len(content):,} now",
            "it was written again meanwhile: open it again",
        )
    return content


class IndexedDataset:
    """The sequences of a .bin/.idx pair.

    Opening reads the header, the ends of the arrays and the files' sizes, whatever their number
    of sequences; `verify` reads all of .idx. The arrays are mapped when they are first asked
    for.

    Args:
        prefix: path of the pair without .bin and .idx.
        mmap: hand out views of the mapped files, nothing is copied. False: map nothing, for file
            systems that map badly; a sequence is read when it is asked for, an array of .idx is
            read once and stays in memory. (A file that is cut short while it is mapped ends the
            process that looks at what is gone with SIGBUS; without maps that is a ConfigError.)

    Attributes:
        dtype: of the tokens.
        num_tokens: of all sequences.

    Raises:
        ConfigError (exit 6): a file is missing, is no .idx of version 1, or the two do not fit
        each other.
    """

    def __init__(self, prefix: Path | str, *, mmap: bool = True) -> None:
        self.prefix = Path(prefix)
        self.mmap = mmap
        self._idx, self._bin = idx_path(self.prefix), bin_path(self.prefix)
        try:
            with open(self._idx, "rb", buffering=0) as file:
                self._header = read_header(self._idx, file)
                size = check_ends(self._idx, file, self._header)
        except OSError as error:
            raise _unreadable(self._idx, error) from None
        try:
            self._size = self._bin.stat().st_size
        except OSError as error:
            raise _unreadable(self._bin, error) from None
        if self._size != size:
            raise data_error(
                self._bin, f"has {self._size:,} bytes, but {self._idx.name} describes {size:,}"
            )
        self.dtype = self._header.dtype
        self.num_tokens = size // self.dtype.itemsize

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        """To another process goes where the pair lies, not what is in it: it is opened there
        again, by workers of a loader too."""
        return partial(type(self), mmap=self.mmap), (self.prefix,)

    @property
    def bin(self) -> Path:
        """The file of the tokens."""
        return self._bin

    def __len__(self) -> int:
        """Sequences."""
        return self._header.sequences

    @overload
    def __getitem__(self, sequence: int) -> Integers: ...
    @overload
    def __getitem__(self, sequence: slice) -> list[Integers]: ...
    def __getitem__(self, sequence: int | slice) -> Integers | list[Integers]:
        """The tokens of one sequence, read-only; of a slice, a list of them. Numbers as in a
        list: -1 is the last, IndexError outside."""
        if isinstance(sequence, slice):
            return [self.get(number) for number in range(*sequence.indices(len(self)))]
        return self.get(sequence)

    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> Integers:
        """`length` tokens of a sequence from `offset` on, by default to its end.

        Raises:
            IndexError: no such sequence, or it does not have these tokens. ConfigError (exit 6):
            .idx says that it lies where .bin has nothing; the file cannot be read.
        """
        number = _position(sequence, len(self), "sequence", self.prefix)
        tokens = int(self.lengths[number])
        byte = int(self.offsets[number])
        count = tokens - offset if length is None else length
        if (
            tokens < 0
            or byte < 0
            or byte % self.dtype.itemsize
            or byte + tokens * self.dtype.itemsize > self._size
        ):
            raise data_error(
                self._idx,
                f"sequence {number} has {tokens:,} tokens from byte {byte:,} on, but"
                f" {self._bin.name} has {self._size:,} bytes",
            )
        if offset < 0 or count < 0 or offset + count > tokens:
            raise IndexError(
                f"tokens {offset} to {offset + count} of sequence {number} of {self.prefix}, which"
                f" has {tokens}"
            )
        start = byte // self.dtype.itemsize + offset
        if self.mmap:
            return self.tokens[start : start + count]
        return self._read(start, count)

    @property
    def num_documents(self) -> int:
        """Documents, empty ones included."""
        return self._header.entries - 1

    def document(self, number: int) -> list[Integers]:
        """The sequences of one document, none where it is empty. Numbers and errors as for
        sequences."""
        number = _position(number, self.num_documents, "document", self.prefix)
        first, last = (int(i) for i in self.document_indices[number : number + 2])
        if not 0 <= first <= last <= len(self):
            raise data_error(
                self._idx, f"document {number} goes from sequence {first} to {last} of {len(self)}"
            )
        return self[first:last]

    @property
    def documents(self) -> Sequence[list[Integers]]:
        """All documents, each made when it is asked for."""
        return _Documents(self)

    @cached_property
    def tokens(self) -> Integers:
        """All tokens, [num_tokens]. ValueError without mmap."""
        if not self.mmap:
            raise ValueError(
                f"{self._bin} was opened with mmap = False: ask for sequences, or open it with mmap"
                " = True"
            )
        return _map(self._bin, self._size).view(self.dtype)

    @cached_property
    def lengths(self) -> NDArray[np.int32]:
        """Tokens of each sequence, int32 [S]; as all arrays of .idx, not aligned where it is
        mapped."""
        return self._array("<i4", len(self), HEADER.size)

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        """Where each sequence begins in .bin, in bytes, int64 [S]."""
        return self._array("<i8", len(self), self._header.offsets)

    @cached_property
    def document_indices(self) -> NDArray[np.int64]:
        """First sequence of each document and S at the end, int64 [D]."""
        return self._array("<i8", self._header.entries, self._header.documents)

    @cached_property
    def modes(self) -> NDArray[np.int8] | None:
        """int8 [S] of multimodal data, else None."""
        if len(self) and self._header.size > self._header.modes:
            return self._array("i1", len(self), self._header.modes)
        return None

    @cached_property
    def _content(self) -> NDArray[np.uint8]:
        return _map(self._idx, self._header.size)

    def _array(self, dtype: str, count: int, byte: int) -> NDArray[Any]:
        if self.mmap:
            return np.frombuffer(self._content, dtype, count, byte)
        try:
            values = np.fromfile(self._idx, dtype, count, offset=byte)
        except OSError as error:
            raise _unreadable(self._idx, error) from None
        if len(values) != count:
            raise data_error(
                self._idx,
                f"ends before byte {self._header.size:,}, where it ended when it was opened",
            )
        values.flags.writeable = False
        return values

    @cached_property
    def _file(self) -> io.FileIO:
        try:
            return io.FileIO(self._bin)
        except OSError as error:
            raise _unreadable(self._bin, error) from None

    def _read(self, start: int, count: int) -> Integers:
        """`count` tokens from token `start` on, without a map."""
        values = np.empty(count, self.dtype)
        memory = values.view(np.uint8).data
        done = 0
        while done < len(memory):
            try:
                got = os.preadv(
                    self._file.fileno(), [memory[done:]], start * self.dtype.itemsize + done
                )
            except OSError as error:
                raise _unreadable(self._bin, error) from None
            if got == 0:
                raise data_error(
                    self._bin, f"ends before byte {self._size:,}, where it ended when it was opened"
                )
            done += got
        values.flags.writeable = False
        return values

    def verify(self) -> None:
        """Check every sequence and document of .idx. Raises ConfigError (exit 6) with the first
        that is wrong."""
        check_sequences(self._idx, self.lengths, self.offsets, self.dtype.itemsize)
        check_documents(self._idx, self.document_indices)


class _Documents(Sequence[list[Integers]]):
    """The documents of a dataset as a sequence."""

    def __init__(self, dataset: IndexedDataset) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return self._dataset.num_documents

    @overload
    def __getitem__(self, number: int) -> list[Integers]: ...
    @overload
    def __getitem__(self, number: slice) -> list[list[Integers]]: ...
    def __getitem__(self, number: int | slice) -> list[Integers] | list[list[Integers]]:
        if isinstance(number, slice):
            return [self._dataset.document(i) for i in range(*number.indices(len(self)))]
        return self._dataset.document(number)


def _position(number: int, size: int, what: str, prefix: Path) -> int:
    """An index of a list of `size` as one that is not negative."""
    position = operator.index(number)
    position += size if position < 0 else 0
    if not 0 <= position < size:
        raise IndexError(f"{what} {number} of {size} in {prefix}")
    return position


class IndexedWriter:
    """Writes a .bin/.idx pair, byte for byte as Megatron's IndexedDatasetBuilder does. Use it as
    a context manager.

    The files appear under their names when the block ends without an exception, .bin first; a
    former .idx is gone before that. So an .idx always belongs to its .bin, also after SIGKILL.
    Memory: 12 bytes a sequence or document.

    Args:
        prefix: path of the pair without .bin and .idx.
        dtype: of the tokens, see `best_dtype`. ValueError if .idx has no code for it.
    """

    def __init__(self, prefix: Path, dtype: DTypeLike) -> None:
        self.prefix = Path(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        if self.dtype not in CODES:
            raise ValueError(
                f"tokens of dtype {self.dtype} have no code in .idx; choose one of"
                f" {', '.join(d.name for d in CODES)}"
            )
        self._lengths = array("i")
        self._documents = array("q", [0])
        self._temporary = (
            temporary_name(bin_path(self.prefix)),
            temporary_name(idx_path(self.prefix)),
        )
        self._file: IO[bytes]

    def __enter__(self) -> Self:
        self.prefix.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self._temporary[0], "wb")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            with names_full_file(self._temporary[0]), self._file as file:
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
            tokens: ids of the whole document, [n]. Empty: no sequence, but an entry in the document
                index.
            lengths: tokens of each of its sequences, summing to n; by default it is one sequence.

        Raises:
            ValueError: lengths do not sum to n. TypeError: tokens are not integers. ConfigError
            (exit 6): an id does not fit the dtype, a sequence is longer than 2^31 - 1 tokens.
        """
        parts = np.asarray(
            [n for n in [len(tokens)] if n] if lengths is None else lengths, np.int64
        )
        self._append(tokens, parts)
        self._documents.append(len(self._lengths))

    def add_documents(
        self,
        tokens: Integers,
        lengths: Sequence[int] | NDArray[np.integer[Any]],
        sequences: NDArray[np.integer[Any]] | None = None,
    ) -> None:
        """Append many documents; errors as `add_document`.

        Args:
            tokens: ids of all of them, [sum(lengths)].
            lengths: tokens of each sequence; those of none are left out.
            sequences: how many of `lengths` belong to each document, summing to len(lengths); by
                default it is one each.
        """
        parts = np.asarray(lengths, np.int64)
        there = parts != 0
        if sequences is not None and np.sum(sequences) != len(parts):
            raise ValueError(
                f"the documents have {np.sum(sequences)} sequences, but there are {len(parts)}"
                " lengths"
            )
        before = len(self._lengths)
        self._append(tokens, parts[there])
        ends = np.cumsum(there, dtype=np.int64)  # sequences written up to and with each
        if sequences is not None:
            ends = np.concatenate(([0], ends))[np.cumsum(sequences, dtype=np.int64)]
        self._documents.frombytes((before + ends).tobytes())

    def _append(self, tokens: Integers, lengths: NDArray[np.int64]) -> None:
        if len(lengths) and not 0 <= lengths.min() <= lengths.max() <= MAX_LENGTH:
            wrong = lengths.min() if lengths.min() < 0 else lengths.max()
            raise data_error(
                self.prefix,
                f"a sequence of {wrong:,} tokens does not fit .idx, whose lengths are int32",
                "split the document",
            )
        if tokens.ndim != 1 or lengths.sum() != len(tokens):
            raise ValueError(
                f"lengths sum to {lengths.sum()}, tokens have the shape {tokens.shape}"
            )
        with names_full_file(self._temporary[0]):
            self._file.write(self._converted(tokens).data)
        self._lengths.frombytes(lengths.astype("=i4").tobytes())

    def _converted(self, tokens: Integers) -> Integers:
        """The tokens in the file's dtype; nothing wraps around."""
        if not np.can_cast(tokens.dtype, self.dtype, "safe") and len(tokens):
            if tokens.dtype.kind not in "iu":
                raise TypeError(f"tokens are of {tokens.dtype}, not of an integer dtype")
            limits = np.iinfo(self.dtype)
            low = int(tokens.min())
            high = int(tokens.max())
            if low < limits.min or high > limits.max:
                wrong = low if low < limits.min else high
                raise data_error(
                    self.prefix,
                    f"the id {wrong} does not fit {self.dtype.name}",
                    "choose the dtype by best_dtype(vocab_size)",
                )
        return np.ascontiguousarray(tokens, self.dtype)

    def _write_index(self, file: IO[bytes]) -> None:
        lengths = np.frombuffer(self._lengths, "=i4")
        file.write(
            HEADER.pack(MAGIC, VERSION, CODES[self.dtype], len(lengths), len(self._documents))
        )
        file.write(lengths.astype("<i4", copy=False).data)
        position = 0
        for first in range(0, len(lengths), CHUNK):
            ends = (
                position
                + np.cumsum(lengths[first : first + CHUNK], dtype=np.int64) * self.dtype.itemsize
            )
            file.write(np.concatenate(([position], ends[:-1])).astype("<i8", copy=False).data)
            position = int(ends[-1])
        file.write(np.frombuffer(self._documents, "=i8").astype("<i8", copy=False).data)
        _sync(file)

    def _publish(self) -> None:
        target_bin = bin_path(self.prefix)
        target_idx = idx_path(self.prefix)
        with names_full_file(self._temporary[1]), open(self._temporary[1], "wb") as file:
            self._write_index(file)
        with contextlib.suppress(FileNotFoundError):
            target_idx.unlink()
            # or a crash could show the former .idx beside the new .bin
            fsync_folder(target_idx.parent)
        os.replace(self._temporary[0], target_bin)
        fsync_folder(target_bin.parent)
        os.replace(self._temporary[1], target_idx)
        fsync_folder(target_idx.parent)


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
