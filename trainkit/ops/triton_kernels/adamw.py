"""The optimizer's two passes over memory: the squared norm of all gradients, and the update.

Both take all tensors in one launch: a table says where each tensor lies, another which piece of
which tensor a program has. A model has hundreds of tensors, and a launch each would take longer
than the update of a small one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainkit.ops.triton_kernels.launch import REGISTERS

PIECE = 2**15  # elements of a program
STEP = 2**11  # of these at once
WARPS = 8
ALIGNED = 16  # bytes


@triton.jit
def _pointer(table, entry, TYPE: tl.constexpr, IS_ALIGNED: tl.constexpr):
    pointer = tl.load(table + entry).to(tl.pointer_type(TYPE))
    if IS_ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _piece(pieces, STEP: tl.constexpr):
    """(tensor, first element, how many, how many of these in whole steps) of this program."""
    place = tl.program_id(0)
    first = tl.multiple_of(tl.load(pieces + 3 * place + 1), 16)  # PIECE is
    size = tl.load(pieces + 3 * place + 2).to(tl.int32)
    return tl.load(pieces + 3 * place), first, size, size // STEP * STEP


@triton.jit
def _squared(x, element, size, MASKED: tl.constexpr):
    v = tl.load(x + element, mask=element < size, other=0) if MASKED else tl.load(x + element)
    if x.dtype.element_ty != tl.float64:
        v = v.to(tl.float32)
    v = v.to(tl.float64)
    return v * v


@triton.jit
def _squares(
    table, pieces, results, TYPE: tl.constexpr, IS_ALIGNED: tl.constexpr, STEP: tl.constexpr
):
    """The sum of squares of one piece, in fp64: squares of large gradients overflow fp32."""
    tensor, first, size, whole = _piece(pieces, STEP)
    x = _pointer(table, tensor, TYPE, IS_ALIGNED) + first
    sums = tl.zeros((STEP,), tl.float64)
    for start in range(0, whole, STEP):
        sums += _squared(x, start + tl.arange(0, STEP), size, False)
    sums += _squared(x, whole + tl.arange(0, STEP), size, True)
    tl.store(results + tl.program_id(0), tl.sum(sums, axis=0))


@triton.jit
def _updated(
    weights, gradients, exp_avgs, exp_avg_sqs, copies, element, size,
    length, kept, root, left1, left2, eps, divisor,
    HAS_COPY: tl.constexpr, WIDE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Some elements, read and written once.

    Without a mask where none is needed: one that ends anywhere would split 16-byte accesses.
    """
    there = None
    if MASKED:
        there = element < size
    g = tl.load(gradients + element, mask=there).to(WIDE) / divisor
    m = tl.load(exp_avgs + element, mask=there).to(WIDE)
    v = tl.load(exp_avg_sqs + element, mask=there).to(WIDE)
    w = tl.load(weights + element, mask=there).to(WIDE)
    m += left1 * (g - m)
    v += left2 * (g * g - v)
    w = w * kept - length * m / (tl.sqrt(v) / root + eps)
    tl.store(exp_avgs + element, m.to(exp_avgs.dtype.element_ty), mask=there)
    tl.store(exp_avg_sqs + element, v.to(exp_avg_sqs.dtype.element_ty), mask=there)
    tl.store(weights + element, w.to(weights.dtype.element_ty), mask=there)
    if HAS_COPY:
        rounded = w.to(tl.float32).to(copies.dtype.element_ty)
        tl.store(copies + element, rounded, mask=there)


