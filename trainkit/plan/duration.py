"""How long a run takes and where the time goes, what it costs, what failures and time limits do
to it."""

from __future__ import annotations

import math
from collections.abc import Mapping

from trainkit.base.lazy_dataclasses import dataclass, field, replace
from trainkit.base.records import Record
from trainkit.jobs import sbatch
from trainkit.jobs.schema import Dataset, Job

DAY = 86400
# Unexpected interruptions a GPU-hour: 419 in 54 days of 16,384 H100 (Llama 3, arXiv:2407.21783,
# section 3.3.4).
FAILURES_PER_GPU_HOUR = 419 / (54 * 24 * 16384)
BYTES_PER_TOKEN = 4.0  # of text, where a dataset's tokens are not known; assumed
# From the start of the ranks to the first step (imports, communicators, the first step itself), and
# for an image of a container besides; assumed. Published
# starts of images from a shared file system take 74 to 200 s.
START_SECONDS = {"cpu": 10.0, "cuda": 60.0, "neuron": 60.0}
IMAGE_SECONDS = 120.0
# from a device to the host's memory, before training goes on under checkpoint.save_async; assumed
COPY_GIB_PER_SECOND = 4.0
# before a time limit, when the run is asked to save: so many, or that part of a short limit
SIGNAL_SECONDS = 300.0
SIGNAL_PART = 0.25
FORWARD = 1 / 3  # of a step's arithmetic without recomputation


def young_interval(mean_time_between: float, cost: float) -> float:
    """Time between checkpoints that loses least, sqrt(2 M C) (Young 1974,
    doi:10.1145/361147.361115; Daly 2006, doi:10.1016/j.future.2004.11.016, first order).

    Args:
        mean_time_between: M, between failures.
        cost: C, that a checkpoint stops training; the same unit.
    """
    return math.sqrt(2 * mean_time_between * cost)


def lost_fraction(interval: float, mean_time_between: float, cost: float) -> float:
    """Part of the time that checkpoints and work done again take: C / T + T / (2 M)."""
    return cost / interval + interval / (2 * mean_time_between)


@dataclass(frozen=True)
class Speed(Record):
    """Tokens a second of the whole world, and whose word that is.

    Args:
        tokens_per_second: of all ranks.
        mfu: part of the device's peak.
        source: measured or predicted, in words.
        interval: that a prediction lies in, four times of five; None: it was measured.
        step_terms: seconds of a predicted step by what they are spent on; empty: it was measured.
        not_fitted: the kind of set-up that no public timing speaks for; "": there are some, or
            it was measured.
        calibration: what the time model's speed was multiplied by, from a run that it was wrong on.
    """

    tokens_per_second: float
    mfu: float | None
    source: str
    interval: tuple[float, float] | None = None
    step_terms: Mapping[str, float] = field(default_factory=dict)
    not_fitted: str = ""
    calibration: float = 1.0


@dataclass(frozen=True)
class Costs:
    """What a run does besides steps, in seconds. None: not known.

    Args:
        write: one checkpoint.
        read: one checkpoint, by a run that goes on from it.
        copy: of one checkpoint's tensors to the host's memory, under checkpoint.save_async.
        forward: part of a step's time that an evaluation's batch takes.
        first_evaluation: the engine evaluates before the first step too.
    """

    write: float | None = None
    read: float | None = None
    copy: float = 0.0
    forward: float = FORWARD
    first_evaluation: bool = True


@dataclass(frozen=True)
class DurationParts(Record):
    """Seconds of a whole run, by what they are spent on. None: not known, and in no sum.

    Args:
        steps: forward, backward and update, and what is computed twice.
        evaluations: of all validation sets.
        saves: that training waits for checkpoints, those before time limits included.
        starts: of all starts: until the first step, and to read a checkpoint at each but the first.
        repeated: steps done again after failures, half an interval of checkpoints each.
    """

    steps: float
    evaluations: float
    saves: float | None
    starts: float
    repeated: float

    @property
    def total(self) -> float:
        """The sum of what is known."""
        return sum(
            part or 0.0
            for part in (self.steps, self.evaluations, self.saves, self.starts, self.repeated)
        )


