"""OLMoE (Muennighoff et al. 2024, arXiv:2409.02060): Llama with an RMSNorm of all queries of a
token together, and of all keys, and experts whose weights are the router's probabilities as they
are.

Parameters: N = L(2HQ + 2HK + E(3HI + H) + 2H + Q + K) + 2VH + H, with E experts of width I.
"""

from __future__ import annotations

from dataclasses import replace

from trainkit.families.contract import ConfigKey, Routing
from trainkit.families.llama import EXPERT_SETTINGS, LLAMA, shape_keys

OLMOE = replace(
    LLAMA,
    name="olmoe",
    settings=LLAMA.settings | EXPERT_SETTINGS,
    query_key_norm="projection",
    routing=Routing(normalized=False),
    hugging_face=replace(
        LLAMA.hugging_face,
        model_type="olmoe",
        architecture="OlmoeForCausalLM",
        inside={
            **LLAMA.hugging_face.inside,
            "attention.q_norm": ("self_attn.q_norm",),
            "attention.k_norm": ("self_attn.k_norm",),
            "mlp.router": ("mlp.gate",),
        },
        experts={
            "mlp.experts.gate_up": ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
            "mlp.experts.down": ("mlp.experts.{}.down_proj",),
        },
        keys=(
            *shape_keys(layers=16, hidden=2048, heads=16, width=2048, epsilon=1e-5),
            ConfigKey("hidden_act", default="silu"),
            ConfigKey("attention_bias", default=False),
            ConfigKey("clip_qkv", default=None),
        ),
    ),
)
