"""Causal attention over samples whose tokens lie on several ranks: keys and values go round the
ranks, and what a rank's queries find in each part is merged exactly (Liu et al. 2023,
arXiv:2310.01889, with the zigzag order of context_group.py).

Of part j with scores s: l_j = logsumexp(s), o_j = softmax(s) v; together L = logaddexp of all l_j
and O = sum of exp(l_j - L) o_j. Backward needs the final O and L alone, so nothing else is kept:
with delta = sum over channels of O dO, p = exp(s - L), of each part dv = p^T dO, ds = p (dO v^T -
delta), dq = scale ds k, dk = scale ds^T q (Dao et al. 2022, arXiv:2205.14135, section B.4). The
gradients of keys and values go round with them, in fp32 or wider.

Shapes: B samples of a micro-batch, S tokens of a whole sample, T of them on each of C ranks, A
heads, G heads of keys and values (A is a multiple of G), D channels of a head; Q queries and K keys
of a block; R = A / G.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainkit.ops.library import declare, differentiate, implement, packed_like
from trainkit.train.model.attention import DocumentBounds
from trainkit.train.parallel.context_group import ContextGroup, chunks_of, positions_of
from trainkit.train.torch_compat import (
    begin_exchange,
    finish_exchange,
    flash_attention,
    flash_attention_backward,
    has_flash,
)

TILE = 256  # queries of a block with a mask


class SeenBlock(NamedTuple):
    """Queries and keys of two ranks that see one another: where they lie on their ranks, and
    whether all keys are seen, those up to the query (of equal places), or some ("all", "causal",
    "some")."""

    queries: slice
    keys: slice
    kind: str


@dataclass(frozen=True)
class Part:
    """What one rank does of the attention of its group.

    Args:
        rank, size: of the group.
        scale: of the scores.
        first_BS: on the host, the first key that each query of a whole sample sees; one row where
            all samples are alike. None: all see from 0 on.
        first: the same on the device.
    """

    rank: int
    size: int
    scale: float
    first_BS: Tensor | None = None
    first: Tensor | None = None

    def blocks(self, origin: int, tokens: int) -> Iterator[SeenBlock]:
        """What this rank's queries see of the keys of rank `origin`; T `tokens` are on each."""
        half = tokens // 2
        if self.first_BS is None:
            if origin == self.rank:
                yield SeenBlock(slice(0, tokens), slice(0, tokens), "causal")
            elif origin < self.rank:  # its first chunk is before both of ours, its second after
                yield SeenBlock(slice(0, tokens), slice(0, half), "all")
            else:  # its two chunks are between ours
                yield SeenBlock(slice(half, tokens), slice(0, tokens), "all")
            return
        for number, own in enumerate(chunks_of(self.rank, self.size)):
            for other, theirs in enumerate(chunks_of(origin, self.size)):
                for start in range(0, half, TILE):
                    length = min(TILE, half - start)
                    found = self._tile(own * half + start, length, theirs * half, half)
                    if found is not None:
                        low, high, kind = found
                        begin = number * half + start
                        there = other * half - theirs * half
                        yield SeenBlock(
                            slice(begin, begin + length), slice(low + there, high + there), kind
                        )

    def _tile(self, query: int, length: int, key: int, keys: int) -> tuple[int, int, str] | None:
        """Of `length` queries from position `query` on and `keys` keys from `key` on: positions of
        the keys that any of them sees, and whether all do."""
        assert self.first_BS is not None
        first_BQ = self.first_BS[:, query : query + length]
        low = max(key, int(first_BQ.min()))
        high = min(key + keys, query + length)
        if low >= high:
            return None
        whole = int(first_BQ.max()) <= low and high - 1 <= query
        return low, high, "all" if whole else "some"

    def hidden(
        self, block: SeenBlock, origin: int, tokens: int, device: torch.device
    ) -> Tensor | None:
        """Which keys a query of the block does not see, (B or 1, 1, 1, Q, K)."""
        if block.kind == "all":
            return None
        size = tokens * self.size
        queries_Q = positions_of(self.rank, self.size, size, device)[block.queries]
        keys_K = positions_of(origin, self.size, size, device)[block.keys]
        hidden_BQK = (keys_K > queries_Q[:, None])[None]
        if self.first is not None:
            hidden_BQK = hidden_BQK | (keys_K < self.first[:, queries_Q, None])
        return hidden_BQK[:, None, None]

    def add(
        self, q_BATD: Tensor, kv_2BGTD: Tensor, origin: int, y_BATD: Tensor, logsum_BAT: Tensor
    ) -> None:
        """Merge what the queries find in the keys and values of rank `origin` into `y` and
        `logsum`, which begin as 0 and -inf."""
        tokens = q_BATD.shape[2]
        for block in self.blocks(origin, tokens):
            q_BAQD = q_BATD[:, :, block.queries]
            k_BGKD, v_BGKD = kv_2BGTD[..., block.keys, :].unbind()
            if self._flash(block, q_BATD):
                causal = block.kind == "causal"
                o, lse = flash_attention(q_BAQD, k_BGKD, v_BGKD, causal, self.scale)
            else:
                hidden = self.hidden(block, origin, tokens, q_BATD.device)
                o, lse = _plain(q_BAQD, k_BGKD, v_BGKD, hidden, self.scale)
            y = y_BATD[:, :, block.queries]
            logsum = logsum_BAT[:, :, block.queries]
            total = torch.logaddexp(logsum, lse)
            y.mul_(_share(logsum, total)).add_(_share(lse, total) * o)
            logsum.copy_(total)

    def gradients(
        self,
        dy_BATD: Tensor,
        q_BATD: Tensor,
        kv_2BGTD: Tensor,
        origin: int,
        y_BATD: Tensor,
        logsum_BAT: Tensor,
        dq_BATD: Tensor,
    ) -> Tensor:
        """Gradients of the keys and values of rank `origin` by this rank's queries, like these but
        in the dtype of `dq`, to which those of the queries are added.

        Args:
            y_BATD, logsum_BAT: final.
        """
        tokens = q_BATD.shape[2]
        dkv_2BGTD = torch.zeros_like(kv_2BGTD, dtype=dq_BATD.dtype)
        for block in self.blocks(origin, tokens):
            at = block.queries
            k_BGKD, v_BGKD = kv_2BGTD[..., block.keys, :].unbind()
            words = (dy_BATD[:, :, at], q_BATD[:, :, at], k_BGKD, v_BGKD, y_BATD[:, :, at])
            logsum = logsum_BAT[:, :, at]
            if self._flash(block, q_BATD):
                causal = block.kind == "causal"
                dq, dk, dv = flash_attention_backward(*words, logsum, causal, self.scale)
            else:
                hidden = self.hidden(block, origin, tokens, q_BATD.device)
                dq, dk, dv = _plain_backward(*words, logsum, hidden, self.scale)
            dq_BATD[:, :, at] += dq
            dkv_2BGTD[0][:, :, block.keys] += dk
            dkv_2BGTD[1][:, :, block.keys] += dv
        return dkv_2BGTD

    def _flash(self, block: SeenBlock, q: Tensor) -> bool:
        return block.kind != "some" and has_flash(q)


