"""What adds up over steps until a row of metrics is made of it; how the ranks of a run compare:
the slowest of them, what pipelines wait, and the memory of every stage."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.base.lazy_dataclasses import dataclass, field, replace
from trainkit.jobs.ranks import coordinates_of
from trainkit.jobs.schema import Job
from trainkit.plan.layout import layout_of
from trainkit.plan.mixtures import phase_at, spans_of
from trainkit.runs.expert_loads import Counts, ExpertLoads
from trainkit.runs.metrics import MetricsRow
from trainkit.train.metrics.stragglers import Stragglers
from trainkit.train.metrics.timers import Timers
from trainkit.train.metrics.utilization import Utilization
from trainkit.train.parallel.memory import MemoryStats
from trainkit.train.parallel.mesh import Mesh
from trainkit.train.update.loss_policy import StepInfo
from trainkit.train.update.step import StepValues

COMPARED = (("forward", "backward"), ("communication",), ("pipeline",))  # phases, added up
PEAKS = ("max_allocated", "max_resident")  # of memory, on a GPU and without one


@dataclass(frozen=True)
class RankComparison:
    """Two further tables of a row of metrics (docs/run-folder.md).

    Args:
        ranks: least, mean and most milliseconds that ranks computed themselves, the rank that took
            most, and the mean of `communication`. None for one rank.
        pipeline: `idle`, the part of forward, backward and what lies between that stages wait,
            mean of all ranks; `predicted_idle`, the schedule's bubble where all stages take
            equally long (plan.layout.Layout.bubble_fraction); `memory_stage_K`, the highest peak
            of the stage's ranks. None without a pipeline.
        compute_ms: of every rank, what `ranks` sums up (Timers.own_ms); none for one rank.
    """

    ranks: dict[str, float] | None = None
    pipeline: dict[str, float] | None = None
    compute_ms: Sequence[float] = ()


def compare_ranks(
    job: Job,
    mesh: Mesh,
    times: Mapping[str, float],
    own_ms: float,
    memory: Mapping[str, int],
    samples: int,
) -> RankComparison:
    """How the ranks did in the steps of a row. Called by all ranks together, for steps whose
    numbers are known.

    Args:
        job: the job.
        mesh: this rank among the others.
        times: this rank's, a step.
        own_ms: this rank's (Timers.own_ms).
        memory: this rank's.
        samples: of the global batch.
    """
    if mesh.degrees.world == 1:
        return RankComparison()
    own = [sum(times.get(phase, 0.0) for phase in group) for group in COMPARED]
    peak = next((memory[kind] for kind in PEAKS if kind in memory), 0)
    everyone = [torch.zeros(5, dtype=torch.float64) for _ in range(mesh.degrees.world)]
    dist.all_gather(everyone, torch.tensor([*own, peak, own_ms], dtype=torch.float64))
    busy, communication, waiting, peaks, compute = torch.stack(everyone, dim=1)
    ranks = {
        "compute_ms_least": float(compute.min()),
        "compute_ms_mean": float(compute.mean()),
        "compute_ms_most": float(compute.max()),
        "slowest": int(compute.argmax()),
        "communication_ms_mean": float(communication.mean()),
    }
    if mesh.degrees.pipeline == 1:
        return RankComparison(ranks, None, compute.tolist())
    whole = float((busy + waiting).sum())
    idle = float(waiting.sum()) / whole if whole else 0.0
    micro_batches = samples // (job.training.micro_batch_size * mesh.degrees.data)
    layout = replace(layout_of(job), micro_batches=micro_batches)
    pipeline = {"idle": idle, "predicted_idle": layout.bubble_fraction}
    return RankComparison(ranks, pipeline | _stage_memory(mesh, peaks), compute.tolist())


def _stage_memory(mesh: Mesh, peaks: Tensor) -> dict[str, float]:
    """The highest of all ranks' memory peaks on each pipeline stage."""
    stages = [coordinates_of(rank, mesh.degrees).pipeline for rank in range(mesh.degrees.world)]
    return {
        f"memory_stage_{stage}": max(
            int(peak) for peak, at in zip(peaks, stages, strict=True) if at == stage
        )
        for stage in sorted(set(stages))
    }


@dataclass
class _Interval:
    """What adds up between two rows."""

    steps: int = 0
    samples: int = 0
    skipped: int = 0
    nan: int = 0
    began: float = 0.0
    loads_LE: Counts = field(default_factory=lambda: np.zeros((), np.int64))
    dropped_L: Counts = field(default_factory=lambda: np.zeros((), np.int64))


