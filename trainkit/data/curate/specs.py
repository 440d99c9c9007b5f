"""What the units of curation are given and what they report: records."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from trainkit.base.lazy_dataclasses import dataclass, field
from trainkit.base.records import INLINE, Record
from trainkit.data.fetch.recipe import FetchRecipe
from trainkit.data.unit_specs import FileRead, ReadingSettings


@dataclass(frozen=True)
class FilterSpec(Record):
    """The spec of a unit that takes one shard through steps that look at one document.

    Args:
        name: of the shard.
        shard: the file; where it is read while it is fetched, only its name.
        recipe: how it is fetched while it is read; None: the file is there.
        size: bytes, for progress.
        reading: how the file becomes documents.
        steps: the tables of the steps.
        numbers: their places among all steps of the dataset, from 0.
        language: of words.
        output: the file to write, .jsonl.zst or .parquet.
        dropped: where documents that are left out are listed.
        rejects: where bad lines go (on_error = "skip").
        keys: of a later pass, the key file of the shard; None: of the first pass.
        numbers_file: of a later pass, a file of `KeyNumbers`.
        duplicates: files of duplicates (key_files.py), which are left out at first.
        duplicates_step, duplicates_number: the step that found them.
    """

    do: Literal["filter"] = field(default="filter", init=False)
    name: str
    shard: Path
    recipe: FetchRecipe | None
    size: int
    reading: ReadingSettings = field(metadata=INLINE)
    steps: tuple[Mapping[str, object], ...]
    numbers: tuple[int, ...]
    language: str
    output: Path
    dropped: Path
    rejects: Path
    keys: Path | None = None
    numbers_file: Path | None = None
    duplicates: tuple[Path, ...] = ()
    duplicates_step: Mapping[str, object] | None = None
    duplicates_number: int = 0


@dataclass
class StepCounts(Record):
    """What went into a step and why it did not come out.

    number: of the step among all of the dataset, from 0; step: its name.
    reasons: {reason: documents}.
    """

    number: int
    step: str
    documents_in: int = 0
    documents_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    reasons: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class FilterResult(Record):
    """What became of a shard in one pass.

    documents, text_bytes: written, copies included.
    lines: documents read, left out and rejected ones.
    steps: in order.
    left_out, rejected, passed_over: as in `TokensResult`.
    words: what words were made by.
    """

    documents: int
    text_bytes: int
    lines: int
    steps: tuple[StepCounts, ...]
    left_out: Mapping[str, int]
    rejects: int
    rejected: Mapping[str, int]
    passed_over: Mapping[str, int]
    words: str
    read: tuple[FileRead, ...] = ()


@dataclass(frozen=True)
class KeysSpec(Record):
    """The spec of a unit that writes what a shard's documents are compared by.

    Args:
        shard: a file that a `FilterSpec` wrote.
        text_key: of its documents.
        step: the table of the step, exact or minhash.
        language: of words.
        output: the key file.
    """

    do: Literal["keys"] = field(default="keys", init=False)
    shard: Path
    text_key: str
    step: Mapping[str, object]
    language: str
    output: Path


@dataclass(frozen=True)
class NumberSpec(Record):
    """The spec of the unit that numbers the documents of all shards through.

    Args:
        against: key files of other datasets, whose documents are kept.
        keys: key files of all shards, in order.
        output: a file of `KeyNumbers`.
    """

    do: Literal["number"] = field(default="number", init=False)
    against: tuple[Path, ...]
    keys: tuple[Path, ...]
    output: Path


@dataclass(frozen=True)
class JoinSpec(Record):
    """The spec of a unit that finds equal keys in a part of them.

    Args:
        numbers_file: a file of `KeyNumbers`.
        band: which section of the key files.
        part, parts: which part of the range of keys.
        edges: what is written are pairs of documents, for `ClusterSpec`; else duplicates.
        output: the file.
    """

    do: Literal["join"] = field(default="join", init=False)
    numbers_file: Path
    band: int
    part: int
    parts: int
    edges: bool
    output: Path


@dataclass(frozen=True)
class ClusterSpec(Record):
    """The spec of the unit that finds groups of documents, and in each the one that is kept.

    Args:
        numbers_file: a file of `KeyNumbers`.
        edges: files of pairs.
        output: a file of duplicates.
    """

    do: Literal["cluster"] = field(default="cluster", init=False)
    numbers_file: Path
    edges: tuple[Path, ...]
    output: Path


@dataclass(frozen=True)
class SummaryShard(Record):
    """A shard in curation.json: its name, and where it is from."""

    name: str
    source: Mapping[str, object]


@dataclass(frozen=True)
class SummarySpec(Record):
    """The spec of the unit that adds up what all passes reported.

    Args:
        name: of the dataset.
        root: the folder that paths of key files are relative to.
        steps: the tables of all steps.
        language: of words.
        stamps: of the units of each pass, shard by shard.
        shards: in order.
        keys: key files of the steps that compare, by the step's number.
        documents: read, as published; None: not known.
        output: curation.json.
    """

    do: Literal["summary"] = field(default="summary", init=False)
    name: str
    root: Path
    steps: tuple[Mapping[str, object], ...]
    language: str
    stamps: tuple[tuple[Path, ...], ...]
    shards: tuple[SummaryShard, ...]
    keys: Mapping[str, tuple[Path, ...]]
    documents: int | None
    output: Path
