"""How long a run takes, what it costs, and what failures and time limits do to it."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass
from typing import Any

from trainkit.jobs.schema import Dataset, Job

DAY = 86400
# Part of the peak that the hardware reaches outside of the bubble, recomputation counted. Megatron-LM reaches 41 to 49 % on H100 (its README's table, 1.7B to
# 462B), BLOOM 48 % on A100; slow networks make it far less: 17 % of the 20B on 24 A100 without InfiniBand. No network is in it.
ASSUMED_UTILIZATION = 0.4
# Unexpected interruptions a GPU-hour: 419 in 54 days of 16,384 H100 (Llama 3, arXiv:2407.21783, section 3.3.4).
FAILURES_PER_GPU_HOUR = 419 / (54 * 24 * 16384)
BYTES_PER_TOKEN = 4.0  # of text, where a dataset's tokens are not known; assumed


def young_interval(mean_time_between: float, cost: float) -> float:
    """Time between checkpoints that loses least, sqrt(2 M C) (Young 1974, doi:10.1145/361147.361115; Daly 2006, doi:10.1016/j.future.2004.11.016, first order).

    Args:
        mean_time_between: M, between failures.
        cost: C, that a checkpoint stops training; the same unit.
    """
    return math.sqrt(2 * mean_time_between * cost)


def lost_fraction(interval: float, mean_time_between: float, cost: float) -> float:
    """Part of the time that checkpoints and work done again take: C / T + T / (2 M)."""
    return cost / interval + interval / (2 * mean_time_between)


def limit_seconds(time: str | int) -> int:
    """A time limit as sbatch --time reads it: MM, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS. Raises ValueError for another form."""
    text = str(time)
    days, dash, rest = text.rpartition("-")
    parts = rest.split(":")
    if not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", text):
        raise ValueError(f"{time!r} is no time limit of Slurm")
    numbers = [int(part) for part in parts]
    if dash:
        hours, minutes, seconds = [*numbers, 0, 0][:3]
        return ((int(days) * 24 + hours) * 60 + minutes) * 60 + seconds
    if len(numbers) == 3:
        return (numbers[0] * 60 + numbers[1]) * 60 + numbers[2]
    return numbers[0] * 60 + (numbers[1] if len(numbers) == 2 else 0)


@dataclass(frozen=True)
class Speed:
    """Tokens a second of the whole world, and whose word that is."""

    tokens_per_second: float
    mfu: float | None
    source: str

    def to_json(self) -> dict[str, Any]:
        """plan/1's `speed`."""
        return asdict(self)


def assumed_speed(job: Job, model_flops: int, hardware_flops: int, bubble: float, utilization: float = ASSUMED_UTILIZATION) -> Speed | None:
    """Speed at an assumed utilization of the peak; None where the device's peak at the job's precision is unknown.

    tokens/s = world x peak x utilization x (1 - bubble) / hardware FLOPs a token; MFU is of the model's FLOPs.
    """
    peak = job.cluster.device.peak_tflops.get(job.training.precision)
    if peak is None:
        return None
    tokens = job.world_size * peak * 1e12 * utilization * (1 - bubble) / hardware_flops
    source = f"assumed: {utilization:.0%} of {peak:g} TFLOP/s outside of the bubble, no network in it"
    return Speed(tokens, tokens * model_flops / (job.world_size * peak * 1e12), source)


@dataclass(frozen=True)
class Duration:
    """How long, at one speed.

    Args:
        step_seconds: a step of the whole global batch.
        days: all steps, nothing lost.
        device_hours: of all devices together.
        failures: interruptions to expect; None: not of this kind of device.
        checkpoint_seconds: interval that loses least, `checkpoint_steps` the same in steps; None: what a checkpoint costs is unknown.
        lost_fraction: part of the time lost at that interval; `lost_as_asked`: at save_interval.
        requeues: how often a time limit ends the job; None: there is none.
    """

    speed: Speed
    step_seconds: float
    days: float
    device_hours: float
    failures: float | None
    checkpoint_seconds: float | None
    checkpoint_steps: int | None
    lost_fraction: float | None
    lost_as_asked: float | None
    requeues: int | None

    def to_json(self) -> dict[str, Any]:
        """plan/1's `duration`."""
        return asdict(self)


def duration_of(job: Job, speed: Speed, tokens: int, write_seconds: float | None) -> Duration:
    """How long `tokens` take.

    Args:
        write_seconds: of one checkpoint; training waits for it.
    """
    seconds = tokens / speed.tokens_per_second
    step = job.global_batch_size * job.model.seq_length / speed.tokens_per_second
    hours = seconds / 3600 * job.world_size
    rate = FAILURES_PER_GPU_HOUR * job.world_size / 3600 if job.cluster.device_type != "cpu" else None
    best = lost = asked = None
    if rate and write_seconds:
        best = young_interval(1 / rate, write_seconds)
        lost = lost_fraction(best, 1 / rate, write_seconds)
        asked = lost_fraction((job.training.save_interval or job.training.train_iters) * step, 1 / rate, write_seconds)
    limit = job.sbatch_options.get("time") if job.cluster.launcher == "slurm" else None
    return Duration(
        speed=speed,
        step_seconds=step,
        days=seconds / DAY,
        device_hours=hours,
        failures=rate * seconds if rate else None,
        checkpoint_seconds=best,
        checkpoint_steps=max(1, round(best / step)) if best else None,
        lost_fraction=lost,
        lost_as_asked=asked,
        requeues=max(0, math.ceil(seconds / limit_seconds(limit)) - 1) if isinstance(limit, str | int) and not isinstance(limit, bool) else None,
    )


@dataclass(frozen=True)
class Epochs:
    """How often the training part of a dataset is read. `estimated`: its tokens are reckoned from its text, BYTES_PER_TOKEN to one."""

    dataset_tokens: int
    epochs: float
    estimated: bool

    def to_json(self) -> dict[str, Any]:
        """plan/1's `epochs`."""
        return asdict(self)


def epochs_of(dataset: Dataset, tokens: int, counted: int | None = None) -> Epochs | None:
    """Epochs of a run over `tokens`; None where neither tokens nor text of the dataset are counted.

    Args:
        counted: tokens of the dataset as prepared, which the published figure gives way to.
    """
    known = counted or dataset.tokens
    size = known or (round(dataset.text_bytes / BYTES_PER_TOKEN) if dataset.text_bytes else None)
    if not size:
        return None
    weights = [float(part) for part in dataset.split.split(",")]
    return Epochs(size, tokens / (size * weights[0] / sum(weights)), estimated=known is None)
