"""What a plan says, and what it objects to."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings

from tests.plan.example import BIG, gpu, job_of, shape
from tests.plan.test_memory import laid_out
from trainkit.base.errors import Exit
from trainkit.engines.registry import ENGINES
from trainkit.jobs.schema import Job, ProfileSettings
from trainkit.plan.batch import consumed_after
from trainkit.plan.objection import with_change
from trainkit.plan.planner import Plan, PreparedData, make_plan


def plan_of(job: Job) -> Plan:
    return make_plan(job, rules=ENGINES[job.engine].rules)


def codes(job: Job) -> list[str]:
    return [objection.code for objection in plan_of(job).objections]


def layout(tensor: int = 1, pipeline: int = 1, **keys: Any) -> dict[str, Any]:
    return {"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline, **keys}


@pytest.mark.parametrize(
    ("ranks", "training", "batch", "steps"),
    [
        (2, {"micro_batch_size": 2, "global_batch_size": 8}, 8, 2),
        (2, {"micro_batch_size": 2, "gradient_accumulation_steps": 3}, 12, 3),
        (4, {"micro_batch_size": 2}, 8, 1),
    ],
)
def test_one_of_batch_and_accumulation_follows_from_the_other(
    ranks: int, training: dict[str, Any], batch: int, steps: int
) -> None:
    plan = make_plan(job_of(ranks=ranks, **training), prepared=PreparedData(host_bytes=10**12))
    assert plan.feasible and (
        plan.global_batch_size,
        plan.gradient_accumulation_steps,
        plan.tokens,
    ) == (batch, steps, 10 * batch * 4)
    document = plan.to_json()
    assert (
        document["schema"] == "plan/1"
        and document["feasible"] is True
        and document["checkpoint_bytes"] == 12 * document["parameters"]
    )


def test_the_form_of_the_document() -> None:
    """Keys may be added, never renamed."""
    document = make_plan(job_of(ranks=2, device=BIG)).to_json()
    keys = {
        "job",
        "feasible",
        "world_size",
        "data_parallel_size",
        "gradient_accumulation_steps",
        "parameters",
        "padded_vocab_size",
        "model_flops_per_token",
    }
    keys |= {
        "memory",
        "checkpoint_bytes",
        "bubble_fraction",
        "tokens",
        "days",
        "objections",
        "hardware_flops_per_token",
        "global_batch_size",
        "vocab_size",
    }
    assert keys <= set(document) and {"fullest_rank", "device_bytes"} <= set(document["memory"])
    parts = {
        "total_bytes",
        "parameter_bytes",
        "gradient_bytes",
        "optimizer_bytes",
        "activation_bytes",
        "reserve_bytes",
    }
    assert parts <= set(document["memory"]["fullest_rank"])
    wrong = make_plan(job_of(ranks=3, global_batch_size=16)).to_json()["objections"]
    assert [{"code", "key", "message"} <= set(entry) for entry in wrong] == [True]


def test_a_vocabulary_that_is_not_known_yet() -> None:
    job = job_of()
    plan = make_plan(
        job.model_copy(update={"model": job.model.model_copy(update={"vocab_size": None})})
    )
    document = plan.to_json()
    assert plan.feasible is None and plan.exit is Exit.NOT_KNOWN
    assert [entry["code"] for entry in document["not_known"]][:1] == ["vocabulary-unknown"]
    few, many = document["between"]
    assert few["vocab_size"] < few["parameters"] < many["parameters"]
    for key in (
        "parameters",
        "padded_vocab_size",
        "memory",
        "checkpoint_bytes",
        "days",
        "duration",
        "storage",
    ):
        assert document[key] is None, key


def test_the_rules_of_another_engine_are_refused() -> None:
    with pytest.raises(ValueError, match="nemo"):
        make_plan(job_of(engine="nemo"))


def test_a_batch_that_does_not_divide_is_refused_with_the_nearest_that_do() -> None:
    plan = make_plan(job_of(ranks=3, micro_batch_size=2, global_batch_size=16))
    assert not plan.feasible and plan.objections[0].message.endswith("; nearest: 12 or 18")
    assert plan.to_json()["objections"][0]["key"] == "training.global_batch_size"


def test_every_batch_of_a_ramp_must_divide() -> None:
    ramp: dict[str, Any] = {"micro_batch_size": 2, "global_batch_size": 24, "train_iters": 40}
    fitting = job_of(ranks=2, **ramp, rampup_batch_size=[4, 4, 120])
    plan = make_plan(fitting)
    assert not plan.objections and plan.tokens == consumed_after(fitting, 40) * 4 < 40 * 24 * 4
    (objection,) = make_plan(job_of(ranks=2, **ramp, rampup_batch_size=[6, 2, 120])).objections
    assert (
        objection.key == "training.rampup_batch_size"
        and "6, 10, 14, 18 and 1 more" in objection.message
    )
    assert "multiples of 4" in objection.message


def test_recomputation_costs_the_hardware() -> None:
    plain, full = make_plan(job_of()), make_plan(job_of(recompute_granularity="full"))
    assert (
        plain.model_flops_per_token == plain.hardware_flops_per_token == full.model_flops_per_token
    )
    assert full.hardware_flops_per_token is not None and plain.hardware_flops_per_token is not None
    assert full.hardware_flops_per_token > plain.hardware_flops_per_token
    published = plan_of(job_of(engine="megatron-lm", recompute_granularity="full"))
    assert (
        published.hardware_flops_per_token is not None
        and published.hardware_flops_per_token > full.hardware_flops_per_token
    )


def test_all_objections_come_at_once() -> None:
    wrong = job_of(
        ranks=3, global_batch_size=16, device=BIG, cluster={"gpus_per_node": 2, "ranks_per_node": 3}
    )
    plan = make_plan(
        wrong.model_copy(update={"profile": ProfileSettings(start=11, stop=12, ranks=(0, 3, 4))}),
        vocab_size=17,
    )
    assert [o.key for o in plan.objections] == [
        "training.global_batch_size",
        "model.vocab_size",
        "cluster.ranks_per_node",
        "profile.start",
        "profile.ranks",
    ]
    assert (
        "17 ids" in plan.objections[1].message
        and "ranks 3, 4: the world has ranks 0 to 2" in plan.objections[4].message
    )


def test_a_world_that_the_degrees_do_not_divide() -> None:
    """Trap 20 of the published set-ups: Azure's TP 8 x PP 16 runs on multiples of 16 nodes only."""
    model = shape(layers=96, hidden=96, heads=8)
    keys: dict[str, Any] = {"device": BIG, "precision": "bf16", "parallelism": layout(8, 16)}
    (objection,) = plan_of(job_of(model, 8, nodes=12, engine="megatron-lm", **keys)).objections
    assert (objection.code, objection.key) == ("world-not-divisible", "nodes") and {
        "nodes": 16
    } in objection.changes
    assert "12 nodes of 8 ranks are 96" in objection.message
    assert codes(job_of(model, 8, nodes=32, engine="megatron-lm", **keys)) == []
    alone = job_of(shape(heads=4), 2, parallelism=layout(4))
    assert codes(alone) == ["world-not-divisible"]


