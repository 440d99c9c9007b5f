"""Converted folders in unmodified trees of the engines: their own loaders take them, and the logits
are ours. Where no trees are named (tests/engines/real.py) they are skipped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.engines.convert.real_logits import ROWS, TOKENS_BS, real_logits
from tests.engines.convert.support import FOUR_EXPERTS, converted, layout
from tests.engines.real import RealEngine, parameters
from tests.train.hf_support import equal, save
from trainkit.engines.convert.formats import RunWeights
from trainkit.jobs.experts import Experts
from trainkit.jobs.schema import Model, RopeScaling
from trainkit.train.huggingface.weights import CheckpointWeights
from trainkit.train.model.transformer import Transformer, build_on_meta

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_rank")]
COMMON: dict[str, Any] = {
    "name": "tiny",
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 16,
}
LLAMA: dict[str, Any] = {**COMMON, "family": "llama", "num_query_groups": 2}
NEOX: dict[str, Any] = {**COMMON, "family": "gpt-neox"}
MODELS = {
    "gpt": Model(**COMMON),
    "gpt-untied-exact": Model(
        **COMMON, untie_embeddings_and_output_weights=True, gelu="exact", ffn_hidden_size=96
    ),
    "rotary": Model(**NEOX, gpt_j_residual=False),
    "llama": Model(**LLAMA, rotary_base=500000.0),
    "llama-3": Model(**LLAMA, kv_channels=16, rope_scaling=RopeScaling(type="llama3", factor=8.0)),
    "llama-tied": Model(**LLAMA, untie_embeddings_and_output_weights=False),
    "qwen2": Model(**{**LLAMA, "family": "qwen2"}),
    "qwen3": Model(**{**LLAMA, "family": "qwen3"}, kv_channels=16),
    "qwen3-tied": Model(**{**LLAMA, "family": "qwen3"}, untie_embeddings_and_output_weights=False),
    "mixtral": Model(**{**LLAMA, "family": "mixtral", "moe": FOUR_EXPERTS}),
    "qwen3-moe": Model(
        **{**LLAMA, "family": "qwen3-moe"},
        kv_channels=16,
        moe=Experts.model_validate(
            {
                **FOUR_EXPERTS,
                "first_dense_layers": 1,
                "shared_expert_intermediate_size": 12,
                "router_norm_topk_prob": False,
                "router_topk_scaling_factor": 1.5,
            }
        ),
    ),
    "gpt-neox": Model(**NEOX),
    "gpt-neox-tanh": Model(**NEOX, gelu="tanh", rotary_percent=0.5, rotary_base=500.0),
    "gpt-j-tied": Model(**NEOX, gpt_j_tied=True, rotary_percent=1.0),
}
MEGATRON: list[tuple[str, dict[str, Any]]] = [
    ("gpt", {}),
    ("gpt", {"pipeline": 2}),
    ("gpt-untied-exact", {"tensor": 2}),
    ("rotary", {}),
    ("llama", {"tensor": 2}),
    ("llama-3", {"pipeline": 2}),
    ("llama-tied", {"pipeline": 2}),
    ("qwen2", {"tensor": 2}),
    ("qwen3", {"tensor": 2}),
    ("qwen3-tied", {"pipeline": 2}),
    ("mixtral", {"expert": 2}),
    ("mixtral", {"tensor": 2}),
    ("qwen3-moe", {"pipeline": 2}),
]
NEOX_CUTS: list[tuple[str, dict[str, Any]]] = [
    ("gpt", {"pipeline": 0}),
    ("gpt", {"pipeline": 1}),
    ("gpt-untied-exact", {"pipeline": 0, "tensor": 2}),
    ("rotary", {"pipeline": 0, "tensor": 2}),
    ("gpt-neox", {"pipeline": 0}),
    ("gpt-neox", {"pipeline": 1, "tensor": 2}),
    ("gpt-neox", {"pipeline": 2}),
    ("gpt-neox-tanh", {"pipeline": 1}),
    ("gpt-j-tied", {"pipeline": 0, "tensor": 2}),
]


def named(cases: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    ids = [f"{name}-{'-'.join(f'{k}{v}' for k, v in cut.items())}" for name, cut in cases]
    return [pytest.param(*case, id=id_) for case, id_ in zip(cases, ids, strict=True)]


def shaken(model: Model) -> Transformer:
    """A model with random values everywhere, small enough for logits around 1."""
    module = build_on_meta(model, ROWS)
    module.to_empty(device="cpu")
    torch.manual_seed(1)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.2)
    return module


@torch.no_grad()
def same_logits(
    engine: RealEngine, target: str, name: str, cut: dict[str, Any], tmp_path: Path
) -> None:
    model = MODELS[name]
    module = shaken(model)
    source = RunWeights(CheckpointWeights(save(module, tmp_path / "ours"), model), model, 7)
    converted(source, target, tmp_path / "out", **cut)
    (tmp_path / "scratch").mkdir()
    found = real_logits(engine, model, layout(**cut), tmp_path / "out", tmp_path / "scratch")
    ours = module(TOKENS_BS)
    print(f"{engine.tree.name} {name} {cut}: {(found - ours).abs().max():.2e} of {ours.std():.2f}")
    equal(found, ours)


@pytest.mark.parametrize(("name", "cut"), named(MEGATRON))
@pytest.mark.parametrize("engine", parameters("megatron-lm"))
def test_megatron_lm(engine: RealEngine, name: str, cut: dict[str, Any], tmp_path: Path) -> None:
    same_logits(engine, "megatron-lm", name, cut, tmp_path)


@pytest.mark.parametrize(("name", "cut"), named(NEOX_CUTS))
@pytest.mark.parametrize("engine", parameters("gpt-neox"))
def test_gpt_neox(engine: RealEngine, name: str, cut: dict[str, Any], tmp_path: Path) -> None:
    same_logits(engine, "gpt-neox", name, cut, tmp_path)
