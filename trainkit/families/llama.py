"""Llama 2 and 3 (Touvron et al. 2023, arXiv:2307.09288): RMSNorm, SwiGLU, rotary positions, grouped
queries, no biases, a head of its own.

Parameters: N = L(2H^2 + 2HK + 3HF + 2H) + 2VH + H.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from trainkit.families.contract import (
    RMS_NORM,
    SWIGLU_MLP,
    ConfigKey,
    Family,
    HuggingFace,
    RotaryKeys,
)


def _ffn_width(hidden_size: int) -> int:
    """Megatron's default for SwiGLU: two thirds of 4 * hidden_size, rounded down to a multiple
    of 64."""
    return max(64, 8 * hidden_size // 3 // 64 * 64)


def _head_dim(config: Mapping[str, int]) -> int:
    return config.get("hidden_size", 4096) // config.get("num_attention_heads", 32)


LLAMA = Family(
    name="llama",
    norm=RMS_NORM,
    mlp=SWIGLU_MLP,
    bias=False,
    learned_positions=False,
    rotary_percent=1.0,
    parallel_residual=False,
    untied=True,
    gelu=None,
    ffn_width=_ffn_width,
    settings=frozenset({"num_query_groups", "rotary_base", "rope_scaling"}),
    hugging_face=HuggingFace(
        model_type="llama",
        architecture="LlamaForCausalLM",
        prefix="model.",
        outside={
            "embed_tokens": "model.embed_tokens",
            "final_norm": "model.norm",
            "head": "lm_head",
        },
        block="model.layers.{}.",
        inside={
            "attention_norm": ("input_layernorm",),
            "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "attention.out": ("self_attn.o_proj",),
            "mlp_norm": ("post_attention_layernorm",),
            "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
            "mlp.down": ("mlp.down_proj",),
        },
        buffers=re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"),
        keys=(
            ConfigKey("num_hidden_layers", "num_layers", 32, "num_layers"),
            ConfigKey("hidden_size", "hidden_size", 4096, "hidden_size"),
            ConfigKey("num_attention_heads", "num_attention_heads", 32, "num_attention_heads"),
            ConfigKey(
                "num_key_value_heads",
                "query_groups",
                setting="num_query_groups",
                derived=lambda config: config.get("num_attention_heads", 32),
            ),
            ConfigKey("head_dim", "head_size", setting="kv_channels", derived=_head_dim),
            ConfigKey("intermediate_size", "ffn_width", 11008, "ffn_hidden_size"),
            ConfigKey("hidden_act", default="silu"),
            ConfigKey("rms_norm_eps", "layernorm_epsilon", 1e-6, "layernorm_epsilon"),
            ConfigKey("tie_word_embeddings", "tied", False, "untie_embeddings_and_output_weights"),
            ConfigKey("attention_bias", default=False),
            ConfigKey("mlp_bias", default=False),
        ),
        dropout={"attention_dropout": "attention_dropout"},
        rotary=RotaryKeys(theta="rope_theta", fraction="partial_rotary_factor"),
    ),
)