def _share(part: Tensor, total: Tensor) -> Tensor:
    """exp(part - total), 0 where nothing was seen so far."""
    return torch.where(total == -torch.inf, 0.0, (part - total).exp())[..., None]


def _scores(q_BAQD: Tensor, k_BGKD: Tensor, hidden: Tensor | None, scale: float) -> Tensor:
    """(B, G, R, Q, K) in fp32 or wider."""
    wide = torch.promote_types(q_BAQD.dtype, torch.float32)
    q_BGRQD = _grouped(q_BAQD.to(wide), k_BGKD)
    s_BGRQK = scale * q_BGRQD @ k_BGKD.to(wide).transpose(-1, -2)[:, :, None]
    return s_BGRQK if hidden is None else s_BGRQK.masked_fill(hidden, -torch.inf)


def _grouped(x_BAQD: Tensor, k_BGKD: Tensor) -> Tensor:
    batch, heads, queries, channels = x_BAQD.shape
    groups = k_BGKD.shape[1]
    return x_BAQD.reshape(batch, groups, heads // groups, queries, channels)


def _plain(
    q_BAQD: Tensor, k_BGKD: Tensor, v_BGKD: Tensor, hidden: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """(softmax(s) v, logsumexp(s)) of one block; 0 and -inf of a query that sees nothing."""
    s_BGRQK = _scores(q_BAQD, k_BGKD, hidden, scale)
    logsum_BGRQ = s_BGRQK.logsumexp(-1)
    p_BGRQK = (s_BGRQK - logsum_BGRQ.clamp(min=torch.finfo(s_BGRQK.dtype).min)[..., None]).exp()
    y_BGRQD = p_BGRQK @ v_BGKD.to(p_BGRQK.dtype)[:, :, None]
    return y_BGRQD.flatten(1, 2), logsum_BGRQ.flatten(1, 2)


def _plain_backward(
    dy_BAQD: Tensor,
    q_BAQD: Tensor,
    k_BGKD: Tensor,
    v_BGKD: Tensor,
    y_BAQD: Tensor,
    logsum_BAQ: Tensor,
    hidden: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of one block's queries, keys and values by the final result and logsumexp."""
    s_BGRQK = _scores(q_BAQD, k_BGKD, hidden, scale)
    wide = s_BGRQK.dtype
    p_BGRQK = (s_BGRQK - _grouped(logsum_BAQ[..., None], k_BGKD)).exp()
    dy = dy_BAQD.to(wide)
    dy_BGRQD = _grouped(dy, k_BGKD)
    delta_BGRQ1 = _grouped((dy * y_BAQD.to(wide)).sum(-1, keepdim=True), k_BGKD)
    dv_BGKD = (p_BGRQK.transpose(-1, -2) @ dy_BGRQD).sum(2)
    dp_BGRQK = dy_BGRQD @ v_BGKD.to(wide).transpose(-1, -2)[:, :, None]
    ds_BGRQK = scale * p_BGRQK * (dp_BGRQK - delta_BGRQ1)
    dq_BAQD = (ds_BGRQK @ k_BGKD.to(wide)[:, :, None]).flatten(1, 2)
    dk_BGKD = (ds_BGRQK.transpose(-1, -2) @ _grouped(q_BAQD.to(wide), k_BGKD)).sum(2)
    return dq_BAQD, dk_BGKD, dv_BGKD


def first_seen(
    documents: DocumentBounds | None, tokens: int, window: int, device: torch.device
) -> Tensor | None:
    """The first key that each query of a sample of S `tokens` sees, (B, S), or (1, S) where all
    samples are alike; None: all see from 0 on."""
    window = window if window < tokens else 0
    if documents is None and not window:
        return None
    queries_S = torch.arange(tokens, device=device)
    after_S = (queries_S - window + 1).clamp(min=0) if window else torch.zeros_like(queries_S)
    if documents is None:
        return after_S[None]
    bounds_D = documents.bounds_D.long() if device.type != "cpu" else torch.tensor(documents.bounds)
    places_N = torch.arange(documents.bounds[-1], device=device)
    starts_N = bounds_D[torch.searchsorted(bounds_D, places_N, right=True) - 1]
    return torch.maximum((starts_N % tokens).view(-1, tokens), after_S)


def _forward(
    q_BATD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    sinks_A: Tensor | None,
    *words: Any,
) -> tuple[Tensor, Tensor]:
    """This rank's results, and the logsumexp of its scores and sinks, (B, A, T). `words`: which
    keys are seen first, on the host and on the device; the scale; rank and size; the group."""
    first_BS, first, scale, (rank, size), name = words
    part = Part(rank, size, scale, first_BS, first)
    # the heads of a token are side by side, as in the queries
    y_BATD = torch.zeros_like(q_BATD, dtype=torch.promote_types(q_BATD.dtype, torch.float32))
    logsum_BAT = y_BATD.new_full(y_BATD.shape[:3], -torch.inf)
    held = torch.stack([k_BGTD, v_BGTD])
    for step in range(size):
        coming = _pass_on(held, rank, size, name) if step + 1 < size else None
        part.add(q_BATD, held, (rank - step) % size, y_BATD, logsum_BAT)
        if coming is not None:
            held = finish_exchange(coming).view_as(held)
    if sinks_A is not None:  # one more score of every query, behind which there is no value
        total_BAT = torch.logaddexp(logsum_BAT, sinks_A.to(logsum_BAT.dtype)[:, None])
        y_BATD.mul_(_share(logsum_BAT, total_BAT))
        logsum_BAT = total_BAT
    return y_BATD.to(q_BATD.dtype), logsum_BAT


def _backward(
    dy_BATD: Tensor,
    q_BATD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    y_BATD: Tensor,
    logsum_BAT: Tensor,
    *words: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of this rank's queries, keys and values; `words` as of `_forward`."""
    first_BS, first, scale, (rank, size), name = words
    part = Part(rank, size, scale, first_BS, first)
    dq_BATD = torch.zeros_like(y_BATD, dtype=logsum_BAT.dtype)
    held = torch.stack([k_BGTD, v_BGTD])
    gradient: Tensor | None = None  # of `held`, coming from the rank before
    for step in range(size):
        coming = _pass_on(held, rank, size, name) if step + 1 < size else None
        given = (dy_BATD, q_BATD, held, (rank - step) % size, y_BATD, logsum_BAT)
        found = part.gradients(*given, dq_BATD)
        if gradient is not None:
            found += finish_exchange(gradient).view_as(found)
        gradient = _pass_on(found, rank, size, name)  # after the last step it comes home
        if coming is not None:
            held = finish_exchange(coming).view_as(held)
    assert gradient is not None
    home = finish_exchange(gradient).view_as(held)
    dk_BGTD, dv_BGTD = (x.to(k_BGTD.dtype, copy=True) for x in home)  # each memory of its own
    return dq_BATD.to(q_BATD.dtype), dk_BGTD, dv_BGTD


def _pass_on(x: Tensor, rank: int, size: int, name: str) -> Tensor:
    """Begin to give it to the next rank; what comes from the one before, flat."""
    sent = [0] * size
    taken = [0] * size
    sent[(rank + 1) % size] = x.numel()
    taken[(rank - 1) % size] = x.numel()
    return begin_exchange(x.flatten(), taken, sent, name)


# One operation for torch: selective recomputation keeps what it returns, and sends nothing again.
forward = declare(
    "ring_attention(Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? first_host, Tensor? first,"
    " float scale, int[] group, str name) -> (Tensor, Tensor)",
    lambda q, *_: (
        torch.empty_like(q),
        q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32)),
    ),
)
backward = declare(
    "ring_attention_backward(Tensor dy, Tensor q, Tensor k, Tensor v, Tensor y, Tensor logsum,"
    " Tensor? first_host, Tensor? first, float scale, int[] group, str name)"
    " -> (Tensor, Tensor, Tensor)",
    lambda dy, q, k, v, y, *_: (torch.empty_like(y), packed_like(k), packed_like(v)),
)
implement(forward, _forward)
implement(backward, _backward)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, first_BS, first, *ctx.words = inputs
    y, logsum = output
    ctx.mark_non_differentiable(logsum)
    ctx.first_BS = first_BS
    ctx.first = first
    ctx.save_for_backward(q, k, v, y, logsum, sinks)


def _gradients(ctx: Any, dy: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    *saved, sinks_A = ctx.saved_tensors
    found = backward(dy, *saved, ctx.first_BS, ctx.first, *ctx.words)
    dsinks_A: Tensor | None = None
    if sinks_A is not None:
        y_BATD, logsum_BAT = saved[3:]
        wide = logsum_BAT.dtype
        share_BAT = (sinks_A.to(wide)[:, None] - logsum_BAT).exp()
        dot_BAT = (y_BATD.to(wide) * dy.to(wide)).sum(-1)
        dsinks_A = -(share_BAT * dot_BAT).sum((0, 2)).to(sinks_A.dtype)
    return *found, dsinks_A, *(None,) * 5


differentiate(forward, _gradients, _save)


def ring_attention(
    q_BATD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    documents: DocumentBounds | None,
    group: ContextGroup,
    *,
    scale: float,
    window: int = 0,
    sinks_A: Tensor | None = None,
) -> Tensor:
    """As attention.attend over whole samples, of this rank's tokens: (B, A, T, D).

    Args:
        documents: of whole samples.
        sinks_A: as of attention.attend_with_sinks: L is then of the scores and the sink, and so
            are all shares; d sink = - sum over queries of exp(sink - L) (O dO).
    """
    tokens = q_BATD.shape[2] * group.size
    host = torch.device("cpu")
    first_BS = first = first_seen(documents, tokens, window, host)
    if q_BATD.device != host:
        first = first_seen(documents, tokens, window, q_BATD.device)
    words = (scale, [group.rank, group.size], group.name)
    y: Tensor = forward(q_BATD, k_BGTD, v_BGTD, sinks_A, first_BS, first, *words)[0]
    return y