@dataclass(frozen=True)
class Duration(Record):
    """How long, at one speed. Time in a queue is not in it.

    Args:
        step_seconds: a step of the whole global batch.
        parts: where the time goes.
        evaluations: how many.
        start_seconds: one start, until its first step.
        days: all parts together.
        days_interval: that they lie in, four times of five; None: the speed was measured.
        device_hours: of all devices together, `device_hours_interval` likewise.
        failures: interruptions to expect; None: not of this kind of device.
        checkpoint_seconds: interval that loses least, `checkpoint_steps` the same in steps; None:
            what a checkpoint costs is unknown.
        lost_fraction: part of the time lost at that interval; `lost_as_asked`: at save_interval.
        requeues: how often a time limit ends the job; None: there is none, or it leaves no time for
            a step.
    """

    speed: Speed
    step_seconds: float
    parts: DurationParts
    evaluations: int
    start_seconds: float
    days: float
    days_interval: tuple[float, float] | None
    device_hours: float
    device_hours_interval: tuple[float, float] | None
    failures: float | None
    checkpoint_seconds: float | None
    checkpoint_steps: int | None
    lost_fraction: float | None
    lost_as_asked: float | None
    requeues: int | None


def time_limit(job: Job) -> int | None:
    """Seconds that the scheduler gives the job at a time; None where jobs.toml sets no limit."""
    if job.cluster.launcher_traits.batch:
        return sbatch.limit_seconds(job.sbatch_options)
    return None


