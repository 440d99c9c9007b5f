"""From a dataset of a job to what a loader takes: an order of samples, and the samples of each
pair of files in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

from trainkit.base.errors import ConfigError
from trainkit.base.process import raise_open_file_limit
from trainkit.data.indexed.dataset import IndexedDataset
from trainkit.data.order.megatron_worker import open_order
from trainkit.data.order.native import NativeOrder, SampleOrder, SplitName
from trainkit.data.order.resolve_pairs import pairs_of, weights_of
from trainkit.data.order.samples import MockSamples, NativeSamples, Samples
from trainkit.jobs.schema import Dataset, Job

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
    open_mixture(job, job.dataset, "train", vocab)
    if job.training.eval_iters:
        for dataset in (job.dataset, *job.validation.values()):
            open_mixture(job, dataset, "valid", vocab)


def open_mixture(job: Job, dataset: Dataset, split: SplitName, vocab: int) -> Mixture:
    """Open one split of a dataset of the job.

    Args:
        job: its model, seed, root and sample_order count.
        dataset: its own, or one of its further validation sets.
        split: which.
        vocab: ids of random tokens are below it.

    Raises ConfigError: a file is missing or damaged (exit 6), the split holds no sample (exit
    3), Megatron's index was not built or is of other data (exit 6).
    """
    length = job.model.seq_length
    seed = job.training.seed
    if dataset.source == "mock":
        salt, count = MOCK[split]
        mock = MockSamples(vocab, length, seed + salt, count)
        return Mixture(
            NativeOrder([count], None, split, seed, [dataset.name]), [mock], [dataset.name]
        )
    pairs = pairs_of(job.cluster.root_folder, dataset, split)
    if not pairs:
        raise _no_sample(
            dataset, split, length, f"datasets.{dataset.name} has no files for the {split} split"
        )
    names = [pair.name for pair in pairs]
    if job.sample_order == "megatron":
        order, of_index = open_order(job, dataset, split, pairs)
        return Mixture(order, of_index, names)
    if job.sample_order != "native":
        assert_never(job.sample_order)
    samples = [
        NativeSamples(IndexedDataset(pair.prefix), pair.split, split, length, pair.mmap)
        for pair in pairs
    ]
    sizes = [part.num_samples for part in samples]
    if not any(sizes):
        if len(pairs) == 1:
            cut = f"datasets.{dataset.name}.split ({dataset.split!r})"
        else:
            cut = f"datasets.{dataset.name}"
        raise _no_sample(
            dataset, split, length, f"{cut} leaves the {split} split no sample of {length} tokens"
        )
    native = NativeOrder(sizes, weights_of(pairs, sizes), split, seed, names)
    native.window(0, 1)  # a dataset without a sample is named now, not at the first batch
    return Mixture(native, samples, names)


def _no_sample(dataset: Dataset, split: SplitName, length: int, what: str) -> ConfigError:
    hint = "give it more weight or files, or shorten seq_length"
    if split == "valid":
        hint += "; to train without evaluations, set eval_iters = 0"
    return ConfigError(what, hint=hint)
