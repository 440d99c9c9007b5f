"""The stage index: Megatron's sample order, built on a CPU before any node is held. The native
order needs none, and an engine that is not native builds its own."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from trainkit.base.errors import ConfigError
from trainkit.data.indexed.paths import DataFolder
from trainkit.jobs.schema import Dataset, Job
from trainkit.stages.contract import Need, Unit

if TYPE_CHECKING:
    from trainkit.data.order.megatron_worker import OrderRequest
    from trainkit.data.order.native import SplitName

VERSION = 1


class IndexStage:
    """One need a dataset that the job reads, one unit a split."""

    name = "index"

    def needs(self, job: Job, stamps: Path) -> list[Need]:
        if job.sample_order != "megatron" or not job.is_native:
            return []
        splits: dict[str, list[SplitName]] = {
            dataset.name: ["train"] for dataset in job.training_datasets
        }
        for dataset in (job.dataset, *job.validation.values()) if job.training.eval_iters else ():
            splits.setdefault(dataset.name, []).append("valid")
        return [
            need
            for dataset in job.datasets
            if dataset.name in splits and (need := _need(job, dataset, splits[dataset.name]))
        ]

    def waits_for(self, job: Job) -> tuple[str, ...]:
        if job.sample_order == "megatron" and job.is_native:
            return ("prep-data",)
        return ()


def _need(job: Job, dataset: Dataset, splits: list[SplitName]) -> Need | None:
    from trainkit.data.order.megatron_worker import order_request  # numpy
    from trainkit.data.order.resolve_pairs import weighed_pairs

    if dataset.source == "mock" or dataset.tokenizer is None:
        return None
    try:
        asked = [
            order_request(
                job, dataset, split, weighed_pairs(job, dataset, split, by_documents=True)
            )
            for split in dict.fromkeys(splits)
        ]
    except ConfigError:
        if DataFolder(job.cluster.root_folder, dataset).manifest.is_file():
            raise
        # which files there are is known when prep-data has made them: this is asked again then
        return None
    name = f"{dataset.name}--{dataset.tokenizer.name}"
    return Need(
        IndexStage.name,
        name,
        dataset.name,
        VERSION,
        {},
        (),
        (),
        tuple(_unit(part) for part in asked),
        evidence=lambda: _evidence(asked),
    )


def _evidence(asked: list[OrderRequest]) -> tuple[bool, str]:
    """The arrays say what they were built from: .idx as it was then, and every option."""
    from trainkit.data.order.megatron_worker import open_requested_order

    try:
        for part in asked:
            open_requested_order(part)
    except ConfigError as error:
        return False, str(error)
    return True, f"what is there was built from these files for {asked[0].samples:,} samples"


def _unit(asked: OrderRequest) -> Unit:
    from trainkit.data.order.megatron_worker import OrderSpec

    spec = OrderSpec(asked, len(os.sched_getaffinity(0)))
    return Unit(
        f"order-{asked.split}",
        (sys.executable, "-I", "-m", "trainkit.data.order.megatron_worker"),
        spec.to_json(),
        size=max(1, asked.samples),
    )
