"""Degrees, stages, micro-batches in flight, the bubble."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.plan.example import job_of, shape
from trainkit.plan.layout import layout_of, nearest, padded_vocab_size, split_layers


def test_the_split_of_the_published_20b() -> None:
    """DeepSpeed's partition of GPT-NeoX's 44 layers over 6 stages, seen by running it: [8, 8, 7, 7, 7, 7]."""
    assert split_layers(44, 6) == [8, 8, 7, 7, 7, 7]


@given(st.integers(0, 300), st.integers(1, 80))
def test_a_split_is_whole_and_balanced(layers: int, parts: int) -> None:
    split = split_layers(layers, parts)
    assert sum(split) == layers and len(split) == parts
    assert max(split) - min(split) <= 1 and split == sorted(split, reverse=True)


@given(st.integers(1, 100), st.integers(1, 12), st.integers(1, 5))
def test_every_layer_is_on_one_stage(layers: int, pipeline: int, virtual: int) -> None:
    parallelism: dict[str, Any] = {"pipeline_model_parallel_size": pipeline}
    if pipeline > 1 and virtual > 1:
        parallelism["virtual_pipeline_model_parallel_size"] = virtual
    layout = layout_of(job_of(shape(layers=layers), pipeline, parallelism=parallelism))
    stages = [layout.stage_layers(stage) for stage in range(pipeline)]
    assert sorted(layer for stage in stages for layer in stage) == list(range(layers))
    assert tuple(map(len, stages)) == layout.layers_by_stage and sum(layout.layers_by_stage) == layers


@pytest.mark.parametrize(("vocab", "tensor", "padded"), [(50257, 1, 50304), (50257, 8, 51200), (50257, 32, 53248), (50277, 2, 50432), (50277, 4, 50688)])
def test_padded_vocabularies(vocab: int, tensor: int, padded: int) -> None:
    """NeMo 22.09 (TP 1 and 8), neuronx-nemo-megatron (TP 32), GPT-NeoX (TP 2 and 4)."""
    assert padded_vocab_size(vocab, 128, tensor) == padded


@pytest.mark.parametrize(("p", "v", "m", "fraction"), [(8, 1, 8, 0.47), (8, 1, 32, 0.18), (8, 1, 64, 0.10), (8, 4, 32, 0.05), (4, 1, 4, 0.429), (1, 1, 7, 0)])
def test_bubbles(p: int, v: int, m: int, fraction: float) -> None:
    """(p - 1) / (v m + p - 1), Narayanan et al. 2021, section 2.2; 42.9 % at 4 stages and 4 micro-batches is BigScience's 7.5B."""
    parallelism = {"pipeline_model_parallel_size": p, **({"virtual_pipeline_model_parallel_size": v} if v > 1 else {})}
    layout = layout_of(job_of(shape(layers=32), p, parallelism=parallelism, global_batch_size=m))
    assert layout.bubble_fraction == pytest.approx(fraction, abs=0.005)


def test_micro_batches_in_flight() -> None:
    """1F1B: the first stage holds p of them, the last one; interleaved, the first holds L (1 + (p - 1) / (p v)) layers (Korthikanti et al. 2022)."""
    plain = layout_of(job_of(shape(layers=32), 4, parallelism={"pipeline_model_parallel_size": 4}, global_batch_size=16))
    assert [plain.in_flight(stage) for stage in range(4)] == [4, 3, 2, 1]
    few = layout_of(job_of(shape(layers=32), 4, parallelism={"pipeline_model_parallel_size": 4}, global_batch_size=2))
    assert [few.in_flight(stage) for stage in range(4)] == [2, 2, 2, 1]
    keys = {"pipeline_model_parallel_size": 4, "virtual_pipeline_model_parallel_size": 2}
    chunks = layout_of(job_of(shape(layers=32), 4, parallelism=keys, global_batch_size=16))
    assert chunks.in_flight(0) * chunks.layers_by_stage[0] == pytest.approx(32 * (1 + 3 / 8))


def test_sequence_parallelism_is_off_alone() -> None:
    """As Megatron-LM's validate_args has it."""
    assert not layout_of(job_of(parallelism={"sequence_parallel": True})).sequence
    assert layout_of(job_of(ranks=2, parallelism={"sequence_parallel": True, "tensor_model_parallel_size": 2})).sequence


@given(st.integers(1, 50), st.integers(1, 10))
def test_the_nearest_numbers_that_fit(wanted: int, divisor: int) -> None:
    for found in nearest(wanted, lambda n: n % divisor == 0):
        assert found % divisor == 0 and 0 < abs(found - wanted) <= divisor
    assert nearest(7, lambda n: n > 9, most=9) == []
