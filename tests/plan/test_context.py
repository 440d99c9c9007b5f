"""What context parallelism asks of a job, and what the plan says of it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.plan.example import job_of, shape
from trainkit.engines.registry import ENGINES
from trainkit.jobs.schema import Job
from trainkit.plan.objection import Objection
from trainkit.plan.planner import make_plan


def over(size: int, how: str = "p2p", **more: Any) -> dict[str, Any]:
    return {"context_parallel_size": size, "cp_comm_type": how, **more}


def refused(job: Job) -> Objection:
    (objection,) = make_plan(job, rules=ENGINES["native"].rules).objections
    return objection


def test_ranks_of_a_sample_are_no_data_parallel_ones() -> None:
    job = job_of(shape(length=16), 8, parallelism=over(2, tensor_model_parallel_size=2))
    assert job.data_parallel_size == 2
    plan = make_plan(job, rules=ENGINES["native"].rules)
    assert plan.layout.shard == 4 and not plan.objections


@pytest.mark.parametrize(
    ("length", "parallelism", "words"),
    [
        (12, over(4), "seq_length 12 does not divide by 2 x context-parallel 4 = 8"),
        (
            12,
            over(2, tensor_model_parallel_size=2, sequence_parallel=True),
            "seq_length 12 does not divide by 2 x context-parallel 2 x tensor-parallel 2"
            " (sequence_parallel) = 8",
        ),
    ],
)
def test_the_sequence_divides(length: int, parallelism: dict[str, Any], words: str) -> None:
    objection = refused(job_of(shape(length=length), 4, parallelism=parallelism))
    assert objection.code == "context-not-divisible"
    assert objection.message.startswith(f"{words}; nearest: context_parallel_size ")
    assert {"model.seq_length": 16} in objection.changes


@pytest.mark.parametrize(
    ("heads", "groups", "words"),
    [
        (6, 6, "num_attention_heads 6 does not divide by tensor-parallel 1 x context-parallel 4"),
        (12, 3, "num_query_groups 3 does not divide by tensor-parallel 1 x context-parallel 4"),
        (12, 2, ""),  # each is there twice
        (12, 4, ""),
    ],
)
def test_whole_heads_are_dealt(heads: int, groups: int, words: str) -> None:
    model = shape("llama", heads=heads, hidden=8 * heads, length=16, num_query_groups=groups)
    job = job_of(model, 4, parallelism=over(4, "a2a"))
    plan = make_plan(job, rules=ENGINES["native"].rules)
    assert [each.message for each in plan.objections] == (
        [f"cp_comm_type = 'a2a': {words}; nearest: p2p"] if words else []
    )
    for each in plan.objections:
        assert each.changes == ({"parallelism.cp_comm_type": "p2p"},)
    assert not make_plan(
        job_of(model, 4, parallelism=over(4)), rules=ENGINES["native"].rules
    ).objections


def test_what_it_does_not_go_with() -> None:
    dropping = shape(length=16, attention_dropout=0.1)
    objection = refused(job_of(dropping, 2, parallelism=over(2)))
    assert objection.code == "dropout-in-context"
    assert {"model.attention_dropout": 0} in objection.changes
    objection = refused(job_of(shape(length=16), 2, parallelism=over(2), compile=True))
    assert objection.code == "compile-in-context"
    assert {"training.compile": False} in objection.changes
    objection = refused(job_of(shape(length=16), 6, parallelism=over(4)))
    assert objection.code == "world-not-divisible"
    assert "tensor-parallel 1 x context-parallel 4 x pipeline-parallel 1 = 4" in objection.message
    assert {"parallelism.context_parallel_size": 2} in objection.changes
