"""The order of samples: pure functions of position, so that resume and every layout of ranks see the same samples.

Native order of one dataset (`NativeSamples`): the token stream is cut into W = (T - 1) // seq_length windows; window k is tokens
[k * seq_length, k * seq_length + seq_length], seq_length + 1 of them, so that neighbours share one token. A split is a range of windows.
`SampleOrder` walks through a split epoch after epoch, each in an order of its own.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from trainkit import _index
from trainkit.base.errors import ConfigError, Exit
from trainkit.data.indexed import IndexedDataset

SplitName = Literal["train", "valid", "test"]
SPLITS: tuple[SplitName, ...] = ("train", "valid", "test")
Split = tuple[Fraction, Fraction, Fraction]
_SPLIT_TEXT = re.compile(r"\d+(\.\d+)?(,\d+(\.\d+)?){0,2}", re.ASCII)


def parse_split(text: str) -> Split:
    """Weights of train, valid and test, "949,50,1" or "95,5", as exact parts of 1.

    Raises ConfigError: not one to three non-negative numbers, or all are zero.
    """
    if not _SPLIT_TEXT.fullmatch(text):
        raise ConfigError(f"split {text!r} is not one to three non-negative numbers with commas", hint='for example "949,50,1"')
    weights = [Fraction(part) for part in text.split(",")]
    weights += [Fraction(0)] * (len(SPLITS) - len(weights))
    total = sum(weights)
    if total == 0:
        raise ConfigError(f"split {text!r} gives every split the weight 0", hint='for example "949,50,1"')
    return weights[0] / total, weights[1] / total, weights[2] / total


def split_bounds(split: Split, num_windows: int) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    """First window and the one after the last of train, valid and test: floor(cumulative weight * num_windows), exact."""
    train, valid, test = (int(part * num_windows) for part in accumulate(split))
    return (0, train), (train, valid), (valid, test)


class Samples(Protocol):
    """One split of one dataset, sample by sample."""

    @property
    def num_samples(self) -> int:
        """Samples of one epoch."""

    def read(self, sample_number: int, out: NDArray[Any]) -> None:
        """Put the seq_length + 1 tokens of a sample into `out`, shape [seq_length + 1]. IndexError outside [0, num_samples)."""


def _check_read(sample_number: int, num_samples: int, out: NDArray[Any], seq_length: int) -> None:
    if not 0 <= sample_number < num_samples:
        raise IndexError(f"sample {sample_number} of {num_samples}")
    if out.shape != (seq_length + 1,):
        raise ValueError(f"out has the shape {out.shape}, not ({seq_length + 1},)")


class NativeSamples:
    """Fixed windows of a dataset's token stream.

    Args:
        dataset: the tokens.
        split: weights as `parse_split` takes them.
        name: which split.
        seq_length: tokens of a sample, without the one more that is the last label.

    Raises:
        ConfigError: the split is malformed (exit 3), the data is shorter than one sample (exit 6).
        ConfigError (exit 3): on `read`, if the split has no window.
    """

    def __init__(self, dataset: IndexedDataset, split: str, name: SplitName, seq_length: int) -> None:
        self.dataset, self.split, self.name, self.seq_length = dataset, split, name, seq_length
        parts = parse_split(split)
        if dataset.num_tokens < seq_length + 1:
            raise ConfigError(
                f"{dataset.prefix} has {dataset.num_tokens:,} tokens, fewer than one sample of seq_length + 1 = {seq_length + 1:,}",
                exit=Exit.STAGE_FAILED,
                hint="add data, or lower model.seq_length",
            )
        low, high = split_bounds(parts, (dataset.num_tokens - 1) // seq_length)[SPLITS.index(name)]
        self.first_window, self.num_samples = low, high - low

    def read(self, sample_number: int, out: NDArray[Any]) -> None:
        if self.num_samples == 0:
            raise _empty(f"{self.dataset.prefix} has no {self.name} sample: split {self.split!r} leaves it no window of {self.seq_length} tokens")
        _check_read(sample_number, self.num_samples, out, self.seq_length)
        start = (self.first_window + sample_number) * self.seq_length
        out[:] = self.dataset.tokens[start : start + self.seq_length + 1]


class MockSamples:
    """Random tokens for trying a cluster without data: token i of a sample is raw output i of Philox4x64 keyed by (seed, number), modulo vocab_size."""

    def __init__(self, vocab_size: int, seq_length: int, seed: int, num_samples: int) -> None:
        self.vocab_size, self.seq_length, self.seed, self.num_samples = vocab_size, seq_length, seed, num_samples

    def read(self, sample_number: int, out: NDArray[Any]) -> None:
        _check_read(sample_number, self.num_samples, out, self.seq_length)
        raw = np.random.Philox(key=np.array([self.seed, sample_number], np.uint64)).random_raw(self.seq_length + 1)
        out[:] = raw % np.uint64(self.vocab_size)


def _empty(message: str) -> ConfigError:
    return ConfigError(message, hint="give the split a larger weight, add data, or set training.eval_iters = 0 if it is only evaluated")


class SampleOrder:
    """Which sample stands at which position of a run.

    Position p lies in epoch p // N, N the samples of one epoch, and holds the sample P(p % N), where P is the permutation of
    `trainkit._index.permute` under the key of (seed, split, epoch). The number of ranks and the micro-batch have no part in it.

    Args:
        datasets: one split of each dataset (several are to come).
        weights: share of each dataset; ignored for one.
        split: the name of the split; salts the key.
        seq_length: tokens of a sample (the exact orders to come depend on it).
        seed: the run's seed.

    Raises:
        ConfigError: not exactly one dataset.
    """

    def __init__(self, datasets: Sequence[Samples], weights: Sequence[float] | None, split: SplitName, seq_length: int, seed: int) -> None:
        if len(datasets) != 1:
            raise ConfigError(f"{len(datasets)} datasets are given; blending several is to come", hint="name one dataset")
        self.datasets, self.weights, self.split, self.seq_length, self.seed = datasets, weights, split, seq_length, seed

    def _key(self, epoch: int) -> int:
        """The first 8 bytes, little endian, of BLAKE2b-64 over the text "trainkit-order/1 SEED SPLIT EPOCH"."""
        text = f"trainkit-order/1 {self.seed} {self.split} {epoch}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")

    def window(self, consumed: int, n: int) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
        """The samples at positions consumed .. consumed + n - 1: (dataset_index int16 [n], sample_number int64 [n]).

        Raises ConfigError: the split has no sample.
        """
        size = self.datasets[0].num_samples
        if size == 0 and n:
            raise _empty(f"the {self.split} split has no sample")
        numbers = np.empty(n, np.int64)
        done = 0
        while done < n:
            epoch, start = divmod(consumed + done, size)
            count = min(n - done, size - start)
            _index.permute(size, self._key(epoch), start, numbers[done : done + count])
            done += count
        return np.zeros(n, np.int16), numbers
