"""GELU (Hendrycks and Gimpel 2016, arXiv:1606.08415), exact or by tanh, alone and of a sum with a
bias. Backward computes the activation again instead of keeping it.

Shapes: N rows (all dimensions but the last), F elements of a row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainkit.ops.library import declare, differentiate, packed_like


def reference(x: Tensor, approximate: str) -> Tensor:
    """torch's; `approximate` is its word: "none" or "tanh"."""
    return F.gelu(x, approximate=approximate)


def bias_reference(x: Tensor, bias: Tensor, approximate: str) -> Tensor:
    """gelu(x + bias), the sum in x's dtype."""
    return F.gelu((x + bias).to(x.dtype), approximate=approximate)


forward = declare(
    "gelu(Tensor x, str approximate) -> Tensor", lambda x, approximate: packed_like(x)
)
backward = declare(
    "gelu_backward(Tensor dy, Tensor x, str approximate) -> Tensor",
    lambda dy, x, approximate: packed_like(x),
)
bias_forward = declare(
    "bias_gelu(Tensor x, Tensor bias, str approximate) -> Tensor",
    lambda x, bias, approximate: packed_like(x),
)
bias_backward = declare(
    "bias_gelu_backward(Tensor dy, Tensor x, Tensor bias, str approximate) -> (Tensor, Tensor)",
    lambda dy, x, bias, approximate: (packed_like(x), packed_like(bias)),
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.approximate = inputs
    ctx.save_for_backward(*tensors)


def _gradient(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
    return backward(dy, *ctx.saved_tensors, ctx.approximate), None


def _bias_gradients(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
    dx, dbias = bias_backward(dy, *ctx.saved_tensors, ctx.approximate)
    return dx, dbias, None


differentiate(forward, _gradient, _save)
differentiate(bias_forward, _bias_gradients, _save)


def fused(x: Tensor, approximate: str) -> Tensor:
    """`reference` in one pass over memory."""
    y: Tensor = forward(x, approximate)
    return y


def bias_fused(x: Tensor, bias: Tensor, approximate: str) -> Tensor:
    """`bias_reference` in one pass over memory; the sum is not rounded."""
    y: Tensor = bias_forward(x, bias, approximate)
    return y


def bytes_moved(
    shape: Sequence[int],
    dtype: torch.dtype,
    bias: torch.dtype | None = None,
    *,
    backward: bool = False,
) -> int:
    """Bytes that forward moves at least: x and the bias in, y out; or backward: dy, x and the bias
    in, the gradients of x and of the bias out.

    Args:
        shape, dtype: of x.
        bias: its dtype; None: there is none.
        backward: of backward.
    """
    moved = (3 if backward else 2) * math.prod(shape) * dtype.itemsize
    if bias is not None:
        moved += (2 if backward else 1) * shape[-1] * bias.itemsize
    return moved
