"""Where a dataset's files lie: <root>/data/<dataset>/<tokenizer>/, and its dataset.json."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.base.documents import read_document
from trainkit.base.errors import ConfigError, Exit
from trainkit.base.lazy_dataclasses import dataclass

if TYPE_CHECKING:
    from trainkit.jobs.schema import Dataset

MANIFEST = "dataset.json"
SCHEMA = "dataset/1"


def read_manifest(path: Path) -> dict[str, Any]:
    """A dataset.json. Raises ConfigError (exit 6) where there is none."""
    if not path.is_file():
        raise ConfigError(
            f"{path} is not there: the dataset is not prepared",
            exit=Exit.STAGE_FAILED,
            hint="invoke prep-data --dataset NAME",
        )
    return read_document(path, SCHEMA)


def bin_path(prefix: Path) -> Path:
    """The tokens of `prefix`."""
    return prefix.with_name(prefix.name + ".bin")


def idx_path(prefix: Path) -> Path:
    """The index of `prefix`."""
    return prefix.with_name(prefix.name + ".idx")


@dataclass(frozen=True)
class DataFolder:
    """The files of one dataset under one tokenizer.

    Args:
        root: the job's `cluster.root`.
        dataset: a dataset that has a tokenizer (every source but "mock").
    """

    root: Path
    dataset: Dataset

    @cached_property
    def corpus(self) -> Path:
        """Downloaded or written text shards, the same for every tokenizer."""
        return Path(self.root) / "data" / self.dataset.name / "corpus"

    @cached_property
    def curated(self) -> Path:
        """What curation makes of the corpus, the same for every tokenizer."""
        return Path(self.root) / "data" / self.dataset.name / "curated"

    @cached_property
    def path(self) -> Path:
        """Everything that depends on the tokenizer."""
        assert self.dataset.tokenizer is not None, "mock data has no folder"
        return Path(self.root) / "data" / self.dataset.name / self.dataset.tokenizer.name

    @property
    def tokenizer(self) -> Path:
        return self.path / "tokenizer.json"

    @property
    def shards(self) -> Path:
        """Token shards until they are merged; with merge = false they stay."""
        return self.path / "shards"

    @property
    def rejects(self) -> Path:
        """Lines that were not documents, a file for each shard that had any."""
        return self.path / "rejects"

    @property
    def prefix(self) -> Path:
        """The merged .bin/.idx without their endings, named as Megatron's preprocess_data.py
        names them."""
        return self.path / f"{self.dataset.name}_text_document"

    @property
    def manifest(self) -> Path:
        """dataset.json: what was read, dropped and written."""
        return self.path / MANIFEST

    def prefixes(self) -> list[Path]:
        """The pairs that hold the dataset's tokens: the merged one or, with merge = false, those
        of the shards that have any, in order.

        Raises ConfigError (exit 6) where shards were to stay pairs and are not prepared.
        """
        if self.dataset.merge:
            return [self.prefix]
        return [self.path / pair for pair in read_manifest(self.manifest)["pairs"]]
