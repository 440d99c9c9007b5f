"""Softmax and cross-entropy of a chunk of logits, the gradient in the logits' place.

A row of a large vocabulary does not fit a program's registers, so it is read twice: forwards for
its maximum and sum, each thread keeping its own until the end, then backwards for the gradient, so
that what was read last, and is still in a cache, is read first.

Shapes: C rows (tokens), V columns that count, P columns in memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainkit.ops.cross_entropy import NO_LABEL
from trainkit.ops.triton_kernels.launch import REGISTERS, wide_of

WARPS = 16
LANES = 32 * WARPS
ACCESS = 16  # bytes of a thread's access
AT_ONCE = 2  # accesses of a thread in flight


@triton.jit
def _columns(LANES: tl.constexpr, EACH: tl.constexpr):
    """Of a step over a row; those of one line are one thread's."""
    return tl.arange(0, LANES)[:, None] * EACH + tl.arange(0, EACH)[None, :]


@triton.jit
def _not_infinite(high):
    """What to subtract where the maximum is `high`: rows of -inf alone must not become NaN here."""
    return tl.where(high == -float("inf"), 0, high)


@triton.jit
def _row_statistics(
    row, vocab, columns, WIDE: tl.constexpr, LANES: tl.constexpr, EACH: tl.constexpr
):
    """(maximum, sum of exp(x - maximum)) of one row."""
    high = tl.full((LANES,), -float("inf"), WIDE)
    total = tl.zeros((LANES,), WIDE)
    for start in range(0, columns, LANES * EACH):
        column = start + _columns(LANES, EACH)
        # the memory's columns bound the load, not the vocabulary's: they are a round number
        x = tl.load(row + column, mask=column < columns, other=0).to(WIDE)
        x = tl.where(column < vocab, x, -float("inf"))
        higher = tl.maximum(high, tl.max(x, axis=1))
        shift = _not_infinite(higher)
        total = total * tl.exp(high - shift) + tl.sum(tl.exp(x - shift[:, None]), axis=1)
        high = higher
    highest = tl.max(high, axis=0)
    return highest, tl.sum(total * tl.exp(high - _not_infinite(highest)), axis=0)


