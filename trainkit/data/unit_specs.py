"""What the units of prep-data are given and what they report, as JSON: each form is a dataclass
with one reader and one writer.

Stamps hash what is written: a key that is renamed, added or left out makes every dataset that was
prepared before stale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from trainkit.data.fetch.recipe import FetchRecipe
from trainkit.data.text.documents import ReadOptions
from trainkit.data.text.filters import DocumentFilter

SpecialTokens = Literal["text", "parse"]
EncoderKey = Literal["auto", "gigatoken", "tokenizers"]
FileRead = tuple[str, int, int, str | None]  # path, size, mtime in ns, XXH128 if it was summed
SliceBounds = tuple[int, int, int, int]  # first sequence, sequences, first document, documents


def _files_read(value: Mapping[str, Any]) -> tuple[FileRead, ...]:
    return tuple((path, size, time, digest) for path, size, time, digest in value.get("read", ()))


@dataclass(frozen=True)
class ReadingSettings:
    """How a file becomes documents: keys of the dataset's table."""

    text_key: str
    text_separator: str | None = None
    drop: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    min_document_bytes: int = 0
    max_document_bytes: int = ReadOptions.max_document_bytes
    fix_text: bool = False
    on_error: Literal["stop", "skip"] = "stop"
    max_reject_fraction: float = 0.001

    def to_json(self) -> dict[str, object]:
        return dict(vars(self))

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ReadingSettings:
        """From the keys of a spec; those that are not there have their defaults."""
        return cls(**{key: value[key] for key in cls.__dataclass_fields__ if key in value})

    @property
    def options(self) -> ReadOptions:
        """How documents are found."""
        return ReadOptions(
            self.text_key, self.text_separator, self.max_document_bytes, tuple(self.drop)
        )

    def filter(self) -> DocumentFilter:
        """What is left out."""
        return DocumentFilter(self.drop, self.min_document_bytes, self.fix_text)


@dataclass(frozen=True)
class EncodingSettings:
    """How documents become ids: keys of the tokenizer's table."""

    eod_token: str
    append_eod: bool = True
    encoder: EncoderKey = "auto"
    special_tokens: SpecialTokens = "text"

    def to_json(self) -> dict[str, object]:
        return dict(vars(self))

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> EncodingSettings:
        """From the keys of a spec; those that are not there have their defaults."""
        return cls(**{key: value[key] for key in cls.__dataclass_fields__ if key in value})


