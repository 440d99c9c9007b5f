"""Causal attention over whole samples: torch's, or on CPUs that multiply bf16 our own, whose scores
never leave the cache and whose products, softmax and sums are fp32 (Dao et al. 2022,
arXiv:2205.14135).

Shapes: B samples, S tokens, A heads, G heads of keys and values (A is a multiple of G), D channels
of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainkit.ops.library import declare, differentiate

CausalAttention = Callable[[Tensor, Tensor, Tensor], Tensor]


def reference(q_BASD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(D)) v, where a token sees the tokens up to itself."""
    return F.scaled_dot_product_attention(
        q_BASD, k_BGSD, v_BGSD, is_causal=True, enable_gqa=q_BASD.shape[1] != k_BGSD.shape[1]
    )


def _by_tokens(x_BASD: Tensor) -> Tensor:
    """A tensor for results, a token's heads one after another: the next product reads them so."""
    return torch.empty_like(
        x_BASD.transpose(1, 2), memory_format=torch.contiguous_format
    ).transpose(1, 2)


forward = declare(
    "causal_attention(Tensor q, Tensor k, Tensor v, float scale) -> (Tensor, Tensor)",
    lambda q, k, v, scale: (_by_tokens(q), q.new_empty(q.shape[:3], dtype=torch.float32)),
)
backward = declare(
    "causal_attention_backward(Tensor dy, Tensor q, Tensor k, Tensor v, Tensor y, Tensor logsum,"
    " float scale) -> (Tensor, Tensor, Tensor)",
    lambda dy, q, k, v, y, logsum, scale: (_by_tokens(q), _by_tokens(k), _by_tokens(v)),
)
runs = declare("causal_attention_runs() -> bool", lambda: False)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.scale = inputs
    y, logsum = output
    ctx.mark_non_differentiable(logsum)
    ctx.save_for_backward(q, k, v, y, logsum)


def _gradients(ctx: Any, dy: Tensor, _: Any) -> tuple[Tensor, Tensor, Tensor, None]:
    dq, dk, dv = backward(dy, *ctx.saved_tensors, ctx.scale)
    return dq, dk, dv, None


differentiate(forward, _gradients, _save)


@cache
def _asked() -> bool:
    return bool(runs())


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def runs_here() -> bool:
    """Whether this machine's processor multiplies bf16 (AVX512-BF16). The kernels must be
    loaded."""
    return _asked()


def fused(q_BASD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor) -> Tensor:
    """`reference`, by our own kernel for what it is made for: bf16 on a CPU that multiplies it,
    heads of a multiple of 16 channels that lie one after another. torch's flash kernels do the
    rest."""
    channels = q_BASD.shape[-1]
    ours = (
        q_BASD.device.type == "cpu"
        and q_BASD.dtype == torch.bfloat16
        and channels > 0
        and channels % 16 == 0
        and all(x.stride(-1) == 1 for x in (q_BASD, k_BGSD, v_BGSD))
    )
    if not (ours and runs_here()):
        return reference(q_BASD, k_BGSD, v_BGSD)
    y: Tensor = forward(q_BASD, k_BGSD, v_BGSD, channels**-0.5)[0]
    return y