@pytest.mark.parametrize("engine", ["native", "gpt-neox"])
def test_stages_may_be_uneven_here(engine: str) -> None:
    """Trap 7: GPT-NeoX's 44 layers run on 6 stages."""
    plan = plan_of(job_of(shape(layers=44), 6, engine=engine, device=BIG, parallelism=layout(1, 6)))
    assert plan.feasible and plan.to_json()["layers_by_stage"] == [8, 8, 7, 7, 7, 7]


@pytest.mark.parametrize("engine", ["megatron-lm", "nemo", "neuronx-nemo"])
def test_stages_must_be_even_here(engine: str) -> None:
    """Traps 7 and 1: 44 layers on 6 stages; BigScience's 60 on 32."""
    (objection,) = plan_of(
        job_of(shape(layers=44), 6, engine=engine, device=BIG, parallelism=layout(1, 6))
    ).objections
    assert (
        objection.code == "layers-not-divisible"
        and {"model.num_layers": 42} in objection.changes
        and {"model.num_layers": 48} in objection.changes
    )
    published = job_of(
        shape(layers=60, heads=4),
        4,
        nodes=32,
        engine=engine,
        device=BIG,
        parallelism=layout(4, 32),
        global_batch_size=4,
    )
    (objection,) = plan_of(published).objections[:1]
    assert {"parallelism.pipeline_model_parallel_size": 30, "nodes": 30} in objection.changes


