"""rotate_qkv: queries, keys and values out of their fused product in one launch, the first R
channels of queries and keys turned on the way; and back. norm_rotate_qkv: each head of queries and
keys normed before it turns.

Shapes: B samples, S tokens, A heads of queries, G of keys and of values, D channels of a head, R
of them turn, channel i with channel i + R / 2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainkit.ops.triton_kernels.column_sums import sum_columns
from trainkit.ops.triton_kernels.launch import REGISTERS, resident, rows_of, wide_of

LEAST = 512  # elements of half of the channels of a program's heads
MOST = 2048
PER_THREAD = 8
# backward of a norm keeps what was normed, its gradient and the sums for the weight side by side
NORM_LEAST = 512
NORM_PER_THREAD = 4


@triton.jit
def _turn(
    source, target, cos, sin, weight, eps, first, heads,
    TURNS: tl.constexpr, BACK: tl.constexpr, NORM: tl.constexpr, WIDE: tl.constexpr,
    SIZE: tl.constexpr, TURNING: tl.constexpr,
    HEADS: tl.constexpr, HALF: tl.constexpr, STILL: tl.constexpr,
):  # fmt: skip
    """HEADS heads of one token, from `first` on."""
    half: tl.constexpr = TURNING // 2
    head = first + tl.arange(0, HEADS)[:, None]
    channel = tl.arange(0, HALF)[None, :]
    there = (head < heads) & (channel < half)
    own = head * SIZE + channel
    low = tl.load(source + own, mask=there, other=0)
    high = tl.load(source + own + half, mask=there, other=0)
    if STILL > 0:
        other = TURNING + tl.arange(0, STILL)[None, :]
        other_there = (head < heads) & (other < SIZE)
        still = tl.load(source + head * SIZE + other, mask=other_there, other=0)
    if NORM:
        x = low.to(WIDE)
        y = high.to(WIDE)
        squares = tl.sum(x * x + y * y, axis=1, keep_dims=True)
        if STILL > 0:
            z = still.to(WIDE)
            squares += tl.sum(z * z, axis=1, keep_dims=True)
        scale = 1 / tl.sqrt(squares / SIZE + eps)
        if STILL > 0:
            w = tl.load(weight + other, mask=other < SIZE, other=0).to(WIDE)
            still = (z * scale * w).to(target.dtype.element_ty)
        w = tl.load(weight + channel, mask=channel < half, other=0).to(WIDE)
        low = (x * scale * w).to(target.dtype.element_ty)
        w = tl.load(weight + half + channel, mask=channel < half, other=0).to(WIDE)
        high = (y * scale * w).to(target.dtype.element_ty)
    if TURNS:
        c = tl.load(cos + channel, mask=channel < half, other=0).to(WIDE)
        s = tl.load(sin + channel, mask=channel < half, other=0).to(WIDE)
        if BACK:
            s = -s
        x = low.to(WIDE)
        y = high.to(WIDE)
        low = (x * c - y * s).to(target.dtype.element_ty)
        high = (y * c + x * s).to(target.dtype.element_ty)
    tl.store(target + own, low, mask=there)
    tl.store(target + own + half, high, mask=there)
    if STILL > 0:
        tl.store(target + head * SIZE + other, still, mask=other_there)


@triton.jit
def _split(
    qkv, q, k, v, weights, cos, sin, tokens, stride, table_sample, heads, groups, eps,
    NORM: tl.constexpr, WIDE: tl.constexpr, SIZE: tl.constexpr, TURNING: tl.constexpr,
    HEADS: tl.constexpr, HALF: tl.constexpr, STILL: tl.constexpr,
):  # fmt: skip
    """One token; the second number of a program says which heads."""
    place = tl.program_id(0).to(tl.int64)
    table = place // tokens * table_sample + place % tokens * TURNING
    qkv += place * stride
    q += place * heads * SIZE
    k += place * groups * SIZE
    v += place * groups * SIZE
    first = tl.program_id(1) * HEADS
    of_keys = first - tl.cdiv(heads, HEADS) * HEADS
    of_values = of_keys - tl.cdiv(groups, HEADS) * HEADS
    if of_keys < 0:
        _turn(
            qkv, q, cos + table, sin + table, weights, eps, first, heads,
            True, False, NORM, WIDE, SIZE, TURNING, HEADS, HALF, STILL,
        )  # fmt: skip
    elif of_values < 0:
        _turn(
            qkv + heads * SIZE, k, cos + table, sin + table, weights + SIZE, eps, of_keys, groups,
            True, False, NORM, WIDE, SIZE, TURNING, HEADS, HALF, STILL,
        )  # fmt: skip
    else:
        _turn(
            qkv + (heads + groups) * SIZE, v, cos, sin, weights, eps, of_values, groups,
            False, False, False, WIDE, SIZE, TURNING, HEADS, HALF, STILL,
        )  # fmt: skip


@triton.jit
def _join(
    dqkv, dq, dk, dv, cos, sin, tokens, stride, table_sample, heads, groups,
    WIDE: tl.constexpr, SIZE: tl.constexpr, TURNING: tl.constexpr,
    HEADS: tl.constexpr, HALF: tl.constexpr, STILL: tl.constexpr,
):  # fmt: skip
    """_split backwards."""
    place = tl.program_id(0).to(tl.int64)
    table = place // tokens * table_sample + place % tokens * TURNING
    dqkv += place * stride
    dq += place * heads * SIZE
    dk += place * groups * SIZE
    dv += place * groups * SIZE
    first = tl.program_id(1) * HEADS
    of_keys = first - tl.cdiv(heads, HEADS) * HEADS
    of_values = of_keys - tl.cdiv(groups, HEADS) * HEADS
    if of_keys < 0:
        _turn(
            dq, dqkv, cos + table, sin + table, cos, 0.0, first, heads,
            True, True, False, WIDE, SIZE, TURNING, HEADS, HALF, STILL,
        )  # fmt: skip
    elif of_values < 0:
        _turn(
            dk, dqkv + heads * SIZE, cos + table, sin + table, cos, 0.0, of_keys, groups,
            True, True, False, WIDE, SIZE, TURNING, HEADS, HALF, STILL,
        )  # fmt: skip
    else:
        _turn(
            dv, dqkv + (heads + groups) * SIZE, cos, sin, cos, 0.0, of_values, groups,
            False, True, False, WIDE, SIZE, TURNING, HEADS, HALF, STILL,
        )  # fmt: skip


@triton.jit
def _turned_back(dy, half, there, cos, sin, inside, like, WIDE: tl.constexpr):
    """Both halves of a gradient, rounded as it is between the two operations."""
    c = tl.load(cos, mask=inside, other=0).to(WIDE)
    s = tl.load(sin, mask=inside, other=0).to(WIDE)
    a = tl.load(dy, mask=there, other=0).to(WIDE)
    b = tl.load(dy + half, mask=there, other=0).to(WIDE)
    low = (a * c + b * s).to(like.dtype.element_ty).to(WIDE)
    high = (b * c - a * s).to(like.dtype.element_ty).to(WIDE)
    return low, high


@triton.jit
def _store_sum(dw, there, to, inside):
    """Of a weight's gradient, over the heads that there are."""
    tl.store(to, tl.sum(tl.where(there, dw, 0), axis=0, keep_dims=True), mask=inside)


