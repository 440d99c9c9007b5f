"""source = "stdlib": the source files of Python's standard library, one document a file. Real
text that every machine has."""

from __future__ import annotations

import os
import platform
import sysconfig
from pathlib import Path

from trainkit.base.errors import ConfigError, Exit
from trainkit.data.fetch.retry import DEFAULT_RETRY, FetchRetryPolicy
from trainkit.data.sources.contract import Shard, Source
from trainkit.data.text.write_shards import DocumentWriter
from trainkit.data.unit_specs import TextRecipe, TextResult
from trainkit.jobs.schema import Dataset

LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}


def source_files(stdlib: Path) -> list[str]:
    """Relative names of *.py files below `stdlib`, sorted, without installed packages, tests and
    caches."""

    def give_up(error: OSError) -> None:
        raise error  # os.walk would leave the folder out without a word

    names = []
    for folder, folders, files in os.walk(stdlib, onerror=give_up):
        folders[:] = [f for f in folders if f not in LEFT_OUT]
        names += [
            os.path.relpath(os.path.join(folder, f), stdlib) for f in files if f.endswith(".py")
        ]
    return sorted(names)


class StdlibSource(Source):
    """Cuts the sorted files into shards of about `shard_bytes` and writes each like a downloaded
    corpus."""

    def identity(self, dataset: Dataset) -> dict[str, str]:
        return {"python_version": platform.python_version()}

    def shards(
        self,
        dataset: Dataset,
        corpus: Path,
        *,
        refresh: bool = False,
        retry: FetchRetryPolicy = DEFAULT_RETRY,
    ) -> list[Shard]:
        stdlib = Path(sysconfig.get_path("stdlib"))
        groups: list[tuple[list[str], int]] = []
        for name in source_files(stdlib):
            size = (stdlib / name).stat().st_size
            if not groups or groups[-1][1] + size > dataset.shard_bytes:
                groups.append(([], 0))
            names, total = groups[-1]
            groups[-1] = ([*names, name], total + size)
        if not groups:
            raise ConfigError(
                f"{stdlib} holds no Python source file",
                exit=Exit.STAGE_FAILED,
                hint="install Python's standard library as source, or use another dataset",
            )
        return [
            Shard(
                f"{i:05d}",
                corpus / f"shard-{i:05d}.jsonl.zst",
                size,
                TextRecipe(stdlib, tuple(names)),
            )
            for i, (names, size) in enumerate(groups)
        ]

    def write(self, recipe: TextRecipe, path: Path, text_key: str) -> TextResult:
        left_out = {"not_utf8": 0, "empty": 0}
        with DocumentWriter(path, text_key) as writer:
            for name in recipe.files:
                try:
                    text = (recipe.folder / name).read_bytes().decode("utf-8")
                except UnicodeDecodeError:
                    left_out["not_utf8"] += 1
                    continue
                if text:
                    writer.add(text, {})
                else:
                    left_out["empty"] += 1
        return TextResult(writer.documents, writer.text_bytes, left_out)
