"""source = "files": .jsonl and .jsonl.zst files that are there already, by path or glob pattern."""

from __future__ import annotations

import glob
from pathlib import Path
from typing import Any

from trainkit.base.errors import ConfigError, Exit
from trainkit.data.corpus import READABLE
from trainkit.data.sources.contract import Shard
from trainkit.jobs.schema import Dataset


class Files:
    """Every matching file is a shard, in the order of `paths` and sorted within a pattern. Nothing is copied."""

    def identity(self, dataset: Dataset) -> dict[str, str]:
        return {}

    def shards(self, dataset: Dataset, corpus: Path) -> list[Shard]:
        found: list[Path] = []
        for pattern in dataset.paths:
            matches = [Path(m) for m in sorted(glob.glob(pattern, recursive=True))]
            if not matches:
                raise ConfigError(f"datasets.{dataset.name}.paths: {pattern!r} matches no file", exit=Exit.STAGE_FAILED)
            found += [m for m in matches if m not in found]
        for path in found:
            if not path.is_file() or not path.name.endswith(READABLE):
                raise ConfigError(f"datasets.{dataset.name}.paths: {path} is no file that ends in {' or '.join(READABLE)}", exit=Exit.STAGE_FAILED)
        return [Shard(f"{i:05d}", path, path.stat().st_size) for i, path in enumerate(found)]

    def write(self, recipe: dict[str, Any], path: Path, text_key: str) -> dict[str, Any]:
        raise AssertionError("files are never written")
