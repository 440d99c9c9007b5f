"""The stage prep-data: text shards, tokenizer, token shards, one .bin/.idx; of ready-made pairs
and blends, the tokenizer and the manifest alone."""

from __future__ import annotations

from pathlib import Path

from trainkit.data.fetch.retry import DEFAULT_RETRY, FetchRetryPolicy
from trainkit.jobs.schema import Dataset, Job
from trainkit.stages.contract import Need
from trainkit.stages.dataset_units import STAGE
from trainkit.stages.prep_pairs import PairsUnits
from trainkit.stages.prep_text import TextUnits


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
    kind = PairsUnits if dataset.source == "indexed" else TextUnits
    work = kind(dataset, tokenizer, root, stamps, patience)
    made = None if force else work.as_made()
    return [made or work.need(force=force)]


class PrepDataStage:
    """Prepares the dataset of a job and its further validation sets. Mock data needs nothing.
    `patience`: as `needs_of_dataset`."""

    name = STAGE

    def __init__(self, patience: FetchRetryPolicy = DEFAULT_RETRY) -> None:
        self.patience = patience

    def needs(self, job: Job, stamps: Path, *, force: bool = False) -> list[Need]:
        # each once
        datasets = {dataset.name: dataset for dataset in (job.dataset, *job.validation.values())}
        found = [
            need
            for dataset in datasets.values()
            for need in needs_of_dataset(
                dataset, Path(job.cluster.root or "."), stamps, force=force, patience=self.patience
            )
        ]
        return list({need.name: need for need in found}.values())  # a part of two blends once

    def waits_for(self, job: Job) -> tuple[str, ...]:
        return ()
