"""Causal attention over whole samples, or a window of them: torch's, or on CPUs that multiply bf16
our own, whose scores never leave the cache and whose products, softmax and sums are fp32 (Dao et
al. 2022, arXiv:2205.14135).

Shapes: B samples, S tokens, A heads, G heads of keys and values (A is a multiple of G), D channels
of a head.
"""

from __future__ import annotations

from functools import cache, partial
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
        return windowed(q_BASD, k_BGSD, v_BGSD, scale, window)
    return F.scaled_dot_product_attention(
        q_BASD,
        k_BGSD,
        v_BGSD,
        is_causal=True,
        scale=scale,
        enable_gqa=q_BASD.shape[1] != k_BGSD.shape[1],
    )


class _Spans(torch.autograd.Function):
    """Views [first, stop) of tokens, which overlap: their gradients are added up in one tensor,
    where that of each slice would be a tensor as large as the whole."""

    @staticmethod
    def forward(ctx: Any, x_BGSD: Tensor, spans: tuple[tuple[int, int], ...]) -> tuple[Tensor, ...]:
        ctx.spans = spans
        ctx.shape = x_BGSD.shape
        return tuple(x_BGSD[:, :, first:stop] for first, stop in spans)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total_BGSD = gradients[0].new_zeros(ctx.shape)
        for (first, stop), gradient in zip(ctx.spans, gradients, strict=True):
            total_BGSD[:, :, first:stop] += gradient
        return total_BGSD, None


def windowed(
    q_BASD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    scale: float | None,
    window: int,
    dropout: float = 0.0,
) -> Tensor:
    """Block of queries by block of queries, each with the keys that any of its queries sees, under
    one mask for all of them: of window + block scores a token all but a block are visible. The
    first `window` queries are plain causal attention.

    Args:
        q_BASD, k_BGSD, v_BGSD, scale, window: as of `reference`; window is not 0.
        dropout: probability with which an attention weight is dropped.
    """
    tokens = q_BASD.shape[2]
    block = max(SMALLEST_BLOCK, window // 8)
    starts = range(window, tokens, block)
    spans = ((0, window), *((start - window, min(start + block, tokens)) for start in starts))
    seen_QK = visible(window, window + block, 0, window + block, window, q_BASD.device)
    hidden_QK = torch.zeros_like(seen_QK, dtype=q_BASD.dtype).masked_fill(~seen_QK, -torch.inf)
    attention = partial(
        F.scaled_dot_product_attention,
        dropout_p=dropout,
        scale=scale,
        enable_gqa=q_BASD.shape[1] != k_BGSD.shape[1],
    )
    keys, values = (_Spans.apply(x, spans) for x in (k_BGSD, v_BGSD))  # type: ignore[no-untyped-call]
    sizes = [window, *(stop - first - window for first, stop in spans[1:])]
    first, *blocks = torch.split(q_BASD, sizes, 2)
    parts = [attention(first, keys[0], values[0], is_causal=True)]
    for q_BAQD, k_BGKD, v_BGKD in zip(blocks, keys[1:], values[1:], strict=True):
        mask_QK = hidden_QK[: q_BAQD.shape[2], : k_BGKD.shape[2]]
        parts.append(attention(q_BAQD, k_BGKD, v_BGKD, attn_mask=mask_QK))
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
    "causal_attention(Tensor q, Tensor k, Tensor v, float scale, int window) -> (Tensor, Tensor)",
    lambda q, k, v, scale, window: (_by_tokens(q), q.new_empty(q.shape[:3], dtype=torch.float32)),
)
backward = declare(
    "causal_attention_backward(Tensor dy, Tensor q, Tensor k, Tensor v, Tensor y, Tensor logsum,"
    " float scale, int window) -> (Tensor, Tensor, Tensor)",
    lambda dy, q, k, v, y, logsum, scale, window: tuple(_by_tokens(x) for x in (q, k, v)),
)
runs = declare("causal_attention_runs() -> bool", lambda: False)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.scale, ctx.window = inputs
    y, logsum = output
    ctx.mark_non_differentiable(logsum)
    ctx.save_for_backward(q, k, v, y, logsum)


def _gradients(ctx: Any, dy: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    dq, dk, dv = backward(dy, *ctx.saved_tensors, ctx.scale, ctx.window)
    return dq, dk, dv, None, None


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
        return reference(q_BASD, k_BGSD, v_BGSD, scale, window)
    scale = channels**-0.5 if scale is None else scale
    y: Tensor = forward(q_BASD, k_BGSD, v_BGSD, scale, window)[0]
    return y
