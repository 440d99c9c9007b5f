"""DeepSeek-V3 (DeepSeek-AI 2024, arXiv:2412.19437; V3.1, R1 and Kimi K2 are of it, too): Llama
whose attention is by latents and whose MLPs, but in the first layers, are experts: sigmoids of the
router, experts of the best groups, a bias that only chooses, an expert that every token takes.

Parameters: N = L(H(C + R) + C + CA(N + U) + AUH + q + 2H) + M(3HF) + (L - M)(E(3HI + H) + 3HS)
+ 2VH + H, with q = HC' + C' + C'A(N + R), or HA(N + R) without a latent of queries; C' and C the
widths of the latents of queries and of keys and values, A heads, N, R and U channels of a head, M
layers without experts, E experts of width I, S the width of the one for all. A bias of E numbers
in each layer with experts is no parameter. The module that predicts one token more (section 2.2),
if it is asked for, has those of one more layer with experts, 2HH and 3H.
"""

from __future__ import annotations

from collections.abc import Mapping
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


def _latent_of_queries(config: Mapping[str, int]) -> int | None:
    """transformers' value where the key is absent; null: there is none."""
    return None if "q_lora_rank" in config else 1536


def _turning(config: Mapping[str, int]) -> int:
    return config.get("qk_rope_head_dim", 64)


def _head_size(config: Mapping[str, int]) -> int:
    return config.get("qk_nope_head_dim", 128) + _turning(config)


_RANK = "mla.q_lora_rank"
_KEYS = (
    *without(
        shape_keys(layers=61, hidden=7168, heads=128, groups=128, width=18432),
        "head_dim",
        "num_key_value_heads",
    ),
    # transformers writes these two, and reads neither
    ConfigKey("head_dim", "rotary_channels", derived=_turning),
    ConfigKey("qk_head_dim", "head_size", derived=_head_size),
    ConfigKey("num_key_value_heads", "query_groups", 128),
    ConfigKey("q_lora_rank", _RANK, setting=_RANK, derived=_latent_of_queries),
    *(
        ConfigKey(name, f"mla.{ours}", default, f"mla.{ours}")
        for name, ours, default in (
            ("kv_lora_rank", "kv_lora_rank", 512),
            ("qk_nope_head_dim", "qk_head_dim", 128),
            ("qk_rope_head_dim", "qk_pos_emb_head_dim", 64),
            ("v_head_dim", "v_head_dim", 128),
        )
    ),
    *expert_keys(
        ("n_routed_experts", "num_local_experts", "moe_intermediate_size"),
        experts=256,
        chosen=8,
        width=2048,
    ),
    ConfigKey("n_shared_experts", "moe.shared_experts", 1, "moe.shared_expert_intermediate_size"),
    ConfigKey("first_k_dense_replace", "moe.first_dense_layers", 3, "moe.first_dense_layers"),
    ConfigKey("n_group", "moe.groups", 8, "moe.router_num_groups"),
    ConfigKey("topk_group", "moe.kept_groups", 4, "moe.router_group_topk"),
    ConfigKey(
        "routed_scaling_factor",
        "moe.router_topk_scaling_factor",
        2.5,
        "moe.router_topk_scaling_factor",
    ),
    replace(NORMALIZED, default=True),
    ConfigKey("scoring_func", default="sigmoid"),
    ConfigKey("topk_method", default="noaux_tc"),
    ConfigKey("moe_layer_freq", default=1),
    ConfigKey("rope_interleave", default=True),
    ConfigKey("hidden_act", default="silu"),
    ConfigKey("attention_bias", default=False),
)

DEEPSEEK_V3 = replace(
    LLAMA,
    name="deepseek-v3",
    settings=(LLAMA.settings - {"num_query_groups", "sliding_rotary_base"})
    | EXPERT_SETTINGS
    | {"mla", "mtp_num_layers", "mtp_loss_scaling_factor"},
    routing=Routing(score="sigmoid", expert_bias=True, wide=True),
    hugging_face=replace(
        LLAMA.hugging_face,
        model_type="deepseek_v3",
        architecture="DeepseekV3ForCausalLM",
        inside={
            "attention_norm": ("input_layernorm",),
            "attention.q": ("self_attn.q_proj",),
            "attention.q_a": ("self_attn.q_a_proj",),
            "attention.q_a_norm": ("self_attn.q_a_layernorm",),
            "attention.q_b": ("self_attn.q_b_proj",),
            "attention.kv_a": ("self_attn.kv_a_proj_with_mqa",),
            "attention.kv_a_norm": ("self_attn.kv_a_layernorm",),
            "attention.kv_b": ("self_attn.kv_b_proj",),
            "attention.out": ("self_attn.o_proj",),
            "mlp_norm": ("post_attention_layernorm",),
            "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
            "mlp.down": ("mlp.down_proj",),
            "mlp.router": ("mlp.gate",),
            "mlp.shared_expert.gate_up": (
                "mlp.shared_experts.gate_proj",
                "mlp.shared_experts.up_proj",
            ),
            "mlp.shared_expert.down": ("mlp.shared_experts.down_proj",),
        },
        vectors={"mlp.router.expert_bias": "mlp.gate.e_score_correction_bias"},
        experts={
            "mlp.experts.gate_up": ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
            "mlp.experts.down": ("mlp.experts.{}.down_proj",),
        },
        keys=_KEYS,
        further={
            "mtp.enorm": "enorm",
            "mtp.hnorm": "hnorm",
            "mtp.eh_proj": "eh_proj",
            "mtp.final_norm": "shared_head.norm",
        },
        further_copies={"embed_tokens": "embed_tokens", "head": "shared_head.head"},
    ),
)
