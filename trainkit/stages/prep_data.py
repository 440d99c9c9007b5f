"""The stage prep-data: text shards, tokenizer, token shards, one .bin/.idx; of ready-made pairs and blends, the tokenizer and the manifest alone."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from trainkit.base.errors import ConfigError
from trainkit.data.indexed import bin_path, idx_path
from trainkit.data.pairs import prefixes_of
from trainkit.data.paths import DataFolder
from trainkit.data.sources import SOURCES, Shard, Source
from trainkit.jobs.schema import Dataset, Job, Tokenizer
from trainkit.stages.contract import Need, Unit
from trainkit.stages.stamps import file_identity, unit_stamp_path

VERSION = 1


def _module(name: str) -> tuple[str, ...]:
    return (sys.executable, "-I", "-m", name)


def _flat(prefix: str, value: dict[str, Any]) -> dict[str, Any]:
    """{"tokenizer": {"type": ..}} as {"datasets.X.tokenizer.type": ..}: the words of the *because*."""
    flat: dict[str, Any] = {}
    for key, item in value.items():
        flat.update(_flat(f"{prefix}.{key}", item) if isinstance(item, dict) else {f"{prefix}.{key}": item})
    return flat


def _settings(dataset: Dataset, tokenizer: Tokenizer, source: Source) -> dict[str, Any]:
    """What the tokens depend on. The split is cut at run time; the files that `paths` matches are inputs, however they were matched."""
    irrelevant = {"name", "split", "tokenizer", "paths"} | (set() if dataset.source == "stdlib" else {"shard_bytes"})
    return {
        **_flat(f"datasets.{dataset.name}", dataset.model_dump(mode="json", exclude=irrelevant, exclude_none=True)),
        **_flat(f"tokenizers.{tokenizer.name}", tokenizer.model_dump(mode="json", exclude={"name"}, exclude_none=True)),
        **source.identity(dataset),
    }


def needs_of_dataset(dataset: Dataset, root: Path, stamps: Path) -> list[Need]:
    """What it takes to have the tokens of `dataset` below `root`, in order; nothing for mock data."""
    tokenizer = dataset.tokenizer
    if dataset.source == "mock" or tokenizer is None:
        return []
    if dataset.source not in (*SOURCES, "indexed", "blend") or tokenizer.type == "gpt2":
        what = f"source = '{dataset.source}'" if tokenizer.type != "gpt2" else "a tokenizer of type = 'gpt2'"
        message = f"dataset '{dataset.name}': {what} is planned for, but not prepared by this version of trainkit"
        raise ConfigError(message, hint="to try the job: --set dataset=mock")
    if dataset.source == "blend":
        parts = {part.dataset.name: part.dataset for blend in (dataset.blend, dataset.valid_blend, dataset.test_blend) for part in blend.values()}
        return [*(need for part in parts.values() for need in needs_of_dataset(part, root, stamps)), _need_of_pairs(dataset, tokenizer, root, stamps, [])]
    if dataset.source == "indexed":
        return [_need_of_pairs(dataset, tokenizer, root, stamps, prefixes_of(dataset))]
    return [_need_of_text(dataset, tokenizer, root, stamps)]


def _need_of_text(dataset: Dataset, tokenizer: Tokenizer, root: Path, stamps: Path) -> Need:
    """From text to one pair."""
    source = SOURCES[dataset.source]
    folder = DataFolder(root, dataset)
    shards = source.shards(dataset, folder.corpus)
    name = f"{dataset.name}--{tokenizer.name}"
    units, scratch = _Units(dataset, tokenizer, folder, shards, name, stamps).all()
    inputs = [s.path for s in shards if not s.recipe] + ([Path(tokenizer.path)] if tokenizer.path else [])
    outputs = (folder.tokenizer, folder.prefix.with_suffix(".bin"), folder.prefix.with_suffix(".idx"), folder.manifest)
    # the lock is the dataset's: two tokenizers share its corpus folder
    return Need(PrepData.name, name, dataset.name, VERSION, _settings(dataset, tokenizer, source), tuple(inputs), outputs, units, scratch)


def _need_of_pairs(dataset: Dataset, tokenizer: Tokenizer, root: Path, stamps: Path, prefixes: list[Path]) -> Need:
    """Tokenizer and manifest of ready-made pairs, which are checked; of a blend (no `prefixes`) the pairs are its parts' own."""
    folder, name = DataFolder(root, dataset), f"{dataset.name}--{tokenizer.name}"
    make = _Units(dataset, tokenizer, folder, [], name, stamps).tokenizer_unit(())
    spec = {
        "name": dataset.name,
        "tokenizer": str(folder.tokenizer),
        "eod_token": tokenizer.eod_token,
        "prefixes": [str(prefix) for prefix in prefixes],
        "given": [file_identity(idx_path(prefix)) for prefix in prefixes],
        "manifest": str(folder.manifest),
    }
    check = Unit("check", _module("trainkit.data.ready"), spec, (folder.manifest,), (make.name,))
    inputs = [path for prefix in prefixes for path in (bin_path(prefix), idx_path(prefix))] + ([Path(tokenizer.path)] if tokenizer.path else [])
    settings = _flat(f"tokenizers.{tokenizer.name}", tokenizer.model_dump(mode="json", exclude={"name"}, exclude_none=True))
    return Need(PrepData.name, name, dataset.name, VERSION, settings, tuple(inputs), (folder.tokenizer, folder.manifest), (make, check))


