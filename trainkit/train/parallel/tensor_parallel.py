"""Tensor and sequence parallelism, put into a plain model from outside by one table of rules
(Shoeybi et al. 2019, arXiv:1909.08053; sequence parallelism: Korthikanti et al. 2022,
arXiv:2205.05198, section 4.2.2).

What is minimized is the sum of a function over the tensor-parallel ranks, each of which adds its
part of the gradient of the logits. So the gradient of every collective is its exact transpose,
which torch's own autograd of it is: of a sum the sum, of gathering the summing and scattering,
and the other way round. The gradient of what all ranks hold alike (norms, biases that are added
after a sum) is the sum of what each finds; `step` adds that up once a step.

The head's loss is computed where each rank holds some rows of the vocabulary: logits of one token
never lie on one rank.

Shapes: B samples of a micro-batch, S tokens of a sample (with sequence parallelism, S of these
outside of attention and MLP is a tensor-parallel rank's part), H hidden size, V rows of the whole
vocabulary, C tokens of a chunk, P columns of this rank's logits in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainkit.jobs.latent import Latent
from trainkit.jobs.ranks import key_value_heads, share_of_rank
from trainkit.jobs.schema import Model
from trainkit.ops.cross_entropy import NO_LABEL, SoftmaxLoss
from trainkit.ops.kernels import REFERENCE, Kernels
from trainkit.train.model.head_loss import Labels, Losses, head_loss, padded_linear
from trainkit.train.model.latent_attention import LatentAttention
from trainkit.train.model.transformer import (
    Attention,
    QueryKeyNorm,
    Sinks,
    Transformer,
    effective,
)
from trainkit.train.parallel.shards import Segment, TensorLayout
from trainkit.train.parallel.tensor_group import TensorGroup, enter, leave, own_tokens
from trainkit.train.torch_compat import gathered, seed_generators, summed


def read_out(
    x_BSH: Tensor,
    weight: Tensor,
    labels: Labels | None,
    multiple: int,
    softmax: SoftmaxLoss,
    *,
    group: TensorGroup,
    vocab: int,
) -> Tensor | Losses:
    """As loss.read_out, of this rank's rows `weight`: whole logits, or the losses over the whole
    vocabulary, the same on all ranks.

    Args:
        group: the ranks that share the vocabulary.
        vocab: V.
    """
    x_BSH = enter(x_BSH, group)
    shares = [share_of_rank(vocab, group.size, rank) for rank in range(group.size)]
    widest = max(rows for _, rows in shares)
    if labels is not None:
        return head_loss(
            x_BSH,
            weight,
            labels,
            multiple,
            softmax,
            widest=widest,
        )
    own_BSP = padded_linear(x_BSH, weight, multiple)
    parts = gathered(F.pad(own_BSP, (0, widest - own_BSP.shape[-1]))[None], group.size, group.name)
    return torch.cat(
        [part[..., :rows] for part, (_, rows) in zip(parts, shares, strict=True)], dim=-1
    )


@dataclass(frozen=True)
class VocabularyPart:
    """What one rank has of the vocabulary.

    Args:
        group: the ranks that share it.
        start: the first row that is here.
        vocab: rows of the whole vocabulary.
        kernels: what it computes with.
    """

    group: TensorGroup
    start: int
    vocab: int
    kernels: Kernels

    def softmax_loss(
        self,
        logits_CP: Tensor,
        labels_C: Tensor,
        vocab: int,
        z_loss: float,
        scale: Tensor,
        learning: bool,
    ) -> tuple[Tensor, Tensor]:
        """cross_entropy.plain where `vocab` rows are here and the others on other ranks: one
        collective of three numbers a token.

        The gradient is that of the whole loss by this rank's logits (Shoeybi et al. 2019,
        arXiv:1909.08053, section 3).

        A label that is none of the vocabulary's is a ValueError, on a GPU a loss of NaN.
        """
        group = self.group
        counted_C = labels_C != NO_LABEL
        wrong_C = counted_C & ((labels_C < 0) | (labels_C >= self.vocab))
        if labels_C.device.type == "cpu" and wrong_C.any():
            raise ValueError(f"label {labels_C[wrong_C][0]} is not one of {self.vocab}")
        rows_C = labels_C - self.start  # NO_LABEL is below 0 then too: nobody has it
        own_3C = self.kernels.softmax_statistics(logits_CP, rows_C, vocab)
        highest_C, sum_C, target_C = combined(gathered(own_3C[None], group.size, group.name))
        target_C = torch.where(wrong_C, torch.nan, target_C)
        logsum_C = highest_C + sum_C.log()
        entropy = torch.where(counted_C, logsum_C - target_C, 0.0).sum(dtype=torch.float64)
        if not learning:
            return logits_CP, entropy
        factor_C = counted_C * scale
        softmax_C = factor_C * (1 + 2 * z_loss * logsum_C) / sum_C
        dlogits_CP = self.kernels.softmax_gradient(
            logits_CP, rows_C, vocab, highest_C, softmax_C, factor_C
        )
        return dlogits_CP, entropy


def combined(parts_T3C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of what `softmax_statistics` found on T ranks: the highest logit of every token, the sum of
    e^(logit - highest) and the label's logit. The same bits on all ranks: each adds in their
    order."""
    highest_TC, sum_TC, target_TC = parts_T3C.unbind(1)
    highest_C = highest_TC.amax(0)
    # a rank that has nothing above -inf added up e^logit: 0, or NaN, by whatever factor
    share_TC = torch.where(highest_TC == -torch.inf, 1, (highest_TC - highest_C).exp())
    sum_C = (sum_TC * share_TC).sum(0)
    return highest_C, sum_C, target_TC.sum(0)


