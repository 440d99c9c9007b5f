"""The stage prep-data: text shards, tokenizer, token shards, one .bin/.idx; of ready-made pairs
and blends, the tokenizer and the manifest alone."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainkit.base.errors import ConfigError
from trainkit.base.files import read_json
from trainkit.data.fetch.retry import DEFAULT_RETRY, FetchRetryPolicy
from trainkit.data.indexed.dataset import bin_path, idx_path
from trainkit.data.indexed.manifest import ranges_path, read_manifest
from trainkit.data.indexed.paths import DataFolder
from trainkit.data.order.resolve_pairs import prefixes_of
from trainkit.data.sources import (
    SOURCES,
    FetchUnit,
    Shard,
    Source,
    download_notice,
    fetch_units,
    tokenizer_fetch_units,
)
from trainkit.jobs.schema import Dataset, Job, Tokenizer
from trainkit.stages.contract import Need, Unit
from trainkit.stages.stamps import check_freshness, file_identity, read_stamp, unit_stamp_path

VERSION = 1
FIRST = "00000"  # the shard whose first documents are compared with tokenizers
LISTING = "listing"  # the unit that writes down which files there are
# bytes of files for each byte of text a BPE is trained on: they hold more than text
TRAINING_FACTOR = 4
# keys that say how a file becomes documents
READING = (
    *("text_key", "text_separator", "drop", "min_document_bytes", "max_document_bytes", "fix_text"),
    *("on_error", "max_reject_fraction"),
)
# keys that tokens do not depend on: how they are cut and read later, what was published about them,
# how they come here
IRRELEVANT = {
    *("name", "tokenizer", "split", "valid_files", "test_files", "mmap", "paths"),
    *(
        "documents",
        "text_bytes",
        "tokens",
        "download_bytes",
        "licence",
        "homepage",
        "blend",
        "valid_blend",
        "test_blend",
    ),
    *("accept_download", "keep_download", "token", "anonymous"),
}


def _module(name: str) -> tuple[str, ...]:
    return (sys.executable, "-I", "-m", name)


def _flat(prefix: str, value: dict[str, Any]) -> dict[str, Any]:
    """{"tokenizer": {"type": ..}} as {"datasets.X.tokenizer.type": ..}: the words of the
    *because*."""
    flat: dict[str, Any] = {}
    for key, item in value.items():
        flat.update(
            _flat(f"{prefix}.{key}", item) if isinstance(item, dict) else {f"{prefix}.{key}": item}
        )
    return flat


def _settings(dataset: Dataset, tokenizer: Tokenizer, source: Source) -> dict[str, Any]:
    """What the tokens depend on. The files that `paths` matches are inputs, however they were
    matched."""
    irrelevant = IRRELEVANT | (set() if dataset.source == "stdlib" else {"shard_bytes"})
    return {
        **_flat(
            f"datasets.{dataset.name}",
            dataset.model_dump(mode="json", exclude=irrelevant, exclude_none=True),
        ),
        **_tokenizer_settings(tokenizer),
        **source.identity(dataset),
    }


def _tokenizer_settings(tokenizer: Tokenizer) -> dict[str, Any]:
    # whatever encodes, the ids are the same
    irrelevant = {"name", "encoder", "url", "vocab_url", "merge_url", "megatron"}
    return _flat(
        f"tokenizers.{tokenizer.name}",
        tokenizer.model_dump(mode="json", exclude=irrelevant, exclude_none=True),
    )


def tokenizer_files(tokenizer: Tokenizer) -> list[Path]:
    """The files that a tokenizer is taken from; none of a BPE that is trained."""
    return [
        Path(path)
        for path in (tokenizer.path, tokenizer.vocab_file, tokenizer.merge_file)
        if path and tokenizer.type != "bpe"
    ]


def needs_of_dataset(
    dataset: Dataset,
    root: Path,
    stamps: Path,
    *,
    anew: bool = False,
    patience: FetchRetryPolicy = DEFAULT_RETRY,
) -> list[Need]:
    """What it takes to have the tokens of `dataset` below `root`, in order; nothing for mock data.

    Args:
        anew: it will be made even if it is fresh. Else, of what is fetched, one that is fresh is
        given without its units, and no server is asked:
            a prepared dataset can be used where the network is not, and after its text was
            deleted.
        patience: with servers that are asked what files there are. Raises Unreachable (exit 6)
        where one gives no answer.
    """
    tokenizer = dataset.tokenizer
    if dataset.source == "mock" or tokenizer is None:
        return []
    if dataset.source == "blend":
        parts = {
            part.dataset.name: part.dataset
            for blend in (dataset.blend, dataset.valid_blend, dataset.test_blend)
            for part in blend.values()
        }
        needs = [
            need
            for part in parts.values()
            for need in needs_of_dataset(part, root, stamps, anew=anew, patience=patience)
        ]
        return [*needs, _Pairs(dataset, tokenizer, root, stamps, patience).need(anew=anew)]
    kind = _Pairs if dataset.source == "indexed" else _Text
    work = kind(dataset, tokenizer, root, stamps, patience)
    if anew:
        made = None
    else:
        made = work.as_made()
    return [made or work.need(anew=anew)]


class PrepDataStage:
    """Prepares the dataset of a job and its further validation sets. Mock data needs nothing.
    `patience`: as `needs_of_dataset`."""

    name = "prep-data"

    def __init__(self, patience: FetchRetryPolicy = DEFAULT_RETRY) -> None:
        self.patience = patience

    def needs(self, job: Job, stamps: Path, *, anew: bool = False) -> list[Need]:
        # each once
        datasets = {dataset.name: dataset for dataset in (job.dataset, *job.validation.values())}
        found = [
            need
            for dataset in datasets.values()
            for need in needs_of_dataset(
                dataset, Path(job.cluster.root or "."), stamps, anew=anew, patience=self.patience
            )
        ]
        return list({need.name: need for need in found}.values())  # a part of two blends once

    def waits_for(self, job: Job) -> tuple[str, ...]:
        return ()


def _fetch_unit(fetch: FetchUnit) -> Unit:
    return Unit(
        fetch.name,
        _module(fetch.module),
        fetch.spec,
        fetch.outputs,
        fetch.after,
        fetch.size,
        network=True,
        several=True,
    )


class _Dataset:
    """What is common to text and ready-made pairs: the tokenizer, and files that are fetched."""

    def __init__(
        self,
        dataset: Dataset,
        tokenizer: Tokenizer,
        root: Path,
        stamps: Path,
        patience: FetchRetryPolicy,
    ) -> None:
        self.dataset = dataset
        self.tokenizer = tokenizer
        self.stamps = stamps
        self.patience = patience
        self.folder = DataFolder(root, dataset)
        self.name = f"{dataset.name}--{tokenizer.name}"
        # the same for every shard, of which there may be 60,000: where it goes, how a file becomes
        # documents, and those tokens
        self.shards_folder, self.rejects_folder, self.tokenizer_json = (
            self.folder.shards,
            str(self.folder.rejects),
            str(self.folder.tokenizer),
        )
        self.reading = dataset.model_dump(mode="json", include=set(READING))
        self.encoding = tokenizer.model_dump(
            mode="json", include={"eod_token", "append_eod", "encoder", "special_tokens"}
        )
        self.tokenizer_fetches = [
            _fetch_unit(fetch)
            for fetch in tokenizer_fetch_units(tokenizer, dataset.token, dataset.endpoint)
        ]

    def settings(self) -> dict[str, Any]:
        """What the outputs depend on, besides inputs."""
        raise NotImplementedError

    def as_made(self) -> Need | None:
        """What was made of a dataset that is fetched, without units, if it is fresh."""
        stamp = read_stamp(self.stamps / f"{self.name}.json")
        if not self.dataset.urls or stamp is None or "outputs" not in stamp:
            return None
        inputs, outputs = (
            [Path(identity[0]) for identity in stamp[key] if identity]
            for key in ("inputs", "outputs")
        )
        need = self._need(inputs, outputs, ())
        if check_freshness(need, self.stamps).fresh:
            return need
        return None

    def _need(
        self,
        inputs: Sequence[Path],
        outputs: Sequence[Path],
        units: Sequence[Unit],
        scratch: Sequence[Path] = (),
        **more: Any,
    ) -> Need:
        # the lock is the dataset's: two tokenizers share its corpus folder
        files = tuple(inputs), tuple(outputs), tuple(units), tuple(scratch)
        return Need(
            PrepDataStage.name,
            self.name,
            self.dataset.name,
            VERSION,
            self.settings(),
            *files,
            **more,
        )

    def _given_files(self) -> list[Path]:
        """Files a tokenizer is taken from that nobody fetches."""
        fetched = {path for unit in self.tokenizer_fetches for path in unit.outputs}
        return [path for path in tokenizer_files(self.tokenizer) if path not in fetched]

    def _fetched_files(self) -> list[Path]:
        return [path for unit in self.tokenizer_fetches for path in unit.outputs]

    def _tokenizer_unit(self, shards: Sequence[Shard], after: Sequence[str]) -> Unit:
        """tokenizer.json, trained on `shards` or taken over."""
        spec = {
            **self.tokenizer.model_dump(mode="json", exclude={"name", "encoder", "megatron"}),
            "tokenizer": str(self.folder.tokenizer),
            **self.reading,
            "shards": [str(shard.path) for shard in shards],
            "total_bytes": sum(shard.size for shard in shards),
            "given": [
                str(path)
                for path in (*self._given_files(), *(s.path for s in shards if not s.recipe))
            ],
        }
        before = (*after, *(unit.name for unit in self.tokenizer_fetches))
        return Unit(
            "tokenizer",
            _module("trainkit.data.tokenizer"),
            spec,
            (self.folder.tokenizer,),
            before,
            spec["total_bytes"],
        )


class _Pairs(_Dataset):
    """Ready-made pairs: they are fetched if urls name them, checked, and described; of a blend,
    whose pairs are its parts', only described."""

    def settings(self) -> dict[str, Any]:
        own = self.dataset.model_dump(
            mode="json", include={"urls", "endpoint", "sha256"}, exclude_none=True
        )
        return {
            **_tokenizer_settings(self.tokenizer),
            **{f"datasets.{self.dataset.name}.{key}": value for key, value in own.items() if value},
        }

    def need(self, *, anew: bool) -> Need:
        corpus = self.folder.corpus
        shards = SOURCES["indexed"].shards(self.dataset, corpus, patience=self.patience)
        fetched = [_fetch_unit(fetch) for fetch in fetch_units(self.dataset, corpus, shards)]
        prefixes = [shard.path.with_suffix("") for shard in shards if shard.path.suffix == ".idx"]
        if self.dataset.source == "indexed" and not self.dataset.urls:
            prefixes = prefixes_of(self.dataset, self.folder.root)
        make = self._tokenizer_unit((), ())
        files = [path for prefix in prefixes for path in (bin_path(prefix), idx_path(prefix))]
        spec = {
            "name": self.dataset.name,
            "tokenizer": str(self.folder.tokenizer),
            "eod_token": self.tokenizer.eod_token,
            "prefixes": [str(prefix) for prefix in prefixes],
            "manifest": str(self.folder.manifest),
        }
        check = Unit(
            "check",
            _module("trainkit.data.tokenize.check_worker"),
            spec,
            (self.folder.manifest,),
            (make.name, *(unit.name for unit in fetched)),
        )
        if fetched:
            inputs = self._given_files()
        else:
            inputs = [*files, *self._given_files()]
        outputs = [
            self.folder.tokenizer,
            self.folder.manifest,
            *self._fetched_files(),
            *(files if fetched else ()),
        ]
        units = (*fetched, *self.tokenizer_fetches, make, check)
        return self._need(
            inputs, outputs, units, announcement=download_notice(self.dataset, corpus, shards)
        )


