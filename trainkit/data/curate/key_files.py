"""What documents are compared by: a file for each shard.

A key file is a header of six little-endian uint64 (magic, documents, bands, records of a band,
columns, 0), then [documents, 2] uint64 of each document's key (`CrawledDocument.key`) and length
in characters, then [bands, records, columns] uint64. A record is (key, number of the document in
the shard), or with three columns (key, document's key, number): sorted, so that a range of keys is
one piece of the file.

Documents of all shards together are numbered through, those of other datasets first.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trainkit.base.errors import ConfigError, Exit
from trainkit.base.files import atomic_open
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.base.records import Record

MAGIC = int.from_bytes(b"tkkeys01", "little")
HEADER = 48  # bytes
WORD = 8
Words64 = NDArray[np.uint64]


def write_keys(path: Path, documents: Words64, records: Words64) -> None:
    """Write a key file, whole or not at all.

    Args:
        path: the file.
        documents: uint64 [N, 2], key and length.
        records: uint64 [bands, R, 2 or 3], not sorted yet.
    """
    bands, count, columns = records.shape
    header = np.array([MAGIC, len(documents), bands, count, columns, 0], "<u8")
    with atomic_open(path) as file:
        file.write(header.tobytes())
        file.write(np.ascontiguousarray(documents, "<u8").tobytes())
        for band in records:
            file.write(band[np.lexsort(band.T[::-1])].astype("<u8", copy=False).tobytes())


@dataclass(frozen=True)
class KeyFile:
    """An open key file.

    Attributes:
        documents: uint64 [N, 2], mapped.
        records: uint64 [bands, R, columns], mapped.
    """

    documents: Words64
    records: Words64


def open_keys(path: Path) -> KeyFile:
    """Map a key file. Raises ConfigError (exit 6) where it is none, or cut."""
    try:
        words = np.memmap(path, "<u8", "r")
        magic, documents, bands, count, columns, _ = map(int, words[: HEADER // WORD])
    except (OSError, ValueError) as error:
        raise _damaged(path, str(error)) from None
    begin = HEADER // WORD + 2 * documents
    if magic != MAGIC or len(words) != begin + bands * count * columns:
        raise _damaged(path, "its size is not what its header says")
    return KeyFile(
        words[HEADER // WORD : begin].reshape(-1, 2),
        words[begin:].reshape(bands, count, columns),
    )


def _damaged(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"{path} is not a key file: {why}",
        exit=Exit.STAGE_FAILED,
        hint="delete it: prep-data makes it again",
    )


@dataclass(frozen=True)
class KeyNumbers(Record):
    """Which numbers the documents of each shard have among all.

    Attributes:
        paths: the key files, those of other datasets first.
        firsts: the number of each one's first document, and behind them that of all documents.
        others: how many of the files are other datasets'.
        records: of a band, in all files.
    """

    SCHEMA = "key-numbers/1"
    paths: tuple[Path, ...]
    firsts: tuple[int, ...]
    others: int
    records: int

    @classmethod
    def count(cls, against: Sequence[Path], keys: Sequence[Path]) -> KeyNumbers:
        """Number the documents of key files. Raises ConfigError (exit 6): one is damaged."""
        firsts = [0]
        records = 0
        for path in (*against, *keys):
            found = open_keys(path)
            firsts.append(firsts[-1] + len(found.documents))
            records += found.records.shape[1]
        return cls((*against, *keys), tuple(firsts), len(against), records)

    @property
    def first_own(self) -> int:
        """The number of the first document that may be left out."""
        return self.firsts[self.others]

    def first_of(self, path: Path) -> int:
        """The number of a shard's first document."""
        return self._firsts_by_path[path]

    @cached_property
    def _firsts_by_path(self) -> dict[Path, int]:
        return dict(zip(self.paths, self.firsts, strict=False))

    def id_of(self, number: int) -> str:
        """What `trainkit_id` says of a document."""
        shard = bisect.bisect_right(self.firsts, number) - 1
        facts = _documents(self.paths[shard])
        return f"{int(facts[number - self.firsts[shard], 0]):016x}"


@lru_cache(maxsize=64)
def _documents(path: Path) -> Words64:
    return open_keys(path).documents


def key_range(records: Words64, low: int, high: int) -> Words64:
    """The records of a sorted section [R, columns] with low <= key <= high."""
    keys = records[:, 0]
    first = int(np.searchsorted(keys, np.uint64(low), "left"))
    last = int(np.searchsorted(keys, np.uint64(high), "right"))
    return records[first:last]


def write_words(path: Path, rows: Words64) -> None:
    """Write uint64 [n, columns] as it is, whole or not at all."""
    with atomic_open(path) as file:
        file.write(np.ascontiguousarray(rows, "<u8").tobytes())


def read_words(path: Path, columns: int) -> Words64:
    """Map what `write_words` wrote, uint64 [n, columns]."""
    if path.stat().st_size == 0:
        return np.zeros((0, columns), np.uint64)
    return np.memmap(path, "<u8", "r").reshape(-1, columns)


# Of a file of duplicates, sorted by the first: the number of a document, the key of the line or
# paragraph in it (0: all of it), the number of the document that is kept, documents of the group.
DUPLICATES = 4


def duplicates_of(paths: Sequence[Path], first: int, end: int) -> Words64:
    """The rows of files of duplicates that concern the documents `first` to `end` - 1, sorted:
    uint64 [n, 4]."""
    parts = []
    for path in paths:
        rows = read_words(path, DUPLICATES)
        numbers = rows[:, 0]
        low, high = np.searchsorted(numbers, np.array([first, end], np.uint64))
        parts.append(np.array(rows[low:high]))
    rows = np.concatenate(parts) if parts else np.zeros((0, DUPLICATES), np.uint64)
    return rows[np.lexsort((rows[:, 1], rows[:, 0]))]
