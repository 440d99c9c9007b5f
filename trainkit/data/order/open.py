"""From a dataset of a job to what a loader takes: an order of samples, and the samples of each
pair of files in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from trainkit.base.errors import ConfigError
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.base.process import raise_open_file_limit
from trainkit.data.indexed.dataset import IndexedDataset
from trainkit.data.order.native import (
    Drawn,
    NativeOrder,
    OrderPart,
    PhasedOrder,
    SampleOrder,
    SplitName,
)
from trainkit.data.order.resolve_pairs import PairPart, SplitPair, weighed_pairs, weights_of
from trainkit.data.order.samples import MockSamples, NativeSamples, Numbers, Samples
from trainkit.jobs.schema import Dataset, Job
from trainkit.plan.mixtures import spans_of

# added to the seed, and samples of an epoch
MOCK: dict[SplitName, tuple[int, int]] = {
    "train": (0, 2**20),
    "valid": (1, 2**12),
    "test": (2, 2**12),
}


@dataclass(frozen=True)
class Mixture:
    """One split of a dataset. `order` gives indexes into `samples` and `names`."""

    order: SampleOrder
    samples: Sequence[Samples]
    names: Sequence[str]


def refuse_without_samples(job: Job) -> None:
    """Open what every rank will read, before any of them starts. Raises ConfigError as
    `open_mixture`."""
    raise_open_file_limit()
    vocab = job.model.vocab_size or 1
    open_training(job, vocab)
    if job.training.eval_iters:
        for dataset in (job.dataset, *job.validation.values()):
            open_mixture(job, dataset, "valid", vocab)


def open_training(job: Job, vocab: int) -> Mixture:
    """Open all that training reads, phase after phase. A dataset that a phase reads again goes on
    where it was: in the native order each of its files, also inside blends; in Megatron's, whose
    order is of a whole dataset, one of the same name. Raises as `open_mixture`."""
    drawn: dict[PairPart, Drawn] = {}
    parts: list[OrderPart] = []
    samples: list[Samples] = []
    names: list[str] = []
    read: Counter[str] = Counter()
    for span in spans_of(job):
        dataset = span.dataset
        offset = 0
        if _is_megatrons(job, dataset):
            mixture = open_mixture(job, dataset, "train", vocab)
            offset = read[dataset.name]
            read[dataset.name] += span.samples
        else:
            mixture = _open_native(job, dataset, "train", vocab, span.samples, drawn)
        parts.append(OrderPart(span.first, mixture.order, offset, len(samples)))
        samples += mixture.samples
        names += mixture.names
    order = parts[0].order if len(parts) == 1 else PhasedOrder(parts)
    return Mixture(order, samples, names)


def open_mixture(job: Job, dataset: Dataset, split: SplitName, vocab: int) -> Mixture:
    """Open one split of a dataset of the job, apart from any phases.

    Args:
        job: its model, seed, root and sample_order count.
        dataset: its own, or one of its further validation sets.
        split: which.
        vocab: ids of random tokens are below it.

    Raises ConfigError: a file is missing or damaged (exit 6), the split holds no sample (exit
    3), Megatron's index was not built or is of other data (exit 6).
    """
    if not _is_megatrons(job, dataset):
        return _open_native(job, dataset, split, vocab)
    from trainkit.data.order.megatron_worker import open_order  # what no other order needs

    pairs = weighed_pairs(job, dataset, split, by_documents=True)
    _refuse_no_files(dataset, split, pairs)
    order, of_index = open_order(job, dataset, split, pairs)
    return Mixture(order, of_index, [pair.name for pair in pairs])


def _is_megatrons(job: Job, dataset: Dataset) -> bool:
    return job.sample_order == "megatron" and dataset.source != "mock"


def _open_native(
    job: Job,
    dataset: Dataset,
    split: SplitName,
    vocab: int,
    samples_now: int = 0,
    drawn: dict[PairPart, Drawn] | None = None,
) -> Mixture:
    """A split in the native order.

    Args:
        job, dataset, split, vocab: as of `open_mixture`.
        samples_now: that this part of the training reads; 0: in all of its steps.
        drawn: what training has read of each file before; afterwards with these samples.
    """
    before = drawn or {}
    length = job.model.seq_length
    seed = job.training.seed
    weights: Sequence[float] | Numbers | None = None
    samples: list[MockSamples] | list[NativeSamples]
    if dataset.source == "mock":
        salt, count = MOCK[split]
        parts = [(dataset.name, Path(), "")]
        samples = [MockSamples(vocab, length, seed + salt, count)]
    else:
        counts = {part: each.samples for part, each in before.items()}
        pairs = weighed_pairs(
            job, dataset, split, by_documents=False, samples=samples_now, drawn=counts
        )
        _refuse_no_files(dataset, split, pairs)
        parts = [pair.part for pair in pairs]
        samples = [
            NativeSamples(IndexedDataset(pair.prefix), pair.split, split, length, pair.mmap)
            for pair in pairs
        ]
        _refuse_no_window(dataset, split, length, samples)
        weights = weights_of(pairs, [part.num_samples for part in samples])
        if dataset.max_epochs is not None and split == "train" and weights is not None:
            weights = np.array(weights, np.int64)  # whole samples: the cap is exact
    names = [name for name, _, _ in parts]
    sizes = [part.num_samples for part in samples]
    goes_on = {part[0]: before[part] for part in parts if part in before}
    order = NativeOrder(sizes, weights, split, seed, names, goes_on=goes_on)
    order.window(0, 1)  # a dataset without a sample is named now, not at the first batch
    if drawn is not None:
        after = order.drawn(samples_now)
        drawn |= {part: after[part[0]] for part in parts}
    return Mixture(order, samples, names)


def _refuse_no_files(dataset: Dataset, split: SplitName, pairs: Sequence[SplitPair]) -> None:
    if not pairs:
        raise _no_sample(split, f"datasets.{dataset.name} has no files for the {split} split")


def _refuse_no_window(
    dataset: Dataset, split: SplitName, length: int, samples: Sequence[NativeSamples]
) -> None:
    if any(part.num_samples for part in samples):
        return
    cut = f"datasets.{dataset.name}"
    if len(samples) == 1:
        cut += f".split ({dataset.split!r})"
    raise _no_sample(split, f"{cut} leaves the {split} split no sample of {length} tokens")


def _no_sample(split: SplitName, what: str) -> ConfigError:
    hint = "give it more weight or files, or shorten seq_length"
    if split == "valid":
        hint += "; to train without evaluations, set eval_iters = 0"
    return ConfigError(what, hint=hint)
