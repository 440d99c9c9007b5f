"""Degrees, stages, micro-batches in flight, the bubble."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st
from torch.distributed.pipelining import schedules

from tests.plan.example import job_of, shape
from trainkit.plan.layout import Layout, layout_of, nearest, padded_vocab_size, split_layers


def test_the_split_of_the_published_20b() -> None:
    """DeepSpeed's partition of GPT-NeoX's 44 layers over 6 stages, seen by running it: [8, 8, 7,
    7, 7, 7]."""
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
    assert (
        tuple(map(len, stages)) == layout.layers_by_stage and sum(layout.layers_by_stage) == layers
    )


@pytest.mark.parametrize(
    ("vocab", "tensor", "padded"),
    [
        (50257, 1, 50304),
        (50257, 8, 51200),
        (50257, 32, 53248),
        (50277, 2, 50432),
        (50277, 4, 50688),
    ],
)
def test_padded_vocabularies(vocab: int, tensor: int, padded: int) -> None:
    """NeMo 22.09 (TP 1 and 8), neuronx-nemo-megatron (TP 32), GPT-NeoX (TP 2 and 4)."""
    assert padded_vocab_size(vocab, 128, tensor) == padded


@pytest.mark.parametrize(
    ("p", "v", "m", "fraction"),
    [
        (8, 1, 8, 0.47),
        (8, 1, 32, 0.18),
        (8, 1, 64, 0.10),
        (8, 4, 32, 0.05),
        (4, 1, 4, 0.429),
        (1, 1, 7, 0),
    ],
)
def test_bubbles(p: int, v: int, m: int, fraction: float) -> None:
    """(p - 1) / (v m + p - 1), Narayanan et al. 2021, section 2.2; 42.9 % at 4 stages and 4
    micro-batches is BigScience's 7.5B."""
    parallelism = {
        "pipeline_model_parallel_size": p,
        **({"virtual_pipeline_model_parallel_size": v} if v > 1 else {}),
    }
    layout = layout_of(job_of(shape(layers=32), p, parallelism=parallelism, global_batch_size=m))
    assert layout.bubble_fraction == pytest.approx(fraction, abs=0.005)


def test_micro_batches_in_flight() -> None:
    """1F1B: the first stage holds p of them, the last one; interleaved, the first holds L (1 +
    (p - 1) / (p v)) layers (Korthikanti et al. 2022)."""
    plain = layout_of(
        job_of(
            shape(layers=32),
            4,
            parallelism={"pipeline_model_parallel_size": 4},
            global_batch_size=16,
        )
    )
    assert [plain.in_flight(stage) for stage in range(4)] == [4, 3, 2, 1]
    few = layout_of(
        job_of(
            shape(layers=32),
            4,
            parallelism={"pipeline_model_parallel_size": 4},
            global_batch_size=2,
        )
    )
    assert [few.in_flight(stage) for stage in range(4)] == [2, 2, 2, 1]
    keys = {"pipeline_model_parallel_size": 4, "virtual_pipeline_model_parallel_size": 2}
    chunks = layout_of(job_of(shape(layers=32), 4, parallelism=keys, global_batch_size=16))
    assert chunks.in_flight(0) * chunks.layers_by_stage[0] == pytest.approx(32 * (1 + 3 / 8))


def test_the_zero_bubble_goes_down_and_up() -> None:
    layout = layout_of(
        job_of(
            shape(layers=9),
            2,
            parallelism={"pipeline_model_parallel_size": 2, "pipeline_schedule": "zbv"},
        )
    )
    assert [layout.stage_of(chunk) for chunk in range(4)] == [0, 1, 1, 0] and layout.last_stage == 0
    assert [layout.stage_layers(stage) for stage in (0, 1)] == [[0, 1, 2, 7, 8], [3, 4, 5, 6]]


FORWARD, BACKWARD, WEIGHTS = "F", "B", "W"
Operation = tuple[str, int, int]  # what, of which chunk, of which micro-batch


