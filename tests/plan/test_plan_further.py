"""What predicts one token more in plan: parameters, FLOPs, stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.plan.example import job_of
from tests.plan.test_plan_experts import PRODUCTS, PUBLISHED
from tests.train.plain_loop import MODELS, VOCAB
from trainkit.jobs.schema import Training
from trainkit.plan.arithmetic import hardware_flops_per_token_of, parameters_of
from trainkit.plan.layout import layout_of
from trainkit.plan.parameter_shapes import chunk_units, numbers, stage_chunks
from trainkit.train.model.head_loss import Labels
from trainkit.train.model.transformer import Transformer, build_on_meta
from trainkit.train.parallel.recompute import wrap_blocks

MODEL = MODELS["deepseek-mtp"]


def test_the_published_count() -> None:
    """682,636,487,424 of DeepSeek-V3 with its module, of which a bias that chooses in each of 59
    layers with experts is no parameter; the published files have copies of embedding and head
    besides (modules of README_WEIGHTS.md)."""
    model = PUBLISHED["DeepSeek-V3"][0].model_copy(update={"mtp_num_layers": 1})
    built = build_on_meta(model, 129280)
    assert parameters_of(model, 129280) == 682_636_487_424 - 59 * 256
    assert sum(p.numel() for p in built.parameters()) == 682_636_487_424 - 59 * 256
    assert numbers(chunk_units(model, 129280)) == 682_636_487_424 - 59 * 256


@pytest.mark.parametrize("pipeline", [{}, {"pipeline_schedule": "zbv"}], ids=["1f1b", "zbv"])
@pytest.mark.parametrize("untied", [True, False])
def test_the_last_chunk_has_it_and_an_embedding(pipeline: dict[str, Any], untied: bool) -> None:
    model = MODEL.model_copy(update={"untie_embeddings_and_output_weights": untied})
    parallelism = {"pipeline_model_parallel_size": 2, **pipeline}
    layout = layout_of(job_of(model, 2, parallelism=parallelism, global_batch_size=8))
    held = [
        numbers(units) for stage in (0, 1) for units in stage_chunks(model, VOCAB, layout, stage)
    ]
    assert sum(held) == parameters_of(model, VOCAB) + VOCAB * model.hidden_size
    assert model.num_layers in layout.stage_layers(layout.last_stage)
    assert sum(layout.layers_by_stage) == model.num_layers


@pytest.mark.parametrize("mode", ["none", "full"])
def test_flops_are_those_that_torch_counts(mode: str) -> None:
    """Of all products but attention's, which torch does not count on CPUs."""
    training = Training.model_validate({"train_iters": 1, "lr": 1.0, "recompute_granularity": mode})
    model = MODEL.model_copy(update={"make_vocab_size_divisible_by": 1})
    module = Transformer(model, VOCAB)
    wrap_blocks(module, model, training)
    tokens = torch.randint(VOCAB, (2, model.seq_length))
    with FlopCounterMode(display=False) as counter:
        module(tokens, Labels(tokens)).objective.backward()
    counts = counter.get_flop_counts()["Global"]
    found = sum(flops for name, flops in counts.items() if str(name) in PRODUCTS)
    assert model.mla is not None
    widths = model.head_size + model.mla.v_head_dim
    seen = model.num_attention_heads * widths * model.seq_length
    attention = (4 if mode == "full" else 3) * model.blocks * seen
    expected = hardware_flops_per_token_of(model, VOCAB, training) - attention
    assert found == expected * tokens.numel()
