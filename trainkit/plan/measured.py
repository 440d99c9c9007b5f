"""What a run took, beside what was planned: errors are shown, and of the same layout the speed
takes the place of the assumed one, by name, and memory beyond the plan is added to it."""

from __future__ import annotations

from typing import get_args

from trainkit.base.lazy_dataclasses import dataclass
from trainkit.jobs.optimizers import Role, kept_of
from trainkit.jobs.schema import Job
from trainkit.plan.duration import Speed
from trainkit.plan.memory import Memory

# What decides speed and memory of a run, by paths of the resolved job.
TRAINING_KEYS = (
    "micro_batch_size",
    "precision",
    "optimizer",
    "recompute_granularity",
    "recompute_every",
    "compile",
)


def layout_key(job: Job) -> dict[str, object]:
    """What two jobs must have in common for the figures of one to hold for the other."""
    training = job.training.model_dump(include=set(TRAINING_KEYS))
    return {
        "engine": job.engine,
        "device": job.cluster.device.name,
        "nodes": job.nodes,
        "ranks_per_node": job.ranks_per_node,
        "model": job.model.model_dump(exclude={"name"}),
        "parallelism": job.parallelism.model_dump(),
        "training": {**training, "micro_batches": job.gradient_accumulation_steps},
        "optimizer_state": [kept_of(job.training, role) for role in get_args(Role)],
    }


@dataclass(frozen=True)
class Measured:
    """A run in figures, with what its own plan had said. None where nothing was measured or
    planned.

    Args:
        run: its id.
        same_layout: it ran as the job is laid out now.
        tokens_per_second: median over its steps.
        peak_bytes: the most that any logged step saw on rank 0: reserved by the allocator, on the
            CPU resident in the process.
        checkpoint_bytes: tensors of its newest checkpoint.
        modelled_tokens_per_second: what the time model says of the run's own layout, uncorrected;
            None: it knows nothing of the device.
    """

    run: str
    same_layout: bool
    tokens_per_second: float | None
    peak_bytes: int | None
    checkpoint_bytes: int | None
    planned_tokens_per_second: float | None
    planned_peak_bytes: int | None
    planned_checkpoint_bytes: int | None
    modelled_tokens_per_second: float | None = None

    @property
    def calibration(self) -> float | None:
        """What the time model's speed is multiplied by to be the measured one."""
        if not self.tokens_per_second or not self.modelled_tokens_per_second:
            return None
        return self.tokens_per_second / self.modelled_tokens_per_second

    @property
    def errors(self) -> dict[str, float | None]:
        """Planned over measured, less 1: 0.1 is a tenth too much."""
        pairs = {
            "tokens_per_second": (self.planned_tokens_per_second, self.tokens_per_second),
            "peak_bytes": (self.planned_peak_bytes, self.peak_bytes),
            "checkpoint_bytes": (self.planned_checkpoint_bytes, self.checkpoint_bytes),
        }
        return {
            name: planned / seen - 1 if planned and seen else None
            for name, (planned, seen) in pairs.items()
        }

    def to_json(self) -> dict[str, object]:
        """plan/1's `measured`."""
        return {**vars(self), "errors": self.errors}


def measured_speed(job: Job, measured: Measured, model_flops: int) -> Speed | None:
    """The speed of a run of the same layout; None for another."""
    if not measured.same_layout or not measured.tokens_per_second:
        return None
    peak = job.cluster.device.peak_tflops.get(job.training.precision)
    if peak:
        mfu = measured.tokens_per_second * model_flops / (job.world_size * peak * 1e12)
    else:
        mfu = None
    return Speed(measured.tokens_per_second, mfu, f"measured: run {measured.run}")


def measured_excess(measured: Measured, planned: Memory) -> float:
    """How many times as much as planned a run of the same layout took at its peak; 1 where that
    is less, or nothing is known. `planned` is what is planned without it."""
    if not measured.same_layout or not measured.peak_bytes:
        return 1.0
    return max(1.0, measured.peak_bytes / planned.stages[0].total_bytes)  # rank 0 is of stage 0


def calibrated_speed(predicted: Speed, measured: Measured) -> Speed:
    """A predicted speed, times what the time model was wrong by in a run of another layout of the
    same job on the same cluster: software and network are the same."""
    part = measured.calibration
    if part is None:
        return predicted
    interval = predicted.interval
    if interval:
        interval = (interval[0] * part, interval[1] * part)
    return Speed(
        tokens_per_second=predicted.tokens_per_second * part,
        mfu=predicted.mfu * part if predicted.mfu else None,
        source=f"{predicted.source}. Times {part:.3g}, as run {measured.run} was to the model",
        interval=interval,
        step_terms={name: term / part for name, term in predicted.step_terms.items()},
        not_fitted=predicted.not_fitted,
        calibration=part,
    )
