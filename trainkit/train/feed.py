"""Which samples a rank reads, and the tokens in them. Positions in the order of samples are all there is to remember.

Shapes: B samples of a micro-batch, S tokens of a sample.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import xxhash
from torch import Tensor

from trainkit.base.errors import ConfigError
from trainkit.base.forms import read_form
from trainkit.data.indexed import IndexedDataset
from trainkit.data.order import MockSamples, NativeSamples, SampleOrder, Samples
from trainkit.data.paths import DataFolder
from trainkit.jobs.schema import Job
from trainkit.train.data_parallel import World

Split = Literal["train", "valid"]
MOCK: dict[Split, tuple[int, int]] = {"train": (0, 2**20), "valid": (1, 2**12)}  # what is added to the seed, and samples of an epoch


def data_folder(job: Job) -> DataFolder:
    """Where the tokens and the tokenizer of the job's dataset lie."""
    return DataFolder(Path(job.cluster.root or "."), job.dataset)


def vocab_size(job: Job) -> int:
    """Rows of the embedding: the model's vocab_size, else the tokenizer's, else what data preparation counted.

    Raises ConfigError where none is known, or the tokenizer has more ids than the model.
    """
    known = job.dataset.tokenizer.vocab_size if job.dataset.tokenizer else None
    if job.dataset.tokenizer and (manifest := data_folder(job).manifest).is_file():
        known = int(read_form(manifest, "dataset/1")["vocab_size"])
    rows = job.model.vocab_size or known
    if rows is None:
        raise ConfigError(f"nobody says how large the vocabulary of model {job.model.name!r} is", hint=f"set models.{job.model.name}.vocab_size")
    if known is not None and known > rows:
        raise ConfigError(f"tokenizer has {known} ids, model {job.model.name!r} only {rows}", hint="raise model.vocab_size, or leave it out")
    return rows


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one rank; label s is the token after token s. `checksum` is the sum of xxh32 over its samples' tokens."""

    tokens_BS: Tensor
    labels_BS: Tensor
    checksum: int


def micro_batches(consumed: int, global_batch: int, micro_batch: int, world: World) -> list[range]:
    """Positions of each micro-batch of this rank in the global batch that begins after `consumed` samples.

    Micro-batch m of data-parallel rank r holds consumed + m * (micro_batch * dp) + r * micro_batch + [0, micro_batch), as
    in Megatron-LM, legacy/data/data_samplers.py MegatronPretrainingSampler. `global_batch` is a multiple of micro_batch * dp.
    """
    starts = range(consumed + world.rank * micro_batch, consumed + global_batch, micro_batch * world.size)
    return [range(start, start + micro_batch) for start in starts]


def _samples(job: Job, split: Split, vocab: int) -> Samples:
    """One split of the job's dataset. Raises ConfigError where it holds no sample, before training rather than at the first evaluation."""
    length = job.model.seq_length
    if job.dataset.source == "mock":
        salt, count = MOCK[split]
        return MockSamples(vocab, length, job.training.seed + salt, count)
    samples = NativeSamples(IndexedDataset(data_folder(job).prefix), job.dataset.split, split, length)
    if samples.num_samples == 0:
        where = f"datasets.{job.dataset.name}.split ({job.dataset.split!r})"
        hint = "give it more weight, shorten seq_length, or set eval_iters = 0"
        raise ConfigError(f"{where} leaves the {split} split no sample of {length} tokens", hint=hint)
    return samples


class Feed:
    """The micro-batches of one split for one rank."""

    def __init__(self, job: Job, split: Split, world: World, device: torch.device) -> None:
        self.world, self.device, self.split = world, device, split
        self.length, self.vocab = job.model.seq_length, vocab_size(job)
        self.micro_batch, self.global_batch = job.training.micro_batch_size, job.global_batch_size
        self.datasets = [_samples(job, split, self.vocab)]
        self.order = SampleOrder(self.datasets, None, split, self.length, job.training.seed)

    def read(self, consumed: int) -> Iterator[Batch]:
        """This rank's micro-batches of the global batch that begins after `consumed` samples. Raises ConfigError for an id beyond the vocabulary."""
        dataset_G, number_G = self.order.window(consumed, self.global_batch)
        for positions in micro_batches(consumed, self.global_batch, self.micro_batch, self.world):
            samples = np.empty((len(positions), self.length + 1), dtype=np.int64)
            for row, position in zip(samples, positions, strict=True):
                at = position - consumed
                self.datasets[dataset_G[at]].read(int(number_G[at]), row)
            if (highest := int(samples.max())) >= self.vocab or samples.min() < 0:
                raise ConfigError(f"token id {highest} in samples {positions} of {self.split}, but the vocabulary has {self.vocab}", hint="run prep-data anew")
            checksum = sum(int(xxhash.xxh32_intdigest(row.tobytes())) for row in samples)
            tokens = torch.from_numpy(samples).to(self.device)
            yield Batch(tokens[:, :-1], tokens[:, 1:], checksum)