# first row of the whole tensor, rows, tensor-parallel ranks that hold them
Piece = tuple[int, int, int]


class _Split(nn.Module):
    """A weight, and a bias if there is one, of which this rank holds `pieces` along a dimension.
    `layouts` says so."""

    def __init__(
        self,
        whole: nn.Linear | nn.Embedding | QueryKeyNorm | Sinks,
        pieces: Sequence[Piece],
        dim: int,
        group: TensorGroup,
    ) -> None:
        super().__init__()
        self.group = group
        self.layouts = dict[str, TensorLayout]()
        starts = [sum(length for _, length, _ in pieces[:i]) for i in range(len(pieces))]
        self.segments = tuple(
            Segment(local, *piece) for local, piece in zip(starts, pieces, strict=True)
        )
        self.weight = self._cut("weight", whole.weight, dim)
        bias = getattr(whole, "bias", None)
        if bias is None or dim == 1:
            self.bias = bias
        else:
            self.bias = self._cut("bias", bias, 0)

    def _cut(self, name: str, whole: Tensor, dim: int) -> nn.Parameter:
        self.layouts[name] = TensorLayout(tuple(whole.shape), dim, self.segments)
        # on meta: values come later, by name
        return nn.Parameter(whole.new_empty(self.layouts[name].local_shape))


class ColumnParallel(_Split):
    """A linear layer of which each rank computes some outputs."""

    def __init__(self, whole: nn.Linear, pieces: Sequence[Piece], group: TensorGroup) -> None:
        super().__init__(whole, pieces, 0, group)
        self.product: Callable[[Tensor, Tensor, Tensor | None], Tensor] = F.linear

    def forward(self, x_BSH: Tensor) -> Tensor:
        return self.product(enter(x_BSH, self.group), self.weight, self.bias)