def evaluations_of(job: Job, *, before: bool = True) -> int:
    """Evaluations of a whole run: before the first step (`before`), every eval_interval, at the
    end."""
    training = job.training
    if not training.eval_iters:
        return 0
    return before + -(-training.train_iters // (training.eval_interval or training.train_iters))


def start_seconds(job: Job) -> float:
    """One start of the job's ranks, until their first step; assumed."""
    return START_SECONDS[job.cluster.device_type] + (IMAGE_SECONDS if job.container else 0.0)


def _stall(job: Job, step: float, costs: Costs) -> float | None:
    """Seconds that one checkpoint stops training. Under save_async it is copied, and the next
    one waits until it is written."""
    if not job.checkpoint.save_async or costs.write is None:
        return costs.write
    interval = (job.training.save_interval or job.training.train_iters) * step
    return costs.copy + max(0.0, costs.write - interval)


def _saves(job: Job, stall: float | None, costs: Costs) -> float | None:
    """Seconds of all checkpoints of a run that nothing ends early."""
    if stall is None or costs.write is None:
        return None
    training = job.training
    written = -(-training.train_iters // (training.save_interval or training.train_iters))
    # the last one is waited for
    return (written - 1) * stall + costs.write * (1 + job.checkpoint.save_first)


def _failures_per_second(job: Job) -> float | None:
    """Interruptions to expect of all the job's devices together; None: not of this kind."""
    if job.cluster.device_type == "cpu":
        return None
    return FAILURES_PER_GPU_HOUR * job.world_size / 3600


@dataclass(frozen=True)
class _CheckpointIntervals:
    """The interval of checkpoints that loses least time, and the part of the time lost at it and
    at the job's own. None where failures or the cost of a checkpoint are unknown."""

    best_seconds: float | None = None
    best_steps: int | None = None
    lost_at_best: float | None = None
    lost_as_asked: float | None = None


def _checkpoint_intervals(
    job: Job, failure_rate: float | None, step: float, stall: float | None, costs: Costs
) -> _CheckpointIntervals:
    """The best interval by Young's formula.

    Args:
        job: the job.
        failure_rate: failures per second.
        step: seconds of a step.
        stall: seconds that a checkpoint stops training.
        costs: of writing and copying one.
    """
    if not failure_rate or not stall or not costs.write:
        return _CheckpointIntervals()
    between_failures = 1 / failure_rate
    if job.checkpoint.save_async:
        cost = costs.copy
        least = costs.write  # the next one waits until this one is written
    else:
        cost = costs.write
        least = 0.0
    best = max(young_interval(between_failures, cost), least)
    asked = (job.training.save_interval or job.training.train_iters) * step
    return _CheckpointIntervals(
        best_seconds=best,
        best_steps=max(1, round(best / step)) if best else None,
        lost_at_best=lost_fraction(best, between_failures, cost),
        lost_as_asked=lost_fraction(asked, between_failures, stall),
    )


def duration_of(job: Job, speed: Speed, tokens: int, costs: Costs) -> Duration:
    """How long `tokens` take, and what is done besides.

    A time limit ends a run that has used it but for `spare_seconds`; every end costs a save, a
    start and the reading of the checkpoint.

    Args:
        job: the job.
        speed: tokens per second of its steps.
        tokens: of the whole run.
        costs: what is done besides steps.
    """
    training = job.training
    steps = tokens / speed.tokens_per_second
    if training.replay_interval:
        steps *= 1 + 1 / (training.replay_interval * job.gradient_accumulation_steps)
    step = job.global_batch_size * job.model.seq_length / speed.tokens_per_second
    evaluated = evaluations_of(job, before=costs.first_evaluation)
    sets = 1 + len(job.validation)
    evaluations = evaluated * sets * training.eval_iters * step * costs.forward
    stall = _stall(job, step, costs)
    start = start_seconds(job)
    saves = _saves(job, stall, costs)
    again = start + (costs.read or 0.0)
    busy = steps + evaluations + (saves or 0.0)

    rate = _failures_per_second(job)
    failures = rate * busy if rate else None
    interval = min((training.save_interval or training.train_iters) * step, steps)
    repeated = (failures or 0.0) * interval / 2

    requeues = _requeues(busy + repeated, time_limit(job), again, costs.write or 0.0)
    if saves is not None:
        saves += (requeues or 0) * (costs.write or 0.0)
    parts = DurationParts(
        steps, evaluations, saves, start + ((requeues or 0) + (failures or 0.0)) * again, repeated
    )

    checkpoints = _checkpoint_intervals(job, rate, step, stall, costs)
    hours = _hours_between(job, speed, tokens, costs)
    per_day = 24 * job.world_size
    return Duration(
        speed=speed,
        step_seconds=step,
        parts=parts,
        evaluations=evaluated,
        start_seconds=start,
        days=parts.total / DAY,
        days_interval=(hours[0] / per_day, hours[1] / per_day) if hours else None,
        device_hours=parts.total / 3600 * job.world_size,
        device_hours_interval=hours,
        failures=failures,
        checkpoint_seconds=checkpoints.best_seconds,
        checkpoint_steps=checkpoints.best_steps,
        lost_fraction=checkpoints.lost_at_best,
        lost_as_asked=checkpoints.lost_as_asked,
        requeues=requeues,
    )


def _hours_between(job: Job, speed: Speed, tokens: int, costs: Costs) -> tuple[float, float] | None:
    """Device-hours at both ends of a predicted speed; arguments as `duration_of` has them."""
    if not speed.interval:
        return None
    ends = (replace(speed, tokens_per_second=end, interval=None) for end in speed.interval)
    slow, fast = (duration_of(job, end, tokens, costs).device_hours for end in ends)
    return fast, slow


def spare_seconds(limit: int, write: float) -> float:
    """Of a time limit, what is left for the save at its end: what a checkpoint takes, and no
    less than SIGNAL_SECONDS or SIGNAL_PART of the limit."""
    return max(write, min(SIGNAL_SECONDS, SIGNAL_PART * limit))


def _requeues(busy: float, limit: int | None, again: float, write: float) -> int | None:
    """How often a time limit ends a run of so many seconds."""
    if limit is None:
        return None
    useful = limit - spare_seconds(limit, write) - again
    return max(0, math.ceil(busy / useful) - 1) if useful > 0 else None


@dataclass(frozen=True)
class Epochs(Record):
    """How often the training part of a dataset is read. `estimated`: its tokens are reckoned
    from its text, BYTES_PER_TOKEN to one."""

    dataset_tokens: int
    epochs: float
    estimated: bool


def epochs_of(
    dataset: Dataset, tokens: int, counted: int | None = None, text_bytes: int | None = None
) -> Epochs | None:
    """Epochs of a run over `tokens`; None where neither tokens nor text of the dataset are counted.

    Args:
        counted: tokens of the dataset as prepared, which the published figure gives way to.
        text_bytes: of its files that are here, likewise.
    """
    known = counted or dataset.tokens
    text = text_bytes or dataset.text_bytes
    size = known or (round(text / BYTES_PER_TOKEN) if text else None)
    if not size:
        return None
    weights = [float(part) for part in dataset.split.split(",")]
    return Epochs(size, tokens / (size * weights[0] / sum(weights)), estimated=known is None)
