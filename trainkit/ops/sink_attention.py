"""Causal attention with a sink: one more logit in the softmax of each head, learned, that no value
stands behind, so that a token may attend to nothing (gpt-oss, arXiv:2508.10925, section 2).

With l the logsumexp of a query's scores and the sink, weights are exp(score - l), and the sink's
gradient is -sum exp(sink - l) (dy . y) over queries. torch's fast kernels give no l with a
gradient, or none: here blocks of queries are computed one after another, and again in backward, so
that scores are never there for a whole sample. Products are in the inputs' dtype, all else in fp32
or wider.

Shapes: B samples, S queries, T keys (S, or with those of a cache before them), A heads, G heads of
keys and values, A = G E, D channels of a head, Q queries of a block, K keys that any of these sees.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from trainkit.ops.causal_attention import visible
from trainkit.ops.library import LIBRARY, declare, differentiate, packed_like

BLOCK = 128  # queries


def _blocks(queries: int, tokens: int, window: int) -> Iterator[tuple[slice, slice]]:
    """(queries, keys that any of them sees) of each block."""
    before = tokens - queries
    for start in range(0, queries, BLOCK):
        stop = min(start + BLOCK, queries)
        first = max(0, before + start - window + 1) if window else 0
        yield slice(start, stop), slice(first, before + stop)


def _scores(
    q_BGEQD: Tensor, k_BGKD: Tensor, scale: float, window: int, at: tuple[slice, slice], before: int
) -> Tensor:
    """(B, G, E, Q, K) of a block, -inf where a key is hidden."""
    mine, keys = at
    seen_QK = visible(
        before + mine.start, before + mine.stop, keys.start, keys.stop, window, q_BGEQD.device
    )
    products = torch.einsum("bgeqd,bgkd->bgeqk", q_BGEQD, k_BGKD)
    wide = products.to(torch.promote_types(products.dtype, torch.float32)) * scale
    return wide.masked_fill_(~seen_QK, -torch.inf)


def _by_groups(x_BAS: Tensor, groups: int) -> Tensor:
    """(B, G, E, S, ...): heads that share keys beside one another."""
    return torch.unflatten(x_BAS, 1, (groups, -1))


def _forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    groups = k.shape[1]
    before = k.shape[2] - q.shape[2]
    q_BGESD = _by_groups(q, groups)
    wide = torch.promote_types(q.dtype, torch.float32)
    sinks_BGES = sinks.to(wide).view(1, groups, -1, 1)
    parts = []
    logsums = []
    for at in _blocks(q.shape[2], k.shape[2], window):
        mine, keys = at
        scores = _scores(q_BGESD[:, :, :, mine], k[:, :, keys], scale, window, at, before)
        logsum_BGEQ = torch.logaddexp(scores.logsumexp(-1), sinks_BGES)
        weights = (scores - logsum_BGEQ[..., None]).exp_().to(q.dtype)
        parts.append(torch.einsum("bgeqk,bgkd->bgeqd", weights, v[:, :, keys]))
        logsums.append(logsum_BGEQ)
    y = torch.cat(parts, 3)
    logsum = torch.cat(logsums, 3)
    return y.flatten(1, 2), logsum.flatten(1, 2)


def _backward(dy: Tensor, *saved: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v, sinks, y, logsum, scale, window = saved
    groups = k.shape[1]
    before = k.shape[2] - q.shape[2]
    q_BGESD, dy_BGESD, logsum_BGES = (_by_groups(x, groups) for x in (q, dy, logsum))
    through_BAS = (dy.to(logsum.dtype) * y).sum(-1)
    through_BGES = _by_groups(through_BAS, groups)
    dk, dv = (x.new_zeros(x.shape, dtype=logsum.dtype) for x in (k, v))
    parts = []
    for at in _blocks(q.shape[2], k.shape[2], window):
        mine, keys = at
        q_BGEQD = q_BGESD[:, :, :, mine]
        dy_BGEQD = dy_BGESD[:, :, :, mine]
        scores = _scores(q_BGEQD, k[:, :, keys], scale, window, at, before)
        weights = (scores - logsum_BGES[:, :, :, mine, None]).exp_()
        dweights = torch.einsum("bgeqd,bgkd->bgeqk", dy_BGEQD, v[:, :, keys])
        dv[:, :, keys] += torch.einsum("bgeqk,bgeqd->bgkd", weights.to(q.dtype), dy_BGEQD)
        dscores = weights * (dweights - through_BGES[:, :, :, mine, None]) * scale
        dscores = dscores.to(q.dtype)
        parts.append(torch.einsum("bgeqk,bgkd->bgeqd", dscores, k[:, :, keys]))
        dk[:, :, keys] += torch.einsum("bgeqk,bgeqd->bgkd", dscores, q_BGEQD)
    dq = torch.cat(parts, 3).flatten(1, 2)
    dsinks = -((sinks.to(logsum.dtype)[:, None] - logsum).exp() * through_BAS).sum((0, 2))
    return dq, dk.to(k.dtype), dv.to(v.dtype), dsinks.to(sinks.dtype)


forward = declare(
    "sink_attention(Tensor q, Tensor k, Tensor v, Tensor sinks, float scale, int window)"
    " -> (Tensor, Tensor)",
    lambda q, k, v, sinks, scale, window: (
        packed_like(q),
        q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32)),
    ),
)
backward = declare(
    "sink_attention_backward(Tensor dy, Tensor q, Tensor k, Tensor v, Tensor sinks, Tensor y,"
    " Tensor logsum, float scale, int window) -> (Tensor, Tensor, Tensor, Tensor)",
    lambda dy, q, k, v, sinks, y, logsum, scale, window: tuple(
        packed_like(x) for x in (q, k, v, sinks)
    ),
)
# in torch's own operations, on every device
LIBRARY.impl("sink_attention", _forward, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
LIBRARY.impl(  # type: ignore[no-untyped-call]
    "sink_attention_backward", _backward, "CompositeExplicitAutograd"
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale, ctx.window = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors, *output)


def _gradients(ctx: Any, dy: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    return *backward(dy, *ctx.saved_tensors, ctx.scale, ctx.window), None, None


differentiate(forward, _gradients, _save)


def sink_attention(
    q_BASD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    sinks_A: Tensor,
    scale: float | None = None,
    window: int = 0,
) -> Tensor:
    """(B, A, S, D). Query s is token T - S + s and sees the tokens up to its own.

    Args:
        q_BASD, k_BGTD, v_BGTD: queries, keys, values.
        sinks_A: a logit a head.
        scale: of the scores; None: 1 / sqrt(D).
        window: a token sees so many tokens, itself among them; 0: all before it.
    """
    scale = q_BASD.shape[-1] ** -0.5 if scale is None else scale
    y: Tensor = forward(q_BASD, k_BGTD, v_BGTD, sinks_A, scale, window)[0]
    return y