@triton.jit
def _unnorm(
    dy, x, weight, dx, part, cos, sin, places, tokens, dy_stride, stride, table_sample,
    first, heads, eps, WIDE: tl.constexpr, SIZE: tl.constexpr, TURNING: tl.constexpr,
    HEADS: tl.constexpr, HALF: tl.constexpr, STILL: tl.constexpr,
):  # fmt: skip
    """HEADS heads of every P-th token, turned back and through the norm; sums for the weight."""
    half: tl.constexpr = TURNING // 2
    head = first + tl.arange(0, HEADS)[:, None]
    channel = tl.arange(0, HALF)[None, :]
    there = (head < heads) & (channel < half)
    own = head * SIZE + channel
    dw_low = tl.zeros((HEADS, HALF), WIDE)
    dw_high = tl.zeros((HEADS, HALF), WIDE)
    if STILL > 0:
        other = TURNING + tl.arange(0, STILL)[None, :]
        other_there = (head < heads) & (other < SIZE)
        other_own = head * SIZE + other
        dw_still = tl.zeros((HEADS, STILL), WIDE)
    # the weight, if it were kept in registers from token to token, would leave too few
    for number in tl.range(tl.program_id(0), places, tl.num_programs(0), disable_licm=True):
        place = tl.full((), number, tl.int64)
        table = place // tokens * table_sample + place % tokens * TURNING + channel
        from_dy = dy + place * dy_stride
        from_x = x + place * stride
        to = dx + place * stride
        n_low = tl.load(from_x + own, mask=there, other=0).to(WIDE)
        n_high = tl.load(from_x + own + half, mask=there, other=0).to(WIDE)
        squares = tl.sum(n_low * n_low + n_high * n_high, axis=1, keep_dims=True)
        if STILL > 0:
            n_still = tl.load(from_x + other_own, mask=other_there, other=0).to(WIDE)
            squares += tl.sum(n_still * n_still, axis=1, keep_dims=True)
        scale = 1 / tl.sqrt(squares / SIZE + eps)
        n_low *= scale
        n_high *= scale
        g_low, g_high = _turned_back(
            from_dy + own, half, there, cos + table, sin + table, channel < half, dx, WIDE,
        )  # fmt: skip
        dw_low += g_low * n_low
        dw_high += g_high * n_high
        g_low *= tl.load(weight + channel, mask=channel < half, other=0).to(WIDE)
        g_high *= tl.load(weight + half + channel, mask=channel < half, other=0).to(WIDE)
        dot = tl.sum(g_low * n_low + g_high * n_high, axis=1, keep_dims=True)
        if STILL > 0:
            n_still *= scale
            g_still = tl.load(from_dy + other_own, mask=other_there, other=0).to(WIDE)
            dw_still += g_still * n_still
            g_still *= tl.load(weight + other, mask=other < SIZE, other=0).to(WIDE)
            dot += tl.sum(g_still * n_still, axis=1, keep_dims=True)
        dot /= SIZE
        low = (g_low - n_low * dot) * scale
        high = (g_high - n_high * dot) * scale
        tl.store(to + own, low.to(dx.dtype.element_ty), mask=there)
        tl.store(to + own + half, high.to(dx.dtype.element_ty), mask=there)
        if STILL > 0:
            rest = (g_still - n_still * dot) * scale
            tl.store(to + other_own, rest.to(dx.dtype.element_ty), mask=other_there)
    _store_sum(dw_low, head < heads, part + channel, channel < half)
    _store_sum(dw_high, head < heads, part + half + channel, channel < half)
    if STILL > 0:
        _store_sum(dw_still, head < heads, part + other, other < SIZE)