class _Text(_Dataset):
    """From text to one pair, or to one of each shard: a shard's text or download, the tokenizer,
    a shard's tokens, and what joins them."""

    def settings(self) -> dict[str, Any]:
        return _settings(self.dataset, self.tokenizer, SOURCES[self.dataset.source])

    def need(self, *, anew: bool) -> Need:
        """With `anew`, nothing of what was made before is used."""
        if anew:
            stamp = {}
        else:
            stamp = read_stamp(self.stamps / f"{self.name}.json") or {}
        shards = SOURCES[self.dataset.source].shards(
            self.dataset, self.folder.corpus, patience=self.patience
        )
        self.shards = _with_former_names(shards, stamp.get("memory", {}).get("names", {}))
        self.former = _Former(self.folder, stamp, self.stamps / f"{self.name}.units")
        earlier = self._fetches() or [self._text(shard) for shard in self.shards if shard.recipe]
        before = {unit.name.partition("-")[2]: unit for unit in earlier if unit.name != LISTING}
        trained_on = self._trained_on()
        make = self._tokenizer_unit(
            trained_on, [before[shard.name].name for shard in trained_on if shard.name in before]
        )
        tokens = [
            self._tokens(shard, before.get(shard.name), first=shard.name == FIRST)
            for shard in self.shards
        ]
        last = self._last(before, tokens)
        pairs = [path for unit in tokens for path in unit.outputs]
        if self.dataset.merge:
            scratch = [*pairs, *(Path(unit.spec["prefix"] + ".lock") for unit in tokens)]
        else:
            scratch = []
        inputs = [*(shard.path for shard in self.shards if not shard.recipe), *self._given_files()]
        outputs = [
            self.folder.tokenizer,
            *last.outputs,
            *self._fetched_files(),
            *([] if self.dataset.merge else pairs),
        ]
        units = (*earlier, *self.tokenizer_fetches, make, *tokens, last)
        memory = {"names": {str(shard.path): shard.name for shard in self.shards}}
        return self._need(
            inputs,
            outputs,
            units,
            scratch,
            announcement=download_notice(self.dataset, self.folder.corpus, self.shards),
            memory=memory,
        )

    def _fetches(self) -> list[Unit]:
        """The listing and every remote shard's file; nothing where all is here, the listing
        alone where shards are read as they come."""
        return [
            _fetch_unit(fetch)
            for fetch in fetch_units(self.dataset, self.folder.corpus, self.shards)
        ]

    def _text(self, shard: Shard) -> Unit:
        """What writes a shard's file from its source's recipe."""
        spec = {
            "do": "text",
            "source": self.dataset.source,
            "identity": SOURCES[self.dataset.source].identity(self.dataset),
            "recipe": shard.recipe,
            "path": str(shard.path),
            "text_key": self.dataset.text_key,
        }
        return Unit(
            f"text-{shard.name}",
            _module("trainkit.data.tokenize.shard_worker"),
            spec,
            (shard.path,),
            size=shard.size,
            several=True,
        )

    def _trained_on(self) -> list[Shard]:
        """The first shards, as many as hold what a BPE is trained on: its unit need not wait for
        the others."""
        if self.tokenizer.type != "bpe":
            return []
        if any(shard.remote and not shard.recipe["keep"] for shard in self.shards):
            what = (
                f"tokenizers.{self.tokenizer.name} is trained on {self.dataset.name} (type = 'bpe')"
            )
            hint = (
                f"set datasets.{self.dataset.name}.keep_download = true, or name a tokenizer.json"
                " (type = 'file')"
            )
            raise ConfigError(
                f"{what}, of which keep_download = false leaves nothing to read twice", hint=hint
            )
        found = []
        size = 0
        for shard in self.shards:
            if size >= TRAINING_FACTOR * self.tokenizer.training_bytes:
                break
            found.append(shard)
            size += shard.size
        return found

    def _tokens(self, shard: Shard, before: Unit | None, *, first: bool) -> Unit:
        prefix = self.shards_folder / (
            shard.name if self.dataset.merge else f"{shard.name}_text_document"
        )
        spec = {
            "do": "tokens",
            "name": shard.name,
            "first": first,
            "shard": str(shard.path),
            "recipe": shard.recipe if before is None else {},
            "size": shard.size,
            **self.reading,
            **self.encoding,
            "tokenizer": self.tokenizer_json,
            "prefix": str(prefix),
            "rejects": f"{self.rejects_folder}/{shard.name}.jsonl",
        }
        after = ("tokenizer",) if before is None else (before.name, "tokenizer")
        outputs = (bin_path(prefix), idx_path(prefix))
        kept = shard.name in self.former.ranges
        return Unit(
            f"tokens-{shard.name}",
            _module("trainkit.data.tokenize.shard_worker"),
            spec,
            outputs,
            after,
            shard.size,
            several=True,
            kept=kept,
        )

    def _last(self, before: dict[str, Unit], tokens: list[Unit]) -> Unit:
        """One pair of all shards, if they are joined, and dataset.json."""
        if self.dataset.merge:
            prefix = self.folder.prefix
        else:
            prefix = None

        def stamp(unit: Unit) -> str:
            return str(unit_stamp_path(self.stamps, self.name, unit.name))

        def entry(shard: Shard, unit: Unit) -> dict[str, Any]:
            earlier = before.get(shard.name)
            if earlier:
                stamps = {earlier.spec["do"]: stamp(earlier)}
            else:
                stamps = {}
            words = {
                "name": shard.name,
                "prefix": unit.spec["prefix"],
                "source": _origin(shard, self.folder.root),
            }
            if shard.name in self.former.ranges:
                kept = {"kept": self.former.ranges[shard.name]}
            else:
                kept = {}
            return {**words, "stamps": {**stamps, "tokens": stamp(unit)}, **kept}

        filtered = self.dataset.drop or self.dataset.min_document_bytes or self.dataset.fix_text
        declared = {
            "documents": self.dataset.documents,
            "text_bytes": None if filtered else self.dataset.text_bytes,
        }
        spec = {
            "name": self.dataset.name,
            "tokenizer": str(self.folder.tokenizer),
            "eod_token": self.tokenizer.eod_token,
            "shards": [entry(shard, unit) for shard, unit in zip(self.shards, tokens, strict=True)],
            "shuffle": self.dataset.shuffle_documents,
            "declared": {key: value for key, value in declared.items() if value is not None},
            "prefix": str(prefix) if prefix else None,
            "former": self.former.identity,
            "manifest": str(self.folder.manifest),
            "rejects": str(self.folder.rejects),
        }
        outputs = (*((bin_path(prefix), idx_path(prefix)) if prefix else ()), self.folder.manifest)
        size = sum(unit.size for unit in tokens) // 20  # copying, beside tokenizing
        return Unit(
            "merge" if prefix else "manifest",
            _module("trainkit.data.tokenize.merge_worker"),
            spec,
            outputs,
            tuple(unit.name for unit in tokens),
            size,
        )


