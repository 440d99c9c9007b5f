"""How the ranks of a run compare: the slowest of them, what pipelines wait, and the memory of
every stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.jobs.ranks import coordinates_of
from trainkit.jobs.schema import Job
from trainkit.plan.layout import layout_of
from trainkit.train.parallel.mesh import Mesh

COMPARED = (("forward", "backward"), ("communication",), ("pipeline",))  # phases, added up
PEAKS = ("max_allocated", "max_resident")  # of memory, on a GPU and without one


@dataclass(frozen=True)
class RankComparison:
    """Two further tables of a row of metrics (docs/run-folder.md).

    Args:
        ranks: least, mean and most milliseconds of `forward` and `backward`, the rank that took
            most, and the mean of `communication`. Ranks of a tensor-parallel group wait for each
            other within these, so there a slow one shows as a slow group. None for one rank.
        pipeline: `idle`, the part of forward, backward and what lies between that stages wait,
            mean of all ranks; `predicted_idle`, the schedule's bubble where all stages take
            equally long (plan.layout.Layout.bubble_fraction); `memory_stage_K`, the highest peak
            of the stage's ranks. None without a pipeline.
        compute_ms: of every rank, what `ranks` sums up; none for one rank.
    """

    ranks: dict[str, float] | None = None
    pipeline: dict[str, float] | None = None
    compute_ms: Sequence[float] = ()


def compare_ranks(
    job: Job, mesh: Mesh, times: Mapping[str, float], memory: Mapping[str, int], samples: int
) -> RankComparison:
    """How the ranks did in the steps of a row. Called by all ranks together, for steps whose
    numbers are known.

    Args:
        job: the job.
        mesh: this rank among the others.
        times: this rank's, a step.
        memory: this rank's.
        samples: of the global batch.
    """
    if mesh.degrees.world == 1:
        return RankComparison()
    own = [sum(times.get(phase, 0.0) for phase in group) for group in COMPARED]
    peak = next((memory[kind] for kind in PEAKS if kind in memory), 0)
    everyone = [torch.zeros(4, dtype=torch.float64) for _ in range(mesh.degrees.world)]
    dist.all_gather(everyone, torch.tensor([*own, peak], dtype=torch.float64))
    compute, communication, waiting, peaks = torch.stack(everyone, dim=1)
    ranks = {
        "compute_ms_least": float(compute.min()),
        "compute_ms_mean": float(compute.mean()),
        "compute_ms_most": float(compute.max()),
        "slowest": int(compute.argmax()),
        "communication_ms_mean": float(communication.mean()),
    }
    if mesh.degrees.pipeline == 1:
        return RankComparison(ranks, None, compute.tolist())
    whole = float((compute + waiting).sum())
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
