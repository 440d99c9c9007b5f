"""rotate_qkv: queries, keys and values out of their fused product in one launch, the first R
channels of queries and keys turned on the way; and back.

Shapes: B samples, S tokens, A heads of queries, G of keys and of values, D channels of a head, R
of them turn, channel i with channel i + R / 2.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from trainkit.ops.triton_kernels.launch import REGISTERS, rows_of, wide_of

LEAST = 512  # elements of half of the channels of a program's heads
MOST = 2048
PER_THREAD = 8


@triton.jit
def _turn(
    source, target, cos, sin, first, heads,
    TURNS: tl.constexpr, BACK: tl.constexpr, WIDE: tl.constexpr,
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
        channel = TURNING + tl.arange(0, STILL)[None, :]
        there = (head < heads) & (channel < SIZE)
        own = head * SIZE + channel
        tl.store(target + own, tl.load(source + own, mask=there), mask=there)


@triton.jit
def _split(
    qkv, q, k, v, cos, sin, tokens, stride, table_sample, heads, groups,
    WIDE: tl.constexpr, SIZE: tl.constexpr, TURNING: tl.constexpr,
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
            qkv, q, cos + table, sin + table, first, heads,
            True, False, WIDE, SIZE, TURNING, HEADS, HALF, STILL,
        )  # fmt: skip
    elif of_values < 0:
        _turn(
            qkv + heads * SIZE, k, cos + table, sin + table, of_keys, groups,
            True, False, WIDE, SIZE, TURNING, HEADS, HALF, STILL,
        )  # fmt: skip
    else:
        _turn(
            qkv + (heads + groups) * SIZE, v, cos, sin, of_values, groups,
            False, False, WIDE, SIZE, TURNING, HEADS, HALF, STILL,
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
            dq, dqkv, cos + table, sin + table, first, heads,
            True, True, WIDE, SIZE, TURNING, HEADS, HALF, STILL,
        )  # fmt: skip
    elif of_values < 0:
        _turn(
            dk, dqkv + heads * SIZE, cos + table, sin + table, of_keys, groups,
            True, True, WIDE, SIZE, TURNING, HEADS, HALF, STILL,
        )  # fmt: skip
    else:
        _turn(
            dv, dqkv + (heads + groups) * SIZE, cos, sin, of_values, groups,
            False, True, WIDE, SIZE, TURNING, HEADS, HALF, STILL,
        )  # fmt: skip


@dataclass(frozen=True)
class _Heads:
    """Of a fused product: A, G, D, and R of the tables."""

    heads: int
    groups: int
    size: int
    turning: int

    def constants(self, wide: tl.dtype) -> tuple[tl.dtype, int, int, int, int, int]:
        """What the kernels are compiled for."""
        half = triton.next_power_of_2(max(self.turning // 2, 1))
        still = self.size - self.turning
        if still:
            still = triton.next_power_of_2(still)
        each = max(half, still // 4)
        group = max(triton.next_power_of_2(self.groups), LEAST // each, 1)
        return wide, self.size, self.turning, min(group, max(1, MOST // each)), half, still

    def grid(self, places: int, group: int) -> tuple[int, int]:
        """Tokens, and groups of heads."""
        return places, triton.cdiv(self.heads, group) + 2 * triton.cdiv(self.groups, group)


def _warps(constants: tuple[tl.dtype, int, int, int, int, int]) -> int:
    _, _, _, group, half, still = constants
    return max(1, group * max(half, still // 4) // (32 * PER_THREAD))


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
    samples, tokens, width = qkv.shape
    shape = _Heads(heads, groups, width // (heads + 2 * groups), cos.shape[-1])
    q = qkv.new_empty(samples, tokens, heads, shape.size)
    k = qkv.new_empty(samples, tokens, groups, shape.size)
    v = qkv.new_empty(samples, tokens, groups, shape.size)
    if qkv.numel():
        matrix = rows_of(qkv)
        constants = shape.constants(wide_of(qkv.dtype))
        _split[shape.grid(len(matrix), constants[3])](
            matrix, q, k, v, cos.contiguous(), sin.contiguous(),
            tokens, matrix.stride(0), _table_stride(cos), heads, groups, *constants,
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


def _table_stride(cos: Tensor) -> int:
    """From sample to sample; one table serves all where it has no samples."""
    if cos.dim() == 3:
        return cos.shape[1] * cos.shape[2]
    return 0