@dataclass(frozen=True)
class TextRecipe:
    """A shard of text that is written from files below a folder, one document a file."""

    folder: Path
    files: tuple[str, ...]

    def to_json(self) -> dict[str, object]:
        return {"folder": str(self.folder), "files": list(self.files)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TextRecipe:
        return cls(Path(value["folder"]), tuple(value["files"]))


@dataclass(frozen=True)
class TextSpec:
    """The spec of a unit that writes one shard of text.

    Args:
        source: the kind of source, a key of `SOURCES`.
        identity: what freshness depends on beyond the dataset's keys.
        recipe: what the text is made of.
        path: the file to write.
        text_key: the key that holds a document's text.
    """

    source: str
    identity: Mapping[str, str]
    recipe: TextRecipe
    path: Path
    text_key: str

    def to_json(self) -> dict[str, object]:
        return {
            "do": "text",
            **vars(self),
            "recipe": self.recipe.to_json(),
            "path": str(self.path),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TextSpec:
        return cls(
            value["source"],
            value.get("identity", {}),
            TextRecipe.from_json(value["recipe"]),
            Path(value["path"]),
            value["text_key"],
        )


@dataclass(frozen=True)
class TextResult:
    """What was written of a shard of text; `left_out`: {reason: documents}."""

    documents: int
    text_bytes: int
    left_out: Mapping[str, int]

    def to_json(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True)
class TokensSpec:
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

    name: str
    shard: Path
    recipe: FetchRecipe | None
    size: int
    reading: ReadingSettings
    encoding: EncodingSettings
    tokenizer: Path
    prefix: Path
    rejects: Path | None = None
    first: bool = True

    def to_json(self) -> dict[str, object]:
        return {
            "do": "tokens",
            "name": self.name,
            "first": self.first,
            "shard": str(self.shard),
            "recipe": {} if self.recipe is None else self.recipe.to_json(),
            "size": self.size,
            **self.reading.to_json(),
            **self.encoding.to_json(),
            "tokenizer": str(self.tokenizer),
            "prefix": str(self.prefix),
            "rejects": None if self.rejects is None else str(self.rejects),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TokensSpec:
        """Keys with a default may be left out."""
        recipe = value.get("recipe")
        rejects = value.get("rejects")
        return cls(
            value.get("name", ""),
            Path(value["shard"]),
            FetchRecipe.from_json(recipe) if recipe else None,
            value["size"],
            ReadingSettings.from_json(value),
            EncodingSettings.from_json(value),
            Path(value["tokenizer"]),
            Path(value["prefix"]),
            Path(rejects) if rejects else None,
            value.get("first", True),
        )


@dataclass(frozen=True)
class TokensResult:
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
        passed_over: {reason: members of archives}.
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

    def to_json(self) -> dict[str, object]:
        return {**vars(self), "read": [list(file) for file in self.read]}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TokensResult:
        """Of an older unit too: keys that came later have their defaults."""
        known = {key: value[key] for key in cls.__dataclass_fields__ if key in value}
        return cls(**{**known, "read": _files_read(value)})


@dataclass(frozen=True)
class TokenizerSpec:
    """The spec of the unit that makes tokenizer.json.

    Args:
        settings: the tokenizer's table, without name, encoder and megatron.
        tokenizer: the file to write.
        reading: how files of text become documents.
        shards: what a BPE is trained on.
        total_bytes: of the shards.
        given: files that lie here and that it is made from.
    """

    settings: TokenizerSettings
    tokenizer: Path
    reading: ReadingSettings
    shards: tuple[Path, ...]
    total_bytes: int
    given: tuple[Path, ...]

    def to_json(self) -> dict[str, object]:
        return {
            **self.settings.to_json(),
            "tokenizer": str(self.tokenizer),
            **self.reading.to_json(),
            "shards": [str(path) for path in self.shards],
            "total_bytes": self.total_bytes,
            "given": [str(path) for path in self.given],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TokenizerSpec:
        return cls(
            TokenizerSettings.from_json(value),
            Path(value["tokenizer"]),
            ReadingSettings.from_json(value),
            tuple(map(Path, value["shards"])),
            value["total_bytes"],
            tuple(map(Path, value["given"])),
        )


@dataclass(frozen=True)
class TokenizerSettings:
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

    def to_json(self) -> dict[str, object]:
        return dict(vars(self))

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TokenizerSettings:
        """From the keys of a spec; those that are not there have their defaults."""
        return cls(**{key: value[key] for key in cls.__dataclass_fields__ if key in value})


@dataclass(frozen=True)
class TokenizerResult:
    """What was made; `read`: the files it is made from."""

    vocab_size: int
    read: tuple[FileRead, ...]

    def to_json(self) -> dict[str, object]:
        return {"vocab_size": self.vocab_size, "read": [list(file) for file in self.read]}


@dataclass(frozen=True)
class MergeShard:
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
    kept: SliceBounds | None = None

    def to_json(self) -> dict[str, object]:
        value: dict[str, object] = {
            "name": self.name,
            "prefix": str(self.prefix),
            "source": self.source,
            "stamps": {kind: str(path) for kind, path in self.stamps.items()},
        }
        if self.kept is not None:
            value["kept"] = list(self.kept)
        return value

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> MergeShard:
        kept = value.get("kept")
        return cls(
            value["name"],
            Path(value["prefix"]),
            value["source"],
            {kind: Path(path) for kind, path in value["stamps"].items()},
            kept and tuple(kept),
        )


@dataclass(frozen=True)
class MergeSpec:
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
    """

    name: str
    tokenizer: Path
    eod_token: str
    shards: tuple[MergeShard, ...]
    shuffle: bool
    declared: Mapping[str, int]
    prefix: Path | None
    former: tuple[object, ...]
    manifest: Path
    rejects: Path

    def to_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "tokenizer": str(self.tokenizer),
            "eod_token": self.eod_token,
            "shards": [shard.to_json() for shard in self.shards],
            "shuffle": self.shuffle,
            "declared": self.declared,
            "prefix": None if self.prefix is None else str(self.prefix),
            "former": list(self.former),
            "manifest": str(self.manifest),
            "rejects": str(self.rejects),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> MergeSpec:
        prefix = value["prefix"]
        return cls(
            value["name"],
            Path(value["tokenizer"]),
            value["eod_token"],
            tuple(MergeShard.from_json(shard) for shard in value["shards"]),
            value["shuffle"],
            value["declared"],
            None if prefix is None else Path(prefix),
            tuple(value.get("former", ())),
            Path(value["manifest"]),
            Path(value["rejects"]),
        )


@dataclass(frozen=True)
class CheckSpec:
    """The spec of the unit that checks ready-made pairs and writes dataset.json."""

    name: str
    tokenizer: Path
    eod_token: str
    prefixes: tuple[Path, ...]
    manifest: Path

    def to_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "tokenizer": str(self.tokenizer),
            "eod_token": self.eod_token,
            "prefixes": [str(prefix) for prefix in self.prefixes],
            "manifest": str(self.manifest),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> CheckSpec:
        return cls(
            value["name"],
            Path(value["tokenizer"]),
            value["eod_token"],
            tuple(map(Path, value["prefixes"])),
            Path(value["manifest"]),
        )
