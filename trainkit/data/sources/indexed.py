"""source = "indexed" with urls: ready-made .bin/.idx pairs, fetched like text."""

from __future__ import annotations

from pathlib import Path

from trainkit.base.errors import ConfigError, Exit
from trainkit.data.fetch.retry import DEFAULT_RETRY, FetchRetryPolicy
from trainkit.data.sources.contract import Shard, Source
from trainkit.data.sources.listing import list_files, read_listing
from trainkit.data.sources.web import as_shards
from trainkit.jobs.schema import Dataset


class IndexedSource(Source):
    """Every .bin and every .idx is a file of its own; none may lack the other. Without urls
    there is nothing to fetch."""

    def shards(
        self,
        dataset: Dataset,
        corpus: Path,
        *,
        refresh: bool = False,
        retry: FetchRetryPolicy = DEFAULT_RETRY,
    ) -> list[Shard]:
        if not dataset.urls:
            return []
        if not dataset.keep_download:
            raise ConfigError(
                f"datasets.{dataset.name}: keep_download = false with source = 'indexed'",
                exit=Exit.STAGE_FAILED,
                hint="training reads the files themselves: take keep_download away",
            )
        found = as_shards(dataset, corpus, list_files(dataset, corpus, retry, refresh=refresh))
        _prefixes(dataset, found)
        return found


def fetched_prefixes(dataset: Dataset, corpus: Path) -> list[Path]:
    """The pairs that `urls` name, without .bin and .idx, in the order of the .idx files. Asks no
    server.

    Raises ConfigError (exit 6) where prep-data has not fetched them.
    """
    found = read_listing(dataset, corpus)
    if found is None:
        raise ConfigError(
            f"datasets.{dataset.name}: what its urls name was not fetched to {corpus}",
            exit=Exit.STAGE_FAILED,
            hint=f"invoke prep-data --dataset {dataset.name}",
        )
    return _prefixes(dataset, as_shards(dataset, corpus, found))


def _prefixes(dataset: Dataset, shards: list[Shard]) -> list[Path]:
    paths = dict.fromkeys(shard.path for shard in shards)
    for path in paths:
        other = {".bin": ".idx", ".idx": ".bin"}.get(path.suffix)
        if other is None:
            raise ConfigError(
                f"datasets.{dataset.name}.urls: {path.name} ends neither in .bin nor in .idx",
                exit=Exit.STAGE_FAILED,
            )
        if path.with_suffix(other) not in paths:
            raise ConfigError(
                f"datasets.{dataset.name}.urls: {path.name} comes without"
                f" {path.with_suffix(other).name}",
                exit=Exit.STAGE_FAILED,
                hint="name both files of every pair",
            )
    return [path.with_suffix("") for path in paths if path.suffix == ".idx"]
