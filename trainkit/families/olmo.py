"""OLMo 2 (OLMo team 2025, arXiv:2501.00656) and OLMo 3: Llama with norms after attention and MLP
instead of before them, and an RMSNorm of all queries of a token together, and of all keys. OLMo 3:
three of four layers have a window; only the others are stretched by rope_scaling.

Parameters: N = L(2HQ + 2HK + 3HF + 2H + Q + K) + 2VH + H.
"""

from __future__ import annotations

from dataclasses import replace

from trainkit.families.contract import ConfigKey, RotaryKeys, WindowKeys
from trainkit.families.llama import LLAMA, shape_keys

_INSIDE = {
    "attention.qkv": LLAMA.hugging_face.inside["attention.qkv"],
    "attention.q_norm": ("self_attn.q_norm",),
    "attention.k_norm": ("self_attn.k_norm",),
    "attention.out": LLAMA.hugging_face.inside["attention.out"],
    "post_attention_norm": ("post_attention_layernorm",),
    "mlp.gate_up": LLAMA.hugging_face.inside["mlp.gate_up"],
    "mlp.down": LLAMA.hugging_face.inside["mlp.down"],
    "post_mlp_norm": ("post_feedforward_layernorm",),
}

OLMO2 = replace(
    LLAMA,
    name="olmo2",
    rotary_base=500000.0,
    norm_placement="after",
    query_key_norm="projection",
    hugging_face=replace(
        LLAMA.hugging_face,
        model_type="olmo2",
        architecture="Olmo2ForCausalLM",
        inside=_INSIDE,
        keys=(
            *shape_keys(epsilon=1e-5),
            ConfigKey("hidden_act", default="silu"),
            ConfigKey("attention_bias", default=False),
        ),
    ),
)

OLMO3 = replace(
    OLMO2,
    name="olmo3",
    stretches_windows=False,
    sliding_window_pattern=4,
    hugging_face=replace(
        OLMO2.hugging_face,
        model_type="olmo3",
        architecture="Olmo3ForCausalLM",
        rotary=RotaryKeys(
            theta="rope_theta",
            fraction="partial_rotary_factor",
            by_layer=True,
            default=500000.0,
            sliding_default=500000.0,
        ),
        windows=WindowKeys(4096),
    ),
)
