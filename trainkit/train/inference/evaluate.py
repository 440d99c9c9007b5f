"""The loss of a trained model on a whole split, in one process: every window once, in order.

Shapes: B samples of a micro-batch, S tokens of a sample, N labels of a micro-batch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from trainkit.base.errors import ConfigError, Exit, TrainkitError
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.data.order.loader import ReadSchedule
from trainkit.data.order.native import SPLITS, SplitName
from trainkit.data.order.samples import Numbers
from trainkit.data.tokenizer import load_tokenizer
from trainkit.jobs.schema import Dataset, Job
from trainkit.ops.cross_entropy import NO_LABEL
from trainkit.train.batches import Feed, data_folder
from trainkit.train.model.batch import Batch
from trainkit.train.model.head_loss import Labels
from trainkit.train.model.transformer import Transformer
from trainkit.train.parallel.data_parallel import World

DECODED_AT_ONCE = 2**18  # tokens: bounds the memory of a document's text


@dataclass(frozen=True)
class Evaluation:
    """What one pass over a split found.

    Args:
        loss: mean cross-entropy over all tokens that have a label, in nats.
        perplexity: exp(loss); None beyond what a float holds.
        bits_per_byte: summed cross-entropy in bits over `bytes`: comparable between tokenizers.
            None where there is no text.
        tokens: labels that the loss is taken of.
        bytes: UTF-8 bytes of their text. The end-of-document token has none, though its loss
            counts.
        samples: windows of seq_length tokens.
        seconds: wall clock, reading and decoding included.
    """

    loss: float
    perplexity: float | None
    bits_per_byte: float | None
    tokens: int
    bytes: int
    samples: int
    seconds: float


class SequentialOrder:
    """Every sample of each dataset once, in its own order, dataset after dataset.

    Args:
        sizes: samples of each dataset.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.ends = np.cumsum(sizes)

    def window(self, consumed: int, n: int) -> tuple[NDArray[np.int16], Numbers]:
        """As the other orders; positions outside [0, sum of sizes) raise IndexError."""
        positions = np.arange(consumed, consumed + n)
        if n and not 0 <= consumed <= consumed + n <= self.ends[-1]:
            raise IndexError(f"positions {consumed} to {consumed + n} of {self.ends[-1]}")
        dataset = np.searchsorted(self.ends, positions, side="right")
        return dataset.astype(np.int16), positions - np.concatenate([[0], self.ends])[dataset]


class EvaluationFeed(Feed):
    """Every window of a split once, in the order of the text, as micro-batches with the masks
    that the job trains with.

    Consecutive windows share a token, the last label of one is the first input of the next; what
    follows the last whole window is left out.

    Args:
        job: its seq_length, micro_batch_size and masks.
        dataset: whose split, prepared with the job's tokenizer.
        split: train, valid or test.
        vocab: rows of the model's embedding.
        device: where the micro-batches go.

    Raises:
        ConfigError: random tokens; no split of that name; the split has no window (exit 3); the
        data was never prepared (exit 6).
    """

    def __init__(
        self, job: Job, dataset: Dataset, split: str, vocab: int, device: torch.device
    ) -> None:
        refuse_unreadable(dataset, split)
        # in the order of the text, whatever order it was trained in
        native = job.model_copy(update={"sample_order": "native"})
        super().__init__(native, dataset, cast(SplitName, split), World(0, 1), device)
        self.vocab = vocab
        self.micro_batch = job.training.micro_batch_size

    def __len__(self) -> int:
        """Windows of the split."""
        return sum(samples.num_samples for samples in self.mixture.samples)

    def batches(self, count: int) -> Iterator[Batch]:
        """The first `count` windows, `micro_batch_size` at a time; the last micro-batch may be
        smaller.

        Raises ConfigError for an id beyond the vocabulary.
        """

        def parts(start: int, n: int) -> list[range]:
            return [
                range(i, min(i + self.micro_batch, start + n))
                for i in range(start, start + n, self.micro_batch)
            ]

        self.close()
        self.loader = self._loader(
            SequentialOrder([samples.num_samples for samples in self.mixture.samples]),
            ReadSchedule(parts, lambda at: count - at, count),
        )
        try:
            yield from self.read(0, count)
        finally:
            self.close()


def refuse_unreadable(dataset: Dataset, split: str) -> None:
    """Raise ConfigError for random tokens, and for an unknown split."""
    if dataset.source == "mock":
        raise ConfigError(
            f"dataset {dataset.name or 'mock'!r} is random tokens: a loss on them says nothing",
            hint="name another with --dataset",
        )
    if split not in SPLITS:
        raise ConfigError(f"there is no split {split!r}", hint=f"one of {', '.join(SPLITS)}")


