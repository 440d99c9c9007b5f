"""Where a dataset's files lie: <root>/data/<dataset>/<tokenizer>/."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trainkit.jobs.schema import Dataset


@dataclass(frozen=True)
class DataFolder:
    """The files of one dataset under one tokenizer.

    Args:
        root: the job's `cluster.root`.
        dataset: a dataset that has a tokenizer (every source but "mock").
    """

    root: Path
    dataset: Dataset

    @property
    def corpus(self) -> Path:
        """Downloaded or written text shards, the same for every tokenizer."""
        return Path(self.root) / "data" / self.dataset.name / "corpus"

    @property
    def path(self) -> Path:
        """Everything that depends on the tokenizer."""
        assert self.dataset.tokenizer is not None, "mock data has no folder"
        return Path(self.root) / "data" / self.dataset.name / self.dataset.tokenizer.name

    @property
    def tokenizer(self) -> Path:
        return self.path / "tokenizer.json"

    @property
    def shards(self) -> Path:
        """Token shards until they are merged."""
        return self.path / "shards"

    @property
    def prefix(self) -> Path:
        """The merged .bin/.idx without their endings, named as Megatron's preprocess_data.py names them."""
        return self.path / f"{self.dataset.name}_text_document"

    @property
    def manifest(self) -> Path:
        """dataset.json: what was read, dropped and written."""
        return self.path / "dataset.json"