class RowParallel(_Split):
    """A linear layer of which each rank reads some inputs; the bias, whole everywhere, is added
    once, after the sum."""

    def __init__(self, whole: nn.Linear, pieces: Sequence[Piece], group: TensorGroup) -> None:
        super().__init__(whole, pieces, 1, group)
        self.product: Callable[[Tensor, Tensor, Tensor | None], Tensor] = F.linear

    def forward(self, x: Tensor) -> Tensor:
        y_BSH = leave(self.product(x, self.weight, None), self.group)
        if self.bias is not None:
            y_BSH = y_BSH + self.bias
        return y_BSH


class VocabParallelEmbedding(_Split):
    """An embedding of which each rank holds some rows."""

    def __init__(self, whole: nn.Embedding, pieces: Sequence[Piece], group: TensorGroup) -> None:
        super().__init__(whole, pieces, 0, group)

    def forward(self, ids_BS: Tensor) -> Tensor:
        mine = self.segments[0]
        rows_BS = ids_BS - mine.whole
        others_BS = (rows_BS < 0) | (rows_BS >= mine.length)
        found_BSH = F.embedding(rows_BS.masked_fill(others_BS, 0), self.weight)
        return leave(found_BSH.masked_fill(others_BS[..., None], 0), self.group)


class ProjectionNorm(_Split):
    """RMSNorm of queries or keys of all heads together, of which each rank has some heads: one
    sum over the ranks for each token."""

    def __init__(self, whole: QueryKeyNorm, pieces: Sequence[Piece], group: TensorGroup) -> None:
        super().__init__(whole, pieces, 0, group)
        self.epsilon = whole.epsilon
        self.offset = whole.offset
        # several ranks may have the same heads of keys
        self.channels = len(whole.weight) * self.segments[0].replicas

    def forward(self, x_BSAD: Tensor) -> Tensor:
        weight = effective(self.weight, self.offset)
        wide_BSW = x_BSAD.flatten(2).to(torch.promote_types(x_BSAD.dtype, torch.float32))
        squares_BS = summed(wide_BSW.square().sum(-1, keepdim=True), self.group.name)
        scale_BS = (squares_BS / self.channels + self.epsilon).rsqrt()
        return (wide_BSW * scale_BS * weight).to(x_BSAD.dtype).view_as(x_BSAD)


class SplitSinks(_Split):
    """Sinks of this rank's heads."""

    def __init__(self, whole: Sinks, pieces: Sequence[Piece], group: TensorGroup) -> None:
        super().__init__(whole, pieces, 0, group)


class PositionEmbedding(nn.Module):
    """Learned positions, whole on every rank, which looks up those of its own tokens."""

    def __init__(self, whole: nn.Embedding, pieces: Sequence[Piece], group: TensorGroup) -> None:
        super().__init__()
        self.group = group
        self.weight = whole.weight

    def forward(self, positions_S: Tensor) -> Tensor:
        return F.embedding(own_tokens(positions_S, self.group), self.weight)