class ByteCounter:
    """UTF-8 bytes of a stream of tokens, by decoding each document in one piece: a token may
    hold a part of a character.

    Exact but for the two ends of the stream, and for every DECODED_AT_ONCE tokens of a longer
    document: a character cut in two there counts as U+FFFD, 3 bytes, on each side.

    Args:
        tokenizer: what wrote the tokens.
        end: the id that ends a document.
    """

    def __init__(self, tokenizer: Tokenizer, end: int) -> None:
        self.tokenizer = tokenizer
        self.end = end
        self.counted = 0
        self._open = np.empty(0, dtype=np.int64)

    def add(self, ids_N: NDArray[np.int64]) -> None:
        """The stream's next tokens."""
        unread = np.concatenate([self._open, ids_N])
        *whole, self._open = np.split(unread, np.flatnonzero(unread == self.end) + 1)
        if len(self._open) >= DECODED_AT_ONCE:
            whole = [*whole, self._open]
            self._open = self._open[:0]
        self._count(whole)

    def total(self) -> int:
        """Bytes of all that was added; the stream is over."""
        self._count([self._open])
        self._open = self._open[:0]
        return self.counted

    def _count(self, documents: list[NDArray[np.int64]]) -> None:
        self.counted += sum(
            len(self.tokenizer.decode(ids[ids != self.end].tolist()).encode()) for ids in documents
        )


def refuse_other_tokenizer(job: Job, ours: Tokenizer, dataset: Dataset, path: Path) -> None:
    """Raise ConfigError unless a dataset has the job's own tokenizer and end-of-document token,
    whatever they are called.

    Args:
        job: the run's.
        ours: its tokenizer.
        dataset: that is to be measured on.
        path: its tokenizer.json.
    """
    assert job.dataset.tokenizer is not None and dataset.tokenizer is not None
    own_path = data_folder(job).tokenizer
    theirs = load_tokenizer(path)
    hint = (
        f'the ids would mean other text: give {dataset.name!r} a tokenizer of type = "file" with'
        f' path = "{own_path}"'
    )
    if theirs.to_str() != ours.to_str():
        sizes = f"{theirs.get_vocab_size()} and {ours.get_vocab_size()} ids"
        raise ConfigError(
            f"dataset {dataset.name!r} has another tokenizer than the run: {path} and {own_path}"
            f" differ ({sizes})",
            hint=hint,
        )
    if dataset.tokenizer.eod_token != job.dataset.tokenizer.eod_token:
        words = (
            f"{dataset.tokenizer.eod_token!r}, in the run with {job.dataset.tokenizer.eod_token!r}"
        )
        raise ConfigError(
            f"documents of dataset {dataset.name!r} end with {words}",
            hint=f"set tokenizers.{dataset.tokenizer.name}.eod_token",
        )


@torch.inference_mode()
def evaluate(
    model: Transformer,
    windows: EvaluationFeed,
    tokenizer: Tokenizer,
    end: int,
    *,
    samples: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """Mean loss over the first `samples` windows, 0: all of them. The same numbers every time;
    nothing is sampled.

    Args:
        model: in the state of evaluation, on the windows' device.
        windows: what to read.
        tokenizer: what wrote them.
        end: the id that ends a document.
        samples: how many windows at most.
        progress: called with (windows done, windows in all) after every micro-batch.

    Raises:
        ConfigError: an id beyond the vocabulary.
        TrainkitError: exit 9, the loss is not finite.
    """
    began = time.perf_counter()
    count = min(samples or len(windows), len(windows))
    done = 0
    device = windows.device
    text = ByteCounter(tokenizer, end)
    nats = torch.zeros((), dtype=torch.float64, device=device)
    tokens = torch.zeros((), dtype=torch.int64, device=device)
    for batch in windows.batches(count):
        # before the model is called: its text is counted while the device works
        labels_N = batch.labels_BS.flatten().cpu().numpy()
        losses = model(
            batch.tokens_BS,
            Labels(batch.labels_BS),
            positions_BS=batch.positions_BS,
            documents=batch.documents,
        )
        nats += losses.cross_entropy
        tokens += losses.tokens
        text.add(labels_N[labels_N != NO_LABEL])
        done += len(batch.tokens_BS)
        progress(done, count)
    return _summary(float(nats), int(tokens), text.total(), count, time.perf_counter() - began)


def _summary(nats: float, tokens: int, size: int, samples: int, seconds: float) -> Evaluation:
    if tokens == 0:
        raise ConfigError(
            "no token of these windows has a label: no loss can be computed",
            hint="evaluate more samples",
        )
    loss = nats / tokens
    if not math.isfinite(loss):
        raise TrainkitError(
            f"the summed loss of {tokens} tokens is {nats}",
            exit=Exit.RANK_USER,
            hint="the weights are broken, or too large for the precision",
        )
    perplexity = math.exp(loss) if loss < 700 else None
    return Evaluation(
        loss,
        perplexity,
        nats / math.log(2) / size if size else None,
        tokens,
        size,
        samples,
        seconds,
    )
