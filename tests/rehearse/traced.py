"""Traces that tests make in a process of their own."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from trainkit.base.errors import ConfigError
from trainkit.jobs.load import load
from trainkit.rehearse.rank_checks import checkpoint_problems
from trainkit.runs.checkpoints import open_checkpoint
from trainkit.train.parallel.mesh import Mesh
from trainkit.train.rehearsal.compare import compare_traces
from trainkit.train.rehearsal.trace import distinct_ranks, trace_ranks
from trainkit.train.update import replicas

LAYOUTS = {
    "tensor x data": "parallelism={ tensor_model_parallel_size = 2, sequence_parallel = true }",
    "pipeline x data, tied": "parallelism={ pipeline_model_parallel_size = 2 }",
    "zero 3": "parallelism={ zero_stage = 3 }",
}


def disagreements(folder: str, layout: str) -> list[str]:
    """What the ranks of `small`, on four, disagree about."""
    sets = [LAYOUTS[layout], "cluster.ranks_per_node=4"]
    job = load(Path(folder)).resolve("small", sets).job
    traces = list(trace_ranks(job, distinct_ranks(job, 257), 257, at_once=2))
    assert all(len(trace.calls) > 5 for trace in traces)
    return [each.message for each in compare_traces(traces)]


def with_a_branch(folder: str) -> list[str]:
    """The same, where rank 0 alone asks all others for something more."""
    real = replicas.squared_norm

    def squared_norm(parameters: object, mesh: Mesh, *more: object) -> torch.Tensor:
        norm = real(parameters, mesh, *more)  # type: ignore[arg-type]
        if mesh.place.tensor == 0:
            dist.all_reduce(norm, group=mesh.tensor_group)
        return norm

    with mock.patch.object(replicas, "squared_norm", squared_norm):
        return disagreements(folder, "tensor x data")


def of_another_width(folder: str, checkpoint: str) -> list[str]:
    """What a job of twice the width says of a checkpoint, and of its own."""
    found = []
    for width in (64, 32):
        job = load(Path(folder)).resolve("small", [f"model.hidden_size={width}"]).job
        (trace,) = trace_ranks(job, [0], 257)
        problems = checkpoint_problems(job, trace.checkpoint, open_checkpoint(Path(checkpoint)))
        found.append(str(ConfigError(problems)) if problems else "")
    return found
