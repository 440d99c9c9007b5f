"""LayerNorm (Ba et al. 2016, arXiv:1607.06450) over the last dimension, alone and of a residual
sum. Statistics are fp32, of fp64 inputs fp64.

Shapes: N rows (all dimensions but the last), H elements of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainkit.ops.library import declare, differentiate, packed_like, row_statistics
from trainkit.ops.traffic import NormTraffic


def reference(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def add_reference(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The norm of x + residual, and x + residual itself."""
    total = x + residual
    return reference(total, weight, bias, eps), total


forward = declare(
    "layer_norm(Tensor x, Tensor weight, Tensor bias, float eps) -> (Tensor, Tensor, Tensor)",
    lambda x, weight, bias, eps: (packed_like(x), row_statistics(x), row_statistics(x)),
)
backward = declare(
    "layer_norm_backward(Tensor dy, Tensor x, Tensor weight, Tensor mean, Tensor rstd)"
    " -> (Tensor, Tensor, Tensor)",
    lambda dy, x, weight, mean, rstd: (packed_like(x), packed_like(weight), packed_like(weight)),
)
add_forward = declare(
    "add_layer_norm(Tensor x, Tensor residual, Tensor weight, Tensor bias, float eps)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    lambda x, residual, weight, bias, eps: (
        packed_like(x),
        packed_like(x),
        row_statistics(x),
        row_statistics(x),
    ),
)
add_backward = declare(
    "add_layer_norm_backward(Tensor dy, Tensor dsum, Tensor sum, Tensor weight, Tensor mean,"
    " Tensor rstd) -> (Tensor, Tensor, Tensor)",
    lambda dy, dsum, sum, weight, mean, rstd: (
        packed_like(sum),
        packed_like(weight),
        packed_like(weight),
    ),
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, _, _ = inputs
    _, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.save_for_backward(x, weight, mean, rstd)


def _gradients(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    return *backward(dy, *ctx.saved_tensors), None


def _add_save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    weight = inputs[2]
    _, total, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.save_for_backward(total, weight, mean, rstd)


def _add_gradients(ctx: Any, dy: Tensor, dsum: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    dx, dweight, dbias = add_backward(dy, dsum, *ctx.saved_tensors)
    return dx, dx, dweight, dbias, None


differentiate(forward, _gradients, _save)
differentiate(add_forward, _add_gradients, _add_save)


def fused(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """`reference` in one pass over memory."""
    y: Tensor = forward(x, weight, bias, eps)[0]
    return y


def add_fused(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`add_reference` in one pass over memory."""
    y, total, _, _ = add_forward(x, residual, weight, bias, eps)
    return y, total


def bytes_moved(
    shape: Sequence[int],
    dtype: torch.dtype,
    weight: torch.dtype,
    *,
    added: bool = False,
    backward: bool = False,
) -> int:
    """Bytes that forward or backward moves at least. Forward: x and the weights in, y and
    statistics out; backward: dy, x, weight and statistics in, three gradients out.

    Args:
        shape, dtype: of x.
        weight: its dtype.
        added: with the residual and the sum of forward, and the sum's gradient of backward.
        backward: of backward.
    """
    if backward:
        return NormTraffic(3 + added, 3, 2).bytes(shape, dtype, weight)
    return NormTraffic(2 + 2 * added, 2, 2).bytes(shape, dtype, weight)