class PrepData:
    """Prepares the dataset of a job and its further validation sets. Mock data needs nothing."""

    name = "prep-data"

    def needs(self, job: Job, stamps: Path) -> list[Need]:
        datasets = {dataset.name: dataset for dataset in (job.dataset, *job.validation.values())}  # each once
        found = [need for dataset in datasets.values() for need in needs_of_dataset(dataset, Path(job.cluster.root or "."), stamps)]
        return list({need.name: need for need in found}.values())  # a part of two blends once


class _Units:
    """The units of one dataset under one tokenizer."""

    def __init__(self, dataset: Dataset, tokenizer: Tokenizer, folder: DataFolder, shards: list[Shard], name: str, stamps: Path) -> None:
        self.dataset, self.tokenizer, self.folder, self.shards, self.name, self.stamps = dataset, tokenizer, folder, shards, name, stamps

    def all(self) -> tuple[tuple[Unit, ...], tuple[Path, ...]]:
        """(units in order, scratch files)."""
        text = [self._text(s) for s in self.shards if s.recipe]
        train = self.tokenizer_unit(tuple(u.name for u in text))
        tokens = [self._tokens(s) for s in self.shards]
        scratch = tuple(path for unit in tokens for path in unit.outputs)
        return (*text, train, *tokens, self._merge(text, tokens)), scratch

    def _text(self, shard: Shard) -> Unit:
        spec = {
            "do": "text",
            "source": self.dataset.source,
            "identity": SOURCES[self.dataset.source].identity(self.dataset),
            "recipe": shard.recipe,
            "path": str(shard.path),
            "text_key": self.dataset.text_key,
        }
        return Unit(f"text-{shard.name}", _module("trainkit.data.shard"), spec, (shard.path,), size=shard.size)

    def tokenizer_unit(self, after: tuple[str, ...]) -> Unit:
        """tokenizer.json, trained or taken over."""
        spec = {
            **self.tokenizer.model_dump(mode="json", exclude={"name"}),
            "tokenizer": str(self.folder.tokenizer),
            "text_key": self.dataset.text_key,
            "shards": [str(s.path) for s in self.shards],
            "total_bytes": sum(s.size for s in self.shards),
            "given": [file_identity(s.path) for s in self.shards if not s.recipe],
        }
        if self.tokenizer.path:
            spec |= {"given": file_identity(Path(self.tokenizer.path)), "shards": []}
        return Unit("tokenizer", _module("trainkit.data.tokenizer"), spec, (self.folder.tokenizer,), after, spec["total_bytes"])

    def _tokens(self, shard: Shard) -> Unit:
        prefix = self.folder.shards / shard.name
        spec = {
            "do": "tokens",
            "shard": str(shard.path),
            "given": None if shard.recipe else file_identity(shard.path),
            "size": shard.size,
            "text_key": self.dataset.text_key,
            "tokenizer": str(self.folder.tokenizer),
            "eod_token": self.tokenizer.eod_token,
            "prefix": str(prefix),
        }
        return Unit(
            f"tokens-{shard.name}", _module("trainkit.data.shard"), spec, (prefix.with_suffix(".bin"), prefix.with_suffix(".idx")), ("tokenizer",), shard.size
        )

    def _merge(self, text: list[Unit], tokens: list[Unit]) -> Unit:
        prefix = self.folder.prefix
        spec = {
            "name": self.dataset.name,
            "tokenizer": str(self.folder.tokenizer),
            "eod_token": self.tokenizer.eod_token,
            "shards": [u.spec["prefix"] for u in tokens],
            "text_stamps": [str(unit_stamp_path(self.stamps, self.name, u.name)) for u in text],
            "token_stamps": [str(unit_stamp_path(self.stamps, self.name, u.name)) for u in tokens],
            "prefix": str(prefix),
            "manifest": str(self.folder.manifest),
        }
        outputs = (prefix.with_suffix(".bin"), prefix.with_suffix(".idx"), self.folder.manifest)
        return Unit("merge", _module("trainkit.data.merge"), spec, outputs, tuple(u.name for u in tokens))
