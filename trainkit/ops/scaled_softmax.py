"""softmax(scale * x) of attention's scores, causal or under a mask, of any length. For devices and
shapes that no flash attention takes: right, and not tuned.

Shapes: Q queries, K keys; any dimensions before them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainkit.ops.library import declare, differentiate, packed_like


def reference(x: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Of keys where `mask`, of a shape that expands to x's, is not true; 0 elsewhere, and in all
    of a row in which it is true everywhere. In fp32 or wider."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32)) * scale
    unseen = mask.expand(x.shape).all(-1, keepdim=True)
    weights = wide.masked_fill(mask & ~unseen, -torch.inf).softmax(-1)
    return weights.masked_fill(mask, 0).to(x.dtype)


def causal_reference(x: Tensor, scale: float) -> Tensor:
    """Query q sees keys up to K - Q + q."""
    queries, keys = x.shape[-2:]
    hidden = torch.ones(queries, keys, dtype=torch.bool, device=x.device).triu(keys - queries + 1)
    return reference(x, hidden, scale)


causal_forward = declare(
    "scaled_causal_softmax(Tensor x, float scale) -> Tensor", lambda x, scale: packed_like(x)
)
forward = declare(
    "scaled_masked_softmax(Tensor x, Tensor mask, float scale) -> Tensor",
    lambda x, mask, scale: packed_like(x),
)
backward = declare(
    "scaled_softmax_backward(Tensor dy, Tensor y, float scale) -> Tensor",
    lambda dy, y, scale: packed_like(y),
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.scale = inputs[-1]
    ctx.others = len(inputs) - 1
    ctx.save_for_backward(output)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    return backward(dy, *ctx.saved_tensors, ctx.scale), *[None] * ctx.others


differentiate(causal_forward, _gradients, _save)
differentiate(forward, _gradients, _save)


def causal_fused(x: Tensor, scale: float) -> Tensor:
    """`causal_reference`."""
    y: Tensor = causal_forward(x, scale)
    return y


def fused(x: Tensor, mask: Tensor, scale: float) -> Tensor:
    """`reference`."""
    y: Tensor = forward(x, mask.expand(x.shape), scale)
    return y


def bytes_moved(
    shape: Sequence[int],
    dtype: torch.dtype,
    mask: Sequence[int] | None = None,
    *,
    backward: bool = False,
) -> int:
    """Bytes that forward moves at least: what is seen of x, and the mask, in, y out; or backward:
    dy and y in, the gradient out.

    Args:
        shape, dtype: of x.
        mask: its shape; None: causal.
        backward: of backward.
    """
    whole = math.prod(shape) * dtype.itemsize
    if backward:
        return 3 * whole
    if mask is not None:
        return 2 * whole + math.prod(mask)
    queries, keys = shape[-2:]
    seen = sum(max(0, keys - queries + query + 1) for query in range(queries))
    return math.prod(shape[:-2]) * seen * dtype.itemsize + whole
