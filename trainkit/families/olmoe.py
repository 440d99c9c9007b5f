"""OLMoE (Muennighoff et al. 2024, arXiv:2409.02060): Llama with an RMSNorm of all queries of a
token together, and of all keys, and experts whose weights are the router's probabilities as they
are.

Parameters: N = L(2HQ + 2HK + E(3HI + H) + 2H + Q + K) + 2VH + H, with E experts of width I.
"""

from __future__ import annotations

from dataclasses import replace

from trainkit.families.contract import ConfigKey, Routing
from trainkit.families.llama import (
    EXPERT_SETTINGS,
    LLAMA,
    NORMALIZED,
    expert_keys,
    shape_keys,
    without,
)

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
            # its norms of queries and keys are as wide as the hidden size and its part
            *without(
                shape_keys(layers=16, hidden=2048, heads=16, epsilon=1e-5),
                "intermediate_size",
                "head_dim",
            ),
            *expert_keys(
                ("num_experts", "num_local_experts", "intermediate_size"),
                experts=64,
                chosen=8,
                width=2048,
            ),
            NORMALIZED,
            ConfigKey("hidden_act", default="silu"),
            ConfigKey("attention_bias", default=False),
            ConfigKey("clip_qkv", default=None),
        ),
    ),
)
