"""rms_norm and layer_norm, with and without a sum before them.

The two differ by a mean and a bias, so they share kernels. A row up to `launch.WHOLE` wide is read
once and kept in registers; a wider one is read again for every step over it.

Shapes: N rows of width W, P parts of the sums over rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainkit.ops.triton_kernels.column_sums import sum_columns
from trainkit.ops.triton_kernels.launch import (
    REGISTERS,
    WHOLE,
    Tile,
    resident,
    rows_of,
    tile,
    wide_of,
)

FORWARD = 4096  # elements of a program
BACKWARD = 2048  # twice as many at widths where four rows fit the registers and two do not
FOUR_ROWS = range(513, 1025)
WALK = 2048  # columns that a program looks at where a row is too wide for it
PARTS_OF_WIDE = 64


@triton.jit
def _forward(
    x, residual, weight, bias, y, total, mean, rstd,
    rows, width, x_stride, residual_stride, eps,
    LAYER: tl.constexpr, ADD: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * ROWS
    inside = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    is_row = inside < rows - first
    there = is_row & (column < width)
    own = inside * width + column
    h = tl.load(x + first * x_stride + inside * x_stride + column, mask=there, other=0)
    if ADD:
        from_residual = residual + first * residual_stride + inside * residual_stride + column
        r = tl.load(from_residual, mask=there, other=0)
        h = (h.to(WIDE) + r.to(WIDE)).to(total.dtype.element_ty)
        tl.store(total + first * width + own, h, mask=there)
    h = h.to(WIDE)
    if LAYER:
        mu = tl.sum(h, axis=1, keep_dims=True) / width
        h = tl.where(column < width, h - mu, 0)
        tl.store(mean + first + inside, mu, mask=is_row)
    scale = 1 / tl.sqrt(tl.sum(h * h, axis=1, keep_dims=True) / width + eps)
    tl.store(rstd + first + inside, scale, mask=is_row)
    h = h * scale * tl.load(weight + column, mask=column < width, other=0).to(WIDE)
    if LAYER:
        h += tl.load(bias + column, mask=column < width, other=0).to(WIDE)
    tl.store(y + first * width + own, h.to(y.dtype.element_ty), mask=there)


@triton.jit
def _summed(x, residual, total, column, there, ADD: tl.constexpr, WIDE: tl.constexpr):
    """A piece of a row, with the residual added and rounded as the stored sum is."""
    h = tl.load(x + column, mask=there, other=0)
    if ADD:
        r = tl.load(residual + column, mask=there, other=0)
        h = (h.to(WIDE) + r.to(WIDE)).to(total.dtype.element_ty)
    return h.to(WIDE)


@triton.jit
def _forward_walking(
    x, residual, weight, bias, y, total, mean, rstd,
    rows, width, x_stride, residual_stride, eps,
    LAYER: tl.constexpr, ADD: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x += row * x_stride
    residual += row * residual_stride
    mu = tl.zeros((), WIDE)
    sums = tl.zeros((COLUMNS,), WIDE)
    if LAYER:
        for start in range(0, width, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            sums += _summed(x, residual, total, column, column < width, ADD, WIDE)
        mu = tl.sum(sums, axis=0) / width
        tl.store(mean + row, mu)
    squares = tl.zeros((COLUMNS,), WIDE)
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        h = _summed(x, residual, total, column, column < width, ADD, WIDE) - mu
        squares += tl.where(column < width, h * h, 0)
    scale = 1 / tl.sqrt(tl.sum(squares, axis=0) / width + eps)
    tl.store(rstd + row, scale)
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        there = column < width
        h = _summed(x, residual, total, column, there, ADD, WIDE)
        if ADD:
            tl.store(total + row * width + column, h.to(total.dtype.element_ty), mask=there)
        h = (h - mu) * scale * tl.load(weight + column, mask=there, other=0).to(WIDE)
        if LAYER:
            h += tl.load(bias + column, mask=there, other=0).to(WIDE)
        tl.store(y + row * width + column, h.to(y.dtype.element_ty), mask=there)


@triton.jit
def _backward(
    dy, dsum, h, weight, mean, rstd, dx, dweight, dbias,
    rows, width, dy_stride, dsum_stride, h_stride,
    LAYER: tl.constexpr, ADD: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program takes every P-th tile of rows and sums over them what the weight gets."""
    column = tl.arange(0, COLUMNS)[None, :]
    dw = tl.zeros((ROWS, COLUMNS), WIDE)
    db = tl.zeros((ROWS, COLUMNS), WIDE)
    step = tl.num_programs(0) * ROWS
    # the weight, if it were kept in registers from row to row, would leave too few
    for start in tl.range(tl.program_id(0) * ROWS, rows, step, disable_licm=True):
        number = start + tl.arange(0, ROWS)
        row = number[:, None].to(tl.int64)
        there = (row < rows) & (column < width)
        scale = tl.load(rstd + number, mask=number < rows, other=0)[:, None]
        g = tl.load(dy + row * dy_stride + column, mask=there, other=0).to(WIDE)
        n = tl.load(h + row * h_stride + column, mask=there, other=0).to(WIDE)
        if LAYER:
            mu = tl.load(mean + number, mask=number < rows, other=0)[:, None]
            n -= mu  # outside of the row g is 0
        n *= scale
        dw += g * n
        db += g
        g *= tl.load(weight + column, mask=column < width, other=0).to(WIDE)
        d = g - n * (tl.sum(g * n, axis=1, keep_dims=True) / width)
        if LAYER:
            d -= tl.sum(g, axis=1, keep_dims=True) / width
        d *= scale
        if ADD:
            d += tl.load(dsum + row * dsum_stride + column, mask=there, other=0).to(WIDE)
        tl.store(dx + row * width + column, d.to(dx.dtype.element_ty), mask=there)
    own = tl.program_id(0).to(tl.int64) * width + column
    tl.store(dweight + own, tl.sum(dw, axis=0, keep_dims=True), mask=column < width)
    if LAYER:
        tl.store(dbias + own, tl.sum(db, axis=0, keep_dims=True), mask=column < width)