@triton.jit
def _join_normed(
    dqkv, dq, dk, dv, qkv, weights, q_parts, k_parts, cos, sin,
    places, tokens, stride, table_sample, heads, groups, eps,
    WIDE: tl.constexpr, SIZE: tl.constexpr, TURNING: tl.constexpr,
    HEADS: tl.constexpr, HALF: tl.constexpr, STILL: tl.constexpr,
):  # fmt: skip
    """_split backwards where heads were normed; qkv and its gradient have the same strides."""
    first = tl.program_id(1) * HEADS
    of_queries = tl.cdiv(heads, HEADS)
    of_groups = tl.cdiv(groups, HEADS)
    of_keys = first - of_queries * HEADS
    of_values = of_keys - of_groups * HEADS
    if of_keys < 0:
        part = q_parts + (tl.program_id(0) * of_queries + tl.program_id(1)) * SIZE
        _unnorm(
            dq, qkv, weights, dqkv, part, cos, sin,
            places, tokens, heads * SIZE, stride, table_sample, first, heads, eps,
            WIDE, SIZE, TURNING, HEADS, HALF, STILL,
        )  # fmt: skip
    elif of_values < 0:
        row = tl.program_id(0) * of_groups + tl.program_id(1) - of_queries
        _unnorm(
            dk, qkv + heads * SIZE, weights + SIZE, dqkv + heads * SIZE, k_parts + row * SIZE,
            cos, sin, places, tokens, groups * SIZE, stride, table_sample, of_keys, groups, eps,
            WIDE, SIZE, TURNING, HEADS, HALF, STILL,
        )  # fmt: skip
    else:
        for number in range(tl.program_id(0), places, tl.num_programs(0)):
            place = tl.full((), number, tl.int64)
            _turn(
                dv + place * groups * SIZE, dqkv + place * stride + (heads + groups) * SIZE,
                cos, sin, cos, 0.0, of_values, groups,
                False, True, False, WIDE, SIZE, TURNING, HEADS, HALF, STILL,
            )  # fmt: skip


