"""The plan of every experiment of jobs.toml: sizes as published, feasible unless it was
published so that it cannot run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainkit.engines.registry import ENGINES
from trainkit.jobs.load import load
from trainkit.jobs.schema import Job
from trainkit.plan.planner import Plan, make_plan
from trainkit.plan.storage import GIB
from trainkit.train.model.transformer import build_on_meta

JOBS = load(Path(__file__).resolve().parents[2], {})
INFEASIBLE = {"jean-zay-76b": ["layers-not-divisible", "memory"]}  # published so, and never run
# Parameters as the engine holds them, padded vocabulary included, from the published shapes; in
# billions.
BILLIONS = {
    "nemo-gpt3-126m": 0.1253,
    "nemo-gpt3-5b": 5.05,
    "nemo-gpt3-20b": 20.26,
    "nemo-gpt3-40b": 39.1,
    "nemo-gpt3-175b": 174.6,
    "neuron-gpt3-23b": 22.99,
    "neuron-gpt3-46b": 45.54,
    "neuron-gpt3-175b": 174.6,
    "azure-gpt3-check": 0.0646,
    "azure-gpt3-857m": 0.3559,
    "jean-zay-7-5b": 7.46,
    "jean-zay-30b": 29.97,
    "jean-zay-76b": 76.04,
    "gpt-neox-20b": 20.55,
    "gpt-neox-9b-lambda": 9.27,
    "gpt-neox-2-7b": 2.78,
}
LAYOUTS = {  # world, tensor, pipeline, data, micro-batches, padded vocabulary
    "gpt-neox-20b-lambda": (24, 4, 6, 1, 32, 50688),
    "gpt-neox-20b": (96, 2, 4, 12, 32, 50432),
    "nemo-gpt3-175b16": (128, 8, 8, 2, 512, 51200),
    "neuron-gpt3-175b": (256, 32, 8, 1, 64, 53248),
    "azure-gpt3-175b": (128, 8, 16, 1, 512, 51200),
    "azure-gpt3-check": (16, 1, 1, 16, 32, 50304),
    "jean-zay-76b-pp30": (120, 4, 30, 1, 4, 50688),
}


def planned(name: str, *sets: str) -> tuple[Job, Plan]:
    job = JOBS.resolve(name, sets).job
    return job, make_plan(job, rules=ENGINES[job.engine].rules)


@pytest.mark.parametrize("name", JOBS.names())
def test_every_job_is_feasible_as_published(name: str) -> None:
    job, plan = planned(name)
    assert [objection.code for objection in plan.objections] == INFEASIBLE.get(name, []), (
        plan.objections
    )
    if plan.vocab_size:
        assert plan.parameters == sum(
            p.numel() for p in build_on_meta(job.model, plan.vocab_size).parameters()
        )


@pytest.mark.parametrize(("name", "billions"), BILLIONS.items(), ids=list(BILLIONS))
def test_parameters(name: str, billions: float) -> None:
    job, _ = planned(name)
    _, plan = planned(name, *(["engine=gpt-neox"] if job.engine == "native" else []))
    # three printed digits
    assert plan.engine_parameters and plan.engine_parameters / 1e9 == pytest.approx(
        billions, rel=2e-3
    )


@pytest.mark.parametrize(("name", "expected"), LAYOUTS.items(), ids=list(LAYOUTS))
def test_layouts(name: str, expected: tuple[int, ...]) -> None:
    _, plan = planned(name)
    layout = plan.layout
    assert (
        layout.world,
        layout.tensor,
        layout.pipeline,
        layout.data,
        layout.micro_batches,
        plan.padded_vocab_size,
    ) == expected


def test_uneven_stages_by_engine() -> None:
    """Trap 7: 44 layers on 6 stages run natively and with GPT-NeoX, not with Megatron-LM."""
    assert (
        planned("gpt-neox-20b-lambda")[1].feasible
        and planned("gpt-neox-20b-lambda", "engine=gpt-neox")[1].feasible
    )
    refused = planned("gpt-neox-20b-lambda", "engine=megatron-lm")[1]
    assert [objection.code for objection in refused.objections] == ["layers-not-divisible"]


def test_the_published_infeasible_job_says_what_would_run() -> None:
    """Trap 1."""
    stages, _ = planned("jean-zay-76b")[1].objections
    assert (
        stages.key == "parallelism.pipeline_model_parallel_size"
        and {"parallelism.pipeline_model_parallel_size": 30, "nodes": 30} in stages.changes
    )


@pytest.mark.parametrize(
    ("nodes", "found"),
    [(12, ["world-not-divisible"]), (16, []), (24, ["world-not-divisible"]), (32, [])],
)
def test_azure_runs_on_multiples_of_16_nodes(nodes: int, found: list[str]) -> None:
    """Trap 20."""
    assert [
        objection.code for objection in planned("azure-gpt3-175b", f"nodes={nodes}")[1].objections
    ] == found


def test_published_checkpoints() -> None:
    """GPT-NeoX-20B: 268 GiB; GPT-3 175B at 14 bytes: 2.22 TiB, which Azure's table rounds to
    2.3."""
    neox, azure = planned("gpt-neox-20b", "engine=gpt-neox")[1], planned("azure-gpt3-175b")[1]
    assert neox.checkpoint_bytes and azure.checkpoint_bytes
    assert round(
        neox.checkpoint_bytes / GIB
    ) == 268 and azure.checkpoint_bytes / 2**40 == pytest.approx(2.223, abs=1e-3)


def test_any_reference_natively() -> None:
    """--set engine=native plans every one of them by the native trainer's rules."""
    problems: dict[str, Any] = {}
    for name in JOBS.names():
        _, plan = planned(name, "engine=native")
        problems[name] = [
            objection.code
            for objection in plan.objections
            if objection.code not in ("memory", "disk-too-small")
        ]
    assert not any(problems.values()), problems


@pytest.mark.parametrize(
    ("name", "engine", "option"),
    [
        ("azure-gpt3-175b", "megatron-lm", "mtp-num-layers"),
        ("nemo-gpt3-5b", "nemo", "+model.num_moe_experts"),
        ("gpt-neox-20b", "gpt-neox", "moe_num_experts"),
    ],
)
def test_a_model_that_an_engines_option_makes_larger_is_not_called_feasible(
    name: str, engine: str, option: str
) -> None:
    job, plan = planned(name, f"engine={engine}")
    assert "not-counted" not in [each.code for each in plan.not_known]
    job = job.model_copy(update={"engine_args": {**job.engine_args, option: 8}})
    larger = make_plan(job, rules=ENGINES[engine].rules)
    assert not larger.feasible
    assert f"engine_args.{option}" in [each.key for each in larger.not_known]
