"""Hugging Face folders of models with experts."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.train.hf_support import (
    CASES,
    VOCAB,
    change_tensors,
    copied,
    folders,
    ours,
    said,
    save,
    write,
)
from trainkit.families import FAMILIES
from trainkit.jobs.schema import Model
from trainkit.train.huggingface import check_weights
from trainkit.train.huggingface.config import contradictions

__all__ = ["copied", "folders"]  # fixtures
WITH_EXPERTS = [name for name, family in FAMILIES.items() if family.routing is not None]


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_keys_of_experts_left_out_have_transformers_defaults(family: str) -> None:
    """Held against transformers' own, which names them all."""
    transformers: Any = importlib.import_module("transformers")

    theirs = transformers.AutoConfig.for_model(FAMILIES[family].hugging_face.model_type)
    model = model_of(family, theirs)
    assert contradictions(theirs.to_dict(), model, theirs.vocab_size) == []
    least = {"model_type": theirs.model_type, "vocab_size": theirs.vocab_size}
    least["rope_parameters"] = theirs.rope_parameters
    assert contradictions(least, model, theirs.vocab_size) == []


def model_of(family: str, theirs: Any) -> Model:
    """The model that transformers' configuration says."""
    width = theirs.intermediate_size
    if family in ("qwen3-moe", "deepseek-v3"):
        width = theirs.moe_intermediate_size
    rope = {"rope_type": "default"} | theirs.rope_parameters
    shape: dict[str, Any] = {
        "family": family,
        "num_layers": theirs.num_hidden_layers,
        "hidden_size": theirs.hidden_size,
        "num_attention_heads": theirs.num_attention_heads,
        "num_query_groups": theirs.num_key_value_heads,
        "seq_length": 2048,
        "rotary_base": rope.pop("rope_theta"),
        "layernorm_epsilon": theirs.rms_norm_eps,
    }
    shape["moe"] = {
        "num_experts": theirs.num_local_experts,
        "router_topk": theirs.num_experts_per_tok,
        "ffn_hidden_size": width,
        "router_norm_topk_prob": family not in ("qwen3-moe", "olmoe"),
    }
    if (kind := rope.pop("rope_type")) != "default":
        shape["rope_scaling"] = {"type": kind, **rope}
    if family == "gpt-oss":
        shape |= {"kv_channels": 64, "sliding_window": 128}
    if family == "deepseek-v3":
        del shape["num_query_groups"]
        shape["ffn_hidden_size"] = theirs.intermediate_size
        shape["moe"] |= {
            "shared_expert_intermediate_size": width,
            "first_dense_layers": 3,
            "router_num_groups": 8,
            "router_group_topk": 4,
            "router_topk_scaling_factor": 2.5,
        }
        shape["mla"] = {
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_head_dim": 128,
            "qk_pos_emb_head_dim": 64,
            "v_head_dim": 128,
        }
    return Model.model_validate(shape)


# DeepSeek-V3's own config.json and gpt-oss-20b's, but for what says nothing of the model
DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 1,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
}
DEEPSEEK_YARN = {
    "type": "yarn",
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def test_deepseek_as_it_was_published() -> None:
    """Keys of transformers 4, and of DeepSeek's own code; and what cannot be."""
    theirs = importlib.import_module("transformers").DeepseekV3Config()
    model = model_of("deepseek-v3", theirs)
    scaled = Model.model_validate(
        {**model.model_dump(), "name": "x", "rope_scaling": DEEPSEEK_YARN}
    )
    assert contradictions(DEEPSEEK, scaled, 129280) == []
    (problem,) = contradictions(DEEPSEEK | {"q_lora_rank": None}, scaled, 129280)
    assert problem.hint == "leave models.x.mla.q_lora_rank out"
    (problem,) = contradictions(DEEPSEEK | {"n_shared_experts": 2}, scaled, 129280)
    assert problem.hint == "set models.x.moe.shared_expert_intermediate_size = 4096"
    (problem,) = contradictions(DEEPSEEK | {"scoring_func": "softmax"}, scaled, 129280)
    assert "family 'deepseek-v3' has 'sigmoid' only" in problem.message
    (problem,) = contradictions(DEEPSEEK, model, 129280)
    assert "mscale = 1.0, mscale_all_dim = 1.0" in problem.hint
    changed = scaled.model_copy(
        update={"moe": scaled.moe and scaled.moe.model_copy(update={"router_topk": 4})}
    )
    found = contradictions(DEEPSEEK | {"num_experts_per_tok": 4}, changed, 129280)
    assert "judges a group by its best two experts, not by 4 / 4" in found[0].message


def test_layers_after_the_last_are_left_out(
    copied: Callable[[str], Path],
) -> None:
    """DeepSeek's module that predicts one token more."""
    model = CASES["deepseek-v3"][0]
    more = {
        "model.layers.2.enorm.weight": torch.ones(32),
        "model.layers.2.eh_proj.weight": torch.ones(32, 64),
    }
    folder = change_tensors(copied("deepseek-v3"), lambda tensors: tensors | more)
    assert check_weights(folder, model, VOCAB) == []
    folder = change_tensors(folder, lambda t: t | {"model.layers.1.enorm.weight": torch.ones(32)})
    assert "has not, model.layers.1.enorm.weight" in said(check_weights(folder, model, VOCAB))


def test_biases_that_choose_stay_wide(one_rank: None, tmp_path: Path) -> None:
    """They move by thousandths, which 16 bits do not hold."""
    model = CASES["deepseek-v3"][0]
    module = ours(model)
    write(save(module, tmp_path / "checkpoints"), model, tmp_path / "out", dtype="bf16")
    tensors = load_file(tmp_path / "out/model.safetensors")
    bias = dict(module.named_buffers())["layers.1.mlp.router.expert_bias"]
    written = tensors["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert written.dtype == torch.float32 and torch.equal(written, bias)
    assert tensors["model.layers.1.mlp.gate.weight"].dtype == torch.bfloat16
