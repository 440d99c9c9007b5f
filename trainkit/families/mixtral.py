"""Mixtral (Jiang et al. 2024, arXiv:2401.04088): Llama whose MLPs are several, of which each token
takes the router's best; their weights sum to 1.

Parameters: N = L(2HQ + 2HK + E(3HI + H) + 2H) + 2VH + H, with E experts of width I.
"""

from __future__ import annotations

from dataclasses import replace

from trainkit.families.contract import ConfigKey, Routing, WindowKeys
from trainkit.families.llama import EXPERT_SETTINGS, LLAMA, expert_keys, shape_keys, without

MIXTRAL = replace(
    LLAMA,
    name="mixtral",
    settings=LLAMA.settings | EXPERT_SETTINGS,
    rotary_base=1e6,
    routing=Routing(),
    hugging_face=replace(
        LLAMA.hugging_face,
        model_type="mixtral",
        architecture="MixtralForCausalLM",
        inside={**LLAMA.hugging_face.inside, "mlp.router": ("block_sparse_moe.gate",)},
        experts={
            "mlp.experts.gate_up": (
                "block_sparse_moe.experts.{}.w1",
                "block_sparse_moe.experts.{}.w3",
            ),
            "mlp.experts.down": ("block_sparse_moe.experts.{}.w2",),
        },
        keys=(
            *without(shape_keys(groups=8, epsilon=1e-5), "intermediate_size"),
            *expert_keys(
                ("num_local_experts", "num_experts", "intermediate_size"),
                experts=8,
                chosen=2,
                width=14336,
            ),
            ConfigKey("hidden_act", default="silu"),
        ),
        windows=WindowKeys(0, by_layer=False),
    ),
)