@triton.jit
def _backward_walking(
    dy, dsum, h, weight, mean, rstd, dx,
    rows, width, dy_stride, dsum_stride, h_stride,
    LAYER: tl.constexpr, ADD: tl.constexpr, WIDE: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(rstd + row)
    mu = tl.zeros((), WIDE)
    if LAYER:
        mu = tl.load(mean + row)
    dots = tl.zeros((COLUMNS,), WIDE)
    sums = tl.zeros((COLUMNS,), WIDE)
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        there = column < width
        g = tl.load(dy + row * dy_stride + column, mask=there, other=0).to(WIDE)
        g *= tl.load(weight + column, mask=there, other=0).to(WIDE)
        n = (tl.load(h + row * h_stride + column, mask=there, other=0).to(WIDE) - mu) * scale
        dots += g * n
        sums += g
    dot = tl.sum(dots, axis=0) / width
    shift = tl.zeros((), WIDE)
    if LAYER:
        shift = tl.sum(sums, axis=0) / width
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        there = column < width
        g = tl.load(dy + row * dy_stride + column, mask=there, other=0).to(WIDE)
        g *= tl.load(weight + column, mask=there, other=0).to(WIDE)
        n = (tl.load(h + row * h_stride + column, mask=there, other=0).to(WIDE) - mu) * scale
        d = (g - n * dot - shift) * scale
        if ADD:
            d += tl.load(dsum + row * dsum_stride + column, mask=there, other=0).to(WIDE)
        tl.store(dx + row * width + column, d.to(dx.dtype.element_ty), mask=there)


@triton.jit
def _weight_parts_walking(
    dy, h, mean, rstd, dweight, dbias,
    rows, width, dy_stride, h_stride,
    LAYER: tl.constexpr, WIDE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """What the weight of some columns gets from every P-th row."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    there = column < width
    dw = tl.zeros((COLUMNS,), WIDE)
    db = tl.zeros((COLUMNS,), WIDE)
    for number in range(tl.program_id(1), rows, tl.num_programs(1)):
        row = tl.full((), number, tl.int64)
        g = tl.load(dy + row * dy_stride + column, mask=there, other=0).to(WIDE)
        n = tl.load(h + row * h_stride + column, mask=there, other=0).to(WIDE)
        if LAYER:
            n -= tl.load(mean + row)
            db += g
        dw += g * n * tl.load(rstd + row)
    own = tl.program_id(1).to(tl.int64) * width + column
    tl.store(dweight + own, dw, mask=there)
    if LAYER:
        tl.store(dbias + own, db, mask=there)


@dataclass(frozen=True)
class _Forward:
    """What a forward leaves; `total` is x itself where nothing was added, `mean` is there for
    layer_norm."""

    y: Tensor
    total: Tensor
    mean: Tensor
    rstd: Tensor


def _normed(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> _Forward:
    """One launch: the norm of x, or of x + residual."""
    wide = wide_of(x.dtype)
    matrix = rows_of(x)
    added = matrix if residual is None else rows_of(residual)
    rows, width = matrix.shape
    y = x.new_empty(x.shape)
    total = x if residual is None else x.new_empty(x.shape)
    rstd = x.new_empty(rows, dtype=_torch_of(wide))
    mean = rstd if bias is None else torch.empty_like(rstd)
    if x.numel():
        if width <= WHOLE:
            kernel = _forward
            part = tile(width, FORWARD)
        else:
            kernel = _forward_walking
            part = Tile(1, WALK, WALK // 256)
        kernel[(triton.cdiv(rows, part.rows),)](
            matrix, added, weight.contiguous(), weight if bias is None else bias.contiguous(),
            y, total, mean, rstd,
            rows, width, matrix.stride(0), added.stride(0), eps,
            LAYER=bias is not None, ADD=residual is not None, WIDE=wide,
            ROWS=part.rows, COLUMNS=part.columns, num_warps=part.warps, maxnreg=REGISTERS,
        )  # fmt: skip
    return _Forward(y, total, mean, rstd)


def _torch_of(wide: tl.dtype) -> torch.dtype:
    return torch.float64 if wide == tl.float64 else torch.float32


@dataclass(frozen=True)
class _Saved:
    """What a backward is given.

    Args:
        h: what was normed.
        weight: of the norm.
        mean: None: of rms_norm.
        rstd: one a row.
    """

    h: Tensor
    weight: Tensor
    mean: Tensor | None
    rstd: Tensor


def _whole_backward(saved: _Saved) -> int:
    """The widest row whose gradient, beside the sums over rows, fits the registers."""
    if saved.mean is None and saved.h.element_size() == saved.weight.element_size() == 2:
        return WHOLE
    return WHOLE // 2


def _gradients(dy: Tensor, dsum: Tensor | None, saved: _Saved) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dweight, dbias); dbias has no meaning without a mean."""
    h = rows_of(saved.h)
    rows, width = h.shape
    dx = saved.h.new_empty(saved.h.shape)
    layer = saved.mean is not None
    if not h.numel():
        return dx, torch.zeros_like(saved.weight), torch.zeros_like(saved.weight)
    whole = width <= _whole_backward(saved)
    if whole:
        elements = 2 * BACKWARD if width in FOUR_ROWS else BACKWARD
        part = tile(width, elements, per_thread=max(1, 16 // h.element_size()))
        parts = resident(h.device, part.warps, triton.cdiv(rows, part.rows))
    else:
        part = Tile(1, WALK, WALK // 256)
        parts = min(rows, PARTS_OF_WIDE)
    dweight = saved.rstd.new_empty(parts, width)
    dbias = torch.empty_like(dweight) if layer else dweight
    sums = (dweight, dbias)
    dy = rows_of(dy)
    added = dy if dsum is None else rows_of(dsum)
    mean = saved.rstd if saved.mean is None else saved.mean
    given = (dy, added, h, saved.weight.contiguous(), mean, saved.rstd, dx)
    shape = (rows, width, dy.stride(0), added.stride(0), h.stride(0))
    kind = {"LAYER": layer, "WIDE": wide_of(h.dtype), "COLUMNS": part.columns}
    launch = {"num_warps": part.warps, "maxnreg": REGISTERS}
    adds = dsum is not None
    if whole:
        _backward[(parts,)](*given, *sums, *shape, **kind, ADD=adds, ROWS=part.rows, **launch)
    else:
        _backward_walking[(rows,)](*given, *shape, **kind, ADD=adds, **launch)
        _weight_parts_walking[(triton.cdiv(width, WALK), parts)](
            dy, h, mean, saved.rstd, *sums, rows, width, dy.stride(0), h.stride(0), **kind, **launch
        )
    total = sum_columns(dweight, saved.weight.dtype)
    return dx, total, sum_columns(dbias, saved.weight.dtype) if layer else total


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(y, rstd)."""
    made = _normed(x, None, weight, None, eps)
    return made.y, made.rstd


def rms_norm_backward(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """(dx, dweight)."""
    dx, dweight, _ = _gradients(dy, None, _Saved(x, weight, None, rstd))
    return dx, dweight


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, x + residual, rstd)."""
    made = _normed(x, residual, weight, None, eps)
    return made.y, made.total, made.rstd


def add_rms_norm_backward(
    dy: Tensor, dsum: Tensor, total: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """(dx, dweight); dx is the gradient of x and of the residual."""
    dx, dweight, _ = _gradients(dy, dsum, _Saved(total, weight, None, rstd))
    return dx, dweight


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, mean, rstd)."""
    made = _normed(x, None, weight, bias, eps)
    return made.y, made.mean, made.rstd


def layer_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dweight, dbias)."""
    return _gradients(dy, None, _Saved(x, weight, mean, rstd))


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(y, x + residual, mean, rstd)."""
    made = _normed(x, residual, weight, bias, eps)
    return made.y, made.total, made.mean, made.rstd


def add_layer_norm_backward(
    dy: Tensor, dsum: Tensor, total: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dweight, dbias); dx is the gradient of x and of the residual."""
    return _gradients(dy, dsum, _Saved(total, weight, mean, rstd))
