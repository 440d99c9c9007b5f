"""The time model of CPU ranks: cores are shared, and a run says how fast they are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.plan.example import job_of, shape
from trainkit.engines.registry import ENGINES
from trainkit.jobs.schema import Job
from trainkit.plan.measured import Measured
from trainkit.plan.planner import PreparedData, make_plan
from trainkit.plan.search import Searcher
from trainkit.plan.time.of_job import host_estimate

VOCAB = 1024


def demo(ranks: int = 2, **keys: object) -> Job:
    model = shape("llama", 8, 256, 4, 128, vocab_size=VOCAB)
    given: dict[str, object] = {"global_batch_size": 16, "micro_batch_size": 2, **keys}
    return job_of(model, ranks, **given)  # type: ignore[arg-type]


def seconds(job: Job, cores: int | None = 2) -> float:
    return host_estimate(job, VOCAB, cores).time.seconds


def test_cores_are_shared() -> None:
    """Twice the ranks on the same cores gain nothing; twice the cores never cost."""
    two = seconds(demo(2), 2)
    assert seconds(demo(4), 2) > 0.9 * two
    assert seconds(demo(2), 4) < two
    assert seconds(demo(2), None) == two


def test_the_order_of_layouts_measured_on_two_cores() -> None:
    """docs/benchmarks.md: DP2 1,074 ms a step, ZeRO 3 1,498, TP2 1,948, with SP 2,358."""
    tensor = {"tensor_model_parallel_size": 2}
    layouts = (
        {"zero_stage": 0},
        {"zero_stage": 3},
        tensor,
        {**tensor, "sequence_parallel": True},
    )
    times = [seconds(demo(parallelism=layout)) for layout in layouts]
    assert times == sorted(times)
    measured = (1074, 1498, 1948, 2358)
    for mine, milliseconds in zip(times[1:], measured[1:], strict=True):
        assert mine / times[0] == pytest.approx(milliseconds / measured[0], rel=0.2)


def test_waiting_leaves_the_core_to_another_rank() -> None:
    """A pipeline of four stages on two cores waits for cores, not for stages."""
    job = demo(4, parallelism={"pipeline_model_parallel_size": 4})
    alone = host_estimate(job, VOCAB, 4).time
    crowded = host_estimate(job, VOCAB, 2).time
    assert alone.terms["bubble"] > 0
    assert crowded.terms["bubble"] < alone.terms["bubble"]


def test_a_run_of_another_layout_gives_times() -> None:
    job = demo()
    run = Measured("r", False, 500.0, None, None, None, None, None, 2000.0)
    here = PreparedData(cores=2)
    assert make_plan(job, VOCAB, prepared=here).duration is None
    found = make_plan(job, VOCAB, prepared=here, measured=run).duration
    assert found and found.speed.mfu is None and "run r" in found.speed.source
    assert found.step_seconds == pytest.approx(4 * seconds(job))
    unknown = replace(run, modelled_tokens_per_second=None)
    assert make_plan(job, VOCAB, prepared=here, measured=unknown).duration is None


def test_a_search_takes_the_run_too() -> None:
    run = Measured("r", True, 500.0, None, None, None, None, None, 2000.0)
    rules = ENGINES["native"].rules
    before = Searcher(demo(), rules, VOCAB, cores=2).search([1])
    after = Searcher(demo(), rules, VOCAB, cores=2, measured=run).search([1])
    assert not before.known and after.known and after.calibrated_by == "r"
    assert [each.change for each in before.ranked] == [each.change for each in after.ranked]
    for first, second in zip(before.ranked, after.ranked, strict=True):
        assert second.tokens_per_second == pytest.approx(first.tokens_per_second / 4)
        assert second.plan and second.plan.duration
        predicted = second.plan.duration.speed.tokens_per_second
        assert predicted == pytest.approx(second.tokens_per_second)
