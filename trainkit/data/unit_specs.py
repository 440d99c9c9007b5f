"""What the units of prep-data are given and what they report: records.

Stamps hash what is written: a key that is renamed, added or left out makes every dataset that was
prepared before stale.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from trainkit.base.lazy_dataclasses import dataclass, field
from trainkit.base.records import INLINE, OMIT_NONE, Record
from trainkit.data.fetch.recipe import FetchRecipe
from trainkit.data.text.documents import ReadOptions
from trainkit.data.text.filters import FilterSettings

SpecialTokens = Literal["text", "parse"]
EncoderKey = Literal["auto", "gigatoken", "tokenizers"]
FileRead = tuple[str, int, int, str | None]  # path, size, mtime in ns, XXH128 if it was summed
SliceBounds = tuple[int, int, int, int]  # first sequence, sequences, first document, documents


@dataclass(frozen=True)
class ReadingSettings(Record):
    """How a file becomes documents: keys of the dataset's table."""

    text_key: str
    text_separator: str | None = None
    filters: FilterSettings = field(default_factory=FilterSettings, metadata=INLINE)
    max_document_bytes: int = ReadOptions.max_document_bytes
    on_error: Literal["stop", "skip"] = "stop"
    max_reject_fraction: float = 0.001

    @property
    def options(self) -> ReadOptions:
        """How documents are found."""
        return ReadOptions(
            self.text_key, self.text_separator, self.max_document_bytes, tuple(self.filters.drop)
        )


@dataclass(frozen=True)
class EncodingSettings(Record):
    """How documents become ids: keys of the tokenizer's table."""

    eod_token: str
    append_eod: bool = True
    encoder: EncoderKey = "auto"
    special_tokens: SpecialTokens = "text"


@dataclass(frozen=True)
class TextRecipe(Record):
    """A shard of text that is written from files below a folder, one document a file."""

    folder: Path
    files: tuple[str, ...]


@dataclass(frozen=True)
class TextSpec(Record):
    """The spec of a unit that writes one shard of text.

    Args:
        source: the kind of source, a key of `SOURCES`.
        identity: what freshness depends on beyond the dataset's keys.
        recipe: what the text is made of.
        path: the file to write.
        text_key: the key that holds a document's text.
    """

    do: Literal["text"] = field(default="text", init=False)
    source: str
    identity: Mapping[str, str]
    recipe: TextRecipe
    path: Path
    text_key: str


@dataclass(frozen=True)
class TextResult(Record):
    """What was written of a shard of text; `left_out`: {reason: documents}."""

    documents: int
    text_bytes: int
    left_out: Mapping[str, int]


@dataclass(frozen=True)
class TokensSpec(Record):
    """The spec of a unit that encodes one shard of text.

    Args:
        name: of the shard.
        shard: the file; where it is read while it is fetched, only its name.
        recipe: how it is fetched while it is read; None: the file is there.
        size: bytes, for progress.
        reading: how the file becomes documents.
        encoding: how they become ids.
        tokenizer: tokenizer.json.
        prefix: of the .bin/.idx to write.
        rejects: where bad lines go (on_error = "skip"); None: nowhere.
        first: the dataset's first shard: where gigatoken encodes, its first documents are
            compared with tokenizers.
    """

    do: Literal["tokens"] = field(default="tokens", init=False)
    name: str
    shard: Path
    recipe: FetchRecipe | None
    size: int
    reading: ReadingSettings = field(metadata=INLINE)
    encoding: EncodingSettings = field(metadata=INLINE)
    tokenizer: Path
    prefix: Path
    rejects: Path | None = None
    first: bool = True

    def to_json(self) -> dict[str, object]:
        """The spec; stamps know {} where nothing is fetched."""
        return super().to_json() | ({} if self.recipe else {"recipe": {}})

    @classmethod
    def from_json(cls, value: Mapping[str, Any], name: str = "") -> TokensSpec:
        """Read what `to_json` wrote. Raises FieldError."""
        return super().from_json({**value, "recipe": value.get("recipe") or None}, name)