def test_more_stages_than_layers() -> None:
    (objection,) = plan_of(job_of(shape(layers=3), 4, parallelism=layout(1, 4))).objections
    assert objection.code == "more-stages-than-layers"


def test_interleaved_schedules() -> None:
    keys: dict[str, Any] = {
        "parallelism": layout(1, 4, virtual_pipeline_model_parallel_size=2),
        "device": BIG,
    }
    model = shape(layers=16)
    assert codes(job_of(model, 4, engine="gpt-neox", **keys)) == ["no-virtual-stages"]
    assert codes(job_of(model, 4, engine="megatron-lm", global_batch_size=8, **keys)) == []
    (objection,) = plan_of(
        job_of(model, 4, engine="megatron-lm", global_batch_size=6, **keys)
    ).objections
    assert objection.code == "micro-batches-not-divisible" and objection.changes == (
        {"training.global_batch_size": 4},
        {"training.global_batch_size": 8},
    )
    assert codes(
        job_of(shape(layers=12), 4, engine="megatron-lm", global_batch_size=8, **keys)
    ) == ["layers-not-divisible"]
    assert codes(job_of(shape(layers=12), 4, global_batch_size=8, **keys)) == []


def test_rounds_of_the_native_interleaved_schedule() -> None:
    """torch.distributed.pipelining: m micro-batches make max(1, m // p) rounds, all equally
    long; of a growing batch every size."""
    keys: dict[str, Any] = {
        "parallelism": layout(1, 4, virtual_pipeline_model_parallel_size=2),
        "device": BIG,
    }
    fitting = [
        m
        for m in range(1, 17)
        if not codes(job_of(shape(layers=16), 4, global_batch_size=m, **keys))
    ]
    assert fitting == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 16]
    (objection,) = plan_of(job_of(shape(layers=16), 4, global_batch_size=9, **keys)).objections
    assert objection.changes == (
        {"training.global_batch_size": 8},
        {"training.global_batch_size": 10},
    )
    (ramp,) = plan_of(
        job_of(shape(layers=16), 4, global_batch_size=16, rampup_batch_size=(8, 1, 100), **keys)
    ).objections
    assert (ramp.code, ramp.key) == (
        "micro-batches-not-divisible",
        "training.rampup_batch_size",
    ) and "a step has 9, 11, 13, 14" in ramp.message
    # fewer micro-batches than stages
    assert (
        codes(job_of(shape(layers=4), 4, global_batch_size=2, parallelism=layout(1, 4), device=BIG))
        == []
    )


def test_what_only_the_native_trainer_has() -> None:
    zero_bubble, copies = (
        layout(1, 2, pipeline_schedule="zbv"),
        layout(data_parallel_replicate_size=2),
    )
    for engine, found in (("native", []), ("megatron-lm", ["no-zero-bubble", "no-replicas"])):
        model = shape(layers=4)
        assert (
            codes(job_of(model, 2, engine=engine, device=BIG, parallelism=zero_bubble)) == found[:1]
        )
        keys: dict[str, Any] = {"device": BIG, "precision": "bf16", "parallelism": copies}
        assert codes(job_of(model, 4, engine=engine, **keys)) == found[1:]
    # two chunks a stage
    assert codes(job_of(shape(layers=3), 2, device=BIG, parallelism=zero_bubble)) == [
        "more-stages-than-layers"
    ]
    (objection,) = plan_of(
        job_of(ranks=8, device=BIG, parallelism=layout(data_parallel_replicate_size=3))
    ).objections
    assert objection.code == "replicas-not-divisible" and objection.changes == tuple(
        {"parallelism.data_parallel_replicate_size": n} for n in (2, 4)
    )


