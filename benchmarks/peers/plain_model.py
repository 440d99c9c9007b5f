"""A plain GPT or Llama as people write it around torch alone, for the peers of the speed
benchmarks: nothing of trainkit is in it.

Shapes: B samples, S tokens, H hidden size, A heads, G heads of keys and values, D of a head, V
vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def _rotated(x_BASD: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
    first, second = x_BASD.chunk(2, dim=-1)
    return x_BASD * cos_SD + torch.cat([-second, first], dim=-1) * sin_SD


class _Attention(nn.Module):
    def __init__(self, shape: Mapping[str, Any], *, bias: bool) -> None:
        super().__init__()
        hidden = shape["hidden_size"]
        self.heads = shape["num_attention_heads"]
        self.groups = shape.get("num_query_groups", self.heads)
        self.size = hidden // self.heads
        self.qkv = nn.Linear(hidden, (self.heads + 2 * self.groups) * self.size, bias=bias)
        self.out = nn.Linear(hidden, hidden, bias=bias)

    def forward(self, x_BSH: Tensor, turns: tuple[Tensor, Tensor] | None) -> Tensor:
        widths = [n * self.size for n in (self.heads, self.groups, self.groups)]
        q, k, v = (
            part.unflatten(-1, (-1, self.size)).transpose(1, 2)
            for part in self.qkv(x_BSH).split(widths, dim=-1)
        )
        if turns is not None:
            cos, sin = (t.to(q.dtype) for t in turns)
            q = _rotated(q, cos, sin)
            k = _rotated(k, cos, sin)
        y = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=self.heads != self.groups
        )
        y_BSH: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return y_BSH


class _Gelu(nn.Module):
    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, width)
        self.down = nn.Linear(width, hidden)

    def forward(self, x_BSH: Tensor) -> Tensor:
        y_BSH: Tensor = self.down(F.gelu(self.up(x_BSH), approximate="tanh"))
        return y_BSH


class _Swiglu(nn.Module):
    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, width, bias=False)
        self.up = nn.Linear(hidden, width, bias=False)
        self.down = nn.Linear(width, hidden, bias=False)

    def forward(self, x_BSH: Tensor) -> Tensor:
        y_BSH: Tensor = self.down(F.silu(self.gate(x_BSH)) * self.up(x_BSH))
        return y_BSH


class _Block(nn.Module):
    def __init__(self, shape: Mapping[str, Any]) -> None:
        super().__init__()
        hidden = shape["hidden_size"]
        llama = shape["family"] == "llama"
        norm: Any = nn.RMSNorm if llama else nn.LayerNorm
        width = shape.get("ffn_hidden_size") or 4 * hidden
        self.attention_norm = norm(hidden)
        self.attention = _Attention(shape, bias=not llama)
        self.mlp_norm = norm(hidden)
        self.mlp = _Swiglu(hidden, width) if llama else _Gelu(hidden, width)

    def forward(self, x_BSH: Tensor, turns: tuple[Tensor, Tensor] | None) -> Tensor:
        x_BSH = x_BSH + self.attention(self.attention_norm(x_BSH), turns)
        y_BSH: Tensor = x_BSH + self.mlp(self.mlp_norm(x_BSH))
        return y_BSH


class PlainModel(nn.Module):
    """A GPT-2 (learned positions, tied head) or a Llama (rotary, own head).

    Args:
        shape: keys of a [models.X] table.
        recompute: compute every block again in backward.
    """

    def __init__(self, shape: Mapping[str, Any], *, recompute: bool = False) -> None:
        super().__init__()
        hidden = shape["hidden_size"]
        # as nanoGPT: a vocabulary that products like
        rows = -(-shape["vocab_size"] // 128) * 128
        self.recompute = recompute
        llama = shape["family"] == "llama"
        self.tokens = nn.Embedding(rows, hidden)
        self.positions = None if llama else nn.Embedding(shape["seq_length"], hidden)
        self.blocks = nn.ModuleList(_Block(shape) for _ in range(shape["num_layers"]))
        self.loss = _loss  # for who compiles it by itself
        self.norm: nn.Module = nn.RMSNorm(hidden) if llama else nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, rows, bias=False)
        if llama:
            size = hidden // shape["num_attention_heads"]
            powers = torch.arange(0, size, 2, dtype=torch.float64) / size
            turns = torch.arange(shape["seq_length"])[:, None] * (
                shape.get("rotary_base", 10000.0) ** -powers
            )
            turns = torch.cat([turns, turns], dim=-1)
            self.register_buffer("cos", turns.cos().float(), persistent=False)
            self.register_buffer("sin", turns.sin().float(), persistent=False)
        else:
            self.head.weight = self.tokens.weight
        self.apply(_begin)
        for name, weight in self.named_parameters():
            if name.endswith(("out.weight", "down.weight")):
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * shape["num_layers"]))

    def forward(self, tokens_BS: Tensor, labels_BS: Tensor) -> Tensor:
        """The mean loss, nats a token."""
        x_BSH = self.tokens(tokens_BS)
        turns = None
        if self.positions is None:
            turns = (self.cos, self.sin)
        else:
            x_BSH = x_BSH + self.positions.weight[: tokens_BS.shape[1]]
        for block in self.blocks:
            if self.recompute:
                x_BSH = checkpoint(block, x_BSH, turns, use_reentrant=False)
            else:
                x_BSH = block(x_BSH, turns)
        return self.loss(self.head(self.norm(x_BSH)), labels_BS)


def _loss(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    return F.cross_entropy(logits_BSV.flatten(0, 1).float(), labels_BS.flatten())


def _begin(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
