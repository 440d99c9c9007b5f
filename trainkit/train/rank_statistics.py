"""How the ranks of a run compare: the slowest of them, what pipelines wait, and the memory of
every stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.distributed as dist

from trainkit.jobs.ranks import coordinates_of
from trainkit.jobs.schema import Job
from trainkit.plan.layout import layout_of
from trainkit.train.parallel.mesh import Mesh

PEAKS = ("max_allocated", "max_resident")  # of memory, on a GPU and without one


def compare_ranks(
    job: Job, mesh: Mesh, times: Mapping[str, float], memory: Mapping[str, int], samples: int
) -> dict[str, dict[str, float]]:
    """Two further tables of a row of metrics (docs/run-folder.md), nothing for one rank. Called
    by all ranks together, for steps whose numbers are known.

    `ranks`: least, mean and most milliseconds of `forward` and `backward`, the rank that took
    most, and the mean of `communication`. Ranks of a tensor-parallel group wait for each other
    within these, so there a slow one shows as a slow group.

    `pipeline`, where there is one: `idle`, the part of forward, backward and what lies between
    that stages wait, mean of all ranks; `predicted_idle`, the schedule's bubble where all stages
    take equally long (plan.layout.Layout.bubble_fraction); `memory_stage_K`, the highest peak of
    the stage's ranks.

    Args:
        times: this rank's, a step.
        memory: this rank's.
        samples: of the global batch.
    """
    if mesh.degrees.world == 1:
        return {}
    own = [
        times.get("forward", 0.0) + times.get("backward", 0.0),
        times.get("communication", 0.0),
        times.get("pipeline", 0.0),
    ]
    peak = next((memory[kind] for kind in PEAKS if kind in memory), 0)
    everyone = [torch.zeros(4, dtype=torch.float64) for _ in range(mesh.degrees.world)]
    dist.all_gather(everyone, torch.tensor([*own, peak], dtype=torch.float64))
    compute, communication, waiting, peaks = torch.stack(everyone, dim=1)
    found = {
        "ranks": {
            "compute_ms_least": float(compute.min()),
            "compute_ms_mean": float(compute.mean()),
            "compute_ms_most": float(compute.max()),
            "slowest": int(compute.argmax()),
            "communication_ms_mean": float(communication.mean()),
        }
    }
    if mesh.degrees.pipeline > 1:
        layout = replace(
            layout_of(job),
            micro_batches=samples // (job.training.micro_batch_size * mesh.degrees.data),
        )
        stages = [coordinates_of(rank, mesh.degrees).pipeline for rank in range(mesh.degrees.world)]
        memories = {
            f"memory_stage_{stage}": max(
                int(peak) for peak, at in zip(peaks, stages, strict=True) if at == stage
            )
            for stage in sorted(set(stages))
        }
        whole = float((compute + waiting).sum())
        found["pipeline"] = {
            "idle": float(waiting.sum()) / whole if whole else 0.0,
            "predicted_idle": layout.bubble_fraction,
            **memories,
        }
    return found
