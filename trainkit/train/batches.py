"""Which samples a rank reads, and the tokens in them. Positions in the order of samples are all
there is to remember.

Shapes: B samples of a micro-batch, S tokens of a sample.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from trainkit.base.documents import read_document
from trainkit.base.errors import ConfigError
from trainkit.data.indexed.paths import DataFolder
from trainkit.data.order.loader import Loader, MicroBatch, ReadSchedule, plain_memory
from trainkit.data.order.native import SampleOrder, SplitName
from trainkit.data.order.open import open_mixture, open_training
from trainkit.data.order.samples import NO_TOKEN, Numbers
from trainkit.data.tokenizer import end_of_document, load_tokenizer
from trainkit.jobs.schema import Dataset, Job
from trainkit.ops.cross_entropy import NO_LABEL
from trainkit.plan.batch import consumed_after, global_batch_size
from trainkit.train.metrics.readback import to_device
from trainkit.train.model.attention import DocumentBounds
from trainkit.train.model.batch import Batch
from trainkit.train.parallel.data_parallel import World


def data_folder(job: Job, dataset: Dataset | None = None) -> DataFolder:
    """Where the tokens and the tokenizer of a dataset of the job lie, by default of its own."""
    return DataFolder(job.cluster.root_folder, dataset or job.dataset)


def vocab_size(job: Job) -> int:
    """Rows of the embedding: the model's vocab_size, else the tokenizer's, else what data
    preparation counted.

    Raises ConfigError where none is known, or the tokenizer has more ids than the model.
    """
    known = job.dataset.tokenizer.vocab_size if job.dataset.tokenizer else None
    if job.dataset.tokenizer and (manifest := data_folder(job).manifest).is_file():
        known = int(read_document(manifest, "dataset/1")["vocab_size"])
    rows = job.model.vocab_size or known
    if rows is None:
        raise ConfigError(
            f"the vocabulary size of model {job.model.name!r} is not known",
            hint=f"set models.{job.model.name}.vocab_size",
        )
    if known is not None and known > rows:
        raise ConfigError(
            f"tokenizer has {known} ids, model {job.model.name!r} only {rows}",
            hint="raise model.vocab_size, or leave it out",
        )
    return rows


def micro_batches(consumed: int, global_batch: int, micro_batch: int, world: World) -> list[range]:
    """Positions of each micro-batch of this rank in the global batch that begins after
    `consumed` samples.

    Micro-batch m of data-parallel rank r holds consumed + m * (micro_batch * dp) + r *
    micro_batch + [0, micro_batch), as in Megatron-LM, legacy/data/data_samplers.py
    MegatronPretrainingSampler.

    Args:
        consumed: samples before the global batch.
        global_batch: its samples, a multiple of micro_batch * dp.
        micro_batch: samples of a micro-batch.
        world: the data-parallel ranks.
    """
    starts = range(
        consumed + world.rank * micro_batch, consumed + global_batch, micro_batch * world.size
    )
    return [range(start, start + micro_batch) for start in starts]


def document_bounds(inputs_BS: NDArray[np.int64], end: int) -> NDArray[np.int64]:
    """0, where every further sample or document begins, and B * S: a document ends with its
    end-of-document token `end`."""
    after = inputs_BS.ravel() == end
    # a sample begins something new whatever it ends with
    after[inputs_BS.shape[1] - 1 :: inputs_BS.shape[1]] = True
    return np.concatenate([[0], np.flatnonzero(after) + 1])


def positions_within(bounds: NDArray[np.int64], shape: tuple[int, ...]) -> NDArray[np.int64]:
    """Position of every token in its document (as Megatron-LM's reset_position_ids: the end
    token is its document's last)."""
    starts = np.repeat(bounds[:-1], np.diff(bounds))
    positions: NDArray[np.int64] = (np.arange(bounds[-1]) - starts).reshape(shape)
    return positions


def _end_token(job: Job, dataset: Dataset) -> int | None:
    """The id that ends a document, where an option of the job needs it. Raises ConfigError for
    data without documents."""
    t = job.training
    asked = [
        key
        for key in ("reset_attention_mask", "reset_position_ids", "eod_mask_loss")
        if getattr(t, key)
    ]
    if not asked:
        return None
    if dataset.tokenizer is None:
        raise ConfigError(
            f"training.{asked[0]} needs documents; dataset {dataset.name!r} is random tokens"
            " without any"
        )
    path = data_folder(job, dataset).tokenizer
    return end_of_document(load_tokenizer(path), dataset.tokenizer.eod_token, path)


def _pinned_memory(shape: tuple[int, int]) -> Numbers:
    """Page-locked memory, from which a copy to the device waits for nothing; torch keeps it
    until the copy is done, and uses it again."""
    values: Numbers = torch.empty(shape, dtype=torch.int64, pin_memory=True).numpy()
    return values


def train_plan(job: Job, world: World) -> ReadSchedule:
    """Global batches as training takes them, growing where it says so, to its last step."""
    micro = job.training.micro_batch_size
    return ReadSchedule(
        lambda consumed, n: micro_batches(consumed, n, micro, world),
        lambda at: global_batch_size(job, at),
        consumed_after(job, job.training.train_iters),
    )


def valid_plan(job: Job, world: World) -> ReadSchedule:
    """The global batches of one evaluation."""
    micro = job.training.micro_batch_size
    whole = job.global_batch_size
    return ReadSchedule(
        lambda consumed, n: micro_batches(consumed, n, micro, world),
        lambda at: whole,
        job.training.eval_iters * whole,
    )


class Feed:
    """The micro-batches of one split for one rank, read some time before they are asked for.

    Args:
        job: the job.
        dataset: one of its datasets; None: all that training reads, phase after phase.
        split: which part of it.
        world: whose micro-batches.
        device: where they go.

    Raises:
        ConfigError: the split has no sample (exit 3), the data or Megatron's index is missing or
        damaged (exit 5 or 6).
    """

    def __init__(
        self,
        job: Job,
        dataset: Dataset | None,
        split: SplitName,
        world: World,
        device: torch.device,
    ) -> None:
        self.device = device
        self.split = split
        self.training = job.training
        self.length = job.model.seq_length
        self.vocab = vocab_size(job)
        if dataset is None:
            self.mixture = open_training(job, self.vocab)
        else:
            self.mixture = open_mixture(job, dataset, split, self.vocab)
        self.end = _end_token(job, dataset or job.dataset)
        self.loader = self._loader(
            self.mixture.order, (train_plan if split == "train" else valid_plan)(job, world)
        )

    def _loader(self, order: SampleOrder, plan: ReadSchedule) -> Loader:
        return Loader(
            order,
            self.mixture.samples,
            self.length,
            plan,
            allocate=_pinned_memory if self.device.type == "cuda" else plain_memory,
        )

    def read(self, consumed: int, global_batch: int) -> Iterator[Batch]:
        """This rank's micro-batches of the global batch of so many samples that begins after
        `consumed`.

        Raises ConfigError for an id beyond the vocabulary (exit 3), and where a file cannot be
        read (exit 6).
        """
        yield from map(self._batch, self.loader.read(consumed, global_batch))

    def first_of(self, world: World, consumed: int, global_batch: int) -> Batch:
        """The first micro-batch of another data-parallel rank, read now. Raises as `read`."""
        micro = self.training.micro_batch_size
        return self._batch(self.loader.load(micro_batches(consumed, global_batch, micro, world)[0]))

    def where(self, position: int) -> str:
        """Names the sample at a position."""
        dataset, number = self.loader.at(position)
        return (
            f"sample {number} of the {self.split} split of dataset {self.mixture.names[dataset]!r}"
        )

    def close(self) -> None:
        """End the threads that read; twice does no harm."""
        self.loader.close()

    def _foreign_id(self, batch: MicroBatch) -> ConfigError:
        wrong = batch.ids.highest if batch.ids.highest >= self.vocab else batch.ids.lowest
        row = int(np.flatnonzero((batch.tokens == wrong).any(1))[0])
        where = self.where(batch.positions[row])
        return ConfigError(
            f"token id {wrong} in {where}, but the model's vocabulary has {self.vocab}",
            hint="it was prepared with another tokenizer: run prep-data again",
        )

    def _batch(self, batch: MicroBatch) -> Batch:
        if batch.ids.highest >= self.vocab or batch.ids.lowest < 0:
            raise self._foreign_id(batch)
        samples = batch.tokens
        checksum = sum(int(xxhash.xxh32_intdigest(row.data)) for row in samples)
        if self.end is None and not batch.ids.missing:  # one copy to the device for both
            rows = to_device(torch.from_numpy(samples), self.device)
            return Batch(rows[:, :-1], rows[:, 1:], checksum, batch.positions.start)
        inputs = samples[:, :-1]
        labels = samples[:, 1:]
        if batch.ids.missing:
            inputs = np.where(inputs == NO_TOKEN, 0, inputs)
            labels = np.where(labels == NO_TOKEN, NO_LABEL, labels)
        positions = None
        documents = None
        if self.end is not None:
            bounds = document_bounds(inputs, self.end)
            if self.training.reset_position_ids:
                positions = to_device(
                    torch.from_numpy(positions_within(bounds, inputs.shape)), self.device
                )
            if self.training.reset_attention_mask:
                bounds_D = to_device(torch.from_numpy(bounds.astype(np.int32)), self.device)
                documents = DocumentBounds(
                    tuple(bounds.tolist()), bounds_D, int(np.diff(bounds).max())
                )
            if self.training.eod_mask_loss:
                labels = np.where(inputs == self.end, NO_LABEL, labels)
        tokens_BS, labels_BS = (
            to_device(torch.from_numpy(np.ascontiguousarray(part)), self.device)
            for part in (inputs, labels)
        )
        return Batch(tokens_BS, labels_BS, checksum, batch.positions.start, positions, documents)
