"""What a source of text is: it names its shards before anything is read, so that each can be a unit of its own."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from trainkit.jobs.schema import Dataset


@dataclass(frozen=True)
class Shard:
    """One file of text.

    Args:
        name: "00000", "00001", ... in the order of the corpus.
        path: the .jsonl or .jsonl.zst file.
        size: bytes of text, or of the file where that is unknown; only for progress and balance.
        recipe: what `Source.write` needs to make the file; empty: the file is there already.
    """

    name: str
    path: Path
    size: int
    recipe: dict[str, Any] = field(default_factory=dict)


class Source(Protocol):
    """A kind of `datasets.X.source`."""

    def identity(self, dataset: Dataset) -> dict[str, str]:
        """What freshness depends on beyond the dataset's own keys."""

    def shards(self, dataset: Dataset, corpus: Path) -> list[Shard]:
        """All shards, in order. Raises ConfigError (exit 6) where there are none."""

    def write(self, recipe: dict[str, Any], path: Path, text_key: str) -> dict[str, Any]:
        """Make one shard from its recipe. Returns {"documents", "text_bytes", "left_out": {reason: documents}}."""
