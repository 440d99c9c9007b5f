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
from numpy.typing import NDArray
from torch import Tensor

from trainkit.base.errors import ConfigError
from trainkit.base.forms import read_form
from trainkit.data.indexed import IndexedDataset
from trainkit.data.order import MockSamples, NativeSamples, SampleOrder, Samples
from trainkit.data.paths import DataFolder
from trainkit.data.tokenizer import end_of_document, load_tokenizer
from trainkit.jobs.schema import Dataset, Job
from trainkit.train.attention import Documents
from trainkit.train.data_parallel import World
from trainkit.train.loss import NO_LABEL
from trainkit.train.readback import to_device

Split = Literal["train", "valid"]
MOCK: dict[Split, tuple[int, int]] = {"train": (0, 2**20), "valid": (1, 2**12)}  # what is added to the seed, and samples of an epoch


def data_folder(job: Job, dataset: Dataset | None = None) -> DataFolder:
    """Where the tokens and the tokenizer of a dataset of the job lie, by default of its own."""
    return DataFolder(Path(job.cluster.root or "."), dataset or job.dataset)


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
    """One micro-batch of one rank; label s is the token after token s. `checksum` is the sum of xxh32 over its samples' tokens.

    `position` is its first sample's in the order of samples. `positions_BS` and `documents` are there where the job asks for them.
    """

    tokens_BS: Tensor
    labels_BS: Tensor
    checksum: int
    position: int
    positions_BS: Tensor | None = None
    documents: Documents | None = None


def micro_batches(consumed: int, global_batch: int, micro_batch: int, world: World) -> list[range]:
    """Positions of each micro-batch of this rank in the global batch that begins after `consumed` samples.

    Micro-batch m of data-parallel rank r holds consumed + m * (micro_batch * dp) + r * micro_batch + [0, micro_batch), as
    in Megatron-LM, legacy/data/data_samplers.py MegatronPretrainingSampler. `global_batch` is a multiple of micro_batch * dp.
    """
    starts = range(consumed + world.rank * micro_batch, consumed + global_batch, micro_batch * world.size)
    return [range(start, start + micro_batch) for start in starts]


def document_bounds(inputs_BS: NDArray[np.int64], end: int) -> NDArray[np.int64]:
    """0, where every further sample or document begins, and B * S: a document ends with its end-of-document token `end`."""
    after = inputs_BS.ravel() == end
    after[inputs_BS.shape[1] - 1 :: inputs_BS.shape[1]] = True  # a sample begins something new whatever it ends with
    return np.concatenate([[0], np.flatnonzero(after) + 1])


def positions_within(bounds: NDArray[np.int64], shape: tuple[int, ...]) -> NDArray[np.int64]:
    """Position of every token in its document (as Megatron-LM's reset_position_ids: the end token is its document's last)."""
    starts = np.repeat(bounds[:-1], np.diff(bounds))
    positions: NDArray[np.int64] = (np.arange(bounds[-1]) - starts).reshape(shape)
    return positions


def _samples(job: Job, dataset: Dataset, split: Split, vocab: int) -> Samples:
    """One split of a dataset. Raises ConfigError where it holds no sample, before training rather than at the first evaluation."""
    length = job.model.seq_length
    if dataset.source == "mock":
        salt, count = MOCK[split]
        return MockSamples(vocab, length, job.training.seed + salt, count)
    samples = NativeSamples(IndexedDataset(data_folder(job, dataset).prefix), dataset.split, split, length)
    if samples.num_samples == 0:
        where = f"datasets.{dataset.name}.split ({dataset.split!r})"
        hint = "give it more weight, or shorten seq_length"
        if split == "valid":
            hint += "; to train without evaluations, set eval_iters = 0"
        raise ConfigError(f"{where} leaves the {split} split no sample of {length} tokens", hint=hint)
    return samples


def _end_token(job: Job, dataset: Dataset) -> int | None:
    """The id that ends a document, where an option of the job needs it. Raises ConfigError for data without documents."""
    t = job.training
    asked = [key for key in ("reset_attention_mask", "reset_position_ids", "eod_mask_loss") if getattr(t, key)]
    if not asked:
        return None
    if dataset.tokenizer is None:
        raise ConfigError(f"training.{asked[0]} needs documents; dataset {dataset.name!r} is random tokens without any")
    path = data_folder(job, dataset).tokenizer
    return end_of_document(load_tokenizer(path), dataset.tokenizer.eod_token, path)


class Feed:
    """The micro-batches of one split for one rank.

    Args:
        job: the job.
        dataset: its dataset, or one of its further validation sets.
        split: which part of it.
        world: whose micro-batches.
        device: where they go.
    """

    def __init__(self, job: Job, dataset: Dataset, split: Split, world: World, device: torch.device) -> None:
        self.world, self.device, self.split, self.training = world, device, split, job.training
        self.name = dataset.name
        self.length, self.vocab = job.model.seq_length, vocab_size(job)
        self.micro_batch = job.training.micro_batch_size
        self.datasets = [_samples(job, dataset, split, self.vocab)]
        self.order = SampleOrder(self.datasets, None, split, self.length, job.training.seed)
        self.end = _end_token(job, dataset)

    def read(self, consumed: int, global_batch: int) -> Iterator[Batch]:
        """This rank's micro-batches of the global batch of so many samples that begins after `consumed`. Raises ConfigError for an id beyond the vocabulary."""
        dataset_G, number_G = self.order.window(consumed, global_batch)
        for positions in micro_batches(consumed, global_batch, self.micro_batch, self.world):
            samples = np.empty((len(positions), self.length + 1), dtype=np.int64)
            for row, position in zip(samples, positions, strict=True):
                at = position - consumed
                self.datasets[dataset_G[at]].read(int(number_G[at]), row)
            if (highest := int(samples.max())) >= self.vocab or samples.min() < 0:
                where = f"samples {positions} of {self.split} of dataset {self.name!r}"
                raise ConfigError(f"token id {highest} in {where}, but the vocabulary has {self.vocab}", hint="run prep-data anew")
            yield self._batch(samples, positions.start)

    def _batch(self, samples: NDArray[np.int64], position: int) -> Batch:
        checksum = sum(int(xxhash.xxh32_intdigest(row.tobytes())) for row in samples)
        inputs, labels = samples[:, :-1], samples[:, 1:]
        positions, documents = None, None
        if self.end is not None:
            bounds = document_bounds(inputs, self.end)
            if self.training.reset_position_ids:
                positions = to_device(torch.from_numpy(positions_within(bounds, inputs.shape)), self.device)
            if self.training.reset_attention_mask:
                bounds_D = to_device(torch.from_numpy(bounds.astype(np.int32)), self.device)
                documents = Documents(tuple(bounds.tolist()), bounds_D, int(np.diff(bounds).max()))
            if self.training.eod_mask_loss:
                labels = np.where(inputs == self.end, NO_LABEL, labels)
        tokens_BS, labels_BS = (to_device(torch.from_numpy(np.ascontiguousarray(part)), self.device) for part in (inputs, labels))
        return Batch(tokens_BS, labels_BS, checksum, position, positions, documents)
