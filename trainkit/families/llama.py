"""Llama 2 and 3 (Touvron et al. 2023, arXiv:2307.09288): RMSNorm, SwiGLU, rotary positions, grouped
queries, no biases, a head of its own.

Parameters: N = L(2H^2 + 2HK + 3HF + 2H) + 2VH + H.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from trainkit.families.contract import (
    RMS_NORM,
    ConfigKey,
    Family,
    HuggingFace,
    RotaryKeys,
)


def _ffn_width(hidden_size: int) -> int:
    """Megatron's default for SwiGLU: two thirds of 4 * hidden_size, rounded down to a multiple
    of 64."""
    return max(64, 8 * hidden_size // 3 // 64 * 64)


def shape_keys(
    *,
    layers: int = 32,
    hidden: int = 4096,
    heads: int = 32,
    groups: int | None = None,
    head_dim: int | None = None,
    width: int = 11008,
    epsilon: float = 1e-6,
    tied: bool = False,
) -> tuple[ConfigKey, ...]:
    """The keys of config.json that say a shape, as Llama and its descendants name them, with
    transformers' values where one is absent.

    Args:
        groups: None: as many as heads.
        head_dim: None: the hidden size over the heads.
        layers, hidden, heads, width, epsilon, tied: of the keys below.
    """

    def all_heads(config: Mapping[str, int]) -> int:
        return config.get("num_attention_heads", heads)

    def divided(config: Mapping[str, int]) -> int:
        return config.get("hidden_size", hidden) // all_heads(config)

    return (
        ConfigKey("num_hidden_layers", "num_layers", layers, "num_layers"),
        ConfigKey("hidden_size", "hidden_size", hidden, "hidden_size"),
        ConfigKey("num_attention_heads", "num_attention_heads", heads, "num_attention_heads"),
        ConfigKey(
            "num_key_value_heads",
            "query_groups",
            groups,
            "num_query_groups",
            derived=all_heads if groups is None else None,
        ),
        ConfigKey(
            "head_dim",
            "head_size",
            head_dim,
            "kv_channels",
            derived=divided if head_dim is None else None,
        ),
        ConfigKey("intermediate_size", "ffn_width", width, "ffn_hidden_size"),
        ConfigKey("rms_norm_eps", "layernorm_epsilon", epsilon, "layernorm_epsilon"),
        ConfigKey("tie_word_embeddings", "tied", tied, "untie_embeddings_and_output_weights"),
    )


def without(keys: Iterable[ConfigKey], *names: str) -> tuple[ConfigKey, ...]:
    """Keys but those of these names."""
    return tuple(key for key in keys if key.name not in names)


def expert_keys(
    names: tuple[str, str, str], *, experts: int, chosen: int, width: int
) -> tuple[ConfigKey, ...]:
    """The keys of config.json that say how many experts there are, how many of them a token takes
    and how wide they are.

    Args:
        names: transformers' name of the number of experts, another of it, and that of the width.
        experts, chosen, width: transformers' values where a key is absent.
    """
    count, other_name, of_width = names
    number, size = "moe.num_experts", "moe.ffn_hidden_size"
    return (
        ConfigKey(count, number, experts, number, other_name=other_name),
        ConfigKey("num_experts_per_tok", "moe.router_topk", chosen, "moe.router_topk"),
        ConfigKey(of_width, size, width, size),
    )


# whether weights of a token's experts sum to 1
NORMALIZED = ConfigKey(
    "norm_topk_prob", "routing.normalized", default=False, setting="moe.router_norm_topk_prob"
)

# what families of rotary positions and grouped queries can say
ROTARY_SETTINGS = frozenset(
    {"num_query_groups", "rotary_base", "rope_scaling", "sliding_rotary_base"}
)
# what families with experts can say besides
EXPERT_SETTINGS = frozenset({"moe"})


LLAMA = Family(
    name="llama",
    norm=RMS_NORM,
    activation="swiglu",
    bias=False,
    learned_positions=False,
    rotary_percent=1.0,
    parallel_residual=False,
    untied=True,
    gelu="tanh",
    ffn_width=_ffn_width,
    settings=ROTARY_SETTINGS,
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
            *shape_keys(),
            ConfigKey("hidden_act", default="silu"),
            ConfigKey("attention_bias", default=False),
            ConfigKey("mlp_bias", default=False),
        ),
        dropout={"attention_dropout": "attention_dropout"},
        rotary=RotaryKeys(theta="rope_theta", fraction="partial_rotary_factor"),
    ),
)
