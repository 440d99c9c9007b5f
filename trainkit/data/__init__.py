"""Data: text, tokens, samples. For any program that has numpy: `from trainkit.data import IndexedDataset` reads a .bin/.idx pair."""

from trainkit.data.indexed import IndexedDataset

__all__ = ["IndexedDataset"]
