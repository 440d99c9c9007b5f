"""Context parallelism, put into a plain model from outside: the tokens of a sample lie on several
ranks, which meet in attention alone.

Parameters are the same on all of them, so gradients are summed over them as over data-parallel
ranks, and weights are sharded over both together.

Shapes: B samples of a micro-batch, S tokens of a whole sample, T = S / C of them on each of C
ranks, A heads, G heads of keys and values (A is a multiple of G), D channels of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal, assert_never, cast

import torch
from torch import Tensor

from trainkit.train.model.attention import DocumentBounds, attend, attend_with_sinks
from trainkit.train.model.batch import Batch
from trainkit.train.model.experts import MixtureOfExperts
from trainkit.train.model.latent_attention import LatentAttention
from trainkit.train.model.transformer import Attention, Transformer
from trainkit.train.parallel.context_group import ContextGroup, dealt, joined, positions_of
from trainkit.train.parallel.ring_attention import ring_attention
from trainkit.train.torch_compat import exchanged, gathered, summed


def own_tokens(batch: Batch, group: ContextGroup) -> Batch:
    """This rank's tokens of a micro-batch, with their positions in whole samples. Documents stay
    those of whole samples."""
    if group.size == 1:
        return batch
    tokens_BS = batch.tokens_BS
    positions_BT = positions_of(group.rank, group.size, tokens_BS.shape[1], tokens_BS.device)
    if batch.positions_BS is not None:
        positions_BT = dealt(batch.positions_BS, group.size, 1)[group.rank]
    return replace(
        batch,
        tokens_BS=dealt(tokens_BS, group.size, 1)[group.rank],
        labels_BS=dealt(batch.labels_BS, group.size, 1)[group.rank],
        positions_BS=positions_BT,
    )


def apply(module: Transformer, group: ContextGroup, how: Literal["p2p", "a2a"]) -> None:
    """Let the attention of a model, or of a part of one, see the tokens of all ranks; after
    tensor and expert parallelism. Nothing is done for one rank."""
    if group.size == 1:
        return
    for part in module.modules():
        if isinstance(part, Attention | LatentAttention):
            match how:
                case "p2p":
                    part.attend = partial(_by_ring, group=group)
                case "a2a":
                    part.attend = partial(_by_heads, group=group)
                case unknown:
                    assert_never(unknown)
        elif isinstance(part, MixtureOfExperts):
            part.over_all = cast(
                Callable[[Tensor], Tensor], partial(_total, inside=part.over_all, group=group)
            )
            part.whole = partial(_whole, inside=part.whole, group=group)
            part.own = partial(_own, inside=part.own, group=group)


def _total(counts: Tensor, inside: Callable[[Tensor], Tensor], group: ContextGroup) -> Tensor:
    """Of all tokens of a micro-batch, where `inside` counts those of a tensor-parallel group."""
    return summed(inside(counts), group.name)


def _whole(x: Tensor, inside: Callable[[Tensor], Tensor], group: ContextGroup) -> Tensor:
    """All tokens of samples in their order, dimension 1; `inside` has those of a tensor-parallel
    group."""
    return joined(list(gathered(inside(x), group.size, group.name).chunk(group.size)), 1)


def _own(x: Tensor, inside: Callable[[Tensor], Tensor], group: ContextGroup) -> Tensor:
    """The inverse of `_whole`."""
    return inside(dealt(x, group.size, 1)[group.rank])


def _by_ring(
    q_BATD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    documents: DocumentBounds | None,
    *_: Any,
    scale: float | None,
    window: int = 0,
    sinks_A: Tensor | None = None,
    group: ContextGroup,
) -> Tensor:
    """As attention.attend over whole samples, of this rank's tokens; nothing is dropped."""
    scale = q_BATD.shape[-1] ** -0.5 if scale is None else scale
    return ring_attention(
        q_BATD, k_BGTD, v_BGTD, documents, group, scale=scale, window=window, sinks_A=sinks_A
    )


def _by_heads(
    q_BATD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    *words: Any,
    group: ContextGroup,
    **more: Any,
) -> Tensor:
    """As `_by_ring`: ordinary attention over whole samples, of some heads on each rank (Jacobs et
    al. 2023, arXiv:2309.14509). Heads of keys and values that are fewer than ranks are there
    several times."""
    if (groups := k_BGTD.shape[1]) < group.size:
        times = group.size // groups
        k_BGTD, v_BGTD = (x.repeat_interleave(times, 1) for x in (k_BGTD, v_BGTD))
    q, k, v = (_all_tokens(x, group) for x in (q_BATD, k_BGTD, v_BGTD))
    if (sinks_A := more.pop("sinks_A", None)) is None:
        return _all_heads(attend(q, k, v, *words, **more), group)
    own_A = sinks_A.chunk(group.size)[group.rank]
    return _all_heads(attend_with_sinks(q, k, v, *words, sinks_A=own_A, **more), group)


def _all_tokens(x_BATD: Tensor, group: ContextGroup) -> Tensor:
    """From all heads of this rank's tokens to its heads of all tokens."""
    rows = [x_BATD.shape[1] // group.size] * group.size
    found = exchanged(x_BATD.transpose(0, 1), rows, rows, group.name)
    return joined(list(torch.split(found, rows)), 2).transpose(0, 1)


def _all_heads(x_BASD: Tensor, group: ContextGroup) -> Tensor:
    """The inverse of `_all_tokens`."""
    rows = [x_BASD.shape[1]] * group.size
    parts = torch.cat(dealt(x_BASD.transpose(0, 1), group.size, 2))
    return exchanged(parts, rows, rows, group.name).transpose(0, 1)
