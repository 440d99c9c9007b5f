"""Small models in checkpoints of ours, and converted folders of them: what the tests here share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.train.hf_support import CASES, COMMON, LATENTS, LLAMA, VOCAB, WIDE, ours, save
from trainkit.engines.convert.formats import (
    ENGINE_FORMATS,
    Converted,
    HuggingFaceExtras,
    ReadWeights,
    RunWeights,
    convert,
)
from trainkit.engines.convert.options import FileLayout
from trainkit.jobs.schema import Model, RopeScaling
from trainkit.train.huggingface.weights import CheckpointWeights, NamedWeights

QWEN3: dict[str, Any] = {**WIDE, "family": "qwen3"}
FOUR_EXPERTS = {"num_experts": 4, "router_topk": 2, "ffn_hidden_size": 20}
NOTHING = HuggingFaceExtras(shard_bytes=10**9, tokenizer=None, about={})
MODELS = {name: model for name, (model, _) in CASES.items()} | {
    "gpt-neox-one-after-the-other": Model(
        **{**COMMON, "family": "gpt-neox", "hidden_size": 48}, gpt_j_residual=False
    ),
    "llama-tied": Model(
        name="tiny",
        family="llama",
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=1,
        ffn_hidden_size=40,
        seq_length=16,
        untie_embeddings_and_output_weights=False,
    ),
    "llama-3": Model(
        name="tiny",
        family="llama",
        num_layers=4,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=40,
        seq_length=16,
        rotary_base=500000.0,
        rope_scaling=RopeScaling(type="llama3", factor=8.0),
    ),
    "qwen3": Model(**QWEN3),
    "qwen3-one-matrix": Model(**QWEN3, untie_embeddings_and_output_weights=False),
    "mixtral": Model(**{**WIDE, "family": "mixtral", "moe": FOUR_EXPERTS}),
    "qwen3-moe-after-dense": Model(
        **{
            **WIDE,
            "family": "qwen3-moe",
            "num_layers": 4,
            "moe": {
                **FOUR_EXPERTS,
                "first_dense_layers": 1,
                "shared_expert_intermediate_size": 12,
                "router_topk_scaling_factor": 1.5,
                "router_norm_topk_prob": False,
            },
        }
    ),
    "latents": Model(
        **{
            **LLAMA,
            "family": "deepseek-v3",
            "num_layers": 4,
            "layernorm_epsilon": 1e-6,
            "mla": LATENTS | {"q_lora_rank": 9},
            "moe": {
                **FOUR_EXPERTS,
                "first_dense_layers": 1,
                "shared_expert_intermediate_size": 20,
            },
        }
    ),
    "latents-whole-queries": Model(
        **{
            **LLAMA,
            "family": "deepseek-v3",
            "layernorm_epsilon": 1e-6,
            "mla": LATENTS,
            "moe": FOUR_EXPERTS,
        }
    ),
    "qwen2-one-matrix": CASES["qwen2"][0].model_copy(
        update={"untie_embeddings_and_output_weights": False}
    ),
}
EXPRESSIBLE = {
    "megatron-lm": (
        "gpt",
        "gpt-untied",
        "gpt-neox-one-after-the-other",
        "llama",
        "llama-tied",
        "llama-3",
        "qwen2",
        "qwen2-one-matrix",
        "qwen3",
        "qwen3-one-matrix",
        "mixtral",
        "qwen3-moe-after-dense",
        "latents",
        "latents-whole-queries",
    ),
    "gpt-neox": (
        "gpt",
        "gpt-untied",
        "gpt-neox",
        "gpt-neox-tied",
        "gpt-j-tied",
        "gpt-neox-one-after-the-other",
    ),
}


def layout(**given: Any) -> FileLayout:
    return FileLayout(
        **{
            "tensor": 1,
            "pipeline": 1,
            "names": "",
            "dtype": torch.float32,
            "divisor": 8,
            **given,
        }
    )


def saved(model: Model, folder: Path) -> RunWeights:
    """Weights of the model in a checkpoint of ours."""
    return RunWeights(CheckpointWeights(save(ours(model), folder), model), model, 7)


def converted(source: RunWeights, target: str, folder: Path, **given: Any) -> Converted:
    return convert(source, target, layout(**given), folder, NOTHING)


def back(target: str, folder: Path, model: Model) -> ReadWeights:
    """What an engine's folder holds."""
    there, _ = ENGINE_FORMATS[target].choose(folder, None)
    return ENGINE_FORMATS[target].read(there, model, VOCAB)


def tensors(weights: NamedWeights) -> dict[str, Tensor]:
    return {name: weights.read(name) for name in weights.shapes}


def same(one: NamedWeights, other: NamedWeights) -> None:
    """Both have the same tensors, bit by bit."""
    left = tensors(one)
    right = tensors(other)
    assert list(left) and left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype and torch.equal(tensor, right[name]), name
