"""The language model of all families, read from top to bottom. It knows of one device.

Shapes: B samples of a micro-batch, S tokens of a sample, H hidden size, A
attention heads, G heads of keys and values, D channels of a head, R channels of it that turn, V
vocabulary, P learned positions, W = (A + 2 G) D.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainkit.jobs.schema import Model
from trainkit.ops.kernels import REFERENCE, Kernels
from trainkit.ops.rotary import Parts, rotate, split
from trainkit.train.model.attention import (
    Context,
    DocumentBounds,
    KeyValueCache,
    attend,
    attend_with_sinks,
)
from trainkit.train.model.experts import MixtureOfExperts
from trainkit.train.model.frequencies import tables
from trainkit.train.model.head_loss import Labels, Losses, read_out
from trainkit.train.model.latent_attention import LatentAttention
from trainkit.train.model.mlp import MLP, GatedMLP
from trainkit.train.model.multi_token import MultiToken, one_further
from trainkit.train.model.projection import Projection


class HeadNorm(nn.Module):
    """The weight that all heads of queries, or of keys, are normed with, each by itself (Qwen3);
    the norm is one operation with the turn, `Kernels.norm_rotate_qkv`.

    Args:
        model: the shape.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(model.head_size))


class QueryKeyNorm(nn.Module):
    """RMSNorm of queries or keys, of all heads of a token together (OLMo 2).

    Args:
        model: the shape.
        heads: of queries, or of keys.
        kernels: what it computes with.
    """

    def __init__(self, model: Model, heads: int, kernels: Kernels) -> None:
        super().__init__()
        self.epsilon = model.layernorm_epsilon
        self.offset = model.architecture.norm.offset
        self.of = kernels.rms_norm
        self.weight = nn.Parameter(torch.ones(model.head_size * heads))

    def forward(self, x_BSAD: Tensor) -> Tensor:
        weight = effective(self.weight, self.offset)
        return self.of(x_BSAD.flatten(2), weight, self.epsilon).view_as(x_BSAD)


def no_turn(qkv_BSW: Tensor) -> tuple[Tensor, Tensor]:
    """Tables by which no channel turns, (S, 0) each."""
    wide = torch.promote_types(qkv_BSW.dtype, torch.float32)
    none_S0 = qkv_BSW.new_empty(qkv_BSW.shape[1], 0, dtype=wide)
    return none_S0, none_S0


def effective(weight: Tensor, offset: float = 0.0, factor: float = 1.0) -> Tensor:
    """A norm's weight or bias as it is used: in fp32 or wider where something is added."""
    if offset:
        weight = weight.to(torch.promote_types(weight.dtype, torch.float32)) + offset
    return weight if factor == 1 else weight * factor


