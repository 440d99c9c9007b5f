"""Before the first step: what cannot be trained is refused with all its reasons at once, and weights begin somewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from trainkit.base.errors import ConfigError, Problem
from trainkit.jobs.schema import Job
from trainkit.train.data_parallel import World
from trainkit.train.feed import vocab_size
from trainkit.train.huggingface import check_weights, load_weights, weights_folder
from trainkit.train.initialize import initialize
from trainkit.train.model import Transformer
from trainkit.train.schedule import batch_sizes
from trainkit.train.torch_compat import local_part
from trainkit.train.wandb_log import wandb_problems

MANY = 20  # tensors named in one message


def refuse_what_cannot_run(job: Job, world: World, *, begins: bool) -> None:
    """Refuse a world, batches, a vocabulary or beginning weights that do not fit the job. Raises ConfigError with all that is wrong.

    `begins`: there is no checkpoint to go on from, so that init_from is needed.
    """
    problems = [*_layout_problems(job, world), *_told(lambda: vocab_size(job)), *wandb_problems(job)]
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


def _layout_problems(job: Job, world: World) -> Iterator[Problem]:
    if world.size != job.world_size:
        yield Problem(f"job {job.name!r} is for {job.world_size} ranks and was started with {world.size}")
    quantum = job.training.micro_batch_size * world.size
    for samples in batch_sizes(job):
        if samples % quantum:
            grown = "" if samples == job.global_batch_size else " (rampup_batch_size passes through it)"
            yield Problem(f"global_batch_size {samples}{grown} does not divide by micro_batch_size x data-parallel size = {quantum}")


@torch.no_grad()
def begin_weights(job: Job, module: Transformer) -> None:
    """Fill a new model: from `init_from`, else by the seed. Called by all ranks together. Raises ConfigError for weights that are not finite."""
    if job.init_from is None:
        initialize(module, job.model, job.training.seed)
        return
    load_weights(weights_folder(job), dict(module.named_parameters()), job.model)
    names = [name for name, _ in module.named_parameters()]
    bad = torch.stack([(~torch.isfinite(local_part(p))).sum() for p in module.parameters()])
    dist.all_reduce(bad)
    if wrong := [f"{name} ({count})" for name, count in zip(names, bad.tolist(), strict=True) if count]:
        raise ConfigError(f"init_from = {job.init_from!r}: weights that are not finite in {len(wrong)} tensors: {', '.join(wrong[:MANY])}")
