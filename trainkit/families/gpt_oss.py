"""gpt-oss (OpenAI 2025, arXiv:2508.10925): Llama with a sink in each head's softmax, biases in
attention, windows in every other layer from the first, and experts with biases, whose gates and
values are kept within limits; a router with a bias.

Parameters: N = L(2HQ + 2HK + Q + 2K + H + A + E(3HI + H + 2I + H + 1) + 2H) + 2VH + H, with A
heads, E experts of width I.
"""

from __future__ import annotations

from dataclasses import replace

from trainkit.families.contract import ConfigKey, RotaryKeys, Routing, WindowKeys
from trainkit.families.llama import EXPERT_SETTINGS, LLAMA, expert_keys, shape_keys, without

GPT_OSS = replace(
    LLAMA,
    name="gpt-oss",
    settings=LLAMA.settings | EXPERT_SETTINGS,
    rotary_base=150000.0,
    qkv_bias=True,
    out_bias=True,
    sinks=True,
    sliding_window_pattern=2,
    routing=Routing(pre_softmax=False, bias=True, clamped=True),
    hugging_face=replace(
        LLAMA.hugging_face,
        model_type="gpt_oss",
        architecture="GptOssForCausalLM",
        inside={**LLAMA.hugging_face.inside, "mlp.router": ("mlp.router",)},
        vectors={"attention.sinks.weight": "self_attn.sinks"},
        experts={
            "mlp.experts.gate_up": ("mlp.experts.gate_up_proj",),
            "mlp.experts.down": ("mlp.experts.down_proj",),
        },
        keys=(
            *without(
                shape_keys(layers=36, hidden=2880, heads=64, groups=8, head_dim=64, epsilon=1e-5),
                "intermediate_size",
            ),
            *expert_keys(
                ("num_local_experts", "num_experts", "intermediate_size"),
                experts=128,
                chosen=4,
                width=2880,
            ),
            ConfigKey("hidden_act", default="silu"),
            ConfigKey("attention_bias", default=True),
            ConfigKey("swiglu_alpha", default=1.702),
            ConfigKey("swiglu_limit", default=7.0),
        ),
        rotary=RotaryKeys(theta="rope_theta", fraction="partial_rotary_factor", default=150000.0),
        windows=WindowKeys(128),
    ),
)
