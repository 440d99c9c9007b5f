"""Qwen3, dense (Yang et al. 2025, arXiv:2505.09388): Llama with an RMSNorm of every head of queries
and keys, before they turn, and a head size of its own.

Parameters: N = L(2HQ + 2HK + 3HF + 2H + 2D) + 2VH + H, the head tied in the small ones: VH less.
"""

from __future__ import annotations

from dataclasses import replace

from trainkit.families.contract import ConfigKey, WindowKeys
from trainkit.families.llama import LLAMA, shape_keys

QWEN3 = replace(
    LLAMA,
    name="qwen3",
    rotary_base=1e6,
    query_key_norm="head",
    hugging_face=replace(
        LLAMA.hugging_face,
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        inside={
            **LLAMA.hugging_face.inside,
            "attention.q_norm": ("self_attn.q_norm",),
            "attention.k_norm": ("self_attn.k_norm",),
        },
        keys=(
            *shape_keys(groups=32, head_dim=128, width=22016),
            ConfigKey("hidden_act", default="silu"),
            ConfigKey("attention_bias", default=False),
        ),
        windows=WindowKeys(4096, switched=True),
    ),
)
