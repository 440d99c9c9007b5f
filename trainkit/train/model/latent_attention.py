"""Attention by latents (DeepSeek-V2, arXiv:2405.04434, section 2.1): queries, and keys with values,
are made of narrow latents of a token.

Channels that turn do so in pairs of neighbours, 2i with 2i + 1, as in the published weights and in
Megatron-LM: their rows are ours, and nothing moves between files.

Shapes: B samples, S tokens of a sample, H hidden size, A attention heads, N channels of a head's
queries and keys that do not turn, R channels that do, D = N + R, V channels of its values.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainkit.jobs.schema import Model
from trainkit.ops.kernels import Kernels
from trainkit.ops.rotary import rotate
from trainkit.train.model.attention import Context, KeyValueCache, attend, unchanged
from trainkit.train.model.projection import Projection

# of both latents' norms, whatever that of the others is: transformers and Megatron-LM alike
EPSILON = 1e-6


class LatentNorm(nn.Module):
    """RMSNorm of a latent."""

    def __init__(self, width: int, kernels: Kernels) -> None:
        super().__init__()
        self.of = kernels.rms_norm
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.of(x, self.weight, EPSILON)


def _pairs_to_halves(x: Tensor) -> Tensor:
    """Of each pair of neighbours the first channel, then of each the second: as `rotate` has
    them. Products of queries and keys are the same."""
    return torch.unflatten(x, -1, (-1, 2)).mT.flatten(-2)


class LatentAttention(nn.Module):
    """Causal self-attention. Rows of `q_b`, or of `q`, are head by head N, then R; rows of `kv_a`
    are the latent of keys and values, then the R channels of a key that all heads share; those of
    `kv_b` head by head N, then V.

    Args:
        model: the shape.
        layer: the block's number, which says whether there is a window.
        kernels: what it computes with.
    """

    def __init__(self, model: Model, layer: int, kernels: Kernels) -> None:
        super().__init__()
        assert model.mla is not None
        self.mla = mla = model.mla
        self.causal_attention = kernels.causal_attention
        self.attend = attend
        self.dropout = model.attention_dropout
        self.slides = model.slides(layer)
        self.window = model.window(layer)
        self.scale = model.score_scale
        hidden = model.hidden_size
        heads = model.num_attention_heads

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return Projection(inputs, outputs, bias=False)

        self.q: nn.Module | None = None
        self.q_a: nn.Module | None = None
        if mla.q_lora_rank is None:
            self.q = linear(hidden, heads * mla.head_size)
        else:
            self.q_a = linear(hidden, mla.q_lora_rank)
            self.q_a_norm = LatentNorm(mla.q_lora_rank, kernels)
            self.q_b = linear(mla.q_lora_rank, heads * mla.head_size)
        self.kv_a = linear(hidden, mla.kv_lora_rank + mla.qk_pos_emb_head_dim)
        self.kv_a_norm = LatentNorm(mla.kv_lora_rank, kernels)
        self.kv_b = linear(mla.kv_lora_rank, heads * (mla.qk_head_dim + mla.v_head_dim))
        self.out = linear(heads * mla.v_head_dim, hidden)
        # what the layout makes of the shared key: that of all tokens that heads see
        self.whole: Callable[[Tensor], Tensor] = unchanged

    @property
    def groups(self) -> int:
        """Heads of keys and values that are here."""
        return int(self.kv_b.weight.shape[0]) // (self.mla.qk_head_dim + self.mla.v_head_dim)

    def forward(self, x_BSH: Tensor, context: Context, cache: KeyValueCache | None) -> Tensor:
        parts = self._heads(x_BSH, context)
        q_BASD, k_BASD, v_BASD = (t.transpose(1, 2) for t in parts)
        if cache is not None:
            k_BASD, v_BASD = cache.extend(k_BASD, v_BASD)
        y_BASD = self.attend(
            q_BASD,
            k_BASD,
            v_BASD,
            context.documents,
            self.dropout if self.training else 0.0,
            self.causal_attention,
            scale=self.scale,
            window=self.window,
        )
        y_BSAV = y_BASD.transpose(1, 2)[..., : self.mla.v_head_dim]
        y_BSH: Tensor = self.out(y_BSAV.flatten(2))
        return y_BSH

    def _heads(self, x_BSH: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, (B, S, A, D) each: kernels want one width, so that values end
        in zeros."""
        mla = self.mla
        rotary = context.sliding_rotary if self.slides else context.rotary
        assert rotary is not None
        if self.q is None:
            assert self.q_a is not None
            q_BSW = self.q_b(self.q_a_norm(self.q_a(x_BSH)))
        else:
            q_BSW = self.q(x_BSH)
        still = mla.qk_head_dim
        turning = mla.qk_pos_emb_head_dim
        q_BSAN, q_BSAR = q_BSW.unflatten(-1, (-1, mla.head_size)).split([still, turning], -1)
        latent_BSC, k_BSR = self.kv_a(x_BSH).split([mla.kv_lora_rank, turning], -1)
        kv_BSW = self.kv_b(self.kv_a_norm(latent_BSC))
        kv_BSAW = kv_BSW.unflatten(-1, (-1, still + mla.v_head_dim))
        k_BSAN, v_BSAV = kv_BSAW.split([still, mla.v_head_dim], -1)
        k_BS1R = rotate(_pairs_to_halves(self.whole(k_BSR).unsqueeze(2)), *rotary)
        k_BSAR = k_BS1R.expand(-1, -1, k_BSAN.shape[2], -1)
        return (
            torch.cat([q_BSAN, rotate(_pairs_to_halves(q_BSAR), *rotary)], -1),
            torch.cat([k_BSAN, k_BSAR], -1),
            F.pad(v_BSAV, (0, mla.head_size - mla.v_head_dim)),
        )
