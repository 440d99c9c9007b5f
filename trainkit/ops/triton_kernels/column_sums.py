"""Sums of columns in a fixed order: the second half of every gradient of a weight, of which
each program of the first half left its part in one row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PARTS = 32
COLUMNS = 32


@triton.jit
def _sum_columns(
    parts, total, count, width, WIDE: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    part = tl.arange(0, PARTS)[:, None]
    sums = tl.zeros((PARTS, COLUMNS), WIDE)
    for start in range(0, count, PARTS):
        row = (start + part).to(tl.int64)
        there = (row < count) & (column < width)
        sums += tl.load(parts + row * width + column, mask=there, other=0)
    result = tl.sum(sums, axis=0)[None, :]
    tl.store(total + column, result.to(total.dtype.element_ty), mask=column < width)


def sum_columns(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """(parts, width) of fp32 or fp64 to (width,) of `dtype`."""
    count, width = parts.shape
    total = parts.new_empty(width, dtype=dtype)
    if width:
        wide = tl.float64 if parts.dtype == torch.float64 else tl.float32
        _sum_columns[(triton.cdiv(width, COLUMNS),)](
            parts, total, count, width, wide, PARTS, COLUMNS, num_warps=4
        )
    return total
