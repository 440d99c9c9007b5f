"""Datasets of text: the units that turn it into one .bin/.idx pair, or into one of each shard.
Shards that are still there of a former merge are not made again."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainkit.base.errors import ConfigError
from trainkit.base.files import read_json
from trainkit.data.fetch.recipe import FetchRecipe
from trainkit.data.indexed.manifest import ranges_path
from trainkit.data.indexed.paths import DataFolder, bin_path, idx_path, read_manifest
from trainkit.data.sources import SOURCES, Shard, download_notice, fetch_units
from trainkit.data.text.filters import FilterSettings
from trainkit.data.text.web_archives import lacking_for
from trainkit.data.unit_specs import (
    MergeShard,
    MergeSpec,
    SliceBounds,
    TextRecipe,
    TextSpec,
    TokensSpec,
)
from trainkit.stages.contract import Need, Unit
from trainkit.stages.dataset_units import DatasetUnits, fetch_unit, module_argv, text_settings
from trainkit.stages.stamps import file_identity, read_stamp, unit_stamp_path


def with_former_names(shards: Sequence[Shard], names: Mapping[str, str]) -> list[Shard]:
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


class MergedBefore:
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
        self.ranges: dict[str, SliceBounds] = {}
        self.identity: list[object] = []
        if folder.dataset.shuffle_documents:
            return
        shards = _of_manifest(folder, stamp, units) or _of_unfinished(folder.prefix)
        if not shards:
            return
        self.identity = [
            file_identity(path) for path in (bin_path(folder.prefix), idx_path(folder.prefix))
        ]
        sequence = 0
        document = 0
        for name, sequences, documents in shards:
            self.ranges[name] = (sequence, sequences, document, documents)
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


FIRST = "00000"  # the shard whose first documents are compared with tokenizers
LISTING = "listing"  # the unit that writes down which files there are
# bytes of files for each byte of text a BPE is trained on: they hold more than text
TRAINING_FACTOR = 4
SHARD_WORKER = "trainkit.data.tokenize.shard_worker"


class TextUnits(DatasetUnits):
    """From text to one pair, or to one of each shard: a shard's text or download, the tokenizer,
    a shard's tokens, and what joins them."""

    curation: Path | None = None  # curation.json of text that was curated

    def settings(self) -> dict[str, object]:
        return text_settings(self.dataset, self.tokenizer, SOURCES[self.dataset.source])

    def left_of(self, stamp: Mapping[str, Any]) -> list[Path]:
        if self.dataset.merge and self.shards_folder.is_dir():
            return self._scratch(stamp.get("memory", {}).get("names", {}).values())
        return []

    def need(self, *, force: bool) -> Need:
        """With `force`, nothing of what was made before is used."""
        stamp = {}
        if not force:
            stamp = read_stamp(self.stamps / f"{self.name}.json") or {}
        earlier, before = self._find_shards(stamp)
        self.former = MergedBefore(self.folder, stamp, self.stamps / f"{self.name}.units")
        trained_on = self._trained_on()
        make = self._tokenizer_unit(
            trained_on, [before[shard.name].name for shard in trained_on if shard.name in before]
        )
        tokens = [self._tokens(shard, before.get(shard.name)) for shard in self.shards]
        last = self._last(before, tokens)
        pairs = [path for unit in tokens for path in unit.outputs]
        inputs = [*(shard.path for shard in self.shards if not shard.recipe), *self.given_files()]
        outputs = [self.folder.tokenizer, *last.outputs, *self._fetched_files()]
        scratch = []
        if self.dataset.merge:
            scratch = self._scratch(shard.name for shard in self.shards)
        else:
            outputs += pairs
        need = self._need(
            inputs,
            outputs,
            (*earlier, *self.tokenizer_fetches, make, *tokens, last),
            scratch,
            announcement=download_notice(self.dataset, self.folder.corpus, self.shards),
            memory={"names": {str(shard.path): shard.name for shard in self.shards}},
        )
        lacking = need.lacking or lacking_for(shard.path.name for shard in self.shards)
        return dataclasses.replace(need, lacking=lacking)

    def _find_shards(self, stamp: Mapping[str, Any]) -> tuple[list[Unit], dict[str, Unit]]:
        """Set `shards`; returns the units that bring their files here, and those of each shard by
        its name."""
        shards = SOURCES[self.dataset.source].shards(
            self.dataset, self.folder.corpus, retry=self.patience
        )
        self.shards = with_former_names(shards, stamp.get("memory", {}).get("names", {}))
        # nothing is fetched where all is here; where shards are read as they come, the listing is
        fetches = fetch_units(self.dataset, self.folder.corpus, self.shards)
        earlier = [fetch_unit(fetch) for fetch in fetches] or [
            self._text(shard, shard.recipe)
            for shard in self.shards
            if isinstance(shard.recipe, TextRecipe)
        ]
        return earlier, {
            unit.name.partition("-")[2]: unit for unit in earlier if unit.name != LISTING
        }

    def _text(self, shard: Shard, recipe: TextRecipe) -> Unit:
        """What writes a shard's file from its source's recipe."""
        identity = SOURCES[self.dataset.source].identity(self.dataset)
        spec = TextSpec(self.dataset.source, identity, recipe, shard.path, self.dataset.text_key)
        return Unit(
            f"text-{shard.name}",
            module_argv(SHARD_WORKER),
            spec.to_json(),
            (shard.path,),
            size=shard.size,
            several=True,
            here=True,  # the only recipes are of this Python's own library
        )

    def _trained_on(self) -> list[Shard]:
        """The first shards, as many as hold what a BPE is trained on: its unit need not wait for
        the others."""
        if self.tokenizer.type != "bpe":
            return []
        if any(isinstance(s.recipe, FetchRecipe) and not s.recipe.keep for s in self.shards):
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

    def _prefix(self, shard: Shard) -> Path:
        """Of the shard's .bin/.idx."""
        if self.dataset.merge:
            return self.shards_folder / shard.name
        return self.shards_folder / f"{shard.name}_text_document"

    def _scratch(self, names: Iterable[str]) -> list[Path]:
        """The files of shards that are joined: nobody needs them after that."""
        endings = (".bin", ".idx", ".lock")
        return [self.shards_folder / f"{name}{ending}" for name in names for ending in endings]

    def _tokens(self, shard: Shard, before: Unit | None) -> Unit:
        """What encodes a shard; `before` writes or fetches its file first."""
        prefix = self._prefix(shard)
        recipe = None
        after: tuple[str, ...] = ("tokenizer",)
        if before is not None:
            after = (before.name, "tokenizer")
        elif isinstance(shard.recipe, FetchRecipe):
            recipe = shard.recipe
        spec = TokensSpec(
            shard.name,
            shard.path,
            recipe,
            shard.size,
            self.reading,
            self.encoding,
            self.tokenizer_json,
            prefix,
            self.rejects_folder / f"{shard.name}.jsonl",
            first=shard.name == FIRST,
        )
        return Unit(
            f"tokens-{shard.name}",
            module_argv(SHARD_WORKER),
            spec.to_json(),
            (bin_path(prefix), idx_path(prefix)),
            after,
            shard.size,
            several=True,
            kept=shard.name in self.former.ranges,
        )

    def _last(self, before: Mapping[str, Unit], tokens: Sequence[Unit]) -> Unit:
        """One pair of all shards, if they are joined, and dataset.json."""
        name = "manifest"
        prefix = None
        outputs: tuple[Path, ...] = (self.folder.manifest,)
        if self.dataset.merge:
            name = "merge"
            prefix = self.folder.prefix
            outputs = (bin_path(prefix), idx_path(prefix), self.folder.manifest)
        spec = MergeSpec(
            self.dataset.name,
            self.folder.tokenizer,
            self.tokenizer.eod_token,
            tuple(
                self._merge_shard(shard, before.get(shard.name), unit)
                for shard, unit in zip(self.shards, tokens, strict=True)
            ),
            self.dataset.shuffle_documents,
            self._declared(),
            prefix,
            self.folder.manifest,
            self.folder.rejects,
            former=tuple(self.former.identity),
            curation=self.curation,
        )
        return Unit(
            name,
            module_argv("trainkit.data.tokenize.merge_worker"),
            spec.to_json(),
            outputs,
            tuple(unit.name for unit in tokens),
            sum(unit.size for unit in tokens) // 20,  # copying, beside tokenizing
        )

    def _merge_shard(self, shard: Shard, earlier: Unit | None, tokens: Unit) -> MergeShard:
        stamps = {"tokens": unit_stamp_path(self.stamps, self.name, tokens.name)}
        if earlier is not None:
            kind = earlier.name.partition("-")[0]  # text or fetch
            stamps[kind] = unit_stamp_path(self.stamps, self.name, earlier.name)
        return MergeShard(
            shard.name,
            self._prefix(shard),
            origin_of(shard, self.folder.root),
            stamps,
            self.former.ranges.get(shard.name),
        )

    def _declared(self) -> dict[str, int]:
        """Counts that were published, and can be compared: not of text that is left out."""
        dataset = self.dataset
        declared = {}
        if dataset.documents is not None:
            declared["documents"] = dataset.documents
        if dataset.text_bytes is not None and self.reading.filters == FilterSettings():
            declared["text_bytes"] = dataset.text_bytes
        return declared


def origin_of(shard: Shard, root: Path) -> dict[str, object]:
    """Where a shard's text is from, for dataset.json: a file (relative to `root` if it is below
    it), an address, or the folder it is made of."""
    recipe = shard.recipe
    if isinstance(recipe, TextRecipe):
        return {"folder": str(recipe.folder).partition("?")[0]}
    if isinstance(recipe, FetchRecipe):
        # a query may hold a signature, and dataset.json is passed on
        origin: dict[str, object] = {"url": recipe.url.partition("?")[0]}
        if recipe.endpoint:
            origin["endpoint"] = recipe.endpoint.partition("?")[0]
        return origin
    path = shard.path
    if path.is_relative_to(root):
        path = path.relative_to(root)
    return {"path": str(path), "bytes": shard.size}
