"""The stage prep-data: text shards, tokenizer, token shards, one .bin/.idx; of ready-made pairs
and blends, the tokenizer and the manifest alone."""

from __future__ import annotations

from pathlib import Path

from trainkit.data.fetch.retry import DEFAULT_RETRY, FetchRetryPolicy
from trainkit.data.indexed.paths import bin_path, idx_path
from trainkit.data.order.resolve_pairs import prefixes_of
from trainkit.data.sources import SOURCES, download_notice, fetch_units
from trainkit.data.unit_specs import CheckSpec
from trainkit.jobs.schema import Dataset, Job
from trainkit.stages.contract import Need, Unit
from trainkit.stages.dataset_units import (
    STAGE,
    DatasetUnits,
    fetch_unit,
    module_argv,
    tokenizer_settings,
)
from trainkit.stages.prep_curation import needs_of_curated
from trainkit.stages.prep_text import TextUnits


class PairsUnits(DatasetUnits):
    """Ready-made pairs: they are fetched if urls name them, checked, and described; of a blend,
    whose pairs are its parts', only described."""

    def settings(self) -> dict[str, object]:
        own = self.dataset.model_dump(
            mode="json", include={"urls", "endpoint", "sha256"}, exclude_none=True
        )
        return {
            **tokenizer_settings(self.tokenizer),
            **{f"datasets.{self.dataset.name}.{key}": value for key, value in own.items() if value},
        }

    def need(self, *, force: bool) -> Need:
        corpus = self.folder.corpus
        shards = SOURCES["indexed"].shards(self.dataset, corpus, retry=self.patience)
        fetched = [fetch_unit(fetch) for fetch in fetch_units(self.dataset, corpus, shards)]
        prefixes = [shard.path.with_suffix("") for shard in shards if shard.path.suffix == ".idx"]
        if self.dataset.source == "indexed" and not self.dataset.urls:
            prefixes = prefixes_of(self.dataset, self.folder.root)
        make = self._tokenizer_unit((), ())
        files = [path for prefix in prefixes for path in (bin_path(prefix), idx_path(prefix))]
        spec = CheckSpec(
            self.dataset.name,
            self.folder.tokenizer,
            self.tokenizer.eod_token,
            tuple(prefixes),
            self.folder.manifest,
        )
        check = Unit(
            "check",
            module_argv("trainkit.data.tokenize.check_worker"),
            spec.to_json(),
            (self.folder.manifest,),
            (make.name, *(unit.name for unit in fetched)),
        )
        inputs = self.given_files() if fetched else [*files, *self.given_files()]
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


def needs_of_dataset(
    dataset: Dataset,
    root: Path,
    stamps: Path,
    *,
    force: bool = False,
    patience: FetchRetryPolicy = DEFAULT_RETRY,
) -> list[Need]:
    """What it takes to have the tokens of `dataset` below `root`, in order; nothing for mock data.

    Args:
        dataset: what is to be prepared.
        root: the folder of data and stamps.
        stamps: the folder of this stage's stamps.
        force: it will be made even if it is fresh. Otherwise a fetched dataset that is fresh is
            returned without its units, and no server is asked: a prepared dataset can be used
            without the network, and after its text was deleted.
        patience: with servers that are asked what files there are.

    Raises Unreachable (exit 6) where a server gives no answer.
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
            for need in needs_of_dataset(part, root, stamps, force=force, patience=patience)
        ]
        return [*needs, PairsUnits(dataset, tokenizer, root, stamps, patience).need(force=force)]
    if dataset.curate is not None:
        return needs_of_curated(dataset, root, stamps, force=force, patience=patience)
    kind = PairsUnits if dataset.source == "indexed" else TextUnits
    work = kind(dataset, tokenizer, root, stamps, patience)
    made = None if force else work.as_made()
    return [made or work.need(force=force)]


class PrepDataStage:
    """Prepares the datasets of a job. Mock data needs nothing.
    `patience`: as `needs_of_dataset`."""

    name = STAGE

    def __init__(self, patience: FetchRetryPolicy = DEFAULT_RETRY) -> None:
        self.patience = patience

    def needs(self, job: Job, stamps: Path, *, force: bool = False) -> list[Need]:
        found = [
            need
            for dataset in job.prepared_datasets
            for need in needs_of_dataset(
                dataset, job.cluster.root_folder, stamps, force=force, patience=self.patience
            )
        ]
        return list({need.name: need for need in found}.values())  # a part of two blends once

    def waits_for(self, job: Job) -> tuple[str, ...]:
        return ()
