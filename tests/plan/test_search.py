"""The search over layouts: what it ranks, what it refuses and says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.plan.example import BIG, gpu, job_of, shape
from trainkit.engines.registry import ENGINES
from trainkit.jobs.devices import built_in_device
from trainkit.jobs.load import load
from trainkit.jobs.schema import Job
from trainkit.plan.planner import make_plan
from trainkit.plan.search import Search, Searcher, describe, divisors

VOCAB = 1024


def small_job(engine: str = "native", ranks: int = 4, **keys: object) -> Job:
    given: dict[str, object] = {"device": BIG, "precision": "bf16", "global_batch_size": 16}
    model = shape("llama", 4, 256, 4, 128, vocab_size=VOCAB)
    return job_of(model, ranks, engine=engine, **{**given, **keys})  # type: ignore[arg-type]


def search(job: Job, nodes: list[int] | None = None) -> Search:
    return Searcher(job, ENGINES[job.engine].rules, VOCAB).search(nodes or [job.nodes])


@pytest.mark.parametrize("engine", ["native", "megatron-lm", "gpt-neox"])
def test_winners_are_feasible_and_in_order(engine: str) -> None:
    job = small_job(engine)
    found = search(job)
    assert len(found.ranked) == 10 and found.known
    speeds = [each.tokens_per_second for each in found.ranked]
    assert speeds == sorted(speeds, reverse=True)
    for each in found.ranked:
        plan = make_plan(each.job, VOCAB, rules=ENGINES[engine].rules)
        assert plan.feasible and plan.memory and plan.memory.fits is not False
        assert plan.global_batch_size == job.global_batch_size
        assert plan.duration
        assert plan.duration.speed.tokens_per_second == pytest.approx(each.tokens_per_second)
    assert found.considered == sum(found.refused.values()) + len(found.ranked)
    assert found.asked and found.ranked[0].tokens_per_second >= found.asked.tokens_per_second


def test_memory_is_a_constraint() -> None:
    room = search(small_job()).ranked[0]
    assert room.plan and room.plan.memory
    need = room.plan.memory.fullest.total_bytes
    tight = gpu(need - 1)
    found = search(small_job(device=tight))
    assert found.refused["memory"] and found.nearest["memory"] == describe(room.change)
    for each in found.ranked:
        assert each.plan and each.plan.memory
        assert each.plan.memory.fullest.total_bytes < need
    nothing = search(small_job(device=gpu(1000)))
    assert not nothing.ranked and nothing.asked is None
    assert nothing.considered == sum(nothing.refused.values())
    assert nothing.refused["memory"]


def test_prime_numbers_of_heads_and_one_layout() -> None:
    job = small_job("megatron-lm")
    odd = job.model_copy(update={"model": job.model.model_copy(update={"num_attention_heads": 7})})
    found = search(
        odd.model_copy(update={"model": odd.model.model_copy(update={"kv_channels": 8})})
    )
    assert all(each.change["parallelism.tensor_model_parallel_size"] == 1 for each in found.ranked)
    assert found.refused["heads-not-divisible"]
    one = search(small_job("megatron-lm", ranks=1, global_batch_size=1))
    kinds = {describe(each.change).split(", recompute")[0] for each in one.ranked}
    assert kinds == {"TP 1, PP 1, ZeRO 0, micro-batch 1", "TP 1, PP 1, ZeRO 1, micro-batch 1"}


def test_an_unknown_device_is_ranked_without_days() -> None:
    found = search(small_job(device=None, precision="fp32"))
    assert found.ranked and not found.known
    assert all(each.plan and each.plan.days is None for each in found.ranked)


def test_more_nodes() -> None:
    """The batch stays the same, and so does what a layout is compared by."""
    found = search(small_job(nodes=1, cluster={"launcher": "slurm"}), [1, 2, 4])
    assert {each.job.global_batch_size for each in found.ranked} == {16}
    assert all(each.change["nodes"] == each.job.nodes for each in found.ranked)
    few = search(small_job(nodes=1, cluster={"launcher": "slurm", "max_nodes": 2}), [1, 2, 4])
    assert few.refused["too-many-nodes"]


def test_divisors() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12] and divisors(7) == [1, 7]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["h100-sxm-80gb", "h200-sxm-141gb"])
def test_deepseek_v3_fits_256_devices(name: str) -> None:
    job = load(Path(__file__).resolve().parents[2], {}).resolve("deepseek-v3", []).job
    cluster = job.cluster.model_copy(update={"device": built_in_device(name)})
    job = job.model_copy(update={"cluster": cluster})
    assert job.world_size == 256
    found = Searcher(job, ENGINES["native"].rules, 129280).search([job.nodes])
    assert len(found.ranked) == 10 and found.refused["memory"]
    assert all(each.plan and each.plan.feasible for each in found.ranked)