class StepLog:
    """Adds steps up, and makes a row of them where log_interval says so.

    Args:
        job: the job.
        mesh: this rank among the others.
        timers: what time went into.
        memory: this rank's.
        utilization: of the job on this rank's device.
    """

    def __init__(
        self, job: Job, mesh: Mesh, timers: Timers, memory: MemoryStats, utilization: Utilization
    ) -> None:
        self.job = job
        self.mesh = mesh
        self.timers = timers
        self.memory = memory
        self.utilization = utilization
        self._since = _Interval()
        self.compute_ms: Sequence[float] = ()  # of every rank, by the last row
        self._slow = Stragglers(mesh.degrees)
        self._spans = spans_of(job)
        self.expert_loads: ExpertLoads | None = None  # of the last row

    def state(self) -> dict[str, int]:
        """For the checkpoint: the next row counts these, whichever attempt writes it."""
        return {"unlogged_skipped": self._since.skipped, "unlogged_nan": self._since.nan}

    def load_state(self, state: Mapping[str, int | float | bool]) -> None:
        """Go on from `state()`; older checkpoints have none."""
        self._since = _Interval(
            skipped=int(state.get("unlogged_skipped", 0)), nan=int(state.get("unlogged_nan", 0))
        )

    def start_clock(self) -> None:
        """The time of steps counts from now on."""
        self._since.began = time.perf_counter()

    def exclude(self, seconds: float) -> None:
        """So much of the time was not spent on steps."""
        self._since.began += seconds

    def count_rolled_back(self, nan: bool) -> None:
        """A step led to a rollback: the next row counts it, its own is taken back."""
        self._since.skipped += 1
        self._since.nan += nan

    def add(
        self,
        info: StepInfo,
        values: StepValues,
        loads: Sequence[float],
        rollbacks: int,
        *,
        reports: bool,
    ) -> MetricsRow | None:
        """One more step. Called by all ranks together.

        Args:
            info: the step.
            values: its numbers.
            loads: of all layers, as `take_loads` has them; none without experts.
            rollbacks: of the run so far.
            reports: this rank wants the row.
        """
        since = self._since
        t = self.job.training
        since.steps += 1
        since.samples += info.samples
        since.skipped += bool(values.overflow or values.nan or values.spike)
        since.nan += bool(values.nan)
        if loads and reports:
            counts = np.array(loads, np.int64).reshape(self.job.model.blocks, -1)
            since.loads_LE = since.loads_LE + counts[:, :-1]
            since.dropped_L = since.dropped_L + counts[:, -1]
        if info.step % t.log_interval and info.step != t.train_iters:
            return None
        times = self.timers.take(since.steps)
        seconds = time.perf_counter() - since.began
        self._since = _Interval(began=since.began + seconds)
        memory = self.memory.now()
        own = self.timers.own_ms
        compared = compare_ranks(self.job, self.mesh, times, own, memory, info.samples)
        self.compute_ms = compared.compute_ms
        if not reports:
            return None
        row = self._row(info, values, since, seconds)
        row["rollbacks"] = rollbacks
        row["times_ms"] = times
        row["memory_bytes"] = memory
        if compared.ranks is not None:
            row["ranks"] = compared.ranks
            if slow := self._slow.add(since.steps, compared.compute_ms):
                row["ranks"] |= {"slow": slow.rank, "slow_times": slow.times}
        if compared.pipeline is not None:
            row["pipeline"] = compared.pipeline
        if loads:
            self.expert_loads = ExpertLoads(info.step, since.steps, since.loads_LE, since.dropped_L)
            row["experts"] = self.expert_loads.row()
        return row

    def _row(
        self, info: StepInfo, values: StepValues, since: _Interval, seconds: float
    ) -> MetricsRow:
        """What the steps of a row were, and how fast."""
        tokens_per_second = since.samples * self.job.model.seq_length / seconds
        used = self.utilization.throughput(tokens_per_second)
        row: MetricsRow = {
            "step": info.step,
            "consumed_samples": info.consumed_samples,
            "global_batch_size": info.samples,
            "lm_loss": values.loss,
            "grad_norm": values.norm,
            "learning_rate": values.rate,
            "loss_scale": values.scale,
            "skipped_iterations": since.skipped,
            "nan_iterations": since.nan,
            "elapsed_ms": 1000 * seconds / since.steps,
            "tokens_per_second": tokens_per_second,
            "samples_per_second": since.samples / seconds,
            "model_tflops": used["model_tflops"],
            "hardware_tflops": used["hardware_tflops"],
            "mfu": used["mfu"],
            "hfu": used["hfu"],
            "peak": used["peak"],
            "batch_checksum": int(values.checksum),
        }
        if self.job.phases:
            row["phase"] = phase_at(self._spans, info.consumed_samples - info.samples)
        if self.job.model.mtp_num_layers:
            row["mtp_loss"] = values.mtp_loss
        return row
