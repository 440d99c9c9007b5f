"""A large bubble draws a note that names the layout which would cut it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.plan.example import BIG, gpu, job_of, shape
from tests.plan.test_split import llama_405b
from trainkit.engines.registry import ENGINES
from trainkit.jobs.schema import Job
from trainkit.plan.layout import layout_of
from trainkit.plan.objection import Objection, with_change
from trainkit.plan.planner import Plan, make_plan


def plan_of(job: Job) -> Plan:
    return make_plan(job, rules=ENGINES[job.engine].rules)


def note_of(job: Job) -> Objection | None:
    return next((note for note in plan_of(job).notes if note.code == "large-bubble"), None)


def piped(engine: str = "native", pipeline: int = 4, device: Any = BIG, **keys: Any) -> Job:
    parallelism = {"pipeline_model_parallel_size": pipeline, **keys.pop("parallelism", {})}
    return job_of(
        shape(layers=16), pipeline, engine=engine, device=device, parallelism=parallelism, **keys
    )


def test_seven_chunks_a_stage() -> None:
    """Llama 3 405B on 16 stages with 16 micro-batches: 48.4 % bubble, 11.8 % with seven chunks a
    stage."""
    job = llama_405b().model_copy(update={"engine": "native"})
    job = job.model_copy(update={"cluster": job.cluster.model_copy(update={"device": BIG})})
    job = job.model_copy(
        update={"training": job.training.model_copy(update={"global_batch_size": 128})}
    )
    plan = plan_of(job)
    assert plan.layout.micro_batches == 16 and plan.layout.bubble_fraction == pytest.approx(
        0.484, abs=1e-3
    )
    note = note_of(job)
    assert note and note.changes == ({"parallelism.virtual_pipeline_model_parallel_size": 7},)
    assert (
        "48.4% of each step is pipeline bubble" in note.message
        and "leaves 11.8%" in note.message
        and "days of steps instead of" in note.message
    )
    changed = plan_of(with_change(job, note.changes[0]))
    assert changed.feasible and changed.duration and plan.duration
    assert changed.duration.parts.steps / plan.duration.parts.steps == pytest.approx(
        (1 - 0.4839) / (1 - 0.1181),
        rel=0.06,  # more chunks are more transfers
    )


def test_what_is_proposed_can_be() -> None:
    """It raises no objection, and it fits: interleaving holds more micro-batches at once."""
    for engine in ("native", "megatron-lm", "gpt-neox"):
        for micro in (1, 4):
            job = piped(engine, micro_batch_size=micro, global_batch_size=8)
            note = note_of(job)
            assert note is not None
            for change in note.changes:
                tried = with_change(job, change)
                assert plan_of(tried).feasible and tried.global_batch_size == 8
                assert layout_of(tried).bubble_fraction < 0.75 * layout_of(job).bubble_fraction
    assert "only more micro-batches" in note_of(piped("gpt-neox", global_batch_size=4)).message  # type: ignore[union-attr]


def test_only_changes_that_fit() -> None:
    wide = shape(layers=16, hidden=1024, heads=16, length=1024)
    keys: dict[str, Any] = {
        "engine": "megatron-lm",
        "parallelism": {"pipeline_model_parallel_size": 4},
        "global_batch_size": 8,
        "precision": "bf16",
    }
    memory = plan_of(job_of(wide, 4, device=BIG, **keys)).memory
    assert memory is not None
    note = note_of(job_of(wide, 4, device=gpu(memory.fullest.total_bytes), **keys))
    assert (
        note is not None
        and not note.changes
        and note_of(job_of(wide, 4, device=BIG, **keys)).changes  # type: ignore[union-attr]
    )


def test_small_bubbles_are_not_worth_a_word() -> None:
    assert note_of(piped(global_batch_size=64)) is None and note_of(job_of(device=BIG)) is None
