"""Shapes of every family that are held against transformers' models (peers.py)."""

from __future__ import annotations

from random import Random
from typing import Any

from trainkit.families import FAMILIES
from trainkit.jobs.schema import Model, RopeScaling

VOCAB = 97  # a prime: padding is always at work
POSITIONS = 24
# of four frequencies one stays, one is mixed, two are divided
LLAMA3 = RopeScaling(type="llama3", factor=8.0, original_max_position_embeddings=64)


def _gpt(**changes: Any) -> Model:
    return Model(
        **{
            "family": "gpt",
            "num_layers": 2,
            "hidden_size": 36,
            "num_attention_heads": 3,
            "seq_length": POSITIONS,
            **changes,
        }
    )


def _neox(**changes: Any) -> Model:
    return Model(
        **{
            "family": "gpt-neox",
            "num_layers": 2,
            "hidden_size": 48,
            "num_attention_heads": 3,
            "seq_length": POSITIONS,
            **changes,
        }
    )


def _llama(**changes: Any) -> Model:
    return Model(
        **{
            "family": "llama",
            "num_layers": 2,
            "hidden_size": 48,
            "num_attention_heads": 6,
            "seq_length": POSITIONS,
            **changes,
        }
    )


YARN = RopeScaling(
    type="yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=4.0, beta_slow=1.0
)


def _modern(family: str, **changes: Any) -> Model:
    """A shape whose heads are wider than the hidden size divided by them, with a window where
    the family has one."""
    shape: dict[str, Any] = {
        "num_layers": 4 if family in ("olmo3", "gemma3") else 2,
        "hidden_size": 48,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 16,
        "ffn_hidden_size": 80,
        "seq_length": POSITIONS,
    }
    if family in ("olmo3", "gemma3"):
        shape["sliding_window"] = 7
    return Model(**{"family": family, **shape, **changes})


CASES: dict[str, Model] = {
    "gpt": _gpt(),
    "gpt-untied": _gpt(untie_embeddings_and_output_weights=True),
    "gpt-exact-gelu": _gpt(gelu="exact", ffn_hidden_size=50, layernorm_epsilon=1e-2),
    "gpt-more-positions": _gpt(max_position_embeddings=40),
    "neox": _neox(),
    "neox-tied": _neox(untie_embeddings_and_output_weights=False),
    "neox-rotary-all": _neox(rotary_percent=1.0, rotary_base=500.0),
    "neox-rotary-rounded-down": _neox(rotary_percent=0.4),  # 6.4 of 16 channels
    "neox-tanh": _neox(gelu="tanh", ffn_hidden_size=50, layernorm_epsilon=1e-2),
    "neox-sequential": _neox(gpt_j_residual=False),
    "neox-one-norm": _neox(gpt_j_tied=True),
    "llama": _llama(),
    "llama-tied": _llama(untie_embeddings_and_output_weights=False),
    "llama-3-groups": _llama(num_query_groups=3, rotary_base=500000.0),
    "llama-2-groups": _llama(num_query_groups=2, ffn_hidden_size=50, layernorm_epsilon=1e-2),
    "llama-1-group": _llama(num_query_groups=1),
    "llama-wide-heads": _llama(num_query_groups=2, kv_channels=10),
    "llama-linear": _llama(
        rope_scaling=RopeScaling(type="linear", factor=4.0), max_position_embeddings=40
    ),
    "llama-3.1": _llama(num_query_groups=2, rope_scaling=LLAMA3, max_position_embeddings=72),
    "llama-3.1-tied": _llama(
        rope_scaling=LLAMA3,
        rotary_base=500000.0,
        untie_embeddings_and_output_weights=False,
        max_position_embeddings=72,
    ),
    "mistral": _modern("mistral", sliding_window=5),
    "mistral-all": _modern("mistral", rotary_base=500.0),
    "qwen2": _modern("qwen2", kv_channels=None),
    "qwen2-tied": _modern(
        "qwen2", num_query_groups=1, untie_embeddings_and_output_weights=False, kv_channels=8
    ),
    "qwen3": _modern("qwen3"),
    "qwen3-tied": _modern(
        "qwen3", num_query_groups=4, untie_embeddings_and_output_weights=False, kv_channels=6
    ),
    "qwen3-yarn": _modern("qwen3", rope_scaling=YARN, max_position_embeddings=80),
    "olmo2": _modern("olmo2"),
    "olmo2-1-group": _modern("olmo2", num_query_groups=1, layernorm_epsilon=1e-2),
    "olmo3": _modern("olmo3"),
    "olmo3-yarn": _modern("olmo3", rope_scaling=YARN, max_position_embeddings=80),
    "gemma3": _modern("gemma3"),
    "gemma3-4b": _modern(
        "gemma3",
        rope_scaling=RopeScaling(type="linear", factor=8.0),
        query_pre_attn_scalar=24,
        sliding_window_pattern=2,
        num_query_groups=4,
    ),
}

