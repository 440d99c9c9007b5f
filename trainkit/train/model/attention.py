"""Causal attention: over whole samples, within documents, or over a cache of what was read before.

Shapes: B samples, S tokens of a sample, T tokens so far (S without a cache), A heads, G heads of
keys and values (A is a multiple of G), D channels of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainkit.jobs.models import varlen_fits
from trainkit.ops.causal_attention import CausalAttention, reference, visible, windowed
from trainkit.ops.sink_attention import sink_attention
from trainkit.train.torch_compat import causal_varlen_attention


@dataclass(frozen=True)
class DocumentBounds:
    """Where documents begin in a micro-batch whose samples lie one after another: a token sees
    its own document only.

    Args:
        bounds: 0, the start of every further document or sample, and B * S.
        bounds_D: the same as int32 on the device.
        longest: tokens of the longest document.
    """

    bounds: tuple[int, ...]
    bounds_D: Tensor
    longest: int


def unchanged(x: Tensor) -> Tensor:
    """Stands in a model where a layout may put a function of its own."""
    return x


def whole_samples(batch: int, tokens: int, device: torch.device) -> DocumentBounds:
    """One document a sample."""
    bounds = range(0, batch * tokens + 1, tokens)
    bounds_D = torch.arange(0, batch * tokens + 1, tokens, dtype=torch.int32, device=device)
    return DocumentBounds(tuple(bounds), bounds_D, tokens)


class KeyValueCache:
    """Keys and values of one layer for the tokens read so far, in memory that is there from the
    start.

    Args:
        batch: B.
        groups: G.
        capacity: the most tokens it will hold.
        head_size: D.
    """

    def __init__(
        self,
        batch: int,
        groups: int,
        capacity: int,
        head_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.length = 0
        self.k_BGTD = torch.empty(batch, groups, capacity, head_size, dtype=dtype, device=device)
        self.v_BGTD = torch.empty_like(self.k_BGTD)

    def extend(self, k_BGSD: Tensor, v_BGSD: Tensor) -> tuple[Tensor, Tensor]:
        """Add S tokens; returns all keys and values so far, (B, G, T, D) each."""
        end = self.length + k_BGSD.shape[2]
        if end > self.k_BGTD.shape[2]:
            raise ValueError(f"{end} tokens do not fit a cache of {self.k_BGTD.shape[2]}")
        self.k_BGTD[:, :, self.length : end] = k_BGSD
        self.v_BGTD[:, :, self.length : end] = v_BGSD
        self.length = end
        return self.k_BGTD[:, :, :end], self.v_BGTD[:, :, :end]


@dataclass(frozen=True)
class Context:
    """What every block gets besides the residual stream: tables of rotary positions for layers
    without a window and with one, what attention is kept within, and for experts the factor of a
    loss summed over tokens in the objective."""

    rotary: tuple[Tensor, Tensor] | None = None
    sliding_rotary: tuple[Tensor, Tensor] | None = None
    documents: DocumentBounds | None = None
    caches: Sequence[KeyValueCache] | None = None
    objective: Tensor | float | None = None


def attend(
    q_BASD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    documents: DocumentBounds | None,
    dropout: float,
    causal: CausalAttention = reference,
    *,
    scale: float | None = None,
    window: int = 0,
) -> Tensor:
    """Softmax attention: (B, A, S, D). Query s is token T - S + s and sees the tokens up to its
    own.

    Args:
        documents: keep it within documents; then T must be S. By the variable-length kernel for
            16-bit numbers on CUDA, which has no dropout and not every D; else document by document.
        dropout: probability with which an attention weight is dropped.
        causal: what computes it where nothing is dropped and there is no cache.
        scale: of the scores; None: 1 / sqrt(D).
        window: a token sees so many tokens, itself among them; 0: all.
    """
    flash = q_BASD.is_cuda and q_BASD.itemsize == 2 and not dropout and varlen_fits(q_BASD.shape[3])
    if flash and documents is None and 0 < window < q_BASD.shape[2] == k_BGTD.shape[2]:
        # torch's other kernels have no window
        documents = whole_samples(q_BASD.shape[0], q_BASD.shape[2], q_BASD.device)
    if documents is not None:
        if flash:
            return _varlen(q_BASD, k_BGTD, v_BGTD, documents, scale, window)
        attend_one = partial(attend, dropout=dropout, causal=causal, scale=scale, window=window)
        return _document_by_document(q_BASD, k_BGTD, v_BGTD, documents, attend_one)
    gqa = q_BASD.shape[1] != k_BGTD.shape[1]
    queries = q_BASD.shape[2]
    tokens = k_BGTD.shape[2]
    if queries == tokens and dropout == 0:
        return causal(q_BASD, k_BGTD, v_BGTD, scale, window)
    if queries == tokens and 0 < window < tokens:
        return windowed(q_BASD, k_BGTD, v_BGTD, scale, window, dropout)
    # what no query sees, as after long texts
    first = max(0, tokens - queries - window + 1) if window else 0
    k_BGTD = k_BGTD[:, :, first:]
    v_BGTD = v_BGTD[:, :, first:]
    seen_ST = None
    if queries not in (1, tokens):
        seen_ST = visible(tokens - queries, tokens, first, tokens, window, q_BASD.device)
    return F.scaled_dot_product_attention(
        q_BASD,
        k_BGTD,
        v_BGTD,
        attn_mask=seen_ST,
        dropout_p=dropout,
        is_causal=queries == tokens,
        scale=scale,
        enable_gqa=gqa,
    )


def attend_with_sinks(
    q_BASD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    documents: DocumentBounds | None,
    *_: Any,
    sinks_A: Tensor,
    scale: float | None = None,
    window: int = 0,
) -> Tensor:
    """As `attend` without dropout, where the softmax of each head has one more logit, that no
    value stands behind.

    Args:
        sinks_A: the logits.
        documents, scale, window: as of `attend`.
    """
    if documents is None:
        return sink_attention(q_BASD, k_BGTD, v_BGTD, sinks_A, scale, window)

    def attend_one(q: Tensor, k: Tensor, v: Tensor, _: None) -> Tensor:
        return sink_attention(q, k, v, sinks_A, scale, window)

    return _document_by_document(q_BASD, k_BGTD, v_BGTD, documents, attend_one)


def _document_by_document(
    q_BASD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    documents: DocumentBounds,
    attend_one: Callable[..., Tensor],
) -> Tensor:
    """One attention a document: no kernel for the CPU takes documents of several lengths at
    once."""
    length = q_BASD.shape[2]
    parts: list[list[Tensor]] = [[] for _ in q_BASD]
    for start, end in zip(documents.bounds, documents.bounds[1:], strict=False):
        b = start // length
        inside = slice(start % length, start % length + end - start)
        q, k, v = (t[b : b + 1, :, inside] for t in (q_BASD, k_BGSD, v_BGSD))
        parts[b].append(attend_one(q, k, v, None))
    return torch.cat([torch.cat(of_sample, dim=2) for of_sample in parts])


def _varlen(
    q_BASD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    documents: DocumentBounds,
    scale: float | None = None,
    window: int = 0,
) -> Tensor:
    """All documents in one kernel, as one sequence of B * S tokens."""
    q_NAD, k_NGD, v_NGD = (t.transpose(1, 2).flatten(0, 1) for t in (q_BASD, k_BGSD, v_BGSD))
    y_NAD = causal_varlen_attention(
        q_NAD, k_NGD, v_NGD, documents.bounds_D, documents.longest, scale, window
    )
    return y_NAD.reshape(q_BASD.shape[0], -1, *y_NAD.shape[1:]).transpose(1, 2)
