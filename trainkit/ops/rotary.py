"""Rotary positions (Su et al. 2021, arXiv:2104.09864) in the layout of GPT-NeoX and of Hugging
Face's Llama: channel i turns with channel i + R / 2. Queries and keys are taken out of the fused
projection, and their gradients written into its gradient, in one pass; in the same one each head
of them may be normed before it turns (Qwen3, Gemma 3).

Shapes: B samples, S tokens, A heads, G heads of keys and values, D channels of a head, R of them
turn; W = (A + 2 G) D, the heads of queries, then of keys, then of values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainkit.ops import rms_norm
from trainkit.ops.library import declare, differentiate, packed_like

Parts = tuple[Tensor, Tensor, Tensor]


def split(qkv_BSW: Tensor, heads: int, groups: int) -> Parts:
    """Queries (B, S, A, D), keys and values (B, S, G, D): views."""
    size = qkv_BSW.shape[-1] // (heads + 2 * groups)
    rows = torch.unflatten(qkv_BSW, -1, (-1, size))
    q, k, v = rows.tensor_split([heads, heads + groups], dim=2)
    return q, k, v


def rotate(x_BSAD: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> Tensor:
    """Turn the first R channels of every head, in the tables' precision; the others pass."""
    if not cos_SR.shape[-1]:
        return x_BSAD
    turning, still = x_BSAD.tensor_split([cos_SR.shape[-1]], dim=-1)
    wide = turning.to(cos_SR.dtype)
    first, second = wide.chunk(2, dim=-1)
    crossed = torch.cat([-second, first], dim=-1)
    turned = wide * cos_SR.unsqueeze(-2) + crossed * sin_SR.unsqueeze(-2)
    return torch.cat([turned.to(x_BSAD.dtype), still], dim=-1)


def reference(qkv_BSW: Tensor, cos_SR: Tensor, sin_SR: Tensor, heads: int, groups: int) -> Parts:
    """`split`, its queries and keys turned.

    Args:
        qkv_BSW: what the projection made.
        cos_SR, sin_SR: tables in fp32 or wider, the same for all samples, or (B, S, R); both
            halves of R are the same.
        heads, groups: A and G.
    """
    q, k, v = split(qkv_BSW, heads, groups)
    return rotate(q, cos_SR, sin_SR), rotate(k, cos_SR, sin_SR), v


def normed_reference(
    qkv_BSW: Tensor,
    weights_2D: Tensor,
    cos_SR: Tensor,
    sin_SR: Tensor,
    heads: int,
    groups: int,
    eps: float,
) -> Parts:
    """`reference` of queries and keys whose heads are normed by RMSNorm and rounded first.

    Args:
        qkv_BSW, cos_SR, sin_SR, heads, groups: as of `reference`; R may be 0.
        weights_2D: of the norm of queries, and of keys; may be wider than qkv.
        eps: of both norms.
    """
    q, k, v = split(qkv_BSW, heads, groups)
    q, k = (
        rotate(rms_norm.reference(x, weight, eps), cos_SR, sin_SR)
        for x, weight in zip((q, k), weights_2D, strict=True)
    )
    return q, k, v


def _parts(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, groups: int) -> Parts:
    size = qkv.shape[-1] // (heads + 2 * groups)
    q, k, v = (qkv.new_empty((*qkv.shape[:2], count, size)) for count in (heads, groups, groups))
    return q, k, v


def _fused_row(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = (dq.shape[2] + 2 * dk.shape[2]) * dq.shape[3]
    return dq.new_empty((*dq.shape[:2], width))


forward = declare(
    "rotate_qkv(Tensor qkv, Tensor cos, Tensor sin, int heads, int groups)"
    " -> (Tensor, Tensor, Tensor)",
    _parts,
)
backward = declare(
    "rotate_qkv_backward(Tensor dq, Tensor dk, Tensor dv, Tensor cos, Tensor sin) -> Tensor",
    _fused_row,
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Parts) -> None:
    ctx.save_for_backward(inputs[1], inputs[2])


def _gradient(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
    return backward(dq, dk, dv, *ctx.saved_tensors), None, None, None, None


differentiate(forward, _gradient, _save)


def fused(qkv_BSW: Tensor, cos_SR: Tensor, sin_SR: Tensor, heads: int, groups: int) -> Parts:
    """`reference` in one pass over memory; values are a copy, not a view."""
    q, k, v = forward(qkv_BSW, cos_SR, sin_SR, heads, groups)
    return q, k, v


normed_forward = declare(
    "norm_rotate_qkv(Tensor qkv, Tensor weights, Tensor cos, Tensor sin, int heads, int groups,"
    " float eps) -> (Tensor, Tensor, Tensor)",
    lambda qkv, weights, cos, sin, heads, groups, eps: _parts(qkv, cos, sin, heads, groups),
)
normed_backward = declare(
    "norm_rotate_qkv_backward(Tensor dq, Tensor dk, Tensor dv, Tensor qkv, Tensor weights,"
    " Tensor cos, Tensor sin, float eps) -> (Tensor, Tensor)",
    lambda dq, dk, dv, qkv, weights, cos, sin, eps: (packed_like(qkv), packed_like(weights)),
)


def _normed_save(ctx: Any, inputs: tuple[Any, ...], output: Parts) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.eps = inputs[6]


def _normed_gradients(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
    dqkv, dweights = normed_backward(dq, dk, dv, *ctx.saved_tensors, ctx.eps)
    return dqkv, dweights, None, None, None, None, None


differentiate(normed_forward, _normed_gradients, _normed_save)


def normed_fused(
    qkv_BSW: Tensor,
    weights_2D: Tensor,
    cos_SR: Tensor,
    sin_SR: Tensor,
    heads: int,
    groups: int,
    eps: float,
) -> Parts:
    """`normed_reference` in one pass over memory; values are a copy, not a view."""
    q, k, v = normed_forward(qkv_BSW, weights_2D, cos_SR, sin_SR, heads, groups, eps)
    return q, k, v


def bytes_moved(shape: Sequence[int], dtype: torch.dtype, tables: Sequence[int]) -> int:
    """Bytes that either direction moves at least: qkv in and its parts out, or back; of the
    tables, one half of R.

    Args:
        shape, dtype: of qkv.
        tables: shape of the cosines.
    """
    wide = torch.promote_types(dtype, torch.float32)
    return 2 * math.prod(shape) * dtype.itemsize + math.prod(tables) * wide.itemsize