@triton.jit
def _write_gradient(
    row, label, vocab, columns, highest, factor, hit,
    WIDE: tl.constexpr, LANES: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """row = factor * exp(row - highest), less `hit` at the label; 0 beyond the vocabulary."""
    shift = _not_infinite(highest)
    last = (columns - 1) // (LANES * EACH)
    for back in range(last + 1):
        column = (last - back) * (LANES * EACH) + _columns(LANES, EACH)
        x = tl.load(row + column, mask=column < columns, other=0, eviction_policy="evict_first").to(
            WIDE
        )
        d = factor * tl.exp(x - shift) - tl.where(column == label, hit, 0)
        d = tl.where(column < vocab, d, 0)
        tl.store(row + column, d.to(row.dtype.element_ty), mask=column < columns)


@triton.jit
def _target_of(row, label, vocab, WIDE: tl.constexpr):
    """The label's logit; 0 where the label is not here."""
    return tl.load(row + label, mask=(label >= 0) & (label < vocab), other=0).to(WIDE)


@triton.jit
def _loss(
    logits, labels, scale, losses, vocab, columns, stride, z_loss,
    LEARNING: tl.constexpr, NO_LABEL: tl.constexpr,
    WIDE: tl.constexpr, LANES: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0).to(tl.int64)
    row = logits + number * stride
    label = tl.load(labels + number)
    target = _target_of(row, label, vocab, WIDE)
    highest, total = _row_statistics(row, vocab, columns, WIDE, LANES, EACH)
    log_sum = highest + tl.log(total)
    counts = label != NO_LABEL
    known = (label >= 0) & (label < vocab)
    # nobody waits for the device to refuse a label of no column: its loss is NaN
    loss = tl.where(known, log_sum - target, float("nan"))
    tl.store(losses + number, tl.where(counts, loss, 0))
    if LEARNING:
        factor = tl.where(counts, tl.load(scale).to(WIDE), 0)
        # d/dlogits of log_sum - target + z * log_sum**2 = softmax * (1 + 2 z log_sum) - onehot
        of_softmax = factor * (1 + 2 * z_loss * log_sum) / total
        _write_gradient(row, label, vocab, columns, highest, of_softmax, factor, WIDE, LANES, EACH)


@triton.jit
def _statistics(
    logits, labels, results, rows, vocab, columns, stride,
    WIDE: tl.constexpr, LANES: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0).to(tl.int64)
    row = logits + number * stride
    highest, total = _row_statistics(row, vocab, columns, WIDE, LANES, EACH)
    tl.store(results + number, highest)
    tl.store(results + rows + number, total)
    target = _target_of(row, tl.load(labels + number), vocab, WIDE)
    tl.store(results + 2 * rows + number, target)


@triton.jit
def _gradient(
    logits, labels, highest, softmax, hit, vocab, columns, stride,
    WIDE: tl.constexpr, LANES: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0).to(tl.int64)
    _write_gradient(
        logits + number * stride,
        tl.load(labels + number),
        vocab,
        columns,
        tl.load(highest + number),
        tl.load(softmax + number),
        tl.load(hit + number),
        WIDE,
        LANES,
        EACH,
    )


@dataclass(frozen=True)
class _Walk:
    """How a program goes over a row: `lanes` threads' pieces of `each` columns at once."""

    wide: tl.dtype
    lanes: int
    each: int


def _walk(logits: Tensor) -> _Walk:
    each = ACCESS // logits.element_size()
    return _Walk(wide_of(logits.dtype), LANES * AT_ONCE, each)


def softmax_loss_(
    logits: Tensor, labels: Tensor, vocab: int, z_loss: float, scale: Tensor, learning: bool
) -> Tensor:
    """Summed cross-entropy of the chunk, fp64; with `learning` the logits become the gradient of
    `scale` times the loss.

    Args:
        logits: (C, P), rows contiguous.
        labels: (C,), or NO_LABEL.
        vocab: V; the gradient of columns beyond it is 0.
        z_loss: weight of log(sum(exp(logits)))**2.
        scale: one number on the device.
        learning: whether the gradient is wanted.
    """
    walk = _walk(logits)
    rows, columns = logits.shape
    losses = logits.new_empty(rows, dtype=torch.promote_types(logits.dtype, torch.float32))
    if rows:
        _loss[(rows,)](
            logits, labels.contiguous(), scale, losses, vocab, columns, logits.stride(0), z_loss,
            learning, NO_LABEL, walk.wide, walk.lanes, walk.each,
            num_warps=WARPS, maxnreg=REGISTERS,
        )  # fmt: skip
    return losses.sum(dtype=torch.float64)


def softmax_statistics(logits: Tensor, labels: Tensor, vocab: int) -> Tensor:
    """(3, C): maximum of a row, sum of exp(x - maximum), the label's logit, 0 where it is not
    among the columns."""
    walk = _walk(logits)
    rows, columns = logits.shape
    results = logits.new_empty(3, rows, dtype=torch.promote_types(logits.dtype, torch.float32))
    if rows:
        _statistics[(rows,)](
            logits, labels.contiguous(), results, rows, vocab, columns, logits.stride(0),
            walk.wide, walk.lanes, walk.each, num_warps=WARPS, maxnreg=REGISTERS,
        )  # fmt: skip
    return results


def softmax_gradient_(
    logits: Tensor, labels: Tensor, vocab: int, highest: Tensor, softmax: Tensor, hit: Tensor
) -> None:
    """logits become softmax * exp(logits - highest), less `hit` at the label.

    Args:
        logits, labels, vocab: as of `softmax_loss_`.
        highest: (C,), the maximum over all parts of the vocabulary.
        softmax: (C,), what exp is multiplied by.
        hit: (C,), what the label's column loses.
    """
    walk = _walk(logits)
    rows, columns = logits.shape
    if rows:
        _gradient[(rows,)](
            logits, labels.contiguous(),
            highest.contiguous(), softmax.contiguous(), hit.contiguous(),
            vocab, columns, logits.stride(0),
            walk.wide, walk.lanes, walk.each, num_warps=WARPS, maxnreg=REGISTERS,
        )  # fmt: skip
