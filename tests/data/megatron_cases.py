"""Small datasets and open files for the tests of Megatron's sample order."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence, Sized
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from trainkit import _index
from trainkit.data.indexed.dataset import IndexedWriter
from trainkit.data.order.megatron_index import IndexRequest


def write_pair(prefix: Path, lengths: Sequence[int]) -> Path:
    """A pair whose sequences have these lengths; token i is i % 1000."""
    with IndexedWriter(prefix, "uint16") as writer:
        writer.add_document(np.arange(sum(lengths)) % 1000, lengths)
    return prefix


def request_of(prefix: Path, lengths: Sized, **values: Any) -> IndexRequest:
    """A request for all of a pair, seed 1234 and seq_length 8 unless told."""
    return IndexRequest(
        **{
            "prefix": prefix,
            "first": 0,
            "last": len(lengths),
            "split_name": "train",
            "seq_length": 8,
            "seed": 1234,
            **values,
        }
    )


@contextlib.contextmanager
def scratch(path: Path) -> Iterator[int]:
    """A new file to write into and read from."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        yield file
    finally:
        os.close(file)


def content(file: int, dtype: DTypeLike) -> NDArray[Any]:
    """All of a file."""
    return np.frombuffer(os.pread(file, os.fstat(file).st_size, 0), dtype)


def documents_of(path: Path, lengths: Any, epochs: int = 1) -> _index.MegatronDocuments:
    """All documents of these lengths, in order."""
    with scratch(path) as file:
        os.pwrite(file, np.asarray(lengths, np.int32).tobytes(), 0)
        return _index.MegatronDocuments(file, 0, 0, len(lengths), epochs)


def sample_rows(
    folder: Path,
    lengths: Any,
    seq_length: int,
    extra: int,
    samples: int,
    *,
    wide: bool = False,
    threads: int = 1,
) -> NDArray[Any]:
    """The sample index over documents of these lengths in this order, [samples + 1, 2]."""
    documents = documents_of(folder / "lengths", lengths)
    with scratch(folder / "ids") as file:
        documents.write_ids(file, 0, threads)
        assert np.array_equal(content(file, np.int32), np.arange(len(lengths)))
    with scratch(folder / "rows") as file:
        documents.write_samples(file, 0, seq_length, extra, samples, wide, threads)
        return content(file, np.int64 if wide else np.int32).reshape(-1, 2)
