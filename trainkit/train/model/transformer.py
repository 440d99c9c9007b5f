"""The language model of all families, read from top to bottom. It knows of one device.

Shapes: B samples of a micro-batch, S tokens of a sample, H hidden size, F width of the MLP, A
attention heads, G heads of keys and values, D channels of a head, R channels of it that turn, V
vocabulary, P learned positions, W = (A + 2 G) D.

Rotary positions (Su et al. 2021, arXiv:2104.09864) are in the layout of GPT-NeoX and of Hugging
Face's Llama: channel i turns with channel i + R / 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import assert_never

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainkit.jobs.schema import Model, RopeScaling
from trainkit.ops.kernels import REFERENCE, Kernels
from trainkit.ops.rotary import split
from trainkit.train.model.attention import DocumentBounds, KeyValueCache, attend
from trainkit.train.model.head_loss import Labels, Losses, read_out


def frequencies(model: Model, device: torch.device) -> Tensor:
    """Radians a token of every pair of channels, fp64: theta ** (-2i / R) for i < R / 2,
    stretched as `rope_scaling` says."""
    rotated = model.rotary_channels
    exponents = torch.arange(0, rotated, 2, dtype=torch.float64, device=device) / rotated
    plain = (model.rotary_base or 10000.0) ** -exponents
    if model.rope_scaling is None:
        return plain
    return _stretched(plain, model.rope_scaling)


def _stretched(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """linear: Chen et al. 2023, arXiv:2306.15595. llama3: as Llama 3.1 was published
    (llama-models, apply_scaling), and transformers' `_compute_llama3_parameters`: wavelengths
    below original / high_freq_factor stay, those above original / low_freq_factor are divided,
    between them the two are mixed linearly in original / wavelength."""
    divided = plain / scaling.factor
    match scaling.type:
        case "linear":
            return divided
        case "llama3":
            # original / wavelength
            turns = scaling.original_max_position_embeddings * plain / (2 * math.pi)
            low = scaling.low_freq_factor
            kept = ((turns - low) / (scaling.high_freq_factor - low)).clamp(0, 1)
            return kept * plain + (1 - kept) * divided
        case unknown:
            assert_never(unknown)


def tables(model: Model, positions_S: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines, (..., S, R) each, in fp32 or wider; both halves of R are the same."""
    angles = positions_S[..., None].double() * frequencies(model, positions_S.device)
    angles = torch.cat([angles, angles], dim=-1)
    wide = torch.promote_types(dtype, torch.float32)
    return angles.cos().to(wide), angles.sin().to(wide)


@dataclass(frozen=True)
class Context:
    """What every block gets besides the residual stream."""

    rotary: tuple[Tensor, Tensor] | None = None
    documents: DocumentBounds | None = None
    caches: Sequence[KeyValueCache] | None = None