def test_tensor_parallelism_stays_in_a_node() -> None:
    (objection,) = plan_of(
        job_of(shape(hidden=96, heads=16), 8, nodes=2, device=BIG, parallelism=layout(16))
    ).objections
    assert objection.code == "tensor-parallel-across-nodes" and objection.changes == (
        {"parallelism.tensor_model_parallel_size": 8},
    )
    assert codes(
        job_of(shape(hidden=96, heads=6), 4, nodes=3, device=BIG, parallelism=layout(6))
    ) == ["tensor-parallel-across-nodes"]


def test_what_tensor_parallelism_splits_must_divide() -> None:
    (heads,) = plan_of(
        job_of(shape(hidden=48, heads=6), 4, device=BIG, parallelism=layout(4))
    ).objections
    assert heads.code == "heads-not-divisible" and heads.changes == (
        {"parallelism.tensor_model_parallel_size": 2},
    )
    grouped, odd = (
        shape("llama", hidden=48, heads=8, num_query_groups=2, ffn_hidden_size=64),
        shape(hidden=48, heads=4, ffn_hidden_size=30),
    )
    # native repeats heads and splits unevenly
    for engine, found in (
        ("megatron-lm", ["query-groups-not-divisible", "mlp-not-divisible"]),
        ("native", []),
    ):
        both = [
            code
            for model in (grouped, odd)
            for code in codes(job_of(model, 4, engine=engine, device=BIG, parallelism=layout(4)))
        ]
        assert both == found
    three = shape("llama", hidden=48, heads=12, num_query_groups=3)
    assert codes(job_of(three, 4, device=BIG, parallelism=layout(4))) == [
        "query-groups-not-divisible"
    ]
    split = layout(4, sequence_parallel=True)
    assert codes(job_of(shape(hidden=48, heads=4, length=6), 4, device=BIG, parallelism=split)) == [
        "sequence-not-divisible"
    ]


def test_sequence_parallelism_alone_is_a_note() -> None:
    """Trap 19: Azure's script passes --sequence-parallel at TP 1 too; Megatron-LM turns it off."""
    plan = plan_of(
        job_of(engine="megatron-lm", device=BIG, parallelism=layout(sequence_parallel=True))
    )
    assert plan.feasible and "sequence-parallel-off" in [note.code for note in plan.notes]


@pytest.mark.parametrize(
    ("engine", "zero", "pipeline", "found"),
    [
        ("megatron-lm", 2, 1, ["no-such-zero-stage"]),
        ("nemo", 3, 1, ["no-such-zero-stage"]),
        ("gpt-neox", 3, 1, []),
        ("gpt-neox", 2, 2, ["no-such-zero-stage"]),
        ("native", 3, 2, []),
        ("native", 2, 2, ["no-such-zero-stage"]),
    ],
)
def test_stages_of_zero(engine: str, zero: int, pipeline: int, found: list[str]) -> None:
    job = job_of(
        shape(layers=2),
        2,
        engine=engine,
        device=BIG,
        precision="bf16",
        parallelism=layout(1, pipeline, zero_stage=zero),
    )
    assert codes(job) == found
    if found:
        assert plan_of(job).objections[0].changes == ({"parallelism.zero_stage": 1},)


@pytest.mark.parametrize(
    ("ranks", "keys", "found"),
    [
        (2, {}, []),
        (4, {"parallelism": layout(2)}, []),
        (1, {}, ["nobody-to-replay"]),
        (4, {"parallelism": layout(2, context_parallel_size=2)}, ["nobody-to-replay"]),
        (4, {"parallelism": layout(1, 2)}, ["replay-in-pipeline"]),
        (2, {"device": BIG}, ["replay-not-deterministic"]),
        (2, {"device": BIG, "deterministic": True}, []),
    ],
)
def test_who_can_compute_a_micro_batch_too(
    ranks: int, keys: dict[str, Any], found: list[str]
) -> None:
    job = job_of(shape(layers=2, length=16), ranks, replay_interval=10, **keys)
    assert codes(job) == found
    for objection in plan_of(job).objections:
        assert all(codes(with_change(job, change)) == [] for change in objection.changes)


