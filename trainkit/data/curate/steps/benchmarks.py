"""step = "decontaminate": documents that hold what models are tested on.

After GPT-3 (Brown et al. 2020, appendix C): n-grams of words, whatever their case and punctuation.
Numbers stay what they are, or problems of arithmetic would all be one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import orjson

from trainkit import _index
from trainkit.base.errors import ConfigError, Exit
from trainkit.data.curate.contract import CrawledDocument, Dropped
from trainkit.data.curate.step_files import benchmark_files
from trainkit.data.curate.words import load_words
from trainkit.data.text.decompress import decompressed_blocks
from trainkit.data.text.documents import get_field
from trainkit.jobs.curation import DecontaminateStep


class BenchmarkEntry(NamedTuple):
    """Where an entry stands: "gsm8k.jsonl:12"."""

    path: Path
    line: int

    def __str__(self) -> str:
        return f"{self.path.name}:{self.line}"


class BenchmarkFilter:
    """Looks each document's n-grams up among those of the benchmarks.

    Raises ConfigError (exit 6): a pattern without a file, a file of which no entry is long enough.
    """

    def __init__(self, table: DecontaminateStep, language: str) -> None:
        self._words = load_words(language)
        self._index = _index.BenchmarkIndex(table.ngram)
        self._limit = table.ngram
        self._entries: list[BenchmarkEntry] = []
        for path in benchmark_files(table.benchmarks):
            self._add_file(path, table)
        self._index.forget_common(table.max_entries)

    def _add_file(self, path: Path, table: DecontaminateStep) -> None:
        least = min(table.min_words, table.ngram)
        longest = grams = 0
        for line, texts in _entries(path, table.keys):
            for text in texts:
                words, added = self._index.add(self._words, text.lower(), len(self._entries), least)
                longest = max(longest, words)
                grams += added
            self._entries.append(BenchmarkEntry(path, line))
        if not grams:
            raise ConfigError(
                f"{path} has no entry of {least} words or more (the longest has {longest}):"
                " nothing would be found",
                exit=Exit.STAGE_FAILED,
                hint="set min_words of the step to fewer, or take the file out",
            )

    def __call__(self, document: CrawledDocument) -> Dropped | None:
        found = self._index.find(self._words, document.text.lower())
        if not found:
            return None
        entry, line, words = found[0]
        return Dropped(
            "contaminated",
            len(words.split()),
            self._limit,
            f"{self._entries[entry]} in line {line}: {words}",
        )


def _entries(path: Path, keys: tuple[str, ...]) -> Iterator[tuple[int, list[str]]]:
    """(line, texts) of a benchmark's entries: those under `keys`, or all there are."""
    for line, value in enumerate(_rows(path), 1):
        if keys and isinstance(value, Mapping):
            value = [get_field(value, key) for key in keys]
        yield line, list(_texts(value))


def _rows(path: Path) -> Iterator[object]:
    name = path.name.lower()
    if name.endswith(".parquet"):
        from pyarrow import ArrowException, parquet

        try:
            yield from parquet.read_table(path).to_pylist()
        except ArrowException as error:
            raise _damaged(path, f"Parquet: {error}") from None
        return
    with open(path, "rb") as stream:
        data = b"".join(decompressed_blocks(name, stream, str(path)))
    if ".txt" in path.suffixes:
        yield from data.decode(errors="replace").split("\n")
        return
    try:
        lines = data.split(b"\n")
        if data.lstrip()[:1] == b"[":
            yield from orjson.loads(data)
        else:
            yield from (orjson.loads(line) if line.strip() else None for line in lines)
    except ValueError as error:
        raise _damaged(path, f"JSON, an object a line or one array: {error}") from None


def _damaged(path: Path, what: str) -> ConfigError:
    return ConfigError(
        f"{path} is not {what}",
        exit=Exit.STAGE_FAILED,
        hint="benchmarks are .jsonl, .json, .txt (a line each) or .parquet",
    )


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (Mapping, list)):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(each)
