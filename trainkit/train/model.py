"""One GPT, read from top to bottom. It knows nothing of ranks, shards or devices.

Shapes: B samples of a micro-batch, S tokens of a sample, H hidden size, F width of the MLP, A attention heads,
D = H / A channels of a head, V vocabulary, P learned positions.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainkit.base.errors import ConfigError
from trainkit.jobs.schema import Model


class Attention(nn.Module):
    """Causal self-attention with one fused projection: rows of `qkv` are all queries, then all keys, then all values."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.head_size = model.hidden_size // model.num_attention_heads
        self.qkv = nn.Linear(model.hidden_size, 3 * model.hidden_size)
        self.out = nn.Linear(model.hidden_size, model.hidden_size)

    def forward(self, x_BSH: Tensor) -> Tensor:
        q_BASD, k_BASD, v_BASD = (t_BSH.unflatten(-1, (-1, self.head_size)).transpose(1, 2) for t_BSH in self.qkv(x_BSH).chunk(3, dim=-1))
        y_BASD = F.scaled_dot_product_attention(q_BASD, k_BASD, v_BASD, is_causal=True)
        y_BSH: Tensor = self.out(y_BASD.transpose(1, 2).flatten(2))
        return y_BSH


class MLP(nn.Module):
    """Two projections around GELU, in the tanh form that GPT-2 and Megatron use."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        width = model.ffn_hidden_size or 4 * model.hidden_size
        self.up = nn.Linear(model.hidden_size, width)
        self.down = nn.Linear(width, model.hidden_size)

    def forward(self, x_BSH: Tensor) -> Tensor:
        h_BSF = F.gelu(self.up(x_BSH), approximate="tanh")
        y_BSH: Tensor = self.down(h_BSF)
        return y_BSH


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(model.hidden_size, eps=model.layernorm_epsilon)
        self.attention = Attention(model)
        self.mlp_norm = nn.LayerNorm(model.hidden_size, eps=model.layernorm_epsilon)
        self.mlp = MLP(model)

    def forward(self, x_BSH: Tensor) -> Tensor:
        x_BSH = x_BSH + self.attention(self.attention_norm(x_BSH))
        x_BSH = x_BSH + self.mlp(self.mlp_norm(x_BSH))
        return x_BSH


class GPT(nn.Module):
    """GPT-2/3: learned positions, LayerNorm before each half of a block, biases, tied or untied head (Radford 2019).

    Parameters: L(12H^2 + 13H) + 2H + VH + PH, and VH more if untied; 12H^2 + 13H is 4H^2 + 2HF + 9H + F for another F.

    Args:
        model: the shape; `family` must be "gpt".
        vocab_size: rows of the embedding, whatever the layout (padding is a layout's own affair).
    """

    def __init__(self, model: Model, vocab_size: int) -> None:
        super().__init__()
        if model.family != "gpt":
            raise ConfigError(f"model family {model.family!r} is to come; the native engine has 'gpt'")
        self.embed_tokens = nn.Embedding(vocab_size, model.hidden_size)
        self.embed_positions = nn.Embedding(model.max_position_embeddings or model.seq_length, model.hidden_size)
        # A dict, not a list: a layer keeps its global number when a pipeline stage holds only some of them.
        self.layers = nn.ModuleDict({str(i): Block(model) for i in range(model.num_layers)})
        self.final_norm = nn.LayerNorm(model.hidden_size, eps=model.layernorm_epsilon)
        self.head = nn.Linear(model.hidden_size, vocab_size, bias=False) if model.untie_embeddings_and_output_weights else None

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Logits of the next token at every position: (B, S) ids -> (B, S, V)."""
        positions_S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        x_BSH = self.embed_tokens(tokens_BS) + self.embed_positions(positions_S)
        for block in self.layers.values():
            x_BSH = block(x_BSH)
        weight_VH = self.embed_tokens.weight if self.head is None else self.head.weight
        logits_BSV = F.linear(self.final_norm(x_BSH), weight_VH)
        return logits_BSV


def token_loss(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    """Mean cross-entropy over all tokens, in nats, in fp32 or wider."""
    wide = torch.promote_types(logits_BSV.dtype, torch.float32)
    return F.cross_entropy(logits_BSV.flatten(0, 1).to(wide), labels_BS.flatten())
