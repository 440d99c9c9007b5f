"""Days, failures, time limits, epochs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.plan.example import BIG, gpu, job_of, shape
from trainkit.jobs import sbatch
from trainkit.jobs.schema import Dataset
from trainkit.plan.duration import (
    FAILURES_PER_GPU_HOUR,
    START_SECONDS,
    Costs,
    Duration,
    Speed,
    duration_of,
    epochs_of,
    lost_fraction,
    time_limit,
    young_interval,
)
from trainkit.plan.measured import Measured, layout_key
from trainkit.plan.planner import Plan, make_plan


def test_what_is_computed_twice_takes_time() -> None:
    """A micro-batch of a step's, at every tenth step."""
    usual = duration(gradient_accumulation_steps=5)
    checked = duration(gradient_accumulation_steps=5, replay_interval=10)
    assert checked.parts.steps == pytest.approx(1.02 * usual.parts.steps)


def test_the_interval_that_loses_least() -> None:
    """Young's, for 3 hours between failures and 30 s a checkpoint: every 805 s, 7.5 % lost; for
    a day: 2,277 s, 2.6 %; at 5 s: 930 s, 1.1 %."""
    for hours, cost, interval, lost in (
        (3, 30, 805, 0.075),
        (24, 30, 2277, 0.026),
        (24, 5, 930, 0.011),
    ):
        best = young_interval(hours * 3600, cost)
        assert best == pytest.approx(interval, abs=1) and lost_fraction(
            best, hours * 3600, cost
        ) == pytest.approx(lost, abs=6e-4)
        assert all(
            lost_fraction(other, hours * 3600, cost) > lost_fraction(best, hours * 3600, cost)
            for other in (best / 1.3, best * 1.3)
        )


def test_failures_as_published() -> None:
    """Llama 3 405B (arXiv:2407.21783): 419 unexpected interruptions in 54 days of 16,384 H100,
    one in 3.1 hours."""
    assert pytest.approx(419) == FAILURES_PER_GPU_HOUR * 54 * 24 * 16384
    hours = 1 / (FAILURES_PER_GPU_HOUR * 16384)
    assert hours == pytest.approx(3.1, abs=0.01)


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        (90, 5400),
        ("90", 5400),
        ("10:30", 630),
        ("6:00:00", 21600),
        ("1-0", 86400),
        ("2-12", 216000),
        ("5-23:30", 516600),
        ("26-00:00:00", 2246400),
    ],
)
def test_time_limits_as_slurm_reads_them(time: str | int, seconds: int) -> None:
    """sbatch(1), --time."""
    assert sbatch.limit_seconds({"time": time}) == seconds


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"time": 0},
        {"time": "UNLIMITED"},
        {"time": "infinite"},
        {"time": "soon"},
        {"time": True},
        {"time": "1-2-3"},
    ],
)
def test_no_time_limit(options: dict[str, str | int | bool]) -> None:
    assert sbatch.limit_seconds(options) is None


def test_the_plan_reads_the_limit_of_slurm_alone() -> None:
    slurm = {"launcher": "slurm", "slurm": {"time": "1-0", "exclusive": True}}
    assert time_limit(job_of(cluster=slurm)) == 86400 and time_limit(job_of()) is None


def duration(costs: Costs | None = None, **keys: Any) -> Duration:
    job = job_of(ranks=8, device=BIG, **{"train_iters": 1000, "save_interval": 10, **keys})
    return duration_of(job, Speed(1000.0, 0.4, "told"), 10**9, costs or Costs(write=30.0))


def test_days_and_what_ends_them() -> None:
    found = duration(cluster={"launcher": "slurm", "slurm": {"time": "1-00:00:00"}})
    assert found.parts.steps == pytest.approx(1e6)
    assert found.days == pytest.approx(
        found.parts.total / 86400
    ) and found.device_hours == pytest.approx(8 * found.days * 24)
    assert found.requeues == 11  # 11.6 days in days
    assert found.failures == pytest.approx(
        FAILURES_PER_GPU_HOUR * 8 * (1e6 + found.parts.evaluations + 3000) / 3600
    )
    assert found.checkpoint_seconds == pytest.approx(
        young_interval(3600 / (8 * FAILURES_PER_GPU_HOUR), 30)
    )
    assert found.lost_as_asked and found.lost_fraction and found.lost_as_asked > found.lost_fraction
    assert duration(cluster={"launcher": "slurm"}).requeues is None


def test_the_parts_of_the_time() -> None:
    """100 checkpoints of 30 s, and 3 evaluations of 10 batches at a third of a step."""
    alone = duration(eval_interval=500)
    step = alone.step_seconds
    # before the first step too
    assert alone.evaluations == 3 and alone.parts.evaluations == pytest.approx(3 * 10 * step / 3)
    assert alone.parts.saves == pytest.approx(3000) and alone.requeues is None
    assert duration(eval_iters=0).parts.evaluations == 0
    assert duration(Costs(write=30.0, first_evaluation=False), eval_interval=300).evaluations == 4
    again = START_SECONDS["cuda"]
    assert alone.failures and alone.parts.starts == pytest.approx((1 + alone.failures) * again)
    interval = 10 * step
    assert alone.parts.repeated == pytest.approx(alone.failures * interval / 2)