def _with_former_names(shards: Sequence[Shard], names: Mapping[str, str]) -> list[Shard]:
    """The shards under the names that their files had before; others get numbers that were not
    given yet. At first they are numbered in order."""
    if not names:
        return list(shards)
    highest = max(map(int, names.values()))
    free = itertools.count(highest + 1)
    return [
        dataclasses.replace(shard, name=names.get(str(shard.path)) or f"{next(free):05d}")
        for shard in shards
    ]


class _Former:
    """The merged pair that was made before, if it still lies there as it was made: the shards it
    was made of need not be made again.

    Args:
        folder: the dataset's files.
        stamp: of the stage, finished or not.
        units: the folder of the units' stamps.

    Attributes:
        ranges: of each shard by name: first sequence, sequences, first document, documents.
        identity: of .bin and .idx.
    """

    def __init__(self, folder: DataFolder, stamp: Mapping[str, Any], units: Path) -> None:
        self.ranges: dict[str, list[int]] = {}
        self.identity: list[Any] = []
        if folder.dataset.shuffle_documents:
            return
        shards = _of_manifest(folder, stamp, units) or _of_unfinished(folder.prefix)
        if not shards:
            return
        self.identity = [
            file_identity(path) for path in (bin_path(folder.prefix), idx_path(folder.prefix))
        ]
        sequence = document = 0
        for name, sequences, documents in shards:
            self.ranges[name] = [sequence, sequences, document, documents]
            sequence = sequence + sequences
            document = document + documents


