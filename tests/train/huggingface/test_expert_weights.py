"""Hugging Face folders of models with experts."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from trainkit.families import FAMILIES
from trainkit.jobs.schema import Model
from trainkit.train.huggingface.config import contradictions

WITH_EXPERTS = [name for name, family in FAMILIES.items() if family.routing is not None]


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_keys_of_experts_left_out_have_transformers_defaults(family: str) -> None:
    """Held against transformers' own, which names them all."""
    transformers: Any = importlib.import_module("transformers")

    theirs = transformers.AutoConfig.for_model(FAMILIES[family].hugging_face.model_type)
    width = theirs.intermediate_size
    if family == "qwen3-moe":
        width = theirs.moe_intermediate_size
    shape: dict[str, Any] = {
        "family": family,
        "num_layers": theirs.num_hidden_layers,
        "hidden_size": theirs.hidden_size,
        "num_attention_heads": theirs.num_attention_heads,
        "num_query_groups": theirs.num_key_value_heads,
        "seq_length": 2048,
        "rotary_base": theirs.rope_parameters["rope_theta"],
        "layernorm_epsilon": theirs.rms_norm_eps,
    }
    shape["moe"] = {
        "num_experts": theirs.num_experts,
        "router_topk": theirs.num_experts_per_tok,
        "ffn_hidden_size": width,
        "router_norm_topk_prob": family == "mixtral",
    }
    model = Model(**shape)
    assert contradictions(theirs.to_dict(), model, theirs.vocab_size) == []
    least = {"model_type": theirs.model_type, "vocab_size": theirs.vocab_size}
    least["rope_parameters"] = theirs.rope_parameters
    assert contradictions(least, model, theirs.vocab_size) == []
