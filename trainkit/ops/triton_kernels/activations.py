"""swiglu, geglu, gelu and bias_gelu: what lies between the two projections of an MLP.

Each backward computes the activation again instead of keeping it.

Shapes: N rows of width F; of gate_up 2 F, all gates, then all values.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainkit.ops.triton_kernels.column_sums import sum_columns
from trainkit.ops.triton_kernels.launch import REGISTERS, Tile, resident, rows_of, wide_of

WARPS = 8
BYTES = 16 * 32 * WARPS  # of a program's piece of a tensor: one access a thread
SILU = 0
TANH = 1
ERF = 2
FORMS = {"tanh": TANH, "none": ERF}  # torch's words


@triton.jit
def _activation(x, FORM: tl.constexpr):
    """(f(x), f'(x)); what is not used is not computed."""
    if FORM == 0:
        s = 1 / (1 + tl.exp(-x))
        slope = s * (1 + x * (1 - s))
    elif FORM == 1:  # x (1 + tanh(u)) / 2 = x sigmoid(2 u)
        twice_u = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        s = 1 / (1 + tl.exp(-twice_u))
        slope = s + x * s * (1 - s) * 1.5957691216057308 * (1 + 0.134145 * x * x)
    else:
        s = 0.5 * (1 + tl.erf(x * 0.7071067811865476))
        slope = s + x * tl.exp(-0.5 * x * x) * 0.3989422804014327
    return x * s, slope


@triton.jit
def _place(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """(rows as int64, columns) of this program's tile."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    return row, column


@triton.jit
def _gated(
    gate_up, h, rows, width, stride,
    FORM: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row, column = _place(ROWS, COLUMNS)
    there = (row < rows) & (column < width)
    gate = tl.load(gate_up + row * stride + column, mask=there, other=0).to(WIDE)
    up = tl.load(gate_up + row * stride + width + column, mask=there, other=0).to(WIDE)
    value, _ = _activation(gate, FORM)
    tl.store(h + row * width + column, (value * up).to(h.dtype.element_ty), mask=there)


@triton.jit
def _gated_backward(
    dh, gate_up, dgate_up, rows, width, dh_stride, stride,
    FORM: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row, column = _place(ROWS, COLUMNS)
    there = (row < rows) & (column < width)
    d = tl.load(dh + row * dh_stride + column, mask=there, other=0).to(WIDE)
    gate = tl.load(gate_up + row * stride + column, mask=there, other=0).to(WIDE)
    up = tl.load(gate_up + row * stride + width + column, mask=there, other=0).to(WIDE)
    value, slope = _activation(gate, FORM)
    own = dgate_up + row * (2 * width) + column
    tl.store(own, (d * up * slope).to(dgate_up.dtype.element_ty), mask=there)
    tl.store(own + width, (d * value).to(dgate_up.dtype.element_ty), mask=there)


@triton.jit
def _plain(
    x, bias, y, rows, width, stride,
    FORM: tl.constexpr, BIAS: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row, column = _place(ROWS, COLUMNS)
    there = (row < rows) & (column < width)
    v = tl.load(x + row * stride + column, mask=there, other=0).to(WIDE)
    if BIAS:
        v += tl.load(bias + column, mask=column < width, other=0).to(WIDE)
    value, _ = _activation(v, FORM)
    tl.store(y + row * width + column, value.to(y.dtype.element_ty), mask=there)


@triton.jit
def _plain_backward(
    dy, x, bias, dx, dbias, rows, width, dy_stride, stride,
    FORM: tl.constexpr, BIAS: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A program takes every P-th tile of rows of its columns and sums what their bias gets."""
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    sums = tl.zeros((ROWS, COLUMNS), WIDE)
    step = tl.num_programs(0) * ROWS
    # a bias that is kept in registers from row to row leaves too few
    for start in tl.range(tl.program_id(0) * ROWS, rows, step, disable_licm=True):
        row = (start + tl.arange(0, ROWS)[:, None]).to(tl.int64)
        there = (row < rows) & (column < width)
        d = tl.load(dy + row * dy_stride + column, mask=there, other=0).to(WIDE)
        v = tl.load(x + row * stride + column, mask=there, other=0).to(WIDE)
        if BIAS:
            v += tl.load(bias + column, mask=column < width, other=0).to(WIDE)
        _, slope = _activation(v, FORM)
        d *= slope
        sums += d
        tl.store(dx + row * width + column, d.to(dx.dtype.element_ty), mask=there)
    if BIAS:
        own = tl.program_id(0).to(tl.int64) * width + column
        tl.store(dbias + own, tl.sum(sums, axis=0, keep_dims=True), mask=column < width)


def _tile(width: int, dtype: torch.dtype) -> Tile:
    elements = max(1, BYTES // dtype.itemsize)
    columns = min(triton.next_power_of_2(width), elements)
    return Tile(elements // columns, columns, WARPS)


def _glu(gate_up: Tensor, form: int) -> Tensor:
    width = gate_up.shape[-1] // 2
    h = gate_up.new_empty(*gate_up.shape[:-1], width)
    if h.numel():
        matrix = rows_of(gate_up)
        part = _tile(width, h.dtype)
        grid = (triton.cdiv(len(matrix), part.rows), triton.cdiv(width, part.columns))
        _gated[grid](
            matrix, h, len(matrix), width, matrix.stride(0),
            form, wide_of(h.dtype), part.rows, part.columns,
            num_warps=part.warps, maxnreg=REGISTERS,
        )  # fmt: skip
    return h


def _glu_backward(dh: Tensor, gate_up: Tensor, form: int) -> Tensor:
    width = gate_up.shape[-1] // 2
    dgate_up = gate_up.new_empty(gate_up.shape)
    if dgate_up.numel():
        given = rows_of(dh)
        matrix = rows_of(gate_up)
        part = _tile(width, dh.dtype)
        grid = (triton.cdiv(len(matrix), part.rows), triton.cdiv(width, part.columns))
        _gated_backward[grid](
            given, matrix, dgate_up, len(matrix), width, given.stride(0), matrix.stride(0),
            form, wide_of(dh.dtype), part.rows, part.columns,
            num_warps=part.warps, maxnreg=REGISTERS,
        )  # fmt: skip
    return dgate_up


def _gelu(x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    y = x.new_empty(x.shape)
    if x.numel():
        matrix = rows_of(x)
        width = matrix.shape[1]
        part = _tile(width, x.dtype)
        grid = (triton.cdiv(len(matrix), part.rows), triton.cdiv(width, part.columns))
        _plain[grid](
            matrix, matrix if bias is None else bias.contiguous(), y,
            len(matrix), width, matrix.stride(0),
            FORMS[approximate], bias is not None, wide_of(x.dtype), part.rows, part.columns,
            num_warps=part.warps, maxnreg=REGISTERS,
        )  # fmt: skip
    return y


def _gelu_backward(
    dy: Tensor, x: Tensor, bias: Tensor | None, approximate: str
) -> tuple[Tensor, Tensor]:
    """(dx, the parts of dbias, of as many rows as there are parts)."""
    dx = x.new_empty(x.shape)
    matrix = rows_of(x)
    rows, width = matrix.shape
    part = _tile(max(1, width), x.dtype)
    across = triton.cdiv(max(1, width), part.columns)
    down = triton.cdiv(rows, part.rows)
    if bias is not None:
        down = max(1, resident(x.device, part.warps, down * across) // across)
    sums = x.new_zeros if not x.numel() else x.new_empty
    wide = torch.promote_types(x.dtype, torch.float32)
    dbias = sums((down if bias is not None else 0, width), dtype=wide)
    if x.numel():
        given = rows_of(dy)
        _plain_backward[(down, across)](
            given, matrix, matrix if bias is None else bias.contiguous(), dx, dbias,
            rows, width, given.stride(0), matrix.stride(0),
            FORMS[approximate], bias is not None, wide_of(x.dtype), part.rows, part.columns,
            num_warps=part.warps, maxnreg=REGISTERS,
        )  # fmt: skip
    return dx, dbias


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return _glu(gate_up, SILU)


def swiglu_backward(dh: Tensor, gate_up: Tensor) -> Tensor:
    """The gradient of gate_up."""
    return _glu_backward(dh, gate_up, SILU)


def geglu(gate_up: Tensor, approximate: str) -> Tensor:
    """gelu(gate) * up."""
    return _glu(gate_up, FORMS[approximate])


def geglu_backward(dh: Tensor, gate_up: Tensor, approximate: str) -> Tensor:
    """The gradient of gate_up."""
    return _glu_backward(dh, gate_up, FORMS[approximate])


def gelu(x: Tensor, approximate: str) -> Tensor:
    """torch's gelu."""
    return _gelu(x, None, approximate)


def gelu_backward(dy: Tensor, x: Tensor, approximate: str) -> Tensor:
    """The gradient of x."""
    return _gelu_backward(dy, x, None, approximate)[0]


def bias_gelu(x: Tensor, bias: Tensor, approximate: str) -> Tensor:
    """gelu(x + bias)."""
    return _gelu(x, bias, approximate)


def bias_gelu_backward(
    dy: Tensor, x: Tensor, bias: Tensor, approximate: str
) -> tuple[Tensor, Tensor]:
    """(dx, dbias)."""
    dx, parts = _gelu_backward(dy, x, bias, approximate)
    return dx, sum_columns(parts, bias.dtype)