def _of_manifest(
    folder: DataFolder, stamp: Mapping[str, Any], units: Path
) -> list[tuple[str, int, int]]:
    """(name, sequences, documents) of the shards of a pair that is as it was when dataset.json
    was written; else nothing."""
    identities = [
        file_identity(path)
        for path in (bin_path(folder.prefix), idx_path(folder.prefix), folder.manifest)
    ]
    # killed between the last unit and the stage's stamp
    merged = read_stamp(units / "merge.json") or {}
    known = (stamp.get("outputs", stamp.get("made_before", [])), merged.get("outputs", []))
    if None in identities or not any(all(i in recorded for i in identities) for recorded in known):
        return []
    manifest = read_manifest(folder.manifest)
    counts = [
        (str(shard["name"]), int(shard.get("sequences", 0)), int(shard.get("documents", 0)))
        for shard in manifest["shards"]
    ]
    whole = sum(count[1] for count in counts), sum(count[2] for count in counts)
    if manifest.get("shuffled") or whole != (manifest["sequences"], manifest["documents"]):
        return []
    return counts


def _of_unfinished(prefix: Path) -> list[tuple[str, int, int]]:
    """The same of a pair whose merge was killed before it wrote dataset.json."""
    identities = [file_identity(path) for path in (bin_path(prefix), idx_path(prefix))]
    try:
        value = read_json(ranges_path(prefix))
        same = [identity[1:] for identity in identities if identity] == value["pair"]
        if same:
            return [
                (str(name), int(sequences), int(documents))
                for name, sequences, documents in value["shards"]
            ]
        return []
    except (OSError, ValueError, KeyError, TypeError):
        return []  # there is none, or none that can be read


def _origin(shard: Shard, root: Path) -> dict[str, Any]:
    """Where a shard's text is from, for dataset.json: a file (relative to `root` if it is below
    it), an address, or the folder it is made of."""
    if shard.recipe:
        origin = {
            key: shard.recipe[key] for key in ("url", "endpoint", "folder") if shard.recipe.get(key)
        }
        # a query may hold a signature, and dataset.json is passed on
        return {key: str(value).partition("?")[0] for key, value in origin.items()}
    if shard.path.is_relative_to(root):
        path = shard.path.relative_to(root)
    else:
        path = shard.path
    return {"path": str(path), "bytes": shard.size}
