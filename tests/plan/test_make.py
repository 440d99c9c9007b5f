"""What a plan says, and what it objects to."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from trainkit.jobs.devices import built_in_device
from trainkit.jobs.schema import Cluster, Dataset, Job, Model, Profile, Training
from trainkit.plan.batch import consumed_after
from trainkit.plan.make import make_plan


def job(ranks: int, **training: Any) -> Job:
    return Job(
        name="j",
        cluster=Cluster(name="c", ranks_per_node=ranks),
        model=Model(name="m", num_layers=1, hidden_size=8, num_attention_heads=2, seq_length=4, vocab_size=16),
        dataset=Dataset(name="mock", source="mock"),
        training=Training.model_validate({"train_iters": 10, "lr": 1e-3, **training}),
    )


@pytest.mark.parametrize(
    ("ranks", "training", "batch", "steps"),
    [
        (2, {"micro_batch_size": 2, "global_batch_size": 8}, 8, 2),
        (2, {"micro_batch_size": 2, "gradient_accumulation_steps": 3}, 12, 3),
        (4, {"micro_batch_size": 2}, 8, 1),
    ],
)
def test_one_of_batch_and_accumulation_follows_from_the_other(ranks: int, training: dict[str, int], batch: int, steps: int) -> None:
    plan = make_plan(job(ranks, **training))
    assert plan.feasible and (plan.global_batch_size, plan.gradient_accumulation_steps, plan.tokens) == (batch, steps, 10 * batch * 4)
    document = plan.to_json()
    assert document["schema"] == "plan/1" and document["feasible"] is True and document["checkpoint_bytes"] == 12 * document["parameters"]


def test_a_batch_that_does_not_divide_is_refused_with_the_nearest_that_do() -> None:
    plan = make_plan(job(3, micro_batch_size=2, global_batch_size=16))
    assert not plan.feasible and "nearest: 12 or 18" in plan.objections[0].message
    assert plan.to_json()["objections"][0]["key"] == "training.global_batch_size"


def test_every_batch_of_a_ramp_must_divide() -> None:
    ramp = {"micro_batch_size": 2, "global_batch_size": 24, "train_iters": 40}
    plan = make_plan(job(2, **ramp, rampup_batch_size=[4, 4, 120]))
    assert plan.feasible and plan.tokens == consumed_after(job(2, **ramp, rampup_batch_size=[4, 4, 120]), 40) * 4 < 40 * 24 * 4
    (objection,) = make_plan(job(2, **ramp, rampup_batch_size=[6, 2, 120])).objections
    assert objection.key == "training.rampup_batch_size" and "6, 10, 14, 18 and 1 more" in objection.message
    assert "multiples of 4" in objection.message


def test_the_checkpoint_is_as_large_as_the_optimizer_makes_it() -> None:
    sizes = [make_plan(job(1, **keys)) for keys in ({}, {"optimizer": "sgd"}, {"optimizer": "sgd", "sgd_momentum": 0.0})]
    assert [plan.checkpoint_bytes for plan in sizes] == [k * plan.parameters for k, plan in zip((12, 8, 4), sizes, strict=True) if plan.parameters]


def test_recomputation_costs_the_hardware() -> None:
    plain, full = make_plan(job(1)), make_plan(job(1, recompute_granularity="full"))
    assert plain.model_flops_per_token == plain.hardware_flops_per_token == full.model_flops_per_token
    assert full.hardware_flops_per_token is not None and plain.hardware_flops_per_token is not None
    assert full.hardware_flops_per_token > plain.hardware_flops_per_token


def test_all_objections_come_at_once() -> None:
    wrong = job(3, global_batch_size=16).model_copy(update={"profile": Profile(start=11, stop=12, ranks=(0, 3, 4))})
    wrong = wrong.model_copy(update={"cluster": Cluster(name="c", ranks_per_node=3, device=built_in_device("cuda"), gpus_per_node=2)})
    plan = make_plan(wrong, vocab_size=17)
    assert [o.key for o in plan.objections] == ["training.global_batch_size", "model.vocab_size", "cluster.ranks_per_node", "profile.start", "profile.ranks"]
    assert "17 ids" in plan.objections[1].message and "ranks 3, 4: the world has ranks 0 to 2" in plan.objections[4].message


def test_planning_imports_no_torch() -> None:
    code = "import sys, trainkit.plan.make, trainkit.plan.batch; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
