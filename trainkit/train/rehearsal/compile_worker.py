"""The unit of the stage precompile: the graphs of every distinct rank, compiled by forks of one
process, with a process group in which nobody else is and one layer of each kind. Each makes
the same calls as in a step and an evaluation, with numbers that mean nothing.

Shapes: B samples of a micro-batch, S tokens of a sample, H hidden size.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainkit.base.errors import Exit, TrainkitError
from trainkit.base.files import make_private_folder
from trainkit.base.locks import locked
from trainkit.base.process import on_this_node
from trainkit.base.worker import ProgressCallback, run_unit
from trainkit.jobs.ranks import coordinates_of, degrees_of
from trainkit.jobs.schema import Job
from trainkit.ops.kernels import choose_for
from trainkit.train.compiled_graphs import (
    READY,
    VARIABLE,
    GraphFiles,
    graph_cache_counts,
    graph_fields,
    machine_fields,
    node_folder,
    pack,
)
from trainkit.train.metrics.timers import Timers
from trainkit.train.model.batch import Batch
from trainkit.train.parallel.context_parallel import own_tokens
from trainkit.train.parallel.data_parallel import COMPUTE, World
from trainkit.train.parallel.mesh import Mesh
from trainkit.train.parallel.pipeline import ModelChunk, PipelineState, tied_at
from trainkit.train.ready_graphs import ReadyGraphs
from trainkit.train.rehearsal.forks import in_forks
from trainkit.train.rehearsal.trace import shares_of, shortened
from trainkit.train.torch_compat import be_deterministic
from trainkit.train.update.build import build_model_parts
from trainkit.train.update.step import Step


def compiling_ranks(job: Job, vocab: int) -> list[int]:
    """Ranks that together have every graph: of the first and the last stage each share, and the
    last tensor-parallel rank, which has to come to the same as the first; on GPUs each of them on
    each number that a GPU has, for it is in the code."""
    degrees = degrees_of(job)
    ends = (0, degrees.pipeline - 1)
    found: dict[tuple[object, ...], int] = {}
    for rank in range(degrees.world):
        place = coordinates_of(rank, degrees)
        if place.pipeline in ends:
            share = shares_of(job, vocab, place.tensor)
            last = place.tensor == degrees.tensor - 1
            found.setdefault((place.pipeline, share, last, _device(job, rank)), rank)
    return list(found.values())


def _device(job: Job, rank: int) -> torch.device:
    """Of a rank, whatever its node."""
    if job.cluster.device_type == "cuda":
        return torch.device("cuda", rank % job.ranks_per_node)
    return torch.device("cpu")


def compile_ranks(
    job: Job, vocab: int, folder: Path, *, at_once: int
) -> Iterator[Mapping[str, Any]]:
    """What `compile_rank` returns of each rank that has graphs of its own. See `in_forks`."""
    ranks = compiling_ranks(job, vocab)
    # the first fills the cache for those that do the same
    for group in (ranks[:1], ranks[1:]):
        yield from in_forks(partial(compile_rank, job, vocab, folder), group, at_once=at_once)


def compile_rank(job: Job, vocab: int, folder: Path, rank: int) -> dict[str, object]:
    """Compile as this rank, in this process, which must have no process group: {"rank", "hits",
    "misses", "seconds", "made", "unmade"}: the `ReadyGraph`s that it put into `folder`, and the
    functions that it could not make one of."""
    began = time.perf_counter()
    short = shortened(job)
    degrees = degrees_of(job)
    if job.training.deterministic:
        be_deterministic()
    device = _device(job, rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("fake", rank=rank, world_size=degrees.world, store=FakeStore())
    mesh = Mesh.of(
        degrees,
        World(rank, degrees.world),
        device,
        sequence=job.parallelism.sequence_parallel,
        tied_at=tied_at(job),
        experts=job.model.moe is not None,
    )
    kernels = choose_for(job).kernels
    graphs = ReadyGraphs(folder, making=True)
    parts = build_model_parts(short, mesh, vocab, kernels=kernels, graphs=graphs)
    step = Step(short, parts, mesh, Timers(device))
    batches = [_batch(job, number, device) for number in range(2)]
    parts.train()
    if mesh.degrees.pipeline == 1:
        samples = len(batches) * job.training.micro_batch_size * degrees.data
        step.backward(iter(batches), samples)
        parts.train(False)
        step.evaluate(batches[:1])
    else:
        for module in parts.modules:
            assert isinstance(module, ModelChunk)
            own = [own_tokens(batch, mesh.context) for batch in batches]
            _run_chunk(job, step, module, own)
    return {
        "rank": rank,
        **graph_cache_counts(graphs),
        "seconds": round(time.perf_counter() - began, 3),
        "made": [asdict(ready) for ready in graphs.made],
        "unmade": sorted(graphs.failed),
    }


def _batch(job: Job, number: int, device: torch.device) -> Batch:
    shape = (job.training.micro_batch_size, job.model.seq_length)
    tokens_BS = torch.zeros(shape, dtype=torch.int64, device=device)
    return Batch(tokens_BS, tokens_BS.clone(), 0, number)


def _run_chunk(job: Job, step: Step, chunk: ModelChunk, batches: list[Batch]) -> None:
    """What a pipeline's schedule calls of a chunk, without its neighbours."""
    assert step.pipeline is not None
    zeros = partial(torch.zeros, (), device=step.device)
    scale = zeros(dtype=torch.float64)
    sums = (zeros(dtype=torch.float64), zeros(dtype=torch.int64))
    chunk.work = PipelineState(batches, job.training.z_loss, scale, *sums)
    dtype = COMPUTE[job.training.precision] or torch.float32
    for learning in (True, False):
        chunk.train(learning)
        x_BSH = torch.zeros(step.pipeline.shape, dtype=dtype, device=step.device)
        if chunk.first:
            x_BSH = torch.zeros(1, dtype=torch.int64, device=step.device)
        else:
            x_BSH.requires_grad_(learning)
        with torch.set_grad_enabled(learning):
            made = chunk(x_BSH)
            if learning:
                made.sum().backward()


