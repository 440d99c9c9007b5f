"""Before the first step: what cannot be trained is refused with all its reasons at once, and
weights begin somewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from trainkit.base.errors import ConfigError, Problem
from trainkit.jobs.ranks import degrees_of
from trainkit.jobs.schema import Job
from trainkit.plan.rules import zero_bubble_problem
from trainkit.train.batches import vocab_size
from trainkit.train.huggingface import check_weights, load_weights, weights_folder
from trainkit.train.metrics.wandb import wandb_problems
from trainkit.train.parallel.data_parallel import World
from trainkit.train.parallel.initialize import initialize
from trainkit.train.parallel.pipeline import chunks_per_stage, schedule_problem
from trainkit.train.torch_compat import local_part
from trainkit.train.update.build import ModelParts
from trainkit.train.update.schedule import batch_sizes

MANY = 20  # tensors named in one message


def refuse_what_cannot_run(job: Job, world: World, *, begins: bool) -> None:
    """Refuse a world, batches, a vocabulary or beginning weights that do not fit the job. Raises
    ConfigError with all that is wrong.

    `begins`: there is no checkpoint to go on from, so that init_from is needed.
    """
    problems = [*layout_problems(job, world), *_told(lambda: vocab_size(job)), *wandb_problems(job)]
    if begins and job.init_from and not problems:
        problems += _told(lambda: _check_init(job))
    if problems:
        raise ConfigError(problems)


def _told(check: Callable[[], object]) -> list[Problem]:
    try:
        check()
    except ConfigError as error:
        return error.list
    return []


def _check_init(job: Job) -> None:
    if problems := check_weights(weights_folder(job), job.model, vocab_size(job)):
        raise ConfigError(problems)


def layout_problems(job: Job, world: World) -> Iterator[Problem]:
    """What is wrong with how the ranks would share the work."""
    p = job.parallelism
    degrees = degrees_of(job)
    if world.size != job.world_size:
        yield Problem(
            f"job {job.name!r} is for {job.world_size} ranks and was started with {world.size}"
        )
    if job.world_size % (degrees.tensor * degrees.pipeline):
        yield Problem(
            f"{job.world_size} ranks do not divide by tensor-parallel {degrees.tensor} x"
            f" pipeline-parallel {degrees.pipeline}"
        )
    elif degrees.world != job.world_size:
        yield Problem(
            f"data-parallel size {job.data_parallel_size} does not divide by"
            f" data_parallel_replicate_size {p.data_parallel_replicate_size}"
        )
    yield from _tensor_problems(job, degrees.tensor)
    yield from _pipeline_problems(job)
    quantum = job.training.micro_batch_size * job.data_parallel_size
    for samples in batch_sizes(job):
        grown = "" if samples == job.global_batch_size else " (rampup_batch_size passes through it)"
        if samples % quantum:
            yield Problem(
                f"global_batch_size {samples}{grown} does not divide by micro_batch_size x"
                f" data-parallel size = {quantum}"
            )
        elif why := schedule_problem(p, samples // quantum):
            yield Problem(
                f"global_batch_size {samples}{grown} is {samples // quantum} micro-batches: {why}"
            )


def _tensor_problems(job: Job, tensor: int) -> Iterator[Problem]:
    """Heads divide; the sequence does where it is split. Vocabulary and MLP may be split
    unevenly, as long as every rank has some."""
    model = job.model
    if model.num_attention_heads % tensor:
        yield Problem(
            f"num_attention_heads {model.num_attention_heads} does not divide by tensor-parallel"
            f" size {tensor}"
        )
    elif model.query_groups % tensor and tensor % model.query_groups:
        yield Problem(
            f"num_query_groups {model.query_groups} is neither a multiple nor a"
            f" divisor of tensor-parallel size {tensor}"
        )
    for key, size in (
        ("ffn_hidden_size", model.ffn_width),
        ("vocab_size", model.vocab_size or tensor),
    ):
        if size < tensor:
            yield Problem(f"{key} {size} is less than tensor-parallel size {tensor}")
    if job.parallelism.sequence_parallel and model.seq_length % tensor:
        yield Problem(
            f"sequence_parallel: seq_length {model.seq_length} does not divide by tensor-parallel"
            f" size {tensor}"
        )


def _pipeline_problems(job: Job) -> Iterator[Problem]:
    """Every chunk has a layer; ZeRO 2 and schedules exclude each other: these add whole
    gradients up and reduce them once."""
    p = job.parallelism
    chunks = p.pipeline_model_parallel_size * chunks_per_stage(p)
    if job.model.num_layers < chunks:
        yield Problem(
            f"{job.model.num_layers} layers for {p.pipeline_model_parallel_size} pipeline stages of"
            f" {chunks_per_stage(p)} chunks"
        )
    if p.pipeline_model_parallel_size > 1 and p.zero_stage == 2:
        yield Problem(
            "zero_stage 2 does not go with a pipeline, whose schedules reduce gradients once; use 1"
            " or 3"
        )
    if p.pipeline_schedule == "zbv" and p.zero_stage == 3:
        yield Problem(
            "zero_stage 3 does not go with pipeline_schedule = 'zbv', which needs the weights of a"
            " backward twice; use 1"
        )
    if why := zero_bubble_problem(p, torch.__version__):
        yield Problem(why, hint="use '1f1b'")


@torch.no_grad()
def begin_weights(job: Job, parts: ModelParts) -> None:
    """Fill a new model: from `init_from`, else by the seed. Called by all ranks together. Raises
    ConfigError for weights that are not finite."""
    if job.init_from is None:
        for module in parts.modules:
            initialize(module, job.model, job.training.seed)
        return
    load_weights(
        weights_folder(job), parts.parameters, job.model, parts.shapes["embed_tokens.weight"][0]
    )
    bad = dict.fromkeys(parts.shapes, 0)
    for sharded in parts.parameters.values():
        bad[sharded.name] += int((~torch.isfinite(local_part(sharded.parameter))).sum())
    counts = torch.tensor(list(bad.values()))
    dist.all_reduce(counts)
    if wrong := [
        f"{name} ({count})" for name, count in zip(bad, counts.tolist(), strict=True) if count
    ]:
        raise ConfigError(
            f"init_from = {job.init_from!r}: weights that are not finite in {len(wrong)} tensors:"
            f" {', '.join(wrong[:MANY])}"
        )