def test_experts_on_all_ranks_leave_nobody_to_compute_them_too() -> None:
    model = shape("qwen3-moe", moe={"num_experts": 4, "router_topk": 2, "ffn_hidden_size": 8})
    for experts, found in ((2, []), (4, ["nobody-to-replay"])):
        spread = {"expert_model_parallel_size": experts}
        assert codes(job_of(model, 4, replay_interval=10, parallelism=spread)) == found


def test_more_nodes_than_there_are() -> None:
    (objection,) = plan_of(job_of(nodes=4, cluster={"max_nodes": 3})).objections
    assert (objection.code, objection.changes) == ("too-many-nodes", ({"nodes": 3},))


LARGE: dict[str, Any] = {
    "layers": 8,
    "hidden": 1024,
    "heads": 16,
    "length": 1024,
    "vocab_size": 32768,
}


@pytest.mark.parametrize(
    ("gib", "keys", "change"),
    [
        (5.0, {"parallelism": layout(zero_stage=0)}, {"parallelism.zero_stage": 1}),
        (3.6, {}, {"training.recompute_granularity": "selective"}),
        (3.2, {}, {"training.micro_batch_size": 1, "training.global_batch_size": 16}),
        (
            3.2,
            {"gradient_accumulation_steps": 2},
            {"training.micro_batch_size": 1, "training.gradient_accumulation_steps": 8},
        ),
        (2.85, {}, {"training.recompute_granularity": "full"}),
        (
            2.6,
            {
                "micro_batch_size": 1,
                "gradient_accumulation_steps": 2,
                "recompute_granularity": "full",
            },
            {"parallelism.zero_stage": 2},
        ),
    ],
    ids=["zero 1", "selective", "smaller", "smaller and more", "full", "zero 2"],
)
def test_the_cheapest_change_that_fits(
    gib: float, keys: dict[str, Any], change: dict[str, Any]
) -> None:
    job = job_of(
        shape(**LARGE),
        4,
        device=gpu(int(gib * 2**30)),
        precision="bf16",
        **{"micro_batch_size": 4, **keys},
    )
    (objection,) = plan_of(job).objections
    assert (objection.code, objection.changes) == ("memory", (change,))
    changed = plan_of(with_change(job, change))
    assert changed.feasible and changed.global_batch_size == job.global_batch_size


def test_several_changes_together_and_none_that_helps() -> None:
    model = shape(**{**LARGE, "layers": 32, "hidden": 4096, "heads": 32})
    (objection,) = plan_of(
        job_of(model, 8, device=gpu(16 * 2**30), precision="bf16", micro_batch_size=8)
    ).objections
    (change,) = objection.changes
    assert len(change) > 1
    assert plan_of(
        with_change(
            job_of(model, 8, device=gpu(16 * 2**30), precision="bf16", micro_batch_size=8), change
        )
    ).feasible
    (hopeless,) = plan_of(
        job_of(model, 8, device=gpu(2**30), precision="bf16", cluster={"max_nodes": 1})
    ).objections
    assert hopeless.code == "memory" and not hopeless.changes and "no change" in hopeless.message


def test_what_hardly_fits_is_said() -> None:
    job = job_of(shape(**LARGE), 4, device=BIG, precision="bf16")
    plan = plan_of(job)
    assert plan.memory is not None
    tight = plan_of(
        job_of(
            shape(**LARGE),
            4,
            device=gpu(int(plan.memory.fullest.total_bytes * 1.05)),
            precision="bf16",
        )
    )
    assert tight.feasible and [note.code for note in tight.notes] == ["memory-tight"]


@settings(deadline=None, max_examples=150)
@given(laid_out())
def test_proposals_really_fit(job: Job) -> None:
    """Every change that an objection proposes is a valid job to which this objection is not
    raised, nor another that was not raised before."""
    objections = plan_of(job).objections
    raised = {objection.code for objection in objections}
    for objection in objections:
        for change in objection.changes:
            changed = with_change(job, change)
            Job.model_validate_json(changed.model_dump_json())
            assert set(codes(changed)) <= raised - {objection.code}, (objection, change)
