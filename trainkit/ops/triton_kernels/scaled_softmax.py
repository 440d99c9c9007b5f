"""softmax(scale * x), causal or under a mask, of rows of any length: right, and not tuned.

Shapes: B samples, A heads, Q queries, K keys.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from trainkit.ops.triton_kernels.launch import REGISTERS, rows_of, wide_of

COLUMNS = 1024
WARPS = 4


@triton.jit
def _scaled(
    x, mask, start, place, keys, seen, scale,
    MASKED: tl.constexpr, WIDE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """scale * x of a piece of a row, -inf where it is not seen."""
    column = start + tl.arange(0, COLUMNS)
    v = tl.load(x + place * keys + column, mask=column < seen, other=0).to(WIDE) * scale
    sees = column < seen
    if MASKED:
        sees = sees & (tl.load(mask + column, mask=column < seen, other=1) == 0)
    return tl.where(sees, v, -float("inf"))


@triton.jit
def _softmax(
    x, mask, y, heads, queries, keys, mask_sample, mask_head, mask_query, scale,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, WIDE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    query = place % queries
    seen = keys
    if CAUSAL:
        seen = tl.maximum(keys - queries + query + 1, 0).to(tl.int32)
    if MASKED:
        sample = place // (heads * queries)
        head = place // queries % heads
        mask += sample * mask_sample + head * mask_head + query * mask_query
    high = tl.full((COLUMNS,), -float("inf"), WIDE)
    total = tl.zeros((COLUMNS,), WIDE)
    for start in range(0, seen, COLUMNS):
        v = _scaled(x, mask, start, place, keys, seen, scale, MASKED, WIDE, COLUMNS)
        higher = tl.maximum(high, v)
        shift = tl.where(higher == -float("inf"), 0, higher)
        total = total * tl.exp(high - shift) + tl.exp(v - shift)
        high = higher
    highest = tl.max(high, axis=0)
    shift = tl.where(highest == -float("inf"), 0, highest)
    # a row that sees nothing is all zeros
    whole = tl.sum(total * tl.exp(high - shift), axis=0)
    whole = tl.where(whole == 0, 1, whole)
    for start in range(0, keys, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        v = _scaled(x, mask, start, place, keys, seen, scale, MASKED, WIDE, COLUMNS)
        p = tl.exp(v - shift) / whole
        tl.store(y + place * keys + column, p.to(y.dtype.element_ty), mask=column < keys)


@triton.jit
def _softmax_backward(dy, y, dx, keys, scale, WIDE: tl.constexpr, COLUMNS: tl.constexpr):
    place = tl.program_id(0).to(tl.int64)
    dots = tl.zeros((COLUMNS,), WIDE)
    for start in range(0, keys, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        there = column < keys
        p = tl.load(y + place * keys + column, mask=there, other=0).to(WIDE)
        dots += p * tl.load(dy + place * keys + column, mask=there, other=0).to(WIDE)
    dot = tl.sum(dots, axis=0)
    for start in range(0, keys, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        there = column < keys
        p = tl.load(y + place * keys + column, mask=there, other=0).to(WIDE)
        d = tl.load(dy + place * keys + column, mask=there, other=0).to(WIDE)
        d = scale * p * (d - dot)
        tl.store(dx + place * keys + column, d.to(dx.dtype.element_ty), mask=there)


def _forward(x: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    x = x.contiguous()
    y = x.new_empty(x.shape)
    queries, keys = x.shape[-2:]
    heads = x.shape[-3] if x.dim() > 2 else 1
    if not x.numel():
        return y
    strides = (0, 0, 0)
    if mask is not None:
        mask = mask.expand(x.shape)
        if mask.stride(-1) != 1 and keys > 1:
            mask = mask.contiguous()
        mask = mask.view(-1, heads, queries, keys) if mask.dim() != 4 else mask
        strides = (mask.stride(0), mask.stride(1), mask.stride(2))
    _softmax[(x.numel() // keys,)](
        x, x if mask is None else mask, y, heads, queries, keys,
        strides[0], strides[1], strides[2], scale,
        mask is None, mask is not None, wide_of(x.dtype), COLUMNS,
        num_warps=WARPS, maxnreg=REGISTERS,
    )  # fmt: skip
    return y


def scaled_causal_softmax(x: Tensor, scale: float) -> Tensor:
    """Query q sees keys up to K - Q + q."""
    return _forward(x, None, scale)


def scaled_masked_softmax(x: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Keys where `mask`, of a shape that expands to x's, is true are not seen."""
    return _forward(x, mask, scale)


def scaled_softmax_backward(dy: Tensor, y: Tensor, scale: float) -> Tensor:
    """The gradient of x, of both."""
    y = rows_of(y).contiguous() if y.numel() else y
    dx = dy.new_empty(dy.shape)
    if dx.numel():
        keys = dy.shape[-1]
        _softmax_backward[(dy.numel() // keys,)](
            dy.contiguous(), y, dx, keys, scale, wide_of(dy.dtype), COLUMNS,
            num_warps=WARPS, maxnreg=REGISTERS,
        )  # fmt: skip
    return dx
