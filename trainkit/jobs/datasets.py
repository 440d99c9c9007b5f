"""What a model reads: datasets and their tokenizers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, model_validator

from trainkit.jobs.curation import OWN_FIELDS, Curation, ScoreStep
from trainkit.jobs.table import NAME, Strings, Table, needs, wrong


class Tokenizer(Table):
    """How text becomes ids."""

    name: str = Field("", pattern=NAME, description="the table's name, filled in")
    type: Literal["bpe", "file", "gpt2"] = Field(
        "bpe",
        description=(
            "bpe: a byte-level BPE trained on the dataset; file: a tokenizer.json; gpt2: a"
            " vocabulary and a file of merges"
        ),
    )
    vocab_size: int | None = Field(
        None,
        ge=257,
        le=2**31 - 1,
        description="ids, the end-of-document id included; of a bpe: how many are trained",
    )
    path: str | None = Field(
        None, description="type = file: the tokenizer.json, relative to the folder of jobs.toml"
    )
    vocab_file: str | None = Field(None, description="type = gpt2: the vocabulary, vocab.json")
    merge_file: str | None = Field(None, description="type = gpt2: the merges, merges.txt")
    url: str | None = Field(None, description="where path is published")
    vocab_url: str | None = Field(None, description="where vocab_file is published")
    merge_url: str | None = Field(None, description="where merge_file is published")
    training_bytes: int = Field(
        2**27,
        ge=1,
        description="characters of text that a BPE is trained on, from the start of the corpus",
    )
    eod_token: str = Field(
        "<|endoftext|>", min_length=1, description="the token that ends every document"
    )
    append_eod: bool = Field(True, description="false: documents are written without it")
    encoder: Literal["auto", "gigatoken", "tokenizers"] = Field(
        "auto",
        description=(
            "what encodes, to the same ids: auto: gigatoken (the extra `data`) where it is"
            " installed and proved to give those of tokenizers, else tokenizers; gigatoken: it, or"
            " an error; tokenizers: up to fifty times slower"
        ),
    )
    special_tokens: Literal["text", "parse"] = Field(
        "text",
        description=(
            "a special token that stands in a document, such as <|endoftext|>: text: ordinary text;"
            " parse: the token, as Megatron reads it"
        ),
    )
    megatron: dict[str, str | int | bool] = Field(
        default_factory=dict,
        description=(
            "what Megatron-LM's tokenizer object says of itself (unique_identifiers): with it, it"
            " finds an index made here in its data_cache_path"
        ),
    )

    @model_validator(mode="after")
    def _complete(self) -> Tokenizer:
        if self.type == "bpe" and self.vocab_size is None:
            raise needs("type", "type = 'bpe' needs vocab_size")
        if self.type == "file" and self.path is None:
            raise needs("type", "type = 'file' needs path")
        if self.type == "gpt2" and (self.vocab_file is None or self.merge_file is None):
            raise needs("type", "type = 'gpt2' needs vocab_file and merge_file")
        if self.merge_file is not None and self.merge_file.endswith(".json"):
            raise wrong(
                "merge_file",
                f"merge_file '{self.merge_file}' is a vocabulary (.json), not a file of merges"
                " (merges.txt)",
            )
        if self.vocab_file is not None and not self.vocab_file.endswith(".json"):
            raise wrong(
                "vocab_file", f"vocab_file '{self.vocab_file}' is not a vocabulary (vocab.json)"
            )
        return self


READ_BY = {"paths": ("files",), "urls": ("web", "indexed"), "prefixes": ("indexed",)}


class Dataset(Table):
    """A corpus, its tokenizer and its split."""

    name: str = Field("", pattern=NAME, description="the table's name, filled in")
    source: Literal["stdlib", "files", "mock", "web", "indexed", "blend"] = Field(
        description=(
            "stdlib: Python's own source files; files: local .jsonl or .jsonl.zst; mock: random"
            " tokens; web: fetched from urls; indexed: .bin/.idx; blend: other datasets"
        )
    )
    blend: Blend = Field(
        default_factory=dict,
        description="source = blend: { NAME = weight, .. }, or [NAME, ..] for weights by size",
    )
    valid_blend: Blend = Field(
        default_factory=dict,
        description=(
            "source = blend: what validation samples come from instead, whole datasets then, as in"
            " train"
        ),
    )
    test_blend: Blend = Field(
        default_factory=dict,
        description=(
            "source = blend: what test samples come from instead, whole datasets then, as in train"
        ),
    )
    temperature: float | None = Field(
        None,
        ge=0.1,  # of lower ones the weights are beyond what a float holds
        description=(
            "source = blend without weights: a dataset weighs size^(1 / temperature), the exponent"
            " alpha of multilingual BERT and XLM (arXiv:1901.07291); 1: by size, above: small ones"
            " more often"
        ),
    )
    max_epochs: float | None = Field(
        None,
        gt=0,
        description=(
            "source = blend: no part is read more often in a training; the others share what it"
            " would exceed in proportion, as in UniMax (arXiv:2304.09151)"
        ),
    )
    urls: Strings = Field(
        (),
        description=(
            "source = web or indexed: what is fetched; {00..29} stands for every number of a range"
        ),
    )
    prefixes: Strings = Field(
        (),
        description=(
            "source = indexed: ready-made .bin/.idx pairs without the ending, blended by size;"
            " {00..71} stands for every number of a range"
        ),
    )
    valid_files: int = Field(
        0,
        ge=0,
        description=(
            "files (source = indexed, or shards of merge = false) held out for validation, the last"
            " ones; `split` does not count then"
        ),
    )
    test_files: int = Field(
        0,
        ge=0,
        description="files held out for the test split, those before the ones for validation",
    )
    mmap: bool = Field(
        False,
        description=(
            "map .bin instead of reading it by pread: better for files below 256 MiB that stay in"
            " the page cache"
        ),
    )
    documents: int | None = Field(None, ge=1, description="documents there are, as published")
    download_bytes: int | None = Field(None, ge=1, description="bytes to be fetched, as published")
    text_bytes: int | None = Field(None, ge=1, description="bytes of text, as published")
    tokens: int | None = Field(
        None,
        ge=1,
        description=(
            "tokens under its tokenizer, as published or counted; plan counts epochs with it"
        ),
    )
    files: int | None = Field(
        None, ge=1, description="files there are, as published; data preparation checks it"
    )
    missing_files: Literal["refuse", "allow"] = Field(
        "refuse",
        description=(
            "allow: addresses that are not there (404) are passed over, as long as `files` of"
            " them are"
        ),
    )
    sha256: Strings = Field(
        (), description="source = web: the sum of each file, in the order of urls"
    )
    endpoint: str | None = Field(
        None, description="another address of the hub (hf://) or of the S3 service (s3://)"
    )
    anonymous: bool = Field(False, description="s3:// and the like: without credentials")
    token: str | None = Field(
        None,
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        description="name of the environment variable that holds the access token",
    )
    keep_download: bool = Field(
        True, description="false: a fetched file is deleted once its tokens are written"
    )
    accept_download: bool = Field(
        False, description="a download above 10 GB may start without asking"
    )
    licence: str | None = Field(None, description="under what terms it may be used")
    homepage: str | None = Field(None, description="where it is described")
    paths: Strings = Field(
        (),
        description=(
            "source = files: files, folders of them or glob patterns, relative to the folder of"
            " jobs.toml"
        ),
    )
    text_key: str = Field(
        "text",
        min_length=1,
        description=(
            "the key of a JSON line, or the column, that holds the text; a dot goes into an object"
        ),
    )
    text_separator: str | None = Field(
        None,
        min_length=1,
        description=".txt files: what stands between documents; by default a file is one document",
    )
    drop: dict[str, Strings] = Field(
        default_factory=dict,
        description='documents left out: { "meta.redpajama_set_name" = ["RedPajamaBook"] }',
    )
    min_document_bytes: int = Field(0, ge=0, description="shorter documents are left out")
    max_document_bytes: int = Field(
        2**26, ge=1, description="longer documents are bad lines (see on_error)"
    )
    fix_text: bool = Field(False, description="repair mojibake with ftfy (the extra `data`)")
    on_error: Literal["stop", "skip"] = Field(
        "stop",
        description="at a line without a document: stop, or write it to rejects.jsonl and go on",
    )
    max_reject_fraction: float = Field(
        0.001,
        ge=0,
        le=1,
        description="on_error = skip: stop all the same above this part of a shard's lines",
    )
    curate: Curation | None = Field(
        None, description="what becomes of the text before it is tokenized, step after step"
    )
    merge: bool = Field(
        True, description="false: every shard stays a .bin/.idx pair of its own, blended by size"
    )
    shuffle_documents: bool = Field(
        False, description="documents of all shards are written in one random order"
    )
    tokenizer: Tokenizer | None = Field(None, description="name of a [tokenizers.X] table")
    split: str = Field(
        "969,30,1",
        pattern=r"^\d+(\.\d+)?(,\d+(\.\d+)?){0,2}$",
        description="weights of train, valid and test, as Megatron's --split",
    )
    shard_bytes: int = Field(
        2**22, ge=2**16, description="text bytes of one shard that source = stdlib writes"
    )

    @model_validator(mode="after")
    def _complete(self, info: ValidationInfo) -> Dataset:
        self._check_source()
        self._check_blend()
        self._check_pairs()
        self._check_files()
        if info.context:
            self._check_score_fields()
        if float(self.split.split(",")[0]) == 0:
            raise wrong("split", f"split '{self.split}' leaves no tokens to train on")
        return self

    def _check_source(self) -> None:
        """What each source cannot do without."""
        if self.source == "files" and not self.paths:
            raise needs("source", "source = 'files' needs paths")
        if self.source == "web" and not self.urls:
            raise needs("source", "source = 'web' needs urls")
        if self.source == "indexed" and not (self.prefixes or self.urls):
            raise needs("source", "source = 'indexed' needs prefixes or urls")
        for key, sources in READ_BY.items():
            if getattr(self, key) and self.source not in sources:
                words = " or ".join(f"'{source}'" for source in sources)
                raise wrong(key, f"{key} is for source = {words}, not '{self.source}'")
        if self.curate is not None and self.source not in ("files", "web"):
            raise wrong("curate", f"curate is for source = 'files' or 'web', not '{self.source}'")
        for step in self.curate.steps if self.curate else ():
            if self.name in getattr(step, "against", ()):
                raise wrong("curate", f"{step.step} against {self.name!r}, the dataset itself")
        if self.source not in ("mock", "blend") and self.tokenizer is None:
            raise needs("source", f"source = '{self.source}' needs tokenizer")

    def _check_score_fields(self) -> None:
        for step in self.curate.steps if self.curate else ():
            if isinstance(step, ScoreStep) and step.field in (self.text_key, *OWN_FIELDS):
                raise wrong(
                    "curate", f"the field {step.field!r} is not for a score: name another as field"
                )

    def _check_pairs(self) -> None:
        """What needs one .bin/.idx pair, or many."""
        if (self.valid_files or self.test_files) and self.source != "indexed" and self.merge:
            raise wrong(
                "valid_files",
                "valid_files and test_files hold out .bin/.idx pairs: source = 'indexed', or merge"
                " = false",
            )
        if not self.merge and self.shuffle_documents:
            raise wrong(
                "shuffle_documents", "shuffle_documents writes one pair; merge = false keeps many"
            )

    def _check_files(self) -> None:
        """Whether what is said of files fits their number."""
        if self.sha256 and len(self.sha256) != len(self.urls):
            raise wrong(
                "sha256", f"sha256 has {len(self.sha256)} entries for {len(self.urls)} urls"
            )
        if self.missing_files == "allow" and self.files is None:
            raise needs(
                "missing_files", "missing_files = 'allow' needs files, the number there must be"
            )

    def _check_blend(self) -> None:
        blends = {
            "blend": self.blend,
            "valid_blend": self.valid_blend,
            "test_blend": self.test_blend,
        }
        if self.source != "blend":
            if given := [
                key for key in (*blends, "temperature", "max_epochs") if getattr(self, key)
            ]:
                raise wrong(given[0], f"{given[0]} is for source = 'blend', not '{self.source}'")
            return
        if not self.blend:
            raise needs("source", "source = 'blend' needs blend")
        if self.temperature and None not in (part.weight for part in self.blend.values()):
            raise wrong(
                "temperature",
                "temperature makes weights of sizes, and blend gives weights; leave one of them"
                " out",
            )
        for key, parts in blends.items():
            weights = [part.weight for part in parts.values()]
            if parts and None not in weights and not any(weights):
                raise wrong(key, f"{key} gives every dataset the weight 0")
            if 0 < weights.count(None) < len(weights):
                raise wrong(
                    key,
                    f"{key} has datasets with a weight and without; give all of them one, or none",
                )
            for name, part in parts.items():
                self._check_part(key, name, part.dataset)

    def _check_part(self, key: str, name: str, part: Dataset) -> None:
        if part.source in ("blend", "mock"):
            raise wrong(
                key,
                f"{key}.{name} has source = '{part.source}'; a blend is made of datasets with files"
                " of their own",
            )
        if part.tokenizer and part.tokenizer.type == "bpe":
            raise wrong(
                key,
                f"{key}.{name}: its tokenizer is trained on each dataset separately (type = 'bpe');"
                " several datasets need type = 'file'",
            )
        if part.tokenizer != self.tokenizer:
            ours, theirs = (d.tokenizer.name if d.tokenizer else "none" for d in (self, part))
            raise wrong(key, f"{key}.{name} has the tokenizer {theirs}, but the blend {ours}")


class BlendPart(Table):
    """One dataset of a blend."""

    weight: float | None = Field(
        None,
        ge=0,
        le=1e100,  # so that their sum, times sizes, is a float too
        allow_inf_nan=False,
        description="its share of the samples, over the sum of all; by default its size",
    )
    dataset: Dataset = Field(description="name of a [datasets.X] table, filled in")


Blend = dict[Annotated[str, Field(pattern=NAME)], BlendPart]
