"""The format of Megatron's .bin/.idx, and what is checked of it.

Layout (Megatron-LM core/datasets/indexed_dataset.py), little endian, nothing padded. S
sequences, D - 1 documents:

    .idx   9 bytes   b"MMIDIDX\\0\\0"
           uint64    version 1 uint8     dtype code of the tokens uint64    S uint64    D S int32
           length of each sequence in tokens S int64   where each sequence begins in .bin, in
           bytes: the lengths before it, summed, times the size of a token D int64   first
           sequence of each document, and S at the end S int8    mode of each sequence
           (multimodal data only; nothing but the file's size says so)
    .bin   the tokens, one sequence after another
"""

from __future__ import annotations

import io
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainkit.base.errors import ConfigError, Exit
from trainkit.base.lazy_dataclasses import dataclass

Integers = NDArray[np.integer[Any]]

MAGIC = b"MMIDIDX\0\0"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, S, D
DTYPES = {
    code: np.dtype(name)
    for code, name in ((1, "u1"), (2, "i1"), (3, "<i2"), (4, "<i4"), (5, "<i8"), (8, "<u2"))
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
MAX_LENGTH = 2**31 - 1  # of a sequence: an int32 in .idx
CHUNK = 2**20  # sequences or documents looked at at once: bounds memory
REBUILD = "the pair is damaged or unfinished: delete both files and prepare the data again"


def best_dtype(vocab_size: int) -> np.dtype[Any]:
    """The dtype Megatron chooses: uint16 for a vocabulary below 65,500 (not 65,536), else int32."""
    return np.dtype("<u2" if vocab_size < 65500 else "<i4")


def data_error(path: Path, message: str, hint: str = REBUILD) -> ConfigError:
    """What is wrong with a file of a pair."""
    return ConfigError(f"{path}: {message}", exit=Exit.STAGE_FAILED, hint=hint)


@dataclass(frozen=True)
class Header:
    """What the start of an .idx says, and where its arrays begin."""

    dtype: np.dtype[Any]
    sequences: int
    entries: int
    size: int

    @property
    def offsets(self) -> int:
        return HEADER.size + 4 * self.sequences

    @property
    def documents(self) -> int:
        return HEADER.size + 12 * self.sequences

    @property
    def modes(self) -> int:
        return self.documents + 8 * self.entries


def read_header(path: Path, file: io.FileIO) -> Header:
    """Token dtype, S and D, after checking that the file is as long as they say."""
    start = file.read(HEADER.size) or b""
    if not start.startswith(MAGIC):
        older = start.startswith(b"TNTIDX\0\0")
        if older:
            what = "is in GPT-NeoX's older 'lazy' or 'cached' format"
        else:
            what = f"begins with {start[: len(MAGIC)]!r}, not {MAGIC!r}"
        raise data_error(
            path,
            what,
            "give the prefix of a Megatron .bin/.idx pair (GPT-NeoX: --dataset-impl mmap)",
        )
    if len(start) < HEADER.size:
        raise data_error(path, f"ends after {len(start)} bytes, inside its header of {HEADER.size}")
    _, version, code, sequences, entries = HEADER.unpack(start)
    if version != VERSION:
        raise data_error(
            path,
            f"has version {version}, not {VERSION}",
            "write it again with a current preprocess_data.py or invoke prep-data",
        )
    if code not in DTYPES:
        raise data_error(
            path,
            f"has dtype code {code}, which is not one of an integer:"
            f" {', '.join(f'{c} = {d.name}' for c, d in DTYPES.items())}",
        )
    header = Header(DTYPES[code], sequences, entries, os.fstat(file.fileno()).st_size)
    if entries < 1 or header.size not in (header.modes, header.modes + sequences):
        raise data_error(
            path,
            f"has {header.size:,} bytes, but {sequences:,} sequences and {entries:,} document"
            f" entries (at least 1) take {header.modes:,}",
        )
    return header


def check_ends(path: Path, file: io.FileIO, header: Header) -> int:
    """Check the first and the last entry of each array; return the bytes .bin must have."""

    def entry(layout: str, byte: int) -> int:
        found = os.pread(file.fileno(), struct.calcsize(layout), byte)
        if len(found) < struct.calcsize(layout):
            raise data_error(
                path, f"ends before byte {header.size:,}, where it ended when it was opened"
            )
        return int(struct.unpack(layout, found)[0])

    first = entry("<q", header.documents)
    last = entry("<q", header.modes - 8)
    if first != 0 or last != header.sequences:
        raise data_error(
            path,
            f"its document index goes from {first} to {last}, not from 0 to {header.sequences}",
        )
    if header.sequences == 0:
        return 0
    for number in (0, header.sequences - 1):
        length = entry("<i", HEADER.size + 4 * number)
        offset = entry("<q", header.offsets + 8 * number)
        if length < 0:
            raise data_error(path, f"sequence {number} has length {length}")
        if offset < 0 or offset % header.dtype.itemsize or (number == 0 and offset):
            raise data_error(path, f"sequence {number} begins at byte {offset}")
    return offset + length * header.dtype.itemsize


def check_sequences(
    path: Path, lengths: NDArray[np.int32], offsets: NDArray[np.int64], itemsize: int
) -> None:
    """Check that offsets are the summed lengths."""
    position = 0
    for first in range(0, len(lengths), CHUNK):
        part = lengths[first : first + CHUNK]
        if part.min() < 0:
            worst = first + int(part.argmin())
            raise data_error(path, f"sequence {worst} has length {lengths[worst]}")
        ends = position + np.cumsum(part, dtype=np.int64) * itemsize
        wrong = np.flatnonzero(
            offsets[first : first + CHUNK] != np.concatenate(([position], ends[:-1]))
        )
        if len(wrong):
            sequence = first + int(wrong[0])
            expected = int(ends[wrong[0] - 1]) if wrong[0] else position
            raise data_error(
                path,
                f"sequence {sequence} begins at byte {offsets[sequence]}, but the lengths before it"
                f" sum to byte {expected}",
            )
        position = int(ends[-1])


def check_documents(path: Path, indices: NDArray[np.int64]) -> None:
    """Check that the document index never falls."""
    for first in range(0, len(indices), CHUNK):
        part = indices[first : first + CHUNK + 1]
        falls = np.flatnonzero(part[1:] < part[:-1])
        if len(falls):
            raise data_error(
                path,
                f"document {first + int(falls[0])} ends before it begins, at sequence"
                f" {part[falls[0] + 1]}",
            )
