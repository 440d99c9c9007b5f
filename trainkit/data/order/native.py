"""The order of samples: pure functions of position, so that resume and every layout of ranks see
the same samples.

An order knows how many samples the datasets have and says which one stands where; the tokens in
it are `trainkit.data.order.samples`' matter. Split: a dataset of W samples in the order of the
file is cut into train, valid and test at floor(cumulative weight * W). Weights of a blend are
integers, by which csrc/index/blend.h draws.
"""

from __future__ import annotations

import functools
import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import accumulate
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from trainkit import _index
from trainkit.base.errors import ConfigError
from trainkit.base.lazy_dataclasses import dataclass

MAX_DATASETS = 32_766  # of a blend: their numbers are int16, as in Megatron
MAX_SUM = 2**62  # of integer weights, and of positions
# what float weights sum to, but for the weights too small to be seen: those count as 1 each
SCALE = MAX_SUM - 2**15


def check_names(names: Sequence[str]) -> None:
    """Raises ConfigError: no dataset, more than 32,766, or a name that comes twice."""
    if not 1 <= len(names) <= MAX_DATASETS:
        raise ConfigError(
            f"{len(names):,} datasets are to be blended, but 1 to {MAX_DATASETS:,} can be",
            hint="merge small datasets",
        )
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ConfigError(
                f"two datasets of a blend are called {name!r}",
                hint="name it once, with its whole weight; give other files another name",
            )
        seen.add(name)


