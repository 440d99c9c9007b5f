"""Small .bin/.idx pairs, and what lies in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from trainkit.data.indexed.dataset import IndexedWriter
from trainkit.data.indexed.paths import bin_path, idx_path


def write_documents(
    prefix: Path, documents: Iterable[Sequence[int]], dtype: str = "uint16"
) -> Path:
    """A pair with one sequence a document."""
    with IndexedWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document(np.array(document, dtype))
    return prefix


def write_sequences(
    prefix: Path, documents: Iterable[Sequence[Sequence[int]]], dtype: str = "uint16"
) -> Path:
    """A pair; a document is several sequences."""
    with IndexedWriter(prefix, dtype) as writer:
        for sequences in documents:
            tokens = [token for sequence in sequences for token in sequence]
            writer.add_document(np.array(tokens, dtype), [len(s) for s in sequences])
    return prefix


def pair_bytes(prefix: Path) -> tuple[bytes, bytes]:
    """The bytes of .bin and of .idx."""
    return bin_path(prefix).read_bytes(), idx_path(prefix).read_bytes()