@dataclass(frozen=True)
class TokensResult(Record):
    """What became of one shard.

    Args:
        documents: written, empty ones included.
        empty_documents: without a token.
        sequences: written.
        tokens: written, those that end documents included.
        text_bytes: of the text that was encoded, in UTF-8.
        lines: documents, left out and rejected ones.
        left_out: {reason: documents}.
        drop_present: {field of `drop`: documents that have it}.
        passed_over: {reason: members of archives, records of web archives}.
        rejects: bad lines.
        rejected: {kind: lines}.
        encoder: what encoded.
        encoder_because: why that.
        compared: texts that were compared with tokenizers.
        passed_on: texts that gigatoken left to tokenizers.
        bin_xxh128: of the .bin.
        idx_xxh128: of the .idx.
        read: the file, where it lies here.
    """

    documents: int
    empty_documents: int
    sequences: int
    tokens: int
    text_bytes: int
    lines: int
    rejects: int
    left_out: Mapping[str, int] = field(default_factory=dict)
    drop_present: Mapping[str, int] = field(default_factory=dict)
    passed_over: Mapping[str, int] = field(default_factory=dict)
    rejected: Mapping[str, int] = field(default_factory=dict)
    encoder: str = ""
    encoder_because: str = ""
    compared: int = 0
    passed_on: int = 0
    bin_xxh128: str = ""
    idx_xxh128: str = ""
    read: tuple[FileRead, ...] = ()


@dataclass(frozen=True)
class TokenizerSpec(Record):
    """The spec of the unit that makes tokenizer.json.

    Args:
        settings: the tokenizer's table, without name, encoder and megatron.
        tokenizer: the file to write.
        reading: how files of text become documents.
        shards: what a BPE is trained on.
        total_bytes: of the shards.
        given: files that lie here and that it is made from.
    """

    settings: TokenizerSettings = field(metadata=INLINE)
    tokenizer: Path
    reading: ReadingSettings = field(metadata=INLINE)
    shards: tuple[Path, ...]
    total_bytes: int
    given: tuple[Path, ...]


@dataclass(frozen=True)
class TokenizerSettings(Record):
    """What a tokenizer.json is made of: keys of the tokenizer's table."""

    type: Literal["bpe", "file", "gpt2"]
    eod_token: str
    vocab_size: int | None = None
    training_bytes: int = 2**27
    path: str | None = None
    vocab_file: str | None = None
    merge_file: str | None = None
    url: str | None = None
    vocab_url: str | None = None
    merge_url: str | None = None
    append_eod: bool = True
    special_tokens: SpecialTokens = "text"


@dataclass(frozen=True)
class TokenizerResult(Record):
    """What was made; `read`: the files it is made from."""

    vocab_size: int
    read: tuple[FileRead, ...]


@dataclass(frozen=True)
class MergeShard(Record):
    """One shard as the last unit sees it.

    Args:
        name: of the shard.
        prefix: of its .bin/.idx.
        source: where its text is from, for dataset.json.
        stamps: of the units that made it: {"tokens": .., "text" or "fetch": ..}.
        kept: where it lies in the pair that was merged before; None: it was not in it.
    """

    name: str
    prefix: Path
    source: Mapping[str, object]
    stamps: Mapping[str, Path]
    kept: SliceBounds | None = field(default=None, metadata=OMIT_NONE)


@dataclass(frozen=True)
class MergeSpec(Record):
    """The spec of the last unit: it joins the shards, or leaves them, and writes dataset.json.

    Args:
        name: of the dataset.
        tokenizer: tokenizer.json.
        eod_token: what ends a document.
        shards: in the order of the corpus.
        shuffle: documents are written in a random order.
        declared: counts that were published: {"documents": .., "text_bytes": ..}.
        prefix: of the pair to write; None: the shards stay as they are.
        former: identities of .bin and .idx of the pair that was merged before, if parts of it
            are used.
        manifest: dataset.json.
        rejects: the folder of bad lines.
        curation: curation.json, which goes into dataset.json; None: the text is as it was read.
    """

    name: str
    tokenizer: Path
    eod_token: str
    shards: tuple[MergeShard, ...]
    shuffle: bool
    declared: Mapping[str, int]
    prefix: Path | None
    former: tuple[object, ...] = field(default=(), kw_only=True)
    manifest: Path
    rejects: Path
    curation: Path | None = field(default=None, metadata=OMIT_NONE)


@dataclass(frozen=True)
class CheckSpec(Record):
    """The spec of the unit that checks ready-made pairs and writes dataset.json."""

    name: str
    tokenizer: Path
    eod_token: str
    prefixes: tuple[Path, ...]
    manifest: Path