@triton.jit
def _update(
    table, pieces, decays, steps, rate, divisor, skip,
    log_beta1, log_beta2, left1, left2, eps,
    WEIGHT: tl.constexpr, GRADIENT: tl.constexpr, COPY: tl.constexpr, HAS_COPY: tl.constexpr,
    WIDE: tl.constexpr, IS_ALIGNED: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One piece: unscale, clip, decay, update; nothing at all where `skip` says so."""
    tensor, first, size, whole = _piece(pieces, STEP)
    goes = tl.load(skip) == 0
    weights = _pointer(table, 5 * tensor, WEIGHT, IS_ALIGNED) + first
    gradients = _pointer(table, 5 * tensor + 1, GRADIENT, IS_ALIGNED) + first
    exp_avgs = _pointer(table, 5 * tensor + 2, WEIGHT, IS_ALIGNED) + first
    exp_avg_sqs = _pointer(table, 5 * tensor + 3, WEIGHT, IS_ALIGNED) + first
    copies = _pointer(table, 5 * tensor + 4, COPY, IS_ALIGNED) + first
    # numbers of a launch are fp32: beta ** count of a beta of that precision would be wrong
    count = tl.load(steps).to(tl.float64) + 1
    learning = tl.load(rate).to(tl.float64)
    length = (learning / (1 - tl.exp(count * log_beta1))).to(WIDE)
    root = tl.sqrt(1 - tl.exp(count * log_beta2)).to(WIDE)
    kept = (1 - learning * tl.load(decays + tensor)).to(WIDE)
    scale = tl.load(divisor).to(WIDE)
    for start in range(0, tl.where(goes, whole, 0), STEP):
        _updated(
            weights, gradients, exp_avgs, exp_avg_sqs, copies, start + tl.arange(0, STEP), size,
            length, kept, root, left1, left2, eps, scale, HAS_COPY, WIDE, False,
        )  # fmt: skip
    _updated(
        weights, gradients, exp_avgs, exp_avg_sqs, copies,
        whole + tl.arange(0, STEP), tl.where(goes, size, 0),
        length, kept, root, left1, left2, eps, scale, HAS_COPY, WIDE, True,
    )  # fmt: skip


@lru_cache(maxsize=64)
def _pieces(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """A line a program: (tensor, first element, how many)."""
    lines = [
        (number, first, min(PIECE, size - first))
        for number, size in enumerate(sizes)
        for first in range(0, size, PIECE)
    ]
    return torch.tensor(lines, dtype=torch.int64).to(device)


@lru_cache(maxsize=64)
def _numbers(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).to(device)


def _table(rows: Sequence[Sequence[Tensor]], device: torch.device) -> Tensor:
    """Addresses, on the device without a wait: pinned memory is kept until it was read."""
    addresses = [[x.data_ptr() for x in row] for row in rows]
    pinned = device.type == "cuda"
    return torch.tensor(addresses, dtype=torch.int64, pin_memory=pinned).to(
        device, non_blocking=True
    )


def _all_aligned(tensors: Sequence[Tensor]) -> bool:
    return all(x.data_ptr() % ALIGNED == 0 for x in tensors)


def _triton_type(dtype: torch.dtype) -> tl.dtype:
    return {
        torch.float64: tl.float64,
        torch.float32: tl.float32,
        torch.bfloat16: tl.bfloat16,
        torch.float16: tl.float16,
    }[dtype]


def squared_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Sum of squares of all, fp64, shape (); in the same order on every run."""
    device = tensors[0].device if tensors else torch.device("cpu")
    held = sorted((x.contiguous() for x in tensors if x.numel()), key=lambda x: str(x.dtype))
    parts = [torch.zeros(1, dtype=torch.float64, device=device)]
    for dtype, group in groupby(held, key=lambda x: x.dtype):
        same = list(group)
        pieces = _pieces(tuple(x.numel() for x in same), device)
        results = torch.empty(len(pieces), dtype=torch.float64, device=device)
        _squares[(len(pieces),)](
            _table([[x] for x in same], device), pieces, results,
            _triton_type(dtype), _all_aligned(same), STEP,
            num_warps=WARPS, maxnreg=REGISTERS,
        )  # fmt: skip
        parts.append(results)
    return torch.cat(parts).sum()


def adamw_step_(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    copies: Sequence[Tensor],
    steps: Tensor,
    rate: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    decays: Sequence[float],
    divisor: Tensor,
    skip: Tensor,
) -> None:
    """One update of all weights, their moments and copies.

    Args:
        weights: contiguous, as their moments, which have their dtype, and their copies.
        gradients: one a weight; divided by `divisor` on the way, not in memory.
        exp_avgs, exp_avg_sqs: the moments.
        copies: none, or one a weight: the weight in another dtype.
        steps: updates so far.
        rate: learning rate.
        beta1, beta2, eps: of AdamW.
        decays: weight decay of each.
        divisor: loss scale and clipping in one.
        skip: not 0: nothing changes.

    Raises:
        ValueError: a tensor that is written is not contiguous.
    """
    written = (*weights, *exp_avgs, *exp_avg_sqs, *copies)
    if not all(x.is_contiguous() for x in written):
        raise ValueError("adamw_step_ writes contiguous tensors only: call .contiguous() on them")
    copied = copies or weights
    rows = [
        ((w, g.contiguous(), m, v, c), decay)
        for w, g, m, v, c, decay in zip(
            weights, gradients, exp_avgs, exp_avg_sqs, copied, decays, strict=True
        )
        if w.numel()
    ]
    rows.sort(key=lambda row: [str(x.dtype) for x in row[0]])
    for dtypes, group in groupby(rows, key=lambda row: tuple(x.dtype for x in row[0])):
        same = list(group)
        tensors = [row[0] for row in same]
        device = tensors[0][0].device
        pieces = _pieces(tuple(row[0].numel() for row in tensors), device)
        weight, gradient, _, _, copy = (_triton_type(dtype) for dtype in dtypes)
        _update[(len(pieces),)](
            _table(tensors, device), pieces, _numbers(tuple(row[1] for row in same), device),
            steps, rate, divisor, skip,
            _logarithm(beta1), _logarithm(beta2), 1 - beta1, 1 - beta2, eps,
            weight, gradient, copy, bool(copies),
            tl.float64 if weight == tl.float64 else tl.float32,
            _all_aligned([x for row in tensors for x in row]), STEP,
            num_warps=WARPS, maxnreg=REGISTERS,
        )  # fmt: skip


def _logarithm(beta: float) -> float:
    return math.log(beta) if beta else -math.inf
