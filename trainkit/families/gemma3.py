"""Gemma 3's language model (Gemma team 2025, arXiv:2503.19786): norms before and after attention
and MLP, whose weights are saved around 0; an RMSNorm of every head of queries and keys; GeGLU;
embeddings multiplied by sqrt(H), tied; five of six layers have a window and a theta of their own.

Parameters: N = L(2HQ + 2HK + 3HF + 4H + 2D) + VH + H.
"""

from __future__ import annotations

import math
from dataclasses import replace

from trainkit.families.contract import (
    RMS_NORM_FROM_ZERO,
    ConfigKey,
    RotaryKeys,
    WindowKeys,
)
from trainkit.families.llama import LLAMA, shape_keys

GEMMA3 = replace(
    LLAMA,
    name="gemma3",
    norm=RMS_NORM_FROM_ZERO,
    activation="geglu",
    untied=False,
    rotary_base=1e6,
    norm_placement="both",
    query_key_norm="head",
    stretches_windows=False,
    sliding_window_pattern=6,
    sliding_rotary_base=10000.0,
    embedding_scale=math.sqrt,
    hugging_face=replace(
        LLAMA.hugging_face,
        model_type="gemma3_text",
        architecture="Gemma3ForCausalLM",
        inside={
            "attention_norm": ("input_layernorm",),
            "attention.qkv": LLAMA.hugging_face.inside["attention.qkv"],
            "attention.q_norm": ("self_attn.q_norm",),
            "attention.k_norm": ("self_attn.k_norm",),
            "attention.out": LLAMA.hugging_face.inside["attention.out"],
            "post_attention_norm": ("post_attention_layernorm",),
            "mlp_norm": ("pre_feedforward_layernorm",),
            "mlp.gate_up": LLAMA.hugging_face.inside["mlp.gate_up"],
            "mlp.down": LLAMA.hugging_face.inside["mlp.down"],
            "post_mlp_norm": ("post_feedforward_layernorm",),
        },
        keys=(
            *shape_keys(
                layers=26, hidden=2304, heads=8, groups=4, head_dim=256, width=9216, tied=True
            ),
            ConfigKey("hidden_activation", default="gelu_pytorch_tanh"),
            ConfigKey("query_pre_attn_scalar", "query_scalar", 256, "query_pre_attn_scalar"),
            ConfigKey("attention_bias", default=False),
        ),
        rotary=RotaryKeys(
            theta="rope_theta",
            fraction="partial_rotary_factor",
            sliding_theta="rope_local_base_freq",
            by_layer=True,
            default=1e6,
        ),
        windows=WindowKeys(4096),
    ),
)
