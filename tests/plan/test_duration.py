"""Days, failures, time limits, epochs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.plan.example import BIG, gpu, job_of
from trainkit.jobs.schema import Dataset
from trainkit.plan.duration import FAILURES_PER_GPU_HOUR, Speed, assumed_speed, duration_of, epochs_of, limit_seconds, lost_fraction, young_interval
from trainkit.plan.make import make_plan
from trainkit.plan.measured import Measured, layout_key


def test_the_interval_that_loses_least() -> None:
    """Young's, for 3 hours between failures and 30 s a checkpoint: every 805 s, 7.5 % lost; for a day: 2,277 s, 2.6 %; at 5 s: 930 s, 1.1 %."""
    for hours, cost, interval, lost in ((3, 30, 805, 0.075), (24, 30, 2277, 0.026), (24, 5, 930, 0.011)):
        best = young_interval(hours * 3600, cost)
        assert best == pytest.approx(interval, abs=1) and lost_fraction(best, hours * 3600, cost) == pytest.approx(lost, abs=6e-4)
        assert all(lost_fraction(other, hours * 3600, cost) > lost_fraction(best, hours * 3600, cost) for other in (best / 1.3, best * 1.3))


def test_failures_as_published() -> None:
    """Llama 3 405B (arXiv:2407.21783): 419 unexpected interruptions in 54 days of 16,384 H100, one in 3.1 hours."""
    assert pytest.approx(419) == FAILURES_PER_GPU_HOUR * 54 * 24 * 16384
    hours = 1 / (FAILURES_PER_GPU_HOUR * 16384)
    assert hours == pytest.approx(3.1, abs=0.01)


@pytest.mark.parametrize(
    ("time", "seconds"),
    [(90, 5400), ("90", 5400), ("10:30", 630), ("6:00:00", 21600), ("1-0", 86400), ("2-12", 216000), ("5-23:30", 516600), ("26-00:00:00", 2246400)],
)
def test_time_limits_as_slurm_reads_them(time: str | int, seconds: int) -> None:
    """sbatch(1), --time."""
    assert limit_seconds(time) == seconds


def test_a_time_limit_of_no_form() -> None:
    with pytest.raises(ValueError, match="soon"):
        limit_seconds("soon")


def test_assumed_speed() -> None:
    """Half of 100 TFLOP/s on 4 devices, a fifth lost to the bubble, 80 GFLOP a token of which 60 are the model's."""
    speed = assumed_speed(job_of(ranks=4, device=BIG), 60 * 10**9, 80 * 10**9, 0.2, utilization=0.5)
    assert speed is not None and speed.tokens_per_second == pytest.approx(4 * 50e12 * 0.8 / 80e9) and speed.mfu == pytest.approx(0.5 * 0.8 * 0.75)
    assert "assumed" in speed.source
    assert assumed_speed(job_of(ranks=4, device=gpu(None, peak_tflops={})), 1, 1, 0.0) is None


def duration(**keys: Any) -> Any:
    job = job_of(ranks=8, device=BIG, train_iters=1000, save_interval=10, **keys)
    return duration_of(job, Speed(1000.0, 0.4, "told"), 10**9, 30.0)


def test_days_and_what_ends_them() -> None:
    found = duration(cluster={"launcher": "slurm", "slurm": {"time": "1-00:00:00"}})
    assert found.days == pytest.approx(1e6 / 86400) and found.device_hours == pytest.approx(8 * 1e6 / 3600)
    assert found.requeues == 11  # 11.6 days in days
    assert found.failures == pytest.approx(FAILURES_PER_GPU_HOUR * found.device_hours)
    assert found.checkpoint_seconds == pytest.approx(young_interval(3600 / (8 * FAILURES_PER_GPU_HOUR), 30))
    assert found.lost_as_asked > found.lost_fraction
    assert duration(cluster={"launcher": "slurm"}).requeues is None


def test_training_time_as_published() -> None:
    """Narayanan et al. 2021, section 5.1: 8TN / (nX), 175B over 300 billion tokens on 1,024 A100 at 140 TFLOP/s: 34 days; 1T, 450 B, 3,072 at 163: 84."""
    for parameters, tokens, gpus, tflops, days in ((175e9, 300e9, 1024, 140e12, 34), (1008e9, 450e9, 3072, 163e12, 84)):
        job = job_of(ranks=8, nodes=gpus // 8, device=BIG)
        speed = Speed(gpus * tflops / (8 * parameters), None, "published")
        assert duration_of(job, speed, int(tokens), None).days == pytest.approx(days, rel=5e-3)


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
    values = {"tokens_per_second": 500.0, "peak_bytes": 10, "checkpoint_bytes": 12, "planned_tokens_per_second": 600.0, "planned_peak_bytes": 9}
    return Measured(run="r", **{"same_layout": True, **values, "planned_checkpoint_bytes": None, **keys})


def test_a_measured_speed_takes_the_place_of_the_assumed_one_by_name() -> None:
    job = job_of(ranks=2, device=BIG)
    plan = make_plan(job, measured=measured())
    assert plan.duration and plan.duration.speed.tokens_per_second == 500 and plan.duration.speed.source == "measured: run r"
    assert plan.days == plan.to_json()["days"] == pytest.approx(plan.tokens / 500 / 86400)
    found = plan.to_json()["measured"]
    assert found["errors"] == {"tokens_per_second": pytest.approx(0.2), "peak_bytes": pytest.approx(-0.1), "checkpoint_bytes": None}
    other = make_plan(job, measured=measured(same_layout=False))
    assert other.duration and other.duration.speed.source.startswith("assumed") and other.measured


def test_layouts_that_can_be_compared() -> None:
    job = job_of(ranks=2)
    assert layout_key(job) == layout_key(job.model_copy(update={"name": "other", "training": job.training.model_copy(update={"lr": 1.0, "train_iters": 7})}))
    assert layout_key(job) != layout_key(job_of(ranks=4)) != layout_key(job_of(ranks=4, micro_batch_size=2))
