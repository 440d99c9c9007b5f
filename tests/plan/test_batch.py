"""The batch's ramp against Megatron's rule."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from tests.megatron_core import megatron_file
from trainkit.jobs.schema import Cluster, Dataset, Job, Model, Training
from trainkit.plan.batch import batch_sizes, consumed_after, global_batch_size


def job_of(whole: int, ramp: tuple[int, int, int] | None) -> Job:
    """A job whose batch grows so."""
    return Job(
        name="ramp",
        cluster=Cluster(name="here"),
        model=Model(
            name="tiny",
            num_layers=1,
            hidden_size=8,
            num_attention_heads=1,
            seq_length=8,
            vocab_size=300,
        ),
        dataset=Dataset(name="mock", source="mock"),
        training=Training(train_iters=10, lr=1.0, global_batch_size=whole, rampup_batch_size=ramp),
    )


@st.composite
def ramps(draw: st.DrawFn) -> tuple[int, tuple[int, int, int]]:
    """A whole batch and a ramp of at least one increment over at least one sample, as Megatron
    wants it."""
    start, increment, increments = (
        draw(st.integers(1, 40)),
        draw(st.integers(1, 20)),
        draw(st.integers(1, 12)),
    )
    return start + increment * increments, (start, increment, draw(st.integers(1, 5000)))


def test_a_ramp_as_megatron_has_it() -> None:
    """Answers of Megatron-Core 0.16.1's RampupBatchsizeNumMicroBatchesCalculator: 16 to 128 by
    16, a step each 1000 / 7 samples."""
    table = [
        (0, 16),
        (1, 16),
        (142, 16),
        (143, 32),
        (285, 32),
        (286, 48),
        (428, 48),
        (429, 64),
        (571, 64),
        (572, 80),
        (714, 80),
    ]
    table += [(715, 96), (857, 96), (858, 112), (999, 112), (1000, 128), (1001, 128), (10**6, 128)]
    job = job_of(128, (16, 16, 1000))
    assert [global_batch_size(job, consumed) for consumed, _ in table] == [
        size for _, size in table
    ]
    assert batch_sizes(job) == [16, 32, 48, 64, 80, 96, 112, 128]
    inexact = job_of(32, (4, 4, 506))  # in floating point 506 / (506 / 7) is below 7
    assert [global_batch_size(inexact, consumed) for consumed in (505, 506, 507)] == [28, 28, 32]


def test_the_steps_of_a_ramp() -> None:
    """Consumed samples before each step, from the same calculator: 4 to 16 by 4 over 100
    samples."""
    positions = [0, 4, 8, 12, 16, 20, 24, 28, 32, 36, 44, 52, 60, 68, 80, 92, 104, 120, 136, 152]
    job = job_of(16, (4, 4, 100))
    assert [consumed_after(job, steps) for steps in range(20)] == positions
    assert consumed_after(job, 3, consumed_samples=60) == 92
    assert consumed_after(job, 10**9) == 104 + (10**9 - 16) * 16


@pytest.mark.parametrize(
    "ramp", [None, (16, 4, 1000), (4, 4, 0)], ids=["none", "from the whole", "over no samples"]
)
def test_no_ramp(ramp: tuple[int, int, int] | None) -> None:
    job = job_of(16, ramp)
    assert [global_batch_size(job, n) for n in (0, 1, 500, 1000, 2000)] == [16] * 5
    assert batch_sizes(job) == [16] and consumed_after(job, 7, 5) == 5 + 7 * 16


def test_a_batch_derived_from_accumulation() -> None:
    job = job_of(16, None)
    training = job.training.model_copy(
        update={"global_batch_size": None, "gradient_accumulation_steps": 3, "micro_batch_size": 2}
    )
    derived = job.model_copy(update={"training": training})
    assert (
        global_batch_size(derived, 0) == 6
        and batch_sizes(derived) == [6]
        and consumed_after(derived, 4) == 24
    )


@settings(max_examples=100, deadline=None)
@given(ramps(), st.data())
def test_any_ramp_as_megatron_core_has_it(
    ramp: tuple[int, tuple[int, int, int]], data: st.DataObject
) -> None:
    module = megatron_file("num_microbatches_calculator.py")
    whole, (start, increment, samples) = ramp
    theirs = module.RampupBatchsizeNumMicroBatchesCalculator(
        whole, 1, 1, False, 1, start, increment, samples
    )
    job = job_of(whole, ramp[1])
    for consumed in (
        0,
        samples - 1,
        samples,
        samples + 1,
        *data.draw(st.lists(st.integers(0, 2 * samples), max_size=20)),
    ):
        theirs.update(consumed, True)
        assert global_batch_size(job, consumed) == theirs.get_current_global_batch_size(), consumed


@settings(max_examples=100, deadline=None)
@given(ramps(), st.integers(0, 300), st.integers(0, 300))
def test_samples_consumed_step_by_step(
    ramp: tuple[int, tuple[int, int, int]], steps: int, more: int
) -> None:
    job = job_of(*ramp)
    consumed, sizes = 0, []
    for _ in range(steps):
        sizes.append(global_batch_size(job, consumed))
        consumed += sizes[-1]
    assert consumed_after(job, steps) == consumed
    # stopping between two steps changes nothing
    assert consumed_after(job, more, consumed) == consumed_after(job, steps + more)
    assert sizes == sorted(sizes) and set(sizes) <= set(batch_sizes(job))
