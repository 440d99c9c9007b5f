"""What prepared text and ready-made pairs have in common: the tokenizer, files that are fetched,
and what freshness depends on."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainkit.data.fetch.retry import FetchRetryPolicy
from trainkit.data.indexed.paths import DataFolder
from trainkit.data.sources import DownloadNotice, FetchUnit, Shard, Source, tokenizer_fetch_units
from trainkit.data.unit_specs import (
    EncodingSettings,
    ReadingSettings,
    TokenizerSettings,
    TokenizerSpec,
)
from trainkit.jobs.schema import Dataset, Tokenizer
from trainkit.stages.contract import Need, Unit
from trainkit.stages.stamps import check_freshness, read_stamp

STAGE = "prep-data"
VERSION = 1
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


def module_argv(name: str) -> tuple[str, ...]:
    """The program of a unit: a module of this interpreter."""
    return (sys.executable, "-I", "-m", name)


def flat_settings(prefix: str, value: Mapping[str, object]) -> dict[str, object]:
    """{"tokenizer": {"type": ..}} as {"datasets.X.tokenizer.type": ..}: as jobs.toml names them
    when one changed; of an array of tables by their numbers."""
    flat: dict[str, object] = {}
    for key, item in value.items():
        if isinstance(item, list) and any(isinstance(each, dict) for each in item):
            item = {str(number): each for number, each in enumerate(item)}
        if isinstance(item, dict):
            flat |= flat_settings(f"{prefix}.{key}", item)
        else:
            flat[f"{prefix}.{key}"] = item
    return flat


def text_settings(dataset: Dataset, tokenizer: Tokenizer, source: Source) -> dict[str, object]:
    """What the tokens of a dataset of text depend on. The files that `paths` matches are inputs,
    however they were matched.

    Args:
        dataset: of text.
        tokenizer: that of the dataset.
        source: of the dataset's kind.
    """
    irrelevant = set(IRRELEVANT)
    if dataset.source != "stdlib":
        irrelevant.add("shard_bytes")
    own = dataset.model_dump(mode="json", exclude=irrelevant, exclude_none=True)
    return {
        **flat_settings(f"datasets.{dataset.name}", own),
        **tokenizer_settings(tokenizer),
        **source.identity(dataset),
    }


def tokenizer_settings(tokenizer: Tokenizer) -> dict[str, object]:
    """What the ids depend on; whatever encodes, they are the same."""
    irrelevant = {"name", "encoder", "url", "vocab_url", "merge_url", "megatron"}
    return flat_settings(
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


def fetch_unit(fetch: FetchUnit) -> Unit:
    """The unit that brings a file here."""
    return Unit(
        fetch.name,
        module_argv(fetch.module),
        fetch.spec,
        fetch.outputs,
        fetch.after,
        fetch.size,
        network=True,
        several=True,
    )


class DatasetUnits:
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
        self.shards_folder = self.folder.shards
        self.rejects_folder = self.folder.rejects
        self.tokenizer_json = self.folder.tokenizer
        self.reading = ReadingSettings.from_json(dataset.model_dump(mode="json"))
        self.encoding = EncodingSettings.from_json(tokenizer.model_dump(mode="json"))
        self.tokenizer_fetches = [
            fetch_unit(fetch)
            for fetch in tokenizer_fetch_units(tokenizer, dataset.token, dataset.endpoint)
        ]

    def settings(self) -> dict[str, object]:
        """What the outputs depend on, besides inputs."""
        raise NotImplementedError

    def left_of(self, stamp: Mapping[str, Any]) -> list[Path]:
        """Files for the units alone that a task which was killed after `stamp` may have left."""
        return []

    def as_made(self) -> Need | None:
        """What was made of a dataset that is fetched, without units, if it is fresh."""
        stamp = read_stamp(self.stamps / f"{self.name}.json")
        if not self.dataset.urls or stamp is None or "outputs" not in stamp:
            return None
        inputs = [Path(identity[0]) for identity in stamp["inputs"] if identity]
        outputs = [Path(identity[0]) for identity in stamp["outputs"] if identity]
        need = self._need(inputs, outputs, (), self.left_of(stamp))
        return need if check_freshness(need, self.stamps).fresh else None

    def _need(
        self,
        inputs: Sequence[Path],
        outputs: Sequence[Path],
        units: Sequence[Unit],
        scratch: Sequence[Path] = (),
        announcement: DownloadNotice | None = None,
        memory: Mapping[str, object] | None = None,
    ) -> Need:
        return Need(
            STAGE,
            self.name,
            self.dataset.name,  # the lock: two tokenizers share the dataset's corpus folder
            VERSION,
            self.settings(),
            tuple(inputs),
            tuple(outputs),
            tuple(units),
            tuple(scratch),
            announcement=announcement,
            memory=memory or {},
            lacking=self.reading.filters.lacking,
        )

    def given_files(self) -> list[Path]:
        """Files a tokenizer is taken from that nobody fetches."""
        fetched = {path for unit in self.tokenizer_fetches for path in unit.outputs}
        return [path for path in tokenizer_files(self.tokenizer) if path not in fetched]

    def _fetched_files(self) -> list[Path]:
        return [path for unit in self.tokenizer_fetches for path in unit.outputs]

    def _tokenizer_unit(self, shards: Sequence[Shard], after: Sequence[str]) -> Unit:
        """tokenizer.json, trained on `shards` or taken over."""
        settings = self.tokenizer.model_dump(mode="json")
        given = [*self.given_files(), *(shard.path for shard in shards if not shard.recipe)]
        spec = TokenizerSpec(
            TokenizerSettings.from_json(settings),
            self.tokenizer_json,
            self.reading,
            tuple(shard.path for shard in shards),
            sum(shard.size for shard in shards),
            tuple(given),
        )
        before = (*after, *(unit.name for unit in self.tokenizer_fetches))
        return Unit(
            "tokenizer",
            module_argv("trainkit.data.tokenizer"),
            spec.to_json(),
            (self.tokenizer_json,),
            before,
            spec.total_bytes,
        )
