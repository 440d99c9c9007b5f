"""Which samples a rank reads, and the tokens in them. Positions in the order of samples are all there is to remember.

Shapes: B samples of a micro-batch, S tokens of a sample.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import xxhash
from torch import Tensor

from trainkit.base.errors import ConfigError
from trainkit.base.files import read_json
from trainkit.base.forms import expect
from trainkit.data.indexed import IndexedDataset
from trainkit.data.order import MockSamples, NativeSamples, SampleOrder
from trainkit.data.paths import DataFolder
from trainkit.jobs.schema import Job
from trainkit.train.data_parallel import World

MOCK_SAMPLES = {"train": 2**20, "valid": 2**12}
Split = Literal["train", "valid"]


def vocab_size(job: Job) -> int:
    """Rows of the embedding: the model's vocab_size, else the tokenizer's, else what data preparation counted.

    Raises ConfigError where none is known, or the tokenizer has more ids than the model.
    """
    manifest = DataFolder(job.cluster.root, job.dataset).manifest if job.dataset.tokenizer else None
    known = job.dataset.tokenizer.vocab_size if job.dataset.tokenizer else None
    if manifest is not None and manifest.is_file():
        known = int(expect(read_json(manifest), "dataset/1", manifest)["vocab_size"])
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


class Feed:
    """The micro-batches of one split for one rank."""

    def __init__(self, job: Job, split: Split, world: World, device: torch.device) -> None:
        self.world, self.device, self.split = world, device, split
        self.length, self.vocab = job.model.seq_length, vocab_size(job)
        self.micro_batch, self.global_batch = job.training.micro_batch_size, job.global_batch_size
        if job.dataset.source == "mock":
            self.datasets = [MockSamples(self.vocab, self.length, job.training.seed, MOCK_SAMPLES[split])]
        else:
            self.datasets = [NativeSamples(IndexedDataset(DataFolder(job.cluster.root, job.dataset).prefix), job.dataset.split, split, self.length)]
        if not any(dataset.num_samples for dataset in self.datasets):
            raise ConfigError(
                f"the {split} split of dataset {job.dataset.name!r} has no sample of {self.length} tokens",
                hint=f"give it more weight in datasets.{job.dataset.name}.split ({job.dataset.split!r}), shorten seq_length, or set eval_iters = 0",
            )
        self.order = SampleOrder(self.datasets, [1.0], split, self.length, job.training.seed)

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
            checksum = sum(xxhash.xxh32_intdigest(row) for row in samples)
            tokens = torch.from_numpy(samples).to(self.device)
            yield Batch(tokens[:, :-1], tokens[:, 1:], checksum)