def integer_weights(weights: Sequence[float], names: Sequence[str]) -> NDArray[np.int64]:
    """Weights in proportion, int64 [D]: floor(SCALE * weight / sum of weights), exactly, but at
    least 1 for a weight above 0.

    Raises ConfigError: another number of weights than datasets, a weight that is negative, NaN
    or infinite, or all are 0.
    """
    if len(weights) != len(names):
        raise ConfigError(
            f"{len(weights)} weights are given for {len(names)} datasets",
            hint="give every dataset a weight, or none",
        )
    for name, weight in zip(names, weights, strict=True):
        if not (math.isfinite(weight) and weight >= 0):
            raise ConfigError(
                f"dataset {name!r} has the weight {weight}",
                hint="a weight is a finite number, 0 or more",
            )
    ratios = [weight.as_integer_ratio() for weight in weights]
    common = max(bottom for _, bottom in ratios)  # denominators of floats are powers of 2
    tops = [top * (common // bottom) for top, bottom in ratios]
    total = sum(tops)
    if total == 0:
        raise ConfigError(
            "every dataset has the weight 0:"
            f" {', '.join(names[:5])}{', ..' if len(names) > 5 else ''}",
            hint="give one a weight above 0",
        )
    return np.array([max(1, top * SCALE // total) if top else 0 for top in tops], np.int64)


def size_weights(sizes: Sequence[int]) -> NDArray[np.int64]:
    """The sizes themselves, int64 [D]: the first sum(sizes) positions of the blend hold every
    sample exactly once.

    Raises ConfigError: they sum to more than 2^62 samples.
    """
    if sum(sizes) > MAX_SUM:
        raise ConfigError(
            f"the datasets have {sum(sizes):,} samples together, more than {MAX_SUM:,}",
            hint="blend fewer",
        )
    return np.array(sizes, np.int64)


SplitName = Literal["train", "valid", "test"]
SPLITS: tuple[SplitName, ...] = ("train", "valid", "test")
Split = tuple[Fraction, Fraction, Fraction]
_SPLIT_TEXT = re.compile(r"\d+(\.\d+)?(,\d+(\.\d+)?){0,2}", re.ASCII)


@functools.cache
def parse_split(text: str) -> Split:
    """Weights of train, valid and test, "949,50,1" or "95,5", as exact parts of 1.

    Raises ConfigError: not one to three non-negative numbers, or all are zero.
    """
    if not _SPLIT_TEXT.fullmatch(text):
        raise ConfigError(
            f"split {text!r} is not one to three non-negative numbers with commas",
            hint='for example "949,50,1"',
        )
    weights = [Fraction(part) for part in text.split(",")]
    weights += [Fraction(0)] * (len(SPLITS) - len(weights))
    total = sum(weights)
    if total == 0:
        raise ConfigError(
            f"split {text!r} gives every split the weight 0", hint='for example "949,50,1"'
        )
    return weights[0] / total, weights[1] / total, weights[2] / total


def split_bounds(
    split: Split, num_windows: int
) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    """First window and the one after the last of train, valid and test: floor(cumulative weight
    * num_windows), exact."""
    train, valid, test = (int(part * num_windows) for part in accumulate(split))
    return (0, train), (train, valid), (valid, test)


class SampleOrder(Protocol):
    """Which sample stands at which position of a run: a pure function, in which the number of
    ranks and the micro-batch have no part."""

    def window(self, consumed: int, n: int) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
        """The samples at positions consumed .. consumed + n - 1: (dataset_index int16 [n],
        sample_number int64 [n]). ConfigError: there are none."""


@dataclass(frozen=True)
class Drawn:
    """What training has read of a dataset before an order begins.

    Args:
        samples: how many, through its epochs.
        named: whether its keys have its name.
    """

    samples: int
    named: bool


NOTHING: Mapping[str, Drawn] = {}


class NativeOrder:
    """One dataset or a blend of several, without an index: nothing grows with the data or the
    length of the training.

    Position p of the run is sample c of dataset d by `trainkit._index.Blend`: in proportion to
    the weights, within 2 samples at every p. Sample c of a dataset of N samples lies in its
    epoch c // N and has the number P(c % N), P the permutation of `trainkit._index.permute`
    under the key of (seed, split, epoch), and in a blend the dataset's name: another dataset
    beside it does not change its order.

    Args:
        sizes: samples of an epoch of each dataset, in this split.
        weights: their shares; None: their sizes, so that the first sum(sizes) positions hold every
            sample exactly once. One dataset needs none. int64 [D]: whole samples, so that the first
            sum(weights) positions hold exactly so many of each.
        split: the name of the split; salts the keys.
        seed: the run's seed.
        names: what the datasets are called.
        goes_on: of a dataset that an earlier order has read from, what was drawn.

    Raises:
        ConfigError: weights negative, NaN, infinite, all 0, or not one a dataset; no dataset,
        more than 32,766, or one named twice; more than 2^62 samples.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[float] | NDArray[np.int64] | None,
        split: SplitName,
        seed: int,
        names: Sequence[str],
        *,
        goes_on: Mapping[str, Drawn] = NOTHING,
    ) -> None:
        if len(sizes) != len(names) or min(sizes, default=0) < 0:
            raise ValueError(f"sizes {sizes} do not fit the datasets {names}")
        check_names(names)
        self.sizes = tuple(sizes)
        self.split = split
        self.seed = seed
        self.names = tuple(names)
        begins = Drawn(0, named=len(names) > 1)
        self._drawn = [goes_on.get(name, begins) for name in names]
        if isinstance(weights, np.ndarray):
            shares = weights
        else:
            shares = size_weights(sizes) if weights is None else integer_weights(weights, names)
        self.shares = shares  # whole numbers in proportion to which datasets are drawn
        self._blend = _index.Blend(shares) if shares.any() else None
        missing = np.flatnonzero((shares > 0) & (np.array(self.sizes) == 0))
        # drawn from, but without a sample
        if len(missing):
            self._missing = self.names[missing[0]]
        else:
            self._missing = None

    def window(self, consumed: int, n: int) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
        """The samples at positions consumed .. consumed + n - 1: (dataset_index int16 [n],
        sample_number int64 [n]).

        Raises:
            ConfigError: no dataset has a sample in this split, or one with a weight above 0 has
            none. ValueError: positions outside 0 .. 2^62.
        """
        datasets = np.empty(n, np.int16)
        counts = np.empty(n, np.int64)
        if n == 0:
            return datasets, counts
        self._checked_blend().at(consumed, datasets, counts)
        if len(self.sizes) == 1:
            return datasets, self._numbers(0, int(counts[0]), n)
        grouped = np.argsort(datasets, kind="stable")  # a radix sort
        numbers = np.empty(n, np.int64)
        done = 0
        for dataset, drawn in enumerate(np.bincount(datasets).tolist()):
            if drawn:
                at = grouped[done : done + drawn]
                numbers[at] = self._numbers(dataset, int(counts[at[0]]), drawn)
                done += drawn
        return datasets, numbers

    def drawn(self, samples: int) -> dict[str, Drawn]:
        """What has been drawn of each dataset after the first `samples` positions, and before
        them. Raises as `window`."""
        counts = self._checked_blend().counts(samples).tolist()
        return {
            name: Drawn(before.samples + count, before.named)
            for name, before, count in zip(self.names, self._drawn, counts, strict=True)
        }

    def epochs(self, samples: int) -> NDArray[np.float64]:
        """How often each dataset has been seen after the first `samples` positions, float64 [D]:
        1.5 is once and half of it again; 0 without samples.

        Raises as `window`.
        """
        counts = self._checked_blend().counts(samples)
        return np.divide(
            counts, self.sizes, out=np.zeros(len(self.sizes)), where=np.array(self.sizes) > 0
        )

    def _checked_blend(self) -> _index.Blend:
        if self._blend is None or not any(self.sizes):
            raise _empty(f"the {self.split} split has no sample")
        if self._missing is not None:
            raise _empty(
                f"dataset {self._missing!r} has a weight above 0, but no {self.split} sample"
            )
        return self._blend

    def _key(self, dataset: int, epoch: int) -> int:
        """The first 8 bytes, little endian, of BLAKE2b-64 over the text "trainkit-order/1 SEED
        SPLIT EPOCH", in a blend with " NAME" behind it; of what goes on, as it began."""
        text = f"trainkit-order/1 {self.seed} {self.split} {epoch}"
        if self._drawn[dataset].named:
            text += f" {self.names[dataset]}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")

    def _numbers(self, dataset: int, first: int, n: int) -> NDArray[np.int64]:
        """The numbers of samples first .. first + n - 1 that a dataset gives, counted through
        its epochs, int64 [n]."""
        size = self.sizes[dataset]
        first += self._drawn[dataset].samples
        numbers = np.empty(n, np.int64)
        done = 0
        while done < n:
            epoch, start = divmod(first + done, size)
            count = min(n - done, size - start)
            _index.permute(size, self._key(dataset, epoch), start, numbers[done : done + count])
            done += count
        return numbers


@dataclass(frozen=True)
class OrderPart:
    """A stretch of positions, and the order that it is read in.

    Args:
        first: position at which it begins.
        order: which sample stands where.
        offset: position in `order` at which it begins.
        datasets: number of the first of the order's datasets among those of all.
    """

    first: int
    order: SampleOrder
    offset: int
    datasets: int


class PhasedOrder:
    """Orders one after another (a `SampleOrder`); the last one goes on to its own end.

    Args:
        parts: one or more, by `first`, of which the lowest is 0.
    """

    def __init__(self, parts: Sequence[OrderPart]) -> None:
        self.parts = tuple(parts)
        self._ends = [part.first for part in parts[1:]] + [MAX_SUM]

    def window(self, consumed: int, n: int) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
        """As `NativeOrder`; raises as the orders do."""
        datasets = [np.empty(0, np.int16)]
        numbers = [np.empty(0, np.int64)]
        for part, end in zip(self.parts, self._ends, strict=True):
            low = max(consumed, part.first)
            high = min(consumed + n, end)
            if low < high:
                found = part.order.window(low - part.first + part.offset, high - low)
                datasets.append(found[0] + np.int16(part.datasets))
                numbers.append(found[1])
        return np.concatenate(datasets), np.concatenate(numbers)


def _empty(message: str) -> ConfigError:
    return ConfigError(
        message,
        hint=(
            "give the split a larger weight, add data, or set training.eval_iters = 0 if it is only"
            " evaluated"
        ),
    )