class Attention(nn.Module):
    """Causal self-attention with one fused projection: rows of `qkv` are all queries, then all
    keys, then all values."""

    def __init__(self, model: Model, kernels: Kernels) -> None:
        super().__init__()
        self.rotate_qkv = kernels.rotate_qkv
        self.causal_attention = kernels.causal_attention
        self.head_size = model.head_size
        self.dropout = model.attention_dropout
        self.widths = [
            heads * model.head_size
            for heads in (model.num_attention_heads, model.query_groups, model.query_groups)
        ]
        bias = model.architecture.bias
        self.qkv = nn.Linear(model.hidden_size, sum(self.widths), bias=bias)
        self.out = nn.Linear(self.widths[0], model.hidden_size, bias=bias)

    def forward(self, x_BSH: Tensor, context: Context, cache: KeyValueCache | None) -> Tensor:
        qkv_BSW = self.qkv(x_BSH)
        heads, groups, _ = (width // self.head_size for width in self.widths)
        if context.rotary is None:
            parts = split(qkv_BSW, heads, groups)
        else:
            parts = self.rotate_qkv(qkv_BSW, *context.rotary, heads, groups)
        q_BASD, k_BGSD, v_BGSD = (t.transpose(1, 2) for t in parts)
        if cache is not None:
            k_BGSD, v_BGSD = cache.extend(k_BGSD, v_BGSD)
        y_BASD = attend(
            q_BASD,
            k_BGSD,
            v_BGSD,
            context.documents,
            self.dropout if self.training else 0.0,
            self.causal_attention,
        )
        y_BSH: Tensor = self.out(y_BASD.transpose(1, 2).flatten(2))
        return y_BSH


class MLP(nn.Module):
    """Two projections around GELU, in GPT-2's tanh form or the exact one of most GPT-NeoX
    models."""

    def __init__(self, model: Model, kernels: Kernels) -> None:
        super().__init__()
        self.gelu = kernels.gelu
        self.approximate = "tanh" if model.gelu_form == "tanh" else "none"
        bias = model.architecture.bias
        self.up = nn.Linear(model.hidden_size, model.ffn_width, bias=bias)
        self.down = nn.Linear(model.ffn_width, model.hidden_size, bias=bias)

    def forward(self, x_BSH: Tensor) -> Tensor:
        y_BSH: Tensor = self.down(self.gelu(self.up(x_BSH), self.approximate))
        return y_BSH


class GatedMLP(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv:2002.05202): rows of `gate_up` are all gates, then all values."""

    def __init__(self, model: Model, kernels: Kernels) -> None:
        super().__init__()
        self.swiglu = kernels.swiglu
        bias = model.architecture.bias
        self.gate_up = nn.Linear(model.hidden_size, 2 * model.ffn_width, bias=bias)
        self.down = nn.Linear(model.ffn_width, model.hidden_size, bias=bias)

    def forward(self, x_BSH: Tensor) -> Tensor:
        y_BSH: Tensor = self.down(self.swiglu(self.gate_up(x_BSH)))
        return y_BSH


class ResidualNorm(nn.Module):
    """The family's norm over the hidden size: of x; or of x and what is added to it, then with
    the sum itself."""

    def __init__(self, model: Model, kernels: Kernels) -> None:
        super().__init__()
        self.epsilon = model.layernorm_epsilon
        self.weight = nn.Parameter(torch.ones(model.hidden_size))
        self.bias = None
        self.of: Callable[..., Tensor] = kernels.rms_norm
        self.of_sum: Callable[..., tuple[Tensor, Tensor]] = kernels.add_rms_norm
        if model.architecture.norm.kind == "layer-norm":
            self.bias = nn.Parameter(torch.zeros(model.hidden_size))
            self.of, self.of_sum = kernels.layer_norm, kernels.add_layer_norm

    def forward(
        self, x_BSH: Tensor, added_BSH: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        weights = [weight for weight in (self.weight, self.bias) if weight is not None]
        if added_BSH is None:
            return self.of(x_BSH, *weights, self.epsilon)
        return self.of_sum(x_BSH, added_BSH, *weights, self.epsilon)


class Block(nn.Module):
    """One pre-norm transformer block: attention then MLP, or both side by side on the same
    residual stream (GPT-J, GPT-NeoX).

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
        self.attention_norm = ResidualNorm(model, kernels)
        self.attention = Attention(model, kernels)
        if model.gpt_j_tied:
            self.mlp_norm = None
        else:
            self.mlp_norm = ResidualNorm(model, kernels)
        if model.architecture.mlp.gated:
            self.mlp: GatedMLP | MLP = GatedMLP(model, kernels)
        else:
            self.mlp = MLP(model, kernels)

    def forward(self, x_BSH: Tensor, context: Context) -> Tensor:
        cache = context.caches[self.number] if context.caches is not None else None
        normed_BSH = self.attention_norm(x_BSH)
        a_BSH = F.dropout(self.attention(normed_BSH, context, cache), self.dropout, self.training)
        if self.mlp_norm is None:
            x_BSH = x_BSH + a_BSH
        elif self.parallel:
            normed_BSH = self.mlp_norm(x_BSH)
            x_BSH = x_BSH + a_BSH
        else:
            normed_BSH, x_BSH = self.mlp_norm(x_BSH, a_BSH)
        m_BSH = F.dropout(self.mlp(normed_BSH), self.dropout, self.training)
        return x_BSH + m_BSH


class Transformer(nn.Module):
    """A decoder-only language model.

    gpt: GPT-2/3 (Radford 2019): learned positions, LayerNorm, biases, GELU, tied head. gpt-neox:
    GPT-NeoX (Black 2022, arXiv:2204.06745): part of each head's channels turn with the position,
    attention and MLP side by side, own head. llama: Llama 2 and 3: RMSNorm, SwiGLU, rotary
    positions, grouped queries, no biases, own head.

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
        self.layers = nn.ModuleDict(
            {str(i): Block(model, i, kernels) for i in range(model.num_layers)}
        )
        self.final_norm = ResidualNorm(model, kernels)
        self.head = nn.Linear(model.hidden_size, vocab_size, bias=False) if model.untied else None

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
        x_BSH = self.transform(self.embed(tokens_BS, positions_BS), positions_BS, documents, caches)
        return self.finish(x_BSH, labels)

    def embed(self, tokens_BS: Tensor, positions_BS: Tensor) -> Tensor:
        """The residual stream that enters the first block."""
        x_BSH: Tensor = self.embed_tokens(tokens_BS)
        if self.embed_positions is not None:
            x_BSH = x_BSH + self.embed_positions(positions_BS)
        return F.dropout(x_BSH, self.shape.hidden_dropout, self.training)

    def transform(
        self,
        x_BSH: Tensor,
        positions_BS: Tensor,
        documents: DocumentBounds | None = None,
        caches: Sequence[KeyValueCache] | None = None,
    ) -> Tensor:
        """The blocks."""
        if self.shape.rotary_channels:
            rotary = tables(self.shape, positions_BS, x_BSH.dtype)
        else:
            rotary = None
        context = Context(rotary, documents, caches)
        for block in self.layers.values():
            x_BSH = block(x_BSH, context)
        return x_BSH

    def finish(self, x_BSH: Tensor, labels: Labels | None) -> Tensor | Losses:
        """The last norm and the head."""
        weight_VH = self.embed_tokens.weight if self.head is None else self.head.weight
        return self.read_out(
            self.final_norm(x_BSH),
            weight_VH,
            labels,
            self.shape.make_vocab_size_divisible_by,
            self.softmax_loss,
        )


def build_on_meta(model: Model, vocab_size: int, kernels: Kernels = REFERENCE) -> Transformer:
    """The model without memory: its parameters have shapes only, so that even the largest is
    there at once."""
    with torch.device("meta"):
        return Transformer(model, vocab_size, kernels)
