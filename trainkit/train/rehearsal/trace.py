"""One rank of a job, built and taken through a step without memory.

The whole model of the rank is built: its layout, its optimizer, what of it a checkpoint holds. The
step is traced with as many layers as there are kinds of them in a chunk, and with few
micro-batches: what repeats is not done again.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from trainkit.base.lazy_dataclasses import dataclass
from trainkit.jobs.ranks import RankCoordinates, degrees_of, rank_at, share_of_rank
from trainkit.jobs.schema import Job
from trainkit.plan.layout import split_layers
from trainkit.train.metrics.timers import Timers
from trainkit.train.model.batch import Batch
from trainkit.train.parallel.mesh import Mesh
from trainkit.train.parallel.pipeline import chunks_on, chunks_per_stage, tied_at
from trainkit.train.rehearsal.fake_world import META, fake_world
from trainkit.train.rehearsal.forks import in_forks
from trainkit.train.rehearsal.recorder import CollectiveCall, CollectiveRecorder
from trainkit.train.update.build import build_model_parts
from trainkit.train.update.step import Step

# layers that are traced of a model in one chunk: one, and one that another follows
LEAST_LAYERS = 2


@dataclass(frozen=True)
class RankTrace:
    """What one rank is and does in a step.

    Args:
        rank: which.
        tensors: of the model that it holds, or parts of.
        elements: of parameters that it holds.
        checkpoint: shapes of all that a checkpoint of the job holds, by name.
        calls: its collectives in a step, in order.
    """

    rank: int
    tensors: int
    elements: int
    checkpoint: dict[str, tuple[int, ...]]
    calls: tuple[CollectiveCall, ...]

    def to_json(self) -> dict[str, object]:
        groups: dict[tuple[int, ...], int] = {}
        calls = [call.to_json(groups) for call in self.calls]
        return {**vars(self), "calls": calls, "groups": list(groups)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> RankTrace:
        groups = [tuple(group) for group in value["groups"]]
        calls = tuple(CollectiveCall.from_json(call, groups) for call in value["calls"])
        shapes = {name: tuple(shape) for name, shape in value["checkpoint"].items()}
        return cls(value["rank"], value["tensors"], value["elements"], shapes, calls)


def distinct_ranks(job: Job, vocab: int) -> list[int]:
    """Ranks that together stand for all: of every pipeline stage a rank; of the first of each kind
    of stage the last tensor-parallel rank too, and one of each other share of a split tensor; of
    the first and the last stage the last data-parallel rank too. All others hold the same shapes
    and do the same; whether stages of a kind do, `further_ranks` looks at."""
    degrees = degrees_of(job)
    shares = _distinct_shares(job, vocab)
    kinds = _stage_kinds(job)
    found_ranks: set[int] = set()
    for stage, kind in enumerate(kinds):
        places = [RankCoordinates(stage, 0, 0, 0)]
        if kinds.index(kind) == stage:
            places = [RankCoordinates(stage, 0, 0, tensor) for tensor in shares]
        if stage in (0, degrees.pipeline - 1):
            places.append(RankCoordinates(stage, degrees.replicate - 1, degrees.shard - 1, 0))
        found_ranks.update(rank_at(place, degrees) for place in places)
    return sorted(found_ranks)


def further_ranks(job: Job, vocab: int, traces: Sequence[RankTrace]) -> list[int]:
    """Ranks to trace besides: the other tensor-parallel ones of a stage whose first rank holds, or
    says to its groups, something else than that of the first stage of its kind."""
    degrees = degrees_of(job)
    kinds = _stage_kinds(job)
    found = {trace.rank: _work_of(trace) for trace in traces}
    ranks = [rank_at(RankCoordinates(stage, 0, 0, 0), degrees) for stage in range(len(kinds))]
    more = []
    for stage, kind in enumerate(kinds):
        if found[ranks[stage]] != found[ranks[kinds.index(kind)]]:
            places = (
                RankCoordinates(stage, 0, 0, tensor) for tensor in _distinct_shares(job, vocab)
            )
            more += [rank for place in places if (rank := rank_at(place, degrees)) not in found]
    return more


def _stage_kinds(job: Job) -> list[tuple[object, ...]]:
    """Of every stage what its chunks are: how many layers, and whether the model's first and last
    are among them. Stages of a kind hold tensors of the same shapes."""
    p = job.parallelism
    count = p.pipeline_model_parallel_size * chunks_per_stage(p)
    layers = split_layers(job.model.num_layers, count)
    return [
        tuple((layers[chunk], chunk == 0, chunk == count - 1) for chunk in chunks_on(stage, p))
        for stage in range(p.pipeline_model_parallel_size)
    ]


def _work_of(trace: RankTrace) -> tuple[object, ...]:
    """What ranks of a kind have in common. Their order of forwards and backwards, and so of calls,
    differs from stage to stage."""
    calls = Counter(
        (call.operation, len(call.group), call.sizes, call.where)
        for call in trace.calls
        if call.peer < 0
    )
    return trace.tensors, trace.elements, frozenset(calls.items())


def _distinct_shares(job: Job, vocab: int) -> list[int]:
    """The first and the last tensor-parallel rank, and one of each other share."""
    last = degrees_of(job).tensor - 1
    shares = list(dict.fromkeys((0, last)))
    seen = {shares_of(job, vocab, rank) for rank in shares}
    for rank in range(1, last):
        if (found := shares_of(job, vocab, rank)) not in seen:
            seen.add(found)
            shares.append(rank)
    return shares


def shares_of(job: Job, vocab: int, rank: int) -> tuple[int, ...]:
    """Rows of each split tensor on a tensor-parallel rank."""
    tensor = job.parallelism.tensor_model_parallel_size
    return tuple(share_of_rank(size, tensor, rank)[1] for size in (job.model.ffn_width, vocab))


def shortened(job: Job) -> Job:
    """The job with every chunk of the model as short as it can be with all its kinds of layers."""
    p = job.parallelism
    chunks = p.pipeline_model_parallel_size * chunks_per_stage(p)
    least = min(split_layers(job.model.num_layers, chunks))
    kinds = LEAST_LAYERS if chunks == 1 else 1
    if job.training.recompute_granularity != "none":
        kinds = max(kinds, job.training.recompute_every)
    moe = job.model.moe
    if moe is not None and moe.first_dense_layers:
        kinds = max(kinds, 2)
        moe = moe.model_copy(update={"first_dense_layers": 1})
    sizes = {"num_layers": chunks * min(least, kinds), "moe": moe}
    return job.model_copy(update={"model": job.model.model_copy(update=sizes)})


def traced_micro_batches(job: Job) -> int:
    """Micro-batches of a traced step: with a pipeline so many that its schedule fills, settles
    and drains; without one the first and the last."""
    stages = job.parallelism.pipeline_model_parallel_size
    most = job.gradient_accumulation_steps
    if stages == 1:
        return min(most, 2)
    rounds = 2 if job.parallelism.virtual_pipeline_model_parallel_size else 1
    return min(most, max(stages * rounds, stages + 1))


def trace_rank(job: Job, rank: int, vocab: int) -> RankTrace:
    """Build a rank and take a step with it, in this process, which must have no process group.

    Args:
        job: what it trains.
        rank: which of the job's ranks.
        vocab: rows of the embedding.
    """
    degrees = degrees_of(job)
    with fake_world(rank, degrees.world) as world:
        mesh = Mesh.of(
            degrees,
            world,
            META,
            sequence=job.parallelism.sequence_parallel,
            tied_at=tied_at(job),
        )
        whole = Step(job, build_model_parts(job, mesh, vocab), mesh, Timers(torch.device("cpu")))
        held = whole.model_parts.parameters
        elements = sum(
            view.numel() for each in held.values() for view in each.views(each.parameter).values()
        )
        tensors = whole.tensors()
        shapes = whole.expected()
        if wrong := [name for name, each in tensors.items() if tuple(each.shape) != shapes[name]]:
            raise AssertionError(f"rank {rank} would save {wrong[0]} in another shape")
        calls = _trace_step(shortened(job), mesh, vocab)
    return RankTrace(rank, len(held), elements, shapes, tuple(calls))


def _trace_step(job: Job, mesh: Mesh, vocab: int) -> list[CollectiveCall]:
    parts = build_model_parts(job, mesh, vocab)
    step = Step(job, parts, mesh, Timers(torch.device("cpu")))
    parts.train()
    count = traced_micro_batches(job)
    samples = count * job.training.micro_batch_size * mesh.degrees.data
    recorder = CollectiveRecorder()
    with recorder:
        step.run(_batches(job, count), samples, False)
    return recorder.calls


def _batches(job: Job, count: int) -> Iterator[Batch]:
    shape = (job.training.micro_batch_size, job.model.seq_length)
    for number in range(count):
        tokens_BS = torch.zeros(shape, dtype=torch.int64, device=META)
        yield Batch(tokens_BS, tokens_BS.clone(), 0, number)


def trace_ranks(
    job: Job, ranks: Sequence[int], vocab: int, *, at_once: int = 1
) -> Iterator[RankTrace]:
    """`trace_rank` of several, each in a fork of this process: torch keeps what it has found out
    about a mesh, and so a process can be one rank only.

    Args:
        job: what they train.
        ranks: which of the job's ranks.
        vocab: rows of the embedding.
        at_once: processes.
    """
    # compiled blocks say to others what they say uncompiled
    training = job.training.model_copy(update={"compile": False})
    eager = job.model_copy(update={"training": training})
    work = partial(_trace_as_json, eager, vocab)
    gc.freeze()  # else every fork's collections copy what it shares with this process
    for value in in_forks(work, ranks, at_once=at_once):
        yield RankTrace.from_json(value)


def _trace_as_json(job: Job, vocab: int, rank: int) -> dict[str, object]:
    return trace_rank(job, rank, vocab).to_json()
