"""How many bytes operations must move between memory and processor: their floor, by which speeds
are judged. Every tensor counts once, however often it is looked at."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class NormTraffic:
    """What a norm reads and writes.

    Args:
        tensors: of x's shape.
        weights: of a row's shape, in the weight's dtype.
        statistics: numbers a row, in the precision of sums.
    """

    tensors: int
    weights: int
    statistics: int

    def bytes(self, shape: Sequence[int], dtype: torch.dtype, weight: torch.dtype) -> int:
        """Of an x of this shape and dtype, and a weight of that one."""
        rows = math.prod(shape[:-1])
        wide = torch.promote_types(dtype, torch.float32)
        return (
            self.tensors * rows * shape[-1] * dtype.itemsize
            + self.weights * shape[-1] * weight.itemsize
            + self.statistics * rows * wide.itemsize
        )