def torch_order(layout: Layout) -> list[list[Operation]]:
    """What each stage does one after another, as torch.distributed.pipelining has it. 1F1B has
    no such list there: by its definition."""
    p, m, chunks = layout.pipeline, layout.micro_batches, len(layout.chunks)
    if chunks == p:
        orders = []
        for stage in range(p):
            warm = min(p - stage, m)
            backwards = [
                [(BACKWARD, stage, i), *([(FORWARD, stage, i + warm)] if i + warm < m else [])]
                for i in range(m)
            ]
            orders.append(
                [(FORWARD, stage, i) for i in range(warm)]
                + [operation for pair in backwards for operation in pair]
            )
        return orders
    kind = schedules.ScheduleZBVZeroBubble if layout.v_shaped else schedules.ScheduleInterleaved1F1B
    schedule: Any = kind.__new__(kind)  # only its order is asked for: no stages, no process group
    vars(schedule).update(
        pp_group_size=p,
        _num_stages=chunks,
        num_stages=chunks,
        _n_microbatches=m,
        n_local_stages=chunks // p,
    )
    vars(schedule).update(
        number_of_rounds=max(1, m // p), microbatches_per_round=m // max(1, m // p)
    )
    words = {
        "FORWARD": FORWARD,
        "BACKWARD_INPUT": BACKWARD,
        "FULL_BACKWARD": BACKWARD,
        "BACKWARD_WEIGHT": WEIGHTS,
    }
    found = [
        [a for a in schedule._calculate_single_rank_operations(stage) if a is not None]
        for stage in range(p)
    ]
    return [
        [(words[a.computation_type.name], a.stage_index, a.microbatch_index) for a in of_stage]
        for of_stage in found
    ]


def played(layout: Layout) -> tuple[float, list[float]]:
    """(idle part of a step, most micro-batches' worth of activations on each stage) where a
    forward takes 1, the whole backward 2."""
    orders, split = torch_order(layout), layout.v_shaped
    last, per_stage = len(layout.chunks) - 1, len(layout.chunks) // layout.pipeline
    ended: dict[Operation, float] = {}
    clock, busy, held, most = ([0.0] * layout.pipeline for _ in range(4))
    while any(orders):
        before = len(ended)
        for stage, order in enumerate(orders):
            while order:
                what, chunk, i = order[0]
                down, up = (
                    (FORWARD, chunk - 1, i),
                    ((BACKWARD, chunk + 1, i) if chunk < last else (FORWARD, chunk, i)),
                )
                need = down if what == FORWARD and chunk else up if what == BACKWARD else None
                if need is not None and need not in ended:
                    break
                cost = 1 if what == FORWARD or split else 2
                clock[stage] = ended[order.pop(0)] = (
                    max(clock[stage], ended[need] if need else 0.0) + cost
                )
                busy[stage] += cost
                held[stage] += (
                    1
                    if what == FORWARD
                    else -1
                    if what == WEIGHTS or (what == BACKWARD and not split)
                    else 0
                )
                most[stage] = max(most[stage], held[stage])
        assert len(ended) > before, "the order waits for itself"
    return 1 - busy[0] / max(clock), [n / per_stage for n in most]


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv"])
@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize("rounds", [0.5, 1, 2, 4])
def test_bubbles_and_micro_batches_in_flight_are_those_of_torchs_schedules(
    schedule: str, p: int, rounds: float
) -> None:
    keys: dict[str, Any] = {
        "pipeline_model_parallel_size": p,
        **({"pipeline_schedule": "zbv"} if schedule == "zbv" else {}),
    }
    if schedule == "interleaved":
        keys["virtual_pipeline_model_parallel_size"] = 2
    m = int(p * rounds)
    layout = layout_of(job_of(shape(layers=4 * p), p, parallelism=keys, global_batch_size=m))
    idle, held = played(layout)
    assert held == [layout.in_flight(stage) for stage in range(p)]
    if schedule == "1f1b" or (schedule == "interleaved" and rounds >= 1) or rounds >= 2:
        assert idle == pytest.approx(layout.bubble_fraction, abs=1e-12)
    else:
        assert idle > layout.bubble_fraction


def most_kept(layout: Layout, stage: int, order: list[Operation], blocks: int) -> int:
    """Most tensors of a micro-batch's size between chunks that a stage has at once, in torch's
    order: what each of a chunk's `blocks` reads, until the backward for the weights; what a
    chunk has sent, until the backward for the input; at the model's end the final norm's input
    and its result's gradient. The next chunk's input is the result of the one before it: where
    both are here, it is one tensor."""
    last, most = len(layout.chunks) - 1, 0
    read: set[tuple[int, int]] = set()  # chunk that reads it, micro-batch
    sent: set[tuple[int, int]] = set()
    for what, chunk, i in order:
        if what == FORWARD:
            read.add((chunk, i))
            sent |= {(chunk + 1, i)} - {(last + 1, i)}
            most = max(
                most, len(read | sent) + (blocks - 1) * len(read) + (2 if chunk == last else 0)
            )
        elif what == BACKWARD:
            sent.discard((chunk + 1, i))
        else:
            read.discard((chunk, i))
    return most


@pytest.mark.parametrize("blocks", [1, 3, 40])
@pytest.mark.parametrize("p", range(2, 9))
def test_what_the_stages_of_a_zero_bubble_have_sent(p: int, blocks: int) -> None:
    """As counted in torch's order of operations, with few micro-batches and many."""
    keys: dict[str, Any] = {"pipeline_model_parallel_size": p, "pipeline_schedule": "zbv"}
    for m in range(1, 4 * p + 1):
        layout = layout_of(job_of(shape(layers=2 * p), p, parallelism=keys, global_batch_size=m))
        for stage, order in enumerate(torch_order(layout)):
            kept = (
                2 * blocks * layout.in_flight(stage)
                + layout.sent_in_flight(stage)
                + (2 if stage == layout.last_stage else 0)
            )
            assert kept == most_kept(layout, stage, order, blocks), (m, stage)


def test_sequence_parallelism_is_off_alone() -> None:
    """As Megatron-LM's validate_args has it."""
    assert not layout_of(job_of(parallelism={"sequence_parallel": True})).sequence
    assert layout_of(
        job_of(ranks=2, parallelism={"sequence_parallel": True, "tensor_model_parallel_size": 2})
    ).sequence


@given(st.integers(1, 50), st.integers(1, 10))
def test_the_nearest_numbers_that_fit(wanted: int, divisor: int) -> None:
    for found in nearest(wanted, lambda n: n % divisor == 0):
        assert found % divisor == 0 and 0 < abs(found - wanted) <= divisor
    assert nearest(7, lambda n: n > 9, most=9) == []
