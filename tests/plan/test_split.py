"""Megatron-LM's published pipeline layouts, and the memory that published runs took."""

from __future__ import annotations

from typing import Any

import pytest

from tests.plan.example import gpu, job_of, shape
from trainkit.engines.registry import ENGINES
from trainkit.jobs.schema import Job
from trainkit.plan.objection import with_change
from trainkit.plan.planner import Plan, make_plan
from trainkit.plan.split import EMBEDDING, FIRST, LAST, LOSS, MEGATRON_LAYOUT

GIB = 2**30
ENDS = {EMBEDDING: True, LOSS: True}


def plan_of(job: Job) -> Plan:
    return make_plan(job, rules=ENGINES[job.engine].rules)


def bloom(engine: str = "megatron-lm", **keys: Any) -> Job:
    """BLOOM-176B (bigscience, tr11-176B-ml): 70 layers on 12 stages, TP 4, DP 8, micro-batch 2,
    every layer computed again."""
    model = shape("gpt", 70, 14336, 112, 2048, vocab_size=250680)
    layout = {"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 12}
    training: dict[str, Any] = {
        "precision": "bf16",
        "recompute_granularity": "full",
        "micro_batch_size": 2,
        "global_batch_size": 2048,
    }
    return job_of(
        model,
        8,
        nodes=48,
        engine=engine,
        device=gpu(80 * GIB),
        parallelism=layout,
        **training,
        **keys,
    )


def llama_405b(**keys: Any) -> Job:
    """Llama 3 405B (arXiv:2407.21783, section 3.3.2): 126 layers on 16 stages, one less at both
    ends."""
    sizes: dict[str, Any] = {"num_query_groups": 8, "ffn_hidden_size": 53248, "vocab_size": 128256}
    layout = {
        "tensor_model_parallel_size": 8,
        "pipeline_model_parallel_size": 16,
        "sequence_parallel": True,
        **keys.pop("parallelism", {}),
    }
    device = gpu(80 * GIB)
    model = shape("llama", 126, 16384, 128, 8192, **sizes)
    return job_of(
        model,
        8,
        nodes=128,
        engine="megatron-lm",
        device=device,
        parallelism=layout,
        precision="bf16",
        global_batch_size=256,
        **keys,
    )


@pytest.mark.parametrize(
    ("job", "layers"), [(bloom, (5, *[6] * 10, 5)), (llama_405b, (7, *[8] * 14, 7))]
)
def test_embedding_and_loss_in_the_split(job: Any, layers: tuple[int, ...]) -> None:
    objection, *_ = plan_of(job()).objections
    change = {f"engine_args.{key}": True for key in ENDS}
    assert objection.code == "layers-not-divisible" and change in objection.changes
    found = plan_of(job(engine_args=ENDS))
    assert (
        "layers-not-divisible" not in [o.code for o in found.objections]
        and found.layout.layers_by_stage == layers
    )
    assert plan_of(with_change(job(), change)).layout.layers_by_stage == layers


def test_the_same_by_the_numbers_of_its_ends_and_spelled_out() -> None:
    ends = plan_of(bloom(engine_args={FIRST: 5, LAST: 5}))
    assert ends.feasible and ends.layout.layers_by_stage == (5, *[6] * 10, 5)
    spelled = plan_of(bloom(engine_args={MEGATRON_LAYOUT: "Et*5,|(t*6|)*10,t*5L"}))
    assert spelled.feasible and spelled.layout.layers_by_stage == (5, *[6] * 10, 5)
    one_end = plan_of(bloom(engine_args={FIRST: 4}))
    assert one_end.feasible and one_end.layout.layers_by_stage == (4, *[6] * 11)


def test_a_layout_with_several_chunks_a_stage() -> None:
    """Chunks go round and round over the stages; one may be without a layer."""
    text = "E|(t|)*126L"  # 128 chunks: 8 of each stage
    job = llama_405b(
        parallelism={"virtual_pipeline_model_parallel_size": 8}, engine_args={MEGATRON_LAYOUT: text}
    )
    plan = plan_of(job)
    assert "pipeline-layout" not in [o.code for o in plan.objections]
    assert plan.layout.chunks == (0, *[1] * 126, 0) and plan.layout.layers_by_stage == (
        7,
        *[8] * 14,
        7,
    )


@pytest.mark.parametrize(
    ("arguments", "key", "words"),
    [
        ({EMBEDDING: True}, EMBEDDING, "70 layers with embedding do not divide over 12 chunks"),
        ({FIRST: 5}, FIRST, "65 layers are left for 11 of 12 stages"),
        ({FIRST: "5"}, FIRST, "is not a number of layers"),
        ({MEGATRON_LAYOUT: "Et*70L"}, MEGATRON_LAYOUT, "1 chunks, 12 stages of 1 are 12"),
        ({MEGATRON_LAYOUT: "Et*5|(t*6|)*10t*4L"}, MEGATRON_LAYOUT, "has 69 layers, the model 70"),
        ({MEGATRON_LAYOUT: "t*5|(t*6|)*10t*5L"}, MEGATRON_LAYOUT, "needs one E, at its beginning"),
        ({MEGATRON_LAYOUT: "Ex*5L"}, MEGATRON_LAYOUT, "has '*'"),
        ({MEGATRON_LAYOUT: "E(t|)*99999999L"}, MEGATRON_LAYOUT, "more than 65536 parts"),
    ],
)
def test_layouts_that_cannot_be(arguments: dict[str, Any], key: str, words: str) -> None:
    objection, *_ = plan_of(bloom(engine_args=arguments)).objections
    assert (objection.code, objection.key) == (
        "pipeline-layout",
        f"engine_args.{key}",
    ) and words in objection.message


def test_other_engines_read_no_such_arguments() -> None:
    assert plan_of(bloom("gpt-neox")).layout.layers_by_stage == (*[6] * 10, 5, 5)
    assert "layers-not-divisible" in [
        o.code for o in plan_of(bloom("nemo", engine_args=ENDS)).objections
    ]


def test_published_runs_took_more() -> None:
    """BLOOM took 60 GB of each A100; GPT-NeoX-20B 27 GB (Lambda Labs). Both lie in the band that
    the plan says beside its own figure."""
    for job in (bloom(engine_args=ENDS), bloom("gpt-neox")):
        memory = plan_of(job).memory
        assert memory and memory.band_bytes and memory.fullest.total_bytes < 60e9
        low, high = memory.band_bytes
        assert low < 60e9 <= 1.01 * high
        assert plan_of(job).to_json()["memory"]["band_bytes"] == [low, high]
    assert plan_of(job_of()).to_json()["memory"]["band_bytes"] is None


def test_what_fits_by_the_plan_and_not_by_published_runs_is_said() -> None:
    job = bloom(engine_args=ENDS)
    memory = plan_of(job).memory
    assert memory is not None
    job = job.model_copy(
        update={
            "cluster": job.cluster.model_copy(
                update={"device": gpu(round(memory.fullest.total_bytes * 1.2))}
            )
        }
    )
    plan = plan_of(job)
    assert plan.feasible and [note.code for note in plan.notes] == ["memory-band"]
    assert "took 43 to 56 GiB where this plan says 40" in plan.notes[0].message