def work(spec: Mapping[str, Any], progress: ProgressCallback) -> dict[str, object]:
    """Compile. `spec` has "job", and the "environment" of its ranks. Returns {"graphs", "compiled",
    "cached", "ranks", "seconds"}."""
    job = Job.model_validate(spec["job"])
    try:
        os.environ.update(on_this_node(spec["environment"]))  # before torch reads it
    except KeyError as missing:
        raise TrainkitError(
            f"${{node:VAR}} asks for what is not in the environment of {os.uname().nodename}, which"
            f" compiles: {', '.join(missing.args)}",
            exit=Exit.STAGE_FAILED,
        ) from None
    fields = graph_fields(job)
    folder = node_folder(fields)
    make_private_folder(folder.parent)
    began = time.perf_counter()
    with locked(folder.with_suffix(".lock"), {"job": job.name}):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        os.environ[VARIABLE] = str(folder)
        found = _compile(job, folder / READY, progress)
        fields = {**fields, **machine_fields(job)}
        seconds = time.perf_counter() - began
        pack(folder, GraphFiles.of(job), fields, seconds=round(seconds, 3), ranks=found)
        shutil.rmtree(folder)  # a rank unpacks what is whole
    compiled = sum(each["misses"] for each in found)
    cached = sum(each["hits"] for each in found)
    return {
        "graphs": compiled + cached,
        "compiled": compiled,
        "cached": cached,
        "ranks": len(found),
        "seconds": round(seconds, 3),
    }


def _refuse_missing_devices(job: Job) -> None:
    """Raise TrainkitError unless this machine has the GPUs of one of the job's nodes. A fork asks:
    who has asked CUDA anything has no forks that can use it."""
    import torch

    (seen,) = in_forks(lambda rank: {"devices": torch.cuda.device_count()}, [0], at_once=1)
    if (devices := seen["devices"]) < job.ranks_per_node:
        raise TrainkitError(
            f"graphs are compiled for each of the {job.ranks_per_node} GPUs of a node, whose number"
            f" is in them, and this machine has {devices}",
            exit=Exit.STAGE_FAILED,
            hint=f"clusters.{job.cluster.name}.stages.precompile names a partition whose nodes have"
            f" {job.ranks_per_node} x {job.cluster.device.name}",
        )


def _compile(job: Job, folder: Path, progress: ProgressCallback) -> list[Mapping[str, Any]]:
    """{"rank", "hits", "misses", "seconds"} of each rank that has graphs of its own."""
    from trainkit.train.batches import vocab_size
    from trainkit.train.ready_graphs import ReadyGraph, merge

    if job.cluster.device_type == "cuda":
        _refuse_missing_devices(job)
    vocab = vocab_size(job)
    found = []
    made = {}
    failed: set[str] = set()
    for each in compile_ranks(job, vocab, folder, at_once=len(os.sched_getaffinity(0))):
        found.append(each)
        progress(len(found), len(found) + 1)
        made[each["rank"]] = [ReadyGraph(**ready) for ready in each["made"]]
        failed.update(each["unmade"])
    counts = merge(folder, made, failed)
    ranks: list[Mapping[str, Any]] = []
    for each in found:
        new, old = counts[each["rank"]]
        sums = {"hits": each["hits"] + old, "misses": each["misses"] + new}
        ranks.append({"rank": each["rank"], **sums, "seconds": each["seconds"]})
        print(f"rank {each['rank']}: {ranks[-1]}", file=sys.stderr)
    return ranks


if __name__ == "__main__":
    run_unit(work)