@dataclass(frozen=True)
class _Heads:
    """Of a fused product: A, G, D, and R of the tables."""

    heads: int
    groups: int
    size: int
    turning: int

    def constants(
        self, wide: tl.dtype, least: int = LEAST
    ) -> tuple[tl.dtype, int, int, int, int, int]:
        """What the kernels are compiled for; `least` elements of half of the channels of a
        program's heads."""
        half = triton.next_power_of_2(max(self.turning // 2, 1))
        still = self.size - self.turning
        if still:
            still = triton.next_power_of_2(still)
        each = max(half, still // 4)
        group = max(triton.next_power_of_2(self.groups), least // each, 1)
        return wide, self.size, self.turning, min(group, max(1, MOST // each)), half, still

    def grid(self, places: int, group: int) -> tuple[int, int]:
        """Tokens, and groups of heads."""
        return places, triton.cdiv(self.heads, group) + 2 * triton.cdiv(self.groups, group)


def _warps(
    constants: tuple[tl.dtype, int, int, int, int, int], per_thread: int = PER_THREAD
) -> int:
    _, _, _, group, half, still = constants
    return max(1, group * max(half, still // 4) // (32 * per_thread))


def rotate_qkv(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, groups: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(q, k, v), in new memory, (B, S, A or G, D) each.

    Args:
        qkv: (B, S, (A + 2 G) D): all queries, all keys, all values.
        cos, sin: (S, R) or (B, S, R); both halves of R are the same, the first is read.
        heads: A.
        groups: G.
    """
    return _parts_of(qkv, None, cos, sin, heads, groups, 0.0)


def norm_rotate_qkv(
    qkv: Tensor, weights: Tensor, cos: Tensor, sin: Tensor, heads: int, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """As `rotate_qkv`, of normed queries and keys; weights: (2, D)."""
    return _parts_of(qkv, weights.contiguous(), cos, sin, heads, groups, eps)


def _parts_of(
    qkv: Tensor,
    weights: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    groups: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    samples, tokens, width = qkv.shape
    shape = _Heads(heads, groups, width // (heads + 2 * groups), cos.shape[-1])
    q = qkv.new_empty(samples, tokens, heads, shape.size)
    k = qkv.new_empty(samples, tokens, groups, shape.size)
    v = qkv.new_empty(samples, tokens, groups, shape.size)
    if qkv.numel():
        matrix = rows_of(qkv)
        constants = shape.constants(wide_of(qkv.dtype))
        _split[shape.grid(len(matrix), constants[3])](
            matrix, q, k, v, cos if weights is None else weights,
            cos.contiguous(), sin.contiguous(),
            tokens, matrix.stride(0), _table_stride(cos), heads, groups, eps,
            weights is not None, *constants,
            num_warps=_warps(constants), maxnreg=REGISTERS,
        )  # fmt: skip
    return q, k, v


def rotate_qkv_backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The gradient of qkv.

    Args:
        dq, dk, dv: (B, S, A or G, D).
        cos, sin: as forward had them.
    """
    samples, tokens, heads, size = dq.shape
    groups = dk.shape[2]
    shape = _Heads(heads, groups, size, cos.shape[-1])
    dqkv = dq.new_empty(samples, tokens, (heads + 2 * groups) * size)
    if dqkv.numel():
        constants = shape.constants(wide_of(dq.dtype))
        _join[shape.grid(samples * tokens, constants[3])](
            dqkv, dq.contiguous(), dk.contiguous(), dv.contiguous(),
            cos.contiguous(), sin.contiguous(), tokens, dqkv.shape[2], _table_stride(cos),
            heads, groups, *constants,
            num_warps=_warps(constants), maxnreg=REGISTERS,
        )  # fmt: skip
    return dqkv


def norm_rotate_qkv_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    qkv: Tensor,
    weights: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """The gradients of qkv and of weights.

    Args:
        dq, dk, dv: (B, S, A or G, D).
        qkv, weights, cos, sin, eps: as forward had them.
    """
    samples, tokens, heads, size = dq.shape
    shape = _Heads(heads, dk.shape[2], size, cos.shape[-1])
    qkv = qkv.contiguous()
    dqkv = torch.empty_like(qkv)
    places = samples * tokens
    if not qkv.numel():
        return dqkv, torch.zeros_like(weights)
    constants = shape.constants(wide_of(qkv.dtype), NORM_LEAST)
    warps = _warps(constants, NORM_PER_THREAD)
    _, columns = shape.grid(places, constants[3])
    programs = max(1, resident(qkv.device, warps, places * columns) // columns)
    of_keys = triton.cdiv(shape.groups, constants[3])
    wide = torch.promote_types(qkv.dtype, torch.float32)
    q_parts = qkv.new_empty(programs * (columns - 2 * of_keys), size, dtype=wide)
    k_parts = qkv.new_empty(programs * of_keys, size, dtype=wide)
    _join_normed[(programs, columns)](
        dqkv, dq.contiguous(), dk.contiguous(), dv.contiguous(), qkv, weights.contiguous(),
        q_parts, k_parts, cos.contiguous(), sin.contiguous(),
        places, tokens, dqkv.shape[2], _table_stride(cos), heads, shape.groups, eps, *constants,
        num_warps=warps, maxnreg=REGISTERS,
    )  # fmt: skip
    sums = [sum_columns(parts, weights.dtype) for parts in (q_parts, k_parts)]
    return dqkv, torch.stack(sums)


def _table_stride(cos: Tensor) -> int:
    """From sample to sample; one table serves all where it has no samples."""
    return cos.shape[1] * cos.shape[2] if cos.dim() == 3 else 0