def rules(model: Model, vocab: int, group: TensorGroup) -> dict[str, tuple[Any, list[Piece]]]:
    """The end of a module's name -> what takes its place, and which rows (of a RowParallel:
    columns) of the whole this rank holds."""
    size = model.num_attention_heads // group.size
    head = model.head_size
    keys, count = key_value_heads(model, group.size, group.rank)
    queries = (group.rank * size * head, size * head, 1)
    replicas = max(1, group.size // model.query_groups)
    # row where keys, and values, begin
    first = [
        model.num_attention_heads * head,
        (model.num_attention_heads + model.query_groups) * head,
    ]
    projected = [queries, *((start + keys * head, count * head, replicas) for start in first)]
    rows = [(*share_of_rank(vocab, group.size, group.rank), 1)]
    norms: dict[str, tuple[Any, list[Piece]]] = {}
    if model.query_key_norm == "projection":
        norms["attention.q_norm"] = (ProjectionNorm, [queries])
        norms["attention.k_norm"] = (ProjectionNorm, [(keys * head, count * head, replicas)])
    found = norms | {
        "attention.qkv": (ColumnParallel, projected),
        "attention.out": (RowParallel, [queries]),
        **_mlp_rules("mlp", model.ffn_width, group),
        "embed_tokens": (VocabParallelEmbedding, rows),
        "embed_positions": (PositionEmbedding, []),
        "head": (ColumnParallel, rows),
    }
    if model.moe is not None and (shared := model.moe.shared_expert_intermediate_size):
        found |= _mlp_rules("mlp.shared_expert", shared, group)
    if model.architecture.sinks:
        found["attention.sinks"] = (SplitSinks, [(group.rank * size, size, 1)])
    return found if model.mla is None else found | _latent_rules(model.mla, size, group)


def _mlp_rules(name: str, whole: int, group: TensorGroup) -> dict[str, tuple[Any, list[Piece]]]:
    """Of an MLP, by its width."""
    start, width = share_of_rank(whole, group.size, group.rank)
    return {
        f"{name}.up": (ColumnParallel, [(start, width, 1)]),
        f"{name}.gate_up": (ColumnParallel, [(start, width, 1), (whole + start, width, 1)]),
        f"{name}.down": (RowParallel, [(start, width, 1)]),
    }


def _latent_rules(
    mla: Latent, heads: int, group: TensorGroup
) -> dict[str, tuple[Any, list[Piece]]]:
    """Of attention by latents, by heads; what makes latents is whole everywhere."""

    def own(channels: int) -> list[Piece]:
        return [(group.rank * heads * channels, heads * channels, 1)]

    return {
        "attention.q": (ColumnParallel, own(mla.head_size)),
        "attention.q_b": (ColumnParallel, own(mla.head_size)),
        "attention.kv_b": (ColumnParallel, own(mla.qk_head_dim + mla.v_head_dim)),
        "attention.out": (RowParallel, own(mla.v_head_dim)),
    }


def apply(
    module: Transformer, vocab: int, group: TensorGroup, kernels: Kernels = REFERENCE
) -> None:
    """Split a model, or a part of one, in place; it must be on the meta device. Nothing is done
    for one rank."""
    if group.size == 1:
        return
    table = rules(module.shape, vocab, group)
    for name, old in list(module.named_modules()):
        for end, (kind, pieces) in table.items():
            if name == end or name.endswith("." + end):
                parent, _, own = name.rpartition(".")
                setattr(module.get_submodule(parent), own, kind(old, pieces, group))
    apart = module.shape.attention_dropout > 0 and not group.sequence
    for part in module.modules():
        if isinstance(part, Attention):
            part.widths = [segment.length for segment in part.qkv.segments]  # type: ignore[union-attr]
        if isinstance(part, LatentAttention):
            part.whole = partial(enter, group=group)
        if isinstance(part, Attention | LatentAttention) and apart:
            _draw_apart(part, group)
    module.read_out = partial(read_out, group=group, vocab=vocab)
    start, _ = share_of_rank(vocab, group.size, group.rank)
    module.softmax_loss = VocabularyPart(group, start, vocab, kernels).softmax_loss


def _draw_apart(attention: Attention | LatentAttention, group: TensorGroup) -> None:
    """Let attention drop by random numbers of its own on each rank, whose heads differ, while
    what lies between the layers, the same on all ranks, drops the same: attention's are seeded
    by a number drawn from the common ones, which go on after it. (With sequence parallelism all
    that drops differs.)"""
    saved: list[Any] = []

    def before(*_: Any) -> None:
        seed = int(torch.randint(2**62, ()))  # of the host's generator: nothing waits
        saved.append(
            (
                torch.get_rng_state(),
                torch.cuda.get_rng_state() if next(attention.parameters()).is_cuda else None,
            )
        )
        seed_generators(seed + group.rank)

    def after(*_: Any) -> None:
        host, device = saved.pop()
        torch.set_rng_state(host)
        if device is not None:
            torch.cuda.set_rng_state(device)

    attention.register_forward_pre_hook(before)
    attention.register_forward_hook(after)