def test_a_time_limit_costs_a_save_a_start_and_a_read_each_time() -> None:
    costs, slurm = Costs(write=30.0, read=20.0), {"launcher": "slurm", "slurm": {"time": 120}}
    limited = duration(costs, cluster=slurm)
    free = duration(costs)
    assert limited.requeues and limited.parts.saves and free.parts.saves
    useful = 7200 - 300 - START_SECONDS["cuda"] - 20
    assert (
        limited.requeues
        == -(
            -int(free.parts.steps + free.parts.evaluations + free.parts.saves + free.parts.repeated)
            // useful
        )
        - 1
    )
    assert limited.parts.saves - free.parts.saves == pytest.approx(30 * limited.requeues)
    assert limited.parts.starts - free.parts.starts == pytest.approx(
        (START_SECONDS["cuda"] + 20) * limited.requeues
    )
    assert (
        duration(costs, cluster={"launcher": "slurm", "slurm": {"time": "UNLIMITED"}}).requeues
        is None
    )
    assert duration(costs, cluster={"launcher": "slurm", "slurm": {"time": 0}}).requeues is None


def test_a_save_behind_training_stops_it_only_for_the_copy() -> None:
    job = job_of(
        ranks=8, device=BIG, train_iters=100, save_interval=10, checkpoint={"save_async": True}
    )
    step = job.global_batch_size * job.model.seq_length / 10
    found = duration_of(job, Speed(10.0, None, "told"), 3200, Costs(write=5 * step, copy=2.0))
    assert found.parts.saves == pytest.approx(9 * 2.0 + 5 * step)  # the last is waited for
    slow = duration_of(job, Speed(10.0, None, "told"), 3200, Costs(write=15 * step, copy=2.0))
    # each waits for the one before it
    assert slow.parts.saves == pytest.approx(9 * (2.0 + 5 * step) + 15 * step)


def test_what_a_checkpoint_takes_is_not_known() -> None:
    found = duration(Costs())
    assert found.parts.saves is None and found.parts.total == pytest.approx(
        found.parts.steps + found.parts.evaluations + found.parts.starts + found.parts.repeated
    )


def test_checkpoints_at_every_step_are_in_the_days() -> None:
    """70B, each step saved to 0.1 GiB/s: the writes alone are 91 days."""
    model = shape(
        "llama", 80, 8192, 64, 4096, num_query_groups=8, ffn_hidden_size=28672, vocab_size=128256
    )
    keys: dict[str, Any] = {
        "train_iters": 1000,
        "save_interval": 1,
        "global_batch_size": 1024,
        "precision": "bf16",
    }
    disk = {"filesystems": {"slow": {"capacity_bytes": 10**15, "write_gib_per_second": 0.1}}}
    h100 = gpu(80 * 2**30, peak_tflops={"bf16": 989.4})
    parallelism = {
        "tensor_model_parallel_size": 8,
        "pipeline_model_parallel_size": 4,
        "sequence_parallel": True,
    }
    job = job_of(
        model,
        8,
        nodes=64,
        device=h100,
        parallelism=parallelism,
        cluster=disk,
        recompute_granularity="full",
        **keys,
    )
    plan = make_plan(job)
    assert plan.feasible, plan.objections
    assert (
        plan.storage
        and plan.storage.write_seconds
        and plan.duration
        and plan.duration.parts.saves
        and plan.days
    )
    assert (
        plan.duration.parts.saves == pytest.approx(1000 * plan.storage.write_seconds)
        and plan.days > 80
    )
    assert plan.duration.parts.steps < 0.02 * plan.duration.parts.saves
    (note,) = [note for note in plan.notes if note.code == "save-interval"]
    assert "every 1 steps: training waits" in note.message and note.changes == (
        {"training.save_interval": 1000},
    )
    found = plan.to_json()["duration"]
    assert set(found["parts"]) == {"steps", "evaluations", "saves", "starts", "repeated"}
    assert sum(found["parts"].values()) == pytest.approx(plan.days * 86400)


def limited(time: str | int, **keys: Any) -> Plan:
    """A large model on Slurm with this time limit: a step takes 23 s."""
    model = shape(
        "llama", 32, 4096, 32, 4096, num_query_groups=8, ffn_hidden_size=14336, vocab_size=128256
    )
    cluster = {"launcher": "slurm", "slurm": {"time": time}, **keys}
    h100 = gpu(80 * 2**30, peak_tflops={"bf16": 989.4})
    job = job_of(
        model,
        8,
        device=h100,
        cluster=cluster,
        precision="bf16",
        global_batch_size=384,
        parallelism={"zero_stage": 3},
        recompute_granularity="full",
    )
    return make_plan(job)


