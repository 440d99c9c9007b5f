"""SwiGLU and GeGLU (Shazeer 2020, arXiv:2002.05202): an activation of the gates times the values.
Backward computes the activation again instead of keeping it.

Shapes: F width of the result; gate_up has 2 F in its last dimension, all gates, then all values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainkit.ops.library import declare, differentiate, packed_like


def reference(gate_up: Tensor) -> Tensor:
    """silu(gate) * up."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def geglu_reference(gate_up: Tensor, approximate: str) -> Tensor:
    """gelu(gate) * up; `approximate` is torch's word: "none" or "tanh"."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate=approximate) * up


def clamped(gate_up: Tensor) -> Tensor:
    """gpt-oss's: (up + 1) * gate * sigmoid(1.702 gate), gates at most 7, values within 7 of 0
    (openai/gpt-oss, gpt_oss/torch/model.py)."""
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * (gate * torch.sigmoid(1.702 * gate))


def _half(gate_up: Tensor, _: str = "") -> Tensor:
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


forward = declare("swiglu(Tensor gate_up) -> Tensor", _half)
backward = declare(
    "swiglu_backward(Tensor dh, Tensor gate_up) -> Tensor", lambda dh, gate_up: packed_like(gate_up)
)
geglu_forward = declare("geglu(Tensor gate_up, str approximate) -> Tensor", _half)
geglu_backward = declare(
    "geglu_backward(Tensor dh, Tensor gate_up, str approximate) -> Tensor",
    lambda dh, gate_up, approximate: packed_like(gate_up),
)


def _save(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradient(ctx: Any, dh: Tensor) -> Tensor:
    gradient: Tensor = backward(dh, *ctx.saved_tensors)
    return gradient


def _geglu_save(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
    gate_up, ctx.approximate = inputs
    ctx.save_for_backward(gate_up)


def _geglu_gradient(ctx: Any, dh: Tensor) -> tuple[Tensor, None]:
    return geglu_backward(dh, *ctx.saved_tensors, ctx.approximate), None


differentiate(forward, _gradient, _save)
differentiate(geglu_forward, _geglu_gradient, _geglu_save)


def fused(gate_up: Tensor) -> Tensor:
    """`reference` in one pass over memory."""
    h: Tensor = forward(gate_up)
    return h


def geglu_fused(gate_up: Tensor, approximate: str) -> Tensor:
    """`geglu_reference` in one pass over memory."""
    h: Tensor = geglu_forward(gate_up, approximate)
    return h


def bytes_moved(shape: Sequence[int], dtype: torch.dtype, *, backward: bool = False) -> int:
    """Bytes that forward moves at least: gate_up in, half of it out; or backward: both in, the
    gradient of gate_up out.

    Args:
        shape, dtype: of gate_up.
        backward: of backward.
    """
    halves = 5 if backward else 3
    return halves * math.prod(shape) // 2 * dtype.itemsize
