"""Data: text, tokens, samples. For any program that has numpy: `from trainkit.data import
IndexedDataset` reads a .bin/.idx pair."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainkit.data.indexed.dataset import IndexedDataset

__all__ = ["IndexedDataset"]


def __getattr__(name: str) -> Any:
    """IndexedDataset when it is asked for: `plan` needs this package's paths, and no numpy."""
    if name != "IndexedDataset":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from trainkit.data.indexed.dataset import IndexedDataset

    return IndexedDataset