def test_a_time_limit_that_leaves_no_time_for_a_step() -> None:
    (objection,) = limited(1).objections
    assert objection.code == "time-limit-too-short" and objection.key == "slurm.time"
    assert (
        "the time limit is 60 s" in objection.message
        and "a start takes about 60 s" in objection.message
    )
    (change,) = objection.changes
    assert limited(change["slurm.time"]).feasible
    slow = {"filesystems": {"slow": {"capacity_bytes": 10**13, "write_gib_per_second": 0.1}}}
    assert limited("0:20:00").feasible and limited("UNLIMITED").feasible
    (too_long,) = limited("0:20:00", **slow).objections
    assert "a checkpoint 897 s" in too_long.message
    (change,) = too_long.changes
    assert limited(change["slurm.time"], **slow).feasible


def test_training_time_as_published() -> None:
    """Narayanan et al. 2021, section 5.1: 8TN / (nX), 175B over 300 billion tokens on 1,024 A100
    at 140 TFLOP/s: 34 days; 1T, 450 B, 3,072 at 163: 84."""
    for parameters, tokens, gpus, tflops, days in (
        (175e9, 300e9, 1024, 140e12, 34),
        (1008e9, 450e9, 3072, 163e12, 84),
    ):
        job = job_of(ranks=8, nodes=gpus // 8, device=BIG)
        speed = Speed(gpus * tflops / (8 * parameters), None, "published")
        assert duration_of(job, speed, int(tokens), Costs()).parts.steps / 86400 == pytest.approx(
            days, rel=5e-3
        )


def test_epochs() -> None:
    data: dict[str, Any] = {"name": "d", "source": "mock", "split": "90,10,0"}
    counted = epochs_of(Dataset(**data, tokens=1000), 1800)
    assert counted is not None and counted.epochs == pytest.approx(2.0) and not counted.estimated
    ours = epochs_of(Dataset(**data, tokens=1000), 1800, counted=500)
    assert ours is not None and ours.epochs == pytest.approx(4.0)
    guessed = epochs_of(Dataset(**data, text_bytes=4000), 900)
    assert guessed is not None and guessed.epochs == pytest.approx(1.0) and guessed.estimated
    assert epochs_of(Dataset(**data), 900) is None


def measured(**keys: Any) -> Measured:
    values = {
        "tokens_per_second": 500.0,
        "peak_bytes": 10,
        "checkpoint_bytes": 12,
        "planned_tokens_per_second": 600.0,
        "planned_peak_bytes": 9,
    }
    return Measured(
        run="r", **{"same_layout": True, **values, "planned_checkpoint_bytes": None, **keys}
    )


def test_a_measured_speed_takes_the_place_of_the_assumed_one_by_name() -> None:
    job = job_of(ranks=2, device=BIG)
    plan = make_plan(job, measured=measured())
    assert (
        plan.duration
        and plan.duration.speed.tokens_per_second == 500
        and plan.duration.speed.source == "measured: run r"
    )
    assert plan.days == plan.to_json()["days"] and plan.duration.parts.steps == pytest.approx(
        plan.tokens / 500
    )
    found = plan.to_json()["measured"]
    assert found["errors"] == {
        "tokens_per_second": pytest.approx(0.2),
        "peak_bytes": pytest.approx(-0.1),
        "checkpoint_bytes": None,
    }
    other = make_plan(job, measured=measured(same_layout=False))
    assert other.duration and other.duration.speed.source.startswith("predicted") and other.measured


def test_layouts_that_can_be_compared() -> None:
    job = job_of(ranks=2)
    assert layout_key(job) == layout_key(
        job.model_copy(
            update={
                "name": "other",
                "training": job.training.model_copy(update={"lr": 1.0, "train_iters": 7}),
            }
        )
    )
    assert (
        layout_key(job)
        != layout_key(job_of(ranks=4))
        != layout_key(job_of(ranks=4, micro_batch_size=2))
    )


def test_a_run_of_another_layout_corrects_the_prediction() -> None:
    """By what the model is wrong there; a run that it knows nothing of corrects nothing."""
    job = job_of(ranks=2, device=BIG)
    alone = make_plan(job).duration
    other = measured(same_layout=False, modelled_tokens_per_second=600)
    corrected = make_plan(job, measured=other).duration
    older = make_plan(job, measured=measured(same_layout=False)).duration
    assert alone and corrected and older
    speed = corrected.speed
    assert speed.tokens_per_second == pytest.approx(alone.speed.tokens_per_second * 500 / 600)
    assert speed.interval and speed.interval[0] < speed.tokens_per_second < speed.interval[1]
    assert sum(speed.step_terms.values()) == pytest.approx(corrected.step_seconds)
    assert "as run r was to the model" in speed.source
    assert older.speed == alone.speed
