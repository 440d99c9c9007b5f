"""Before the first step: what cannot be trained is refused with all its reasons at once, and
weights begin somewhere."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from trainkit.base.errors import ConfigError, Problem, raise_problems
from trainkit.jobs.schema import Job
from trainkit.plan.checks import layout_objections
from trainkit.plan.rules import (
    NATIVE,
    experts_apart_problem,
    float8_problem,
    zero_bubble_problem,
)
from trainkit.train.batches import vocab_size
from trainkit.train.huggingface import check_weights, load_weights, weights_folder
from trainkit.train.metrics.wandb import wandb_problems
from trainkit.train.parallel.data_parallel import World
from trainkit.train.parallel.initialize import initialize
from trainkit.train.torch_compat import local_part
from trainkit.train.update.build import ModelParts

MANY = 20  # tensors named in one message


def refuse_what_cannot_run(job: Job, world: World, *, begins: bool) -> None:
    """Refuse a world, batches, a vocabulary or beginning weights that do not fit the job. Raises
    ConfigError with all that is wrong.

    `begins`: there is no checkpoint to go on from, so that init_from is needed.
    """
    problems = [*layout_problems(job), *wandb_problems(job)]
    if world.size != job.world_size:
        ranks = f"is for {job.world_size} ranks and was started with {world.size}"
        problems.append(Problem(f"job {job.name!r} {ranks}"))
    if torch.cuda.is_available() and job.cluster.device_type == "cuda":
        capability = torch.cuda.get_device_capability(world.local_rank)
        if why := float8_problem(job.training.precision, capability):
            problems.append(Problem(why, hint="use 'bf16'"))
    try:
        vocab_size(job)
    except ConfigError as error:
        problems += error.list
    if begins and job.init_from and not problems:
        problems += check_weights(weights_folder(job), job.model, vocab_size(job))
    raise_problems(problems)


def layout_problems(job: Job) -> Iterator[Problem]:
    """Why the ranks cannot share the work: what the plan objects to, and what this torch lacks."""
    yield from (objection.problem(job.name) for objection in layout_objections(job, NATIVE))
    if why := zero_bubble_problem(job.parallelism, torch.__version__):
        yield Problem(why, hint="use '1f1b'")
    if job.model.moe and (why := experts_apart_problem(job.parallelism, torch.__version__)):
        yield Problem(why, hint="use data and pipeline parallelism alone")


@torch.no_grad()
def begin_weights(job: Job, parts: ModelParts) -> None:
    """Fill a new model: from `init_from`, else by the seed. Called by all ranks together. Raises
    ConfigError for weights that are not finite."""
    if job.init_from is None:
        for module in parts.modules:
            initialize(module, job.model, job.training.seed)
        return
    rows = parts.shapes["embed_tokens.weight"][0]
    left_out = load_weights(weights_folder(job), parts.parameters, job.model, rows)
    if left_out and dist.get_rank() == 0:
        print(
            f" init_from = {job.init_from!r}: layers {left_out} are not read: they are after the"
            " model's last, and predict further tokens (mtp_num_layers)",
            flush=True,
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
