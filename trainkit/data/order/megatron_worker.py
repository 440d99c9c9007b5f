"""Megatron's sample order for a split of a job's dataset: what is built before the run, and how
a rank opens it. As a program, the unit that builds it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainkit.base.errors import ConfigError
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.base.records import Record
from trainkit.base.worker import ProgressCallback, run_unit
from trainkit.data.indexed.dataset import IndexedDataset
from trainkit.data.indexed.paths import DataFolder
from trainkit.data.order.megatron import MegatronOrder
from trainkit.data.order.megatron_blend import Blend, MegatronBlend, build_blend, plan_blend
from trainkit.data.order.megatron_cache import split_ranges
from trainkit.data.order.megatron_index import (
    IndexRequest,
    MegatronIndex,
    build_index,
    read_index_sizes,
)
from trainkit.data.order.native import SPLITS, SplitName
from trainkit.data.order.resolve_pairs import WHOLE_SPLIT, SplitPair, weights_of
from trainkit.data.order.samples import MegatronSamples
from trainkit.jobs.schema import Dataset, Job
from trainkit.plan.batch import consumed_after
from trainkit.plan.mixtures import samples_of


@dataclass(frozen=True)
class OrderRequest(Record):
    """One split as Megatron would be asked for it.

    Args:
        pairs: where its tokens are.
        split: which.
        samples: how many will be read, in Megatron's own count.
        least: how many there must be.
        seq_length: tokens of a sample.
        seed: of the shuffles.
        folder: where the arrays go; a data_cache_path for Megatron.
        tokenizer: `unique_identifiers` of Megatron's tokenizer object, or None.
    """

    pairs: tuple[SplitPair, ...]
    split: SplitName
    samples: int
    least: int
    seq_length: int
    seed: int
    folder: Path
    tokenizer: Mapping[str, object] | None


def order_request(
    job: Job, dataset: Dataset, split: SplitName, pairs: Sequence[SplitPair]
) -> OrderRequest:
    """What training with `job` reads of a split. Megatron-LM asks for eval_iters global batches
    of validation samples at every evaluation and one time more (training/training.py,
    get_train_valid_test_num_samples); trainkit reads the first eval_iters of them each time."""
    t = job.training
    batch = job.global_batch_size
    evaluations = t.train_iters // (t.eval_interval or t.train_iters) + 1
    once = t.eval_iters * batch
    samples = {
        "train": samples_of(job, dataset) or consumed_after(job, t.train_iters),
        "valid": evaluations * once,
        "test": once,
    }[split]
    least = samples if split == "train" else once
    folder = DataFolder(job.cluster.root_folder, dataset).path / "megatron"
    if dataset.tokenizer and dataset.tokenizer.megatron:
        described = dataset.tokenizer.megatron
    else:
        described = None
    return OrderRequest(
        tuple(pairs),
        split,
        samples,
        least,
        job.model.seq_length,
        job.training.seed,
        folder,
        described,
    )


def _requests(asked: OrderRequest) -> list[IndexRequest]:
    """One a pair, not saying yet how many samples. Raises ConfigError where the split has no
    width there."""
    requests = []
    for pair in asked.pairs:
        bounds = split_ranges(pair.split, len(IndexedDataset(pair.prefix)))[
            SPLITS.index(asked.split)
        ]
        if bounds is None:
            raise ConfigError(
                f"the split {pair.split!r} of {pair.prefix} gives {asked.split} no width",
                hint="give it a weight, or set training.eval_iters = 0 if it is only evaluated",
            )
        shared = None if pair.split == WHOLE_SPLIT[asked.split] else pair.split
        requests.append(
            IndexRequest(
                pair.prefix, *bounds, asked.split, asked.seq_length, asked.seed, split=shared
            )
        )
    return requests


def _plan(asked: OrderRequest) -> IndexRequest | Blend:
    """What Megatron builds: one index, or a blend of several."""
    requests = _requests(asked)
    weights = weights_of(asked.pairs, [pair_tokens(pair) for pair in asked.pairs])
    if len(requests) == 1 and weights is None:
        (only,) = requests
        return IndexRequest(**{**vars(only), "num_samples": asked.samples})
    return plan_blend(requests, weights, asked.samples)


def pair_tokens(pair: SplitPair) -> int:
    """Tokens of a pair, by which several pairs of one dataset share its weight."""
    return IndexedDataset(pair.prefix).num_tokens


def open_order(
    job: Job, dataset: Dataset, split: SplitName, pairs: Sequence[SplitPair]
) -> tuple[MegatronOrder, list[MegatronSamples]]:
    """The order, and the samples of each pair. Every rank maps the arrays; none waits for another.

    Raises ConfigError: it was not built or was built from something else (exit 6), or has fewer
    samples than will be read (exit 3).
    """
    asked = order_request(job, dataset, split, pairs)
    order, indexes = open_requested_order(asked)
    samples = [
        MegatronSamples(
            IndexedDataset(pair.prefix),
            index.documents,
            index.samples,
            asked.seq_length,
            mmap=pair.mmap,
        )
        for pair, index in zip(pairs, indexes, strict=True)
    ]
    return order, samples


def open_requested_order(asked: OrderRequest) -> tuple[MegatronOrder, list[MegatronIndex]]:
    """The order and the index of each pair; raises as `open_order`."""
    plan = _plan(asked)
    if isinstance(plan, Blend):
        blend = MegatronBlend(asked.folder, plan, asked.tokenizer)
        order = MegatronOrder(blend.indexes, blend.datasets, blend.numbers)
        indexes = blend.indexes
    else:
        indexes = [MegatronIndex(asked.folder, plan, asked.tokenizer)]
        order = MegatronOrder(indexes)
    _refuse_too_few(asked, order.num_samples)
    return order, indexes


def _refuse_too_few(asked: OrderRequest, there: int) -> None:
    if there < asked.least:
        names = ", ".join(pair.name for pair in asked.pairs[:4]) + (
            ", ..." if len(asked.pairs) > 4 else ""
        )
        raise ConfigError(
            f"Megatron's blend by size of {names} has {there:,} {asked.split} samples, one epoch of"
            f" each; {asked.least:,} will be read",
            hint=(
                "give the datasets weights, lower training.train_iters, or use sample_order ="
                ' "native"'
            ),
        )


@dataclass(frozen=True)
class OrderSpec(Record):
    """The spec of the unit that builds the order of one split, with so many threads."""

    asked: OrderRequest
    threads: int


def work(value: Mapping[str, Any], progress: ProgressCallback) -> dict[str, object]:
    """Build all that a split needs; what is there and fits is kept. Returns {"samples"}."""
    spec = OrderSpec.from_json(value)
    asked = spec.asked
    plan = _plan(asked)
    requests = plan.requests if isinstance(plan, Blend) else (plan,)
    # else as many epochs are built as it takes
    if isinstance(plan, Blend) and plan.weights is None:
        _refuse_too_few(asked, sum(read_index_sizes(request).samples for request in requests))
    sizes = [request.last - request.first for request in requests]
    total = sum(sizes)
    done = 0
    for request, size in zip(requests, sizes, strict=True):
        if not _there(asked, request):
            before = done
            build_index(
                request,
                asked.folder,
                spec.threads,
                asked.tokenizer,
                lambda part, whole, before=before, size=size: progress(
                    before + size * part // max(1, whole), total
                ),
            )
        done += size
        progress(done, total)
    if isinstance(plan, Blend) and not _there(asked, plan):
        build_blend(plan, asked.folder, asked.tokenizer)
    order, _ = open_requested_order(asked)
    return {"samples": order.num_samples}


def _there(asked: OrderRequest, part: IndexRequest | Blend) -> bool:
    """Whether it need not be built; another that opens it meanwhile finds it untouched then."""
    kind = MegatronBlend if isinstance(part, Blend) else MegatronIndex
    try:
        kind(asked.folder, part, asked.tokenizer)  # type: ignore[arg-type]
    except ConfigError:
        return False
    return True


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"  # numpy's; the index has threads of its own
    run_unit(work)