EXPERTS = {"num_experts": 6, "router_topk": 2, "ffn_hidden_size": 20}
CASES |= {
    "qwen3-moe": _modern("qwen3-moe", moe=EXPERTS),
    "qwen3-moe-dense-first": _modern(
        "qwen3-moe",
        num_layers=3,
        sliding_window=5,
        moe=EXPERTS | {"first_dense_layers": 2, "router_norm_topk_prob": False},
    ),
    "mixtral": _modern("mixtral", moe=EXPERTS),
    "mixtral-window": _modern("mixtral", sliding_window=5, moe=EXPERTS | {"router_topk": 6}),
    "olmoe": _modern("olmoe", kv_channels=None, moe=EXPERTS | {"router_topk": 3}),
    "olmoe-normalized": _modern(
        "olmoe",
        num_query_groups=1,
        kv_channels=None,
        untie_embeddings_and_output_weights=False,
        moe=EXPERTS | {"router_norm_topk_prob": True},
    ),
}


def random_experts(family: str, layers: int, draw: Random) -> dict[str, Any]:
    """[models.X.moe] with what transformers' class of a family can say."""
    experts = draw.randint(2, 7)
    keys: dict[str, Any] = {
        "num_experts": experts,
        "router_topk": draw.randint(2, experts),
        "ffn_hidden_size": draw.randint(4, 30),
    }
    if family != "mixtral":
        keys["router_norm_topk_prob"] = draw.choice([False, True])
    if family == "qwen3-moe":
        keys["first_dense_layers"] = draw.randrange(layers)
    return keys


def random_shape(family: str, draw: Random) -> Model:
    """A small shape of a family that rotary positions turn, with any of its keys."""
    groups, per_group = draw.choice([1, 2, 3]), draw.choice([1, 2])
    seq_length = draw.randint(5, 20)
    heads = groups * per_group
    keys: dict[str, Any] = {
        "num_layers": draw.randint(1, 3),
        "hidden_size": heads * draw.choice([10, 12, 24]),
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "ffn_hidden_size": draw.randint(10, 60),
        "seq_length": seq_length,
        "rotary_base": draw.choice([500.0, 1e4, 1e6]),
        "layernorm_epsilon": draw.choice([1e-6, 1e-3]),
        "untie_embeddings_and_output_weights": draw.choice([False, True]),
    }
    if FAMILIES[family].routing is not None:
        keys["moe"] = random_experts(family, keys["num_layers"], draw)
    if draw.random() < 0.5 and family != "olmoe":
        keys["kv_channels"] = draw.choice([4, 8, 14])
    if family in ("mistral", "olmo3", "gemma3", "mixtral", "qwen3-moe"):
        keys["sliding_window"] = draw.randint(2, seq_length)
    if family in ("olmo3", "gemma3"):
        keys["sliding_window_pattern"] = draw.randint(1, 3)
    if family == "gemma3":
        keys["query_pre_attn_scalar"] = draw.randint(3, 30)
        keys["sliding_rotary_base"] = draw.choice([100.0, 1e4])
    if draw.random() < 0.4:
        keys["rope_scaling"] = {
            "type": draw.choice(["linear", "yarn"]),
            "factor": draw.choice([1.5, 8.0]),
            "original_max_position_embeddings": 32,
        }
        keys["max_position_embeddings"] = 64
    return Model.model_validate({"family": family, **keys})


ONE_OF_EACH = (
    "gpt",
    "neox",
    "llama-3-groups",
    "qwen2",
    "qwen3",
    "olmo2",
    "olmo3",
    "gemma3",
    "qwen3-moe",
    "mixtral",
    "olmoe",
)
