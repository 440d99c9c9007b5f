"""What engine native does, without trainkit's compiled code, which interpreters of other engines
have not: which sample stands at a position of a run, its tokens, and the learning rate of a step.
The same as `trainkit.data.order.native` and `samples` (csrc/index/permutation.h and blend.h say how
the order is made) and as `trainkit.train.update.schedule`."""

from __future__ import annotations

import hashlib
import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROUNDS = 10
LEAST_PART = 4
MASK = 2**64 - 1


def _mixed(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def permuted(size: int, key: int, position: int) -> int:
    """Where `position` goes in the permutation of [0, size) under `key`."""
    root = math.isqrt(size - 1) + 1  # rounded up
    rows = max(LEAST_PART, root)
    rows += rows % 2
    columns = max(LEAST_PART, -(-size // rows))
    keys = [_mixed((key + (n + 1) * 0x9E3779B97F4A7C15) & MASK) for n in range(ROUNDS)]
    while True:
        left, right = divmod(position, columns)
        for even, odd in zip(keys[::2], keys[1::2], strict=True):
            left = (left + (_mixed(right ^ even) * rows >> 64)) % rows
            right = (right + (_mixed(left ^ odd) * columns >> 64)) % columns
        position = left * columns + right
        if position < size:
            return position


class Order:
    """One dataset or a blend of several.

    Args:
        names: of the datasets.
        sizes: samples of an epoch of each.
        weights: whole numbers in proportion to which they are drawn.
        split: the name of the split.
        seed: the run's.
    """

    def __init__(
        self,
        names: Sequence[str],
        sizes: Sequence[int],
        weights: Sequence[int],
        split: str,
        seed: int,
    ) -> None:
        self.names = names
        self.sizes = sizes
        self.salt = f"trainkit-order/1 {seed} {split}"
        # (weight of the left child, of both, left, right); a leaf is ~dataset
        self._nodes: list[tuple[int, int, int, int]] = []
        lightest = [(weight, number, ~number) for number, weight in enumerate(weights) if weight]
        heapq.heapify(lightest)
        while len(lightest) > 1:
            left, _, left_node = heapq.heappop(lightest)
            right, _, right_node = heapq.heappop(lightest)
            number = len(self._nodes)
            heapq.heappush(lightest, (left + right, len(weights) + number, number))
            self._nodes.append((left, left + right, left_node, right_node))
        self._root = lightest[0][2]

    def at(self, position: int) -> tuple[int, int]:
        """(dataset, sample number) at a position."""
        node = self._root
        while node >= 0:
            left, both, *children = self._nodes[node]
            before = (position * left + both // 2) // both
            after = ((position + 1) * left + both // 2) // both
            goes_left = after > before
            position = before if goes_left else position - before
            node = children[0 if goes_left else 1]
        return ~node, self._number(~node, position)

    def _number(self, dataset: int, given: int) -> int:
        """The number of the sample that a dataset gives after `given` others."""
        epoch, place = divmod(given, self.sizes[dataset])
        text = f"{self.salt} {epoch}"
        if len(self.sizes) > 1:
            text += f" {self.names[dataset]}"
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return permuted(self.sizes[dataset], int.from_bytes(digest, "little"), place)


class Windows:
    """Windows of S + 1 tokens of one pair: window k begins at token k * S.

    Args:
        pair: prefix, the type of a token, the first window of the split.
    """

    def __init__(self, pair: Mapping[str, Any], length: int) -> None:
        self.first = pair["first_window"]
        self.length = length
        self.path = f"{pair['prefix']}.bin"
        self.dtype = np.dtype(pair["dtype"])

    def read(self, number: int) -> NDArray[np.int64]:
        begin = (self.first + number) * self.length * self.dtype.itemsize
        tokens = np.fromfile(self.path, self.dtype, self.length + 1, offset=begin)
        return tokens.astype(np.int64)


class RandomTokens:
    """Of datasets.X.source = "mock": as MockSamples of trainkit.data.order.samples."""

    def __init__(self, mock: Mapping[str, int], length: int) -> None:
        self.seed = mock["seed"]
        self.vocab_size = mock["vocab_size"]
        self.length = length

    def read(self, number: int) -> NDArray[np.int64]:
        bits = np.random.Philox(key=np.array([self.seed, number], np.uint64))
        raw = bits.random_raw(self.length + 1) % np.uint64(self.vocab_size)
        return raw.astype(np.int64)


LEFT: Mapping[str, Callable[[float], float]] = {
    "linear": lambda done: 1 - done,
    "cosine": lambda done: 0.5 * (math.cos(math.pi * done) + 1),
    "exponential": lambda done: 2 * 0.5**done - 1,
    "minus_sqrt": lambda done: 1 - math.sqrt(done),
}


def rate_factor(rates: Mapping[str, Any], completed: int) -> float:
    """The rate of the step that follows `completed` steps, as a part of `lr`.

    Args:
        rates: lr; begin, at which the warmup begins, and warmup, its steps; fall and decay, the
            steps from which it falls and at which min_lr is reached; shape: of LEFT, or constant.
        completed: steps.
    """
    lr, begin, warmup, fall, decay, low = (
        float(rates[key]) for key in ("lr", "begin", "warmup", "fall", "decay", "min_lr")
    )
    if warmup > 0 and completed <= warmup:
        return (begin + (lr - begin) * completed / warmup) / lr
    if rates["shape"] == "constant":
        return 1.0
    if completed > decay:
        return low / lr
    done = (completed - fall) / (decay - fall) if decay > fall else completed - fall
    left = LEFT[rates["shape"]](min(1.0, max(0.0, done)))
    return (low + left * (lr - low)) / lr
