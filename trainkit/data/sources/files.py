"""source = "files": files that are there already, by path or glob pattern; {00..29} stands for
every number of a range, a folder for its files."""

from __future__ import annotations

import glob
from pathlib import Path

from trainkit.base.errors import ConfigError, Exit
from trainkit.data.fetch.ranges import expand
from trainkit.data.fetch.retry import DEFAULT_RETRY, FetchRetryPolicy
from trainkit.data.indexed.published import check_published
from trainkit.data.sources.contract import Shard, Source
from trainkit.data.sources.folders import folder_files
from trainkit.data.text.formats import READABLE, READABLE_IN_WORDS
from trainkit.jobs.schema import Dataset


class FilesSource(Source):
    """Every matching file is a shard, in the order of `paths` and sorted within a pattern; of a
    folder those of `folder_files`.
    Nothing is copied."""

    def shards(
        self,
        dataset: Dataset,
        corpus: Path,
        *,
        refresh: bool = False,
        retry: FetchRetryPolicy = DEFAULT_RETRY,
    ) -> list[Shard]:
        place = f"datasets.{dataset.name}.paths"
        found: dict[Path, None] = {}
        missing = []
        for pattern in (text for given in dataset.paths for text in expand(given)):
            matches = [Path(m) for m in sorted(glob.glob(pattern, recursive=True))]
            if not matches:
                missing.append(pattern)
            for path in matches:
                files = folder_files(path, place) if path.is_dir() else [path]
                found.update(dict.fromkeys(files))
        if missing and (dataset.missing_files == "refuse" or not found):
            more = f" ({len(missing) - 1:,} more match none)" if len(missing) > 1 else ""
            raise ConfigError(
                f"{place}: {missing[0]!r} matches no file{more}",
                exit=Exit.STAGE_FAILED,
            )
        for path in found:
            refuse_unreadable(dataset, path)
        sizes = [path.stat().st_size for path in found]
        if dataset.files is not None and len(found) != dataset.files:
            raise ConfigError(
                f"datasets.{dataset.name}: {len(found):,} files are there, files ="
                f" {dataset.files:,}",
                exit=Exit.STAGE_FAILED,
                hint="some were not copied; or correct `files`",
            )
        check_published(dataset, {"download_bytes": sum(sizes)})
        return [
            Shard(f"{i:05d}", path, size)
            for i, (path, size) in enumerate(zip(found, sizes, strict=True))
        ]


def refuse_unreadable(dataset: Dataset, path: Path) -> None:
    """Raises ConfigError (exit 6): not a file, or of no format that is known."""
    if not path.is_file() or not path.name.endswith(READABLE):
        raise ConfigError(
            f"datasets.{dataset.name}.paths: {path} is not a file of a format that is read",
            exit=Exit.STAGE_FAILED,
            hint=f"read are {READABLE_IN_WORDS}; the name says the format",
        )