class Sinks(nn.Module):
    """The logit that every head's softmax has besides its scores."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(heads))


class Attention(nn.Module):
    """Causal self-attention with one fused projection: rows of `qkv` are all queries, then all
    keys, then all values.

    Args:
        model: the shape.
        layer: the block's number, which says whether there is a window.
        kernels: what it computes with.
    """

    def __init__(self, model: Model, layer: int, kernels: Kernels) -> None:
        super().__init__()
        self.rotate_qkv = kernels.rotate_qkv
        self.causal_attention = kernels.causal_attention
        self.attend: Callable[..., Tensor] = (
            attend_with_sinks if model.architecture.sinks else attend
        )
        self.head_size = model.head_size
        self.dropout = model.attention_dropout
        self.slides = model.slides(layer)
        self.window = model.window(layer)
        self.scale = model.score_scale
        heads = model.num_attention_heads
        groups = model.query_groups
        self.widths = [count * model.head_size for count in (heads, groups, groups)]
        self.qkv = Projection(model.hidden_size, sum(self.widths), bias=model.qkv_bias)
        bias = model.architecture.bias or model.architecture.out_bias
        self.out = Projection(self.widths[0], model.hidden_size, bias=bias)
        self.sinks = Sinks(heads) if model.architecture.sinks else None
        self.norm_heads: Callable[..., Parts] | None = None
        self.q_norm: HeadNorm | QueryKeyNorm | None = None
        self.k_norm: HeadNorm | QueryKeyNorm | None = None
        if model.query_key_norm == "head":
            self.norm_heads = kernels.norm_rotate_qkv
            self.epsilon = model.layernorm_epsilon
            self.offset = model.architecture.norm.offset
            self.q_norm = HeadNorm(model)
            self.k_norm = HeadNorm(model)
        elif model.query_key_norm == "projection":
            self.q_norm = QueryKeyNorm(model, heads, kernels)
            self.k_norm = QueryKeyNorm(model, groups, kernels)

    def forward(self, x_BSH: Tensor, context: Context, cache: KeyValueCache | None) -> Tensor:
        parts = self._heads(self.qkv(x_BSH), context)
        q_BASD, k_BGSD, v_BGSD = (t.transpose(1, 2) for t in parts)
        if cache is not None:
            k_BGSD, v_BGSD = cache.extend(k_BGSD, v_BGSD)
        y_BASD = self.attend(
            q_BASD,
            k_BGSD,
            v_BGSD,
            context.documents,
            self.dropout if self.training else 0.0,
            self.causal_attention,
            scale=self.scale,
            window=self.window,
            **({} if self.sinks is None else {"sinks_A": self.sinks.weight}),
        )
        y_BSH: Tensor = self.out(y_BASD.transpose(1, 2).flatten(2))
        return y_BSH

    @property
    def groups(self) -> int:
        """Heads of keys and values that are here."""
        return self.widths[1] // self.head_size

    def _heads(self, qkv_BSW: Tensor, context: Context) -> Parts:
        """Queries (B, S, A, D), keys and values (B, S, G, D), normed and turned."""
        heads, groups, _ = (width // self.head_size for width in self.widths)
        rotary = context.sliding_rotary if self.slides else context.rotary
        if self.q_norm is None or self.k_norm is None:
            if rotary is None:
                return split(qkv_BSW, heads, groups)
            return self.rotate_qkv(qkv_BSW, *rotary, heads, groups)
        if self.norm_heads is not None:
            weights_2D = torch.stack([self.q_norm.weight, self.k_norm.weight])
            weights_2D = effective(weights_2D, self.offset)
            turn = rotary or no_turn(qkv_BSW)
            return self.norm_heads(qkv_BSW, weights_2D, *turn, heads, groups, self.epsilon)
        q_BSAD, k_BSGD, v_BSGD = split(qkv_BSW, heads, groups)
        q_BSAD = self.q_norm(q_BSAD)
        k_BSGD = self.k_norm(k_BSGD)
        if rotary is None:
            return q_BSAD, k_BSGD, v_BSGD
        return rotate(q_BSAD, *rotary), rotate(k_BSGD, *rotary), v_BSGD


class ResidualNorm(nn.Module):
    """The family's norm over the hidden size: of x; or of x and what is added to it, then with
    the sum itself.

    Args:
        model: the shape.
        kernels: what it computes with.
        factor: the result is multiplied by it, at no cost: its few weights are.
    """

    def __init__(self, model: Model, kernels: Kernels, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = factor
        self.epsilon = model.layernorm_epsilon
        self.offset = model.architecture.norm.offset
        self.weight = nn.Parameter(torch.ones(model.hidden_size))
        self.bias = None
        self.of: Callable[..., Tensor] = kernels.rms_norm
        self.of_sum: Callable[..., tuple[Tensor, Tensor]] = kernels.add_rms_norm
        if model.architecture.norm.kind == "layer-norm":
            self.bias = nn.Parameter(torch.zeros(model.hidden_size))
            self.of = kernels.layer_norm
            self.of_sum = kernels.add_layer_norm

    def forward(
        self, x_BSH: Tensor, added_BSH: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        weights = [effective(self.weight, self.offset, self.factor)]
        if self.bias is not None:
            weights.append(effective(self.bias, factor=self.factor))
        if added_BSH is None:
            return self.of(x_BSH, *weights, self.epsilon)
        return self.of_sum(x_BSH, added_BSH, *weights, self.epsilon)


class Block(nn.Module):
    """One transformer block: attention then MLP, each with a norm before it, after it or both, or
    both side by side on the same residual stream (GPT-J, GPT-NeoX).

    Args:
        model: the shape.
        number: its place in the whole model.
        kernels: what it computes with.
    """

    def __init__(self, model: Model, number: int, kernels: Kernels) -> None:
        super().__init__()
        self.number = number
        self.parallel = model.parallel_residual
        self.dropout = model.hidden_dropout

        def norm(name: str) -> ResidualNorm | None:
            return ResidualNorm(model, kernels) if name in model.norms else None

        self.attention_norm = norm("attention_norm")
        of = Attention if model.mla is None else LatentAttention
        self.attention = of(model, number, kernels)
        self.post_attention_norm = norm("post_attention_norm")
        self.mlp_norm = norm("mlp_norm")
        self.mlp: nn.Module
        self.sparse = model.sparse(number)
        if self.sparse:
            self.mlp = MixtureOfExperts(model, kernels, partial(GatedMLP, model, kernels))
        elif model.mlp.gated:
            self.mlp = GatedMLP(model, kernels, model.ffn_width)
        else:
            self.mlp = MLP(model, kernels)
        self.post_mlp_norm = norm("post_mlp_norm")

    def forward(self, x_BSH: Tensor, context: Context) -> Tensor:
        normed_BSH, x_BSH = self.attended(x_BSH, context)
        m_BSH: Tensor = self.mlp(normed_BSH, *((context.objective,) if self.sparse else ()))
        m_BSH = F.dropout(m_BSH, self.dropout, self.training)
        if self.post_mlp_norm is not None:
            m_BSH = self.post_mlp_norm(m_BSH)
        return x_BSH + m_BSH

    def attended(self, x_BSH: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """What the MLP reads, and what its result is added to."""
        cache = context.caches[self.number] if context.caches is not None else None
        normed_BSH = x_BSH if self.attention_norm is None else self.attention_norm(x_BSH)
        a_BSH = F.dropout(self.attention(normed_BSH, context, cache), self.dropout, self.training)
        if self.post_attention_norm is not None:
            a_BSH = self.post_attention_norm(a_BSH)
        if self.parallel:
            normed_BSH = normed_BSH if self.mlp_norm is None else self.mlp_norm(x_BSH)
            x_BSH = x_BSH + a_BSH
        elif self.mlp_norm is None:
            normed_BSH = x_BSH = x_BSH + a_BSH
        else:
            normed_BSH, x_BSH = self.mlp_norm(x_BSH, a_BSH)
        return normed_BSH, x_BSH


class Transformer(nn.Module):
    """A decoder-only language model of any family (trainkit/families).

    Args:
        model: the shape.
        vocab_size: rows of the embedding and of the head.
        kernels: what it computes with.
    """

    def __init__(self, model: Model, vocab_size: int, kernels: Kernels = REFERENCE) -> None:
        super().__init__()
        self.shape = model
        self.read_out = read_out
        self.softmax_loss = kernels.softmax_loss
        self.embed_tokens = nn.Embedding(vocab_size, model.hidden_size)
        self.embed_positions: nn.Embedding | None = None
        if model.architecture.learned_positions:
            self.embed_positions = nn.Embedding(model.positions, model.hidden_size)
        # A dict, not a list: a layer keeps its number in a model that has only some of them.
        self.layers = nn.ModuleDict({str(i): Block(model, i, kernels) for i in range(model.blocks)})
        # muP's multiplier of the logits
        self.final_norm = ResidualNorm(model, kernels, 1 / model.width_factor)
        self.head = nn.Linear(model.hidden_size, vocab_size, bias=False) if model.untied else None
        self.mtp: MultiToken | None = None
        if model.mtp_num_layers:
            self.mtp = MultiToken(model, partial(ResidualNorm, model, kernels))

    def forward(
        self,
        tokens_BS: Tensor,
        labels: Labels | None = None,
        *,
        positions_BS: Tensor | None = None,
        documents: DocumentBounds | None = None,
        caches: Sequence[KeyValueCache] | None = None,
    ) -> Tensor | Losses:
        """Logits of the next token at every position, (B, S) ids -> (B, S, V); or, given labels,
        their summed losses.

        Args:
            tokens_BS: ids.
            labels: take the loss instead of returning logits.
            positions_BS: position of every token; by default 0, 1, ... after what `caches` hold.
            documents: keep attention within documents.
            caches: one a layer, each extended by these tokens.
        """
        if positions_BS is None:
            start = caches[0].length if caches else 0
            positions_BS = torch.arange(start, start + tokens_BS.shape[1], device=tokens_BS.device)
        x_BSH = self.transform(
            self.embed(tokens_BS, positions_BS),
            positions_BS,
            documents,
            caches,
            objective=None if labels is None else labels.scale,
        )
        return self.finish(x_BSH, labels, tokens_BS, positions_BS, documents)

    def embed(self, tokens_BS: Tensor, positions_BS: Tensor) -> Tensor:
        """The residual stream that enters the first block."""
        x_BSH: Tensor = self.embed_tokens(tokens_BS)
        if self.shape.embedding_factor != 1:
            # rounded to the weights' dtype first, as Gemma 3 was trained
            x_BSH = x_BSH * torch.tensor(self.shape.embedding_factor, dtype=x_BSH.dtype)
        if self.embed_positions is not None:
            x_BSH = x_BSH + self.embed_positions(positions_BS)
        return F.dropout(x_BSH, self.shape.hidden_dropout, self.training)

    def transform(
        self,
        x_BSH: Tensor,
        positions_BS: Tensor,
        documents: DocumentBounds | None = None,
        caches: Sequence[KeyValueCache] | None = None,
        objective: Tensor | float | None = None,
        *,
        further: bool = False,
    ) -> Tensor:
        """The blocks; `further`: that of `mtp` instead. `objective`: what a loss summed over
        tokens is multiplied with in the objective, for experts; None: there is none."""
        rotary, sliding = self._rotary(positions_BS, x_BSH.dtype)
        objective = objective if self.shape.moe else None
        context = Context(rotary, sliding, documents, caches, objective)
        for name, block in self.layers.items():
            if further == (int(name) >= self.shape.num_layers):
                x_BSH = block(x_BSH, context)
        return x_BSH

    def _rotary(
        self, positions_BS: Tensor, dtype: torch.dtype
    ) -> list[tuple[Tensor, Tensor] | None]:
        """Tables for layers without a window and for those with one; None: nobody asks."""
        layers = self.shape.blocks if self.shape.rotary_channels else 0
        kinds = {self.shape.slides(layer) for layer in range(layers)}
        return [
            tables(self.shape, positions_BS, dtype, sliding=kind) if kind in kinds else None
            for kind in (False, True)
        ]

    def finish(
        self,
        x_BSH: Tensor,
        labels: Labels | None,
        tokens_BS: Tensor,
        positions_BS: Tensor,
        documents: DocumentBounds | None,
    ) -> Tensor | Losses:
        """The last norm and the head, and in training what predicts one token more, whose loss is
        in the objective alone. `x_BSH`: of the blocks; the rest as of `forward`."""
        x_BSH = self.final_norm(x_BSH)
        found = self._read_out(x_BSH, labels)
        if self.mtp is None or labels is None or not self.training:
            return found
        next_BS, labels_BS = one_further(tokens_BS, labels, positions_BS, documents)
        x_BSH = self.mtp(self.embed(next_BS, positions_BS), x_BSH)
        x_BSH = self.transform(x_BSH, positions_BS, documents, objective=labels.scale, further=True)
        more = self._read_out(self.mtp.final_norm(x_BSH), self.mtp.labels(labels_BS, labels))
        assert isinstance(found, Losses) and isinstance(more, Losses)
        self.mtp.count(more)
        return found._replace(objective=found.objective + more.objective)

    def _read_out(self, x_BSH: Tensor, labels: Labels | None) -> Tensor | Losses:
        """The head."""
        weight_VH = self.embed_tokens.weight if self.head is None else self.head.weight
        multiple = self.shape.make_vocab_size_divisible_by
        return self.read_out(x_BSH, weight_VH, labels, multiple, self.softmax_loss)


def build_on_meta(model: Model, vocab_size: int, kernels: Kernels = REFERENCE) -> Transformer:
    """The model without memory: its parameters have shapes only, so that even the largest is
    there at once."""
    with torch.device("meta"):
        return Transformer(model, vocab_size, kernels)
