"""Qwen3 with experts (Yang et al. 2025, arXiv:2505.09388): every MLP is several small ones, of
which each token takes the router's best; their weights sum to 1.

Parameters: N = L(2HQ + 2HK + E(3HI + H) + 2H + 2D) + 2VH + H, with E experts of width I.
"""

from __future__ import annotations

from dataclasses import replace

from trainkit.families.contract import ConfigKey, Routing, WindowKeys
from trainkit.families.llama import EXPERT_SETTINGS, NORMALIZED, expert_keys, shape_keys
from trainkit.families.qwen3 import QWEN3

QWEN3_MOE = replace(
    QWEN3,
    name="qwen3-moe",
    settings=QWEN3.settings | EXPERT_SETTINGS,
    routing=Routing(),
    hugging_face=replace(
        QWEN3.hugging_face,
        model_type="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        inside={**QWEN3.hugging_face.inside, "mlp.router": ("mlp.gate",)},
        experts={
            "mlp.experts.gate_up": ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
            "mlp.experts.down": ("mlp.experts.{}.down_proj",),
        },
        keys=(
            *shape_keys(layers=24, hidden=2048, groups=4, width=6144),
            *expert_keys(
                ("num_experts", "num_local_experts", "moe_intermediate_size"),
                experts=128,
                chosen=8,
                width=768,
            ),
            NORMALIZED,
            ConfigKey("decoder_sparse_step", default=1),
            ConfigKey("mlp_only_layers", "moe.dense_layers", [], "moe.first_dense_layers"),
            ConfigKey("hidden_act", default="silu"),
            ConfigKey("attention_bias", default=False),
        ),
        windows=WindowKeys(4096, by_layer=False, switched=True),
    ),
)
