"""Causal attention over whole samples, or a window of them: torch's, or on CPUs that multiply bf16
our own, whose scores never leave the cache and whose products, softmax and sums are fp32 (Dao et
al. 2022, arXiv:2205.14135).

Shapes: B samples, S tokens, A heads, G heads of keys and values (A is a multiple of G), D channels
of a head.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from trainkit.ops.library import declare, differentiate

# queries of a block at least: below it the kernels' own overhead decides
SMALLEST_BLOCK = 64


class CausalAttention(Protocol):
    """What computes it; see `reference`."""

    def __call__(
        self,
        q_BASD: Tensor,
        k_BGSD: Tensor,
        v_BGSD: Tensor,
        scale: float | None = None,
        window: int = 0,
    ) -> Tensor: ...


def reference(
    q_BASD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    scale: float | None = None,
    window: int = 0,
) -> Tensor:
    """softmax(scale q k^T) v, where a token sees the tokens up to itself: (B, A, S, D).

    Args:
        q_BASD, k_BGSD, v_BGSD: queries, keys, values.
        scale: None: 1 / sqrt(D).
        window: so many tokens, itself among them; 0: all before it.
    """
    if 0 < window < q_BASD.shape[2]:
        return _windowed(q_BASD, k_BGSD, v_BGSD, scale, window)
    return F.scaled_dot_product_attention(
        q_BASD,
        k_BGSD,
        v_BGSD,
        is_causal=True,
        scale=scale,
        enable_gqa=q_BASD.shape[1] != k_BGSD.shape[1],
    )


def _windowed(
    q_BASD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, scale: float | None, window: int
) -> Tensor:
    """Block of queries by block of queries, each with the keys that any of its queries sees: of
    window + block - 1 scores a token all but block - 1 are visible."""
    tokens = q_BASD.shape[2]
    block = max(SMALLEST_BLOCK, window // 4)
    parts = []
    for start in range(0, tokens, block):
        stop = min(start + block, tokens)
        first = max(0, start - window + 1)
        seen_QK = visible(start, stop, first, stop, window, q_BASD.device)
        parts.append(
            F.scaled_dot_product_attention(
                q_BASD[:, :, start:stop],
                k_BGSD[:, :, first:stop],
                v_BGSD[:, :, first:stop],
                attn_mask=seen_QK,
                scale=scale,
                enable_gqa=q_BASD.shape[1] != k_BGSD.shape[1],
            )
        )
    return torch.cat(parts, dim=2)


def visible(
    start: int, stop: int, first: int, last: int, window: int, device: torch.device
) -> Tensor:
    """Which of the keys [first, last) each of the queries [start, stop) sees, (Q, K) booleans:
    those up to itself, with a window the last so many of them."""
    queries_Q1 = torch.arange(start, stop, device=device)[:, None]
    keys_K = torch.arange(first, last, device=device)
    seen_QK = keys_K <= queries_Q1
    return seen_QK & (keys_K > queries_Q1 - window) if window else seen_QK


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


def fused(
    q_BASD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    scale: float | None = None,
    window: int = 0,
) -> Tensor:
    """`reference`, by our own kernel for what it is made for: bf16 on a CPU that multiplies it,
    heads of a multiple of 16 channels that lie one after another, no window. torch's flash
    kernels do the rest."""
    channels = q_BASD.shape[-1]
    ours = (
        q_BASD.device.type == "cpu"
        and q_BASD.dtype == torch.bfloat16
        and channels > 0
        and not 0 < window < q_BASD.shape[2]
        and channels % 16 == 0
        and all(x.stride(-1) == 1 for x in (q_BASD, k_BGSD, v_BGSD))
    )
    if not (ours and runs_here()):
        return reference(q_BASD, k_BGSD, v_BGSD, scale, window)
    y: Tensor = forward(q_BASD, k_BGSD, v_BGSD, channels**-0.5 if scale is None else scale)[0]
    return y
