"""RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467) over the last dimension, alone and of a
residual sum. Statistics are fp32, of fp64 inputs fp64.

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


def reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x**2) + eps) * weight; the weight may be wider than x."""
    return F.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)


def add_reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of x + residual, and x + residual itself."""
    total = x + residual
    return reference(total, weight, eps), total


forward = declare(
    "rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)",
    lambda x, weight, eps: (packed_like(x), row_statistics(x)),
)
backward = declare(
    "rms_norm_backward(Tensor dy, Tensor x, Tensor weight, Tensor rstd) -> (Tensor, Tensor)",
    lambda dy, x, weight, rstd: (packed_like(x), packed_like(weight)),
)
add_forward = declare(
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor, Tensor)",
    lambda x, residual, weight, eps: (packed_like(x), packed_like(x), row_statistics(x)),
)
add_backward = declare(
    "add_rms_norm_backward(Tensor dy, Tensor dsum, Tensor sum, Tensor weight, Tensor rstd)"
    " -> (Tensor, Tensor)",
    lambda dy, dsum, sum, weight, rstd: (packed_like(sum), packed_like(weight)),
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, weight, output[1])


def _gradients(ctx: Any, dy: Tensor, _: Any) -> tuple[Tensor, Tensor, None]:
    x, weight, rstd = ctx.saved_tensors
    dx, dweight = backward(dy, x, weight, rstd)
    return dx, dweight, None


def _add_save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, _, weight, _ = inputs
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(output[1], weight, output[2])


def _add_gradients(
    ctx: Any, dy: Tensor, dsum: Tensor, _: Any
) -> tuple[Tensor, Tensor, Tensor, None]:
    total, weight, rstd = ctx.saved_tensors
    dx, dweight = add_backward(dy, dsum, total, weight, rstd)
    return dx, dx, dweight, None


differentiate(forward, _gradients, _save)
differentiate(add_forward, _add_gradients, _add_save)


def fused(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`reference` in one pass over memory."""
    y: Tensor = forward(x, weight, eps)[0]
    return y


def add_fused(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`add_reference` in one pass over memory."""
    y, total, _ = add_forward(x, residual, weight, eps)
    return y, total


def bytes_moved(
    shape: Sequence[int],
    dtype: torch.dtype,
    weight: torch.dtype,
    *,
    added: bool = False,
    backward: bool = False,
) -> int:
    """Bytes that forward or backward moves at least. Forward: x and weight in, y and the
    statistic out; backward: dy, x, weight and statistic in, two gradients out.

    Args:
        shape, dtype: of x.
        weight: its dtype.
        added: with the residual and the sum of forward, and the sum's gradient of backward.
        backward: of backward.
    """
    if backward:
        return NormTraffic(3 + added, 2, 1).bytes(shape, dtype, weight)
    return NormTraffic(2 + 2 * added, 1, 1).bytes(shape, dtype, weight)
