"""What is asked before ranks start: whether the plan objects, and whether every rank could read
its samples and report where it is asked to."""

from __future__ import annotations

import importlib.util
import os

from trainkit.base.errors import ConfigError, Exit, TrainkitError
from trainkit.base.extras import MissingExtra
from trainkit.base.process import raise_open_file_limit
from trainkit.data.order.open import open_mixture
from trainkit.jobs.schema import Job
from trainkit.launch.supervise.rank_environment import secret_values
from trainkit.plan.planner import Plan


def refuse_infeasible(plan: Plan) -> Plan:
    """The plan itself. Raises TrainkitError (exit 4) with every objection."""
    if plan.objections:
        raise TrainkitError(
            "; ".join(f"{o.key}: {o.message}" for o in plan.objections),
            exit=Exit.PLAN,
            hint=f"invoke plan {plan.job}",
        )
    return plan


def refuse_without_samples(job: Job) -> None:
    """Open what every rank will read, before any of them starts. Raises ConfigError as
    `open_mixture`."""
    raise_open_file_limit()
    evaluated = {"valid": job.dataset, **job.validation} if job.training.eval_iters else {}
    open_mixture(job, job.dataset, "train", vocab=job.model.vocab_size or 1)
    for dataset in evaluated.values():
        open_mixture(job, dataset, "valid", vocab=job.model.vocab_size or 1)


def refuse_without_wandb(job: Job) -> None:
    """Raise ConfigError where the job asks for Weights & Biases and its ranks could not have it;
    before there is a run."""
    if job.wandb is None:
        return
    from trainkit.train.metrics.wandb import wandb_problems

    problems = wandb_problems(
        job, {**job.environment, **secret_values(job.cluster.secrets, os.environ)}
    )
    # ./inv can mend that by itself
    if len(problems) == 1 and importlib.util.find_spec("wandb") is None:
        raise MissingExtra(problems[0].message, "wandb", otherwise="or leave out wandb")
    if problems:
        raise ConfigError(problems)
