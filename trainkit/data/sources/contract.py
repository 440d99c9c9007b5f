"""What a source of text is: it names its shards before anything is read, so that each can be a
unit of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from trainkit.base.lazy_dataclasses import dataclass
from trainkit.data.fetch.recipe import FetchRecipe
from trainkit.data.fetch.retry import DEFAULT_RETRY, FetchRetryPolicy
from trainkit.data.unit_specs import TextRecipe, TextResult
from trainkit.jobs.schema import Dataset


@dataclass(frozen=True)
class Shard:
    """One file of text.

    Args:
        name: "00000", "00001", ... in the order of the corpus.
        path: the file; its name says its format.
        size: bytes of text, or of the file where that is unknown; only for progress and balance.
        recipe: how the file is written by `Source.write`, or fetched; None: the file is there
            already.
    """

    name: str
    path: Path
    size: int
    recipe: FetchRecipe | TextRecipe | None = None

    @property
    def remote(self) -> bool:
        """Whether it has to be fetched."""
        return isinstance(self.recipe, FetchRecipe)


@dataclass(frozen=True)
class FetchUnit:
    """A unit of work that brings a file here, in the words of `stages.contract.Unit`.

    Args:
        name: "fetch-00000", or "listing".
        module: what `python -m` runs.
        spec: everything it depends on.
        outputs: files it leaves.
        after: names that must have succeeded before.
        size: bytes to come.
    """

    name: str
    module: str
    spec: Mapping[str, object]
    outputs: tuple[Path, ...]
    after: tuple[str, ...] = ()
    size: int = 1


class Source:
    """A kind of `datasets.X.source`."""

    def identity(self, dataset: Dataset) -> dict[str, str]:
        """What freshness depends on beyond the dataset's own keys."""
        return {}

    def shards(
        self,
        dataset: Dataset,
        corpus: Path,
        *,
        refresh: bool = False,
        retry: FetchRetryPolicy = DEFAULT_RETRY,
    ) -> list[Shard]:
        """All shards, in order. Of what is fetched, servers are asked only if no listing below
        `corpus` says it, or `refresh`. Writes nothing.

        Raises Unreachable (exit 6) where a server gave no answer within `retry`; ConfigError
        or TrainkitError (exit 6): there are none, or not those that were published.
        """
        raise NotImplementedError

    def write(self, recipe: TextRecipe, path: Path, text_key: str) -> TextResult:
        """Write one shard of text, by sources that make their own.

        Args:
            recipe: what it is made of.
            path: the file to write.
            text_key: the key that holds a document's text.
        """
        raise AssertionError(f"{type(self).__name__} writes no text")
