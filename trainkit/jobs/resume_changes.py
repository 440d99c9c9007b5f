"""What may be changed when a run goes on: where it runs, how it is laid out, reported and kept,
how long it lasts; never which samples it sees."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trainkit.base.documents import read_document
from trainkit.base.errors import ConfigError, Problem, raise_problems
from trainkit.jobs.clusters import WatchLimits
from trainkit.jobs.layers import parse_overrides
from trainkit.jobs.messages import suggest
from trainkit.jobs.provenance import SET, SourcedValue
from trainkit.jobs.resolved import SCHEMA, ResolvedJob, read_job
from trainkit.jobs.schema import Job, NotifySettings, Parallelism, RetrySettings

CHANGEABLE = (
    "nodes",
    *(f"notify.{name}" for name in NotifySettings.model_fields),
    "kernels",
    "cluster.hostfile",
    "cluster.interface",
    "cluster.memory_bytes",
    "cluster.python",
    "cluster.quarantine_seconds",
    "cluster.ranks_per_node",
    "cluster.spares",
    "cluster.ssh_args",
    *(f"cluster.watch.{name}" for name in WatchLimits.model_fields),
    *(f"parallelism.{name}" for name in Parallelism.model_fields),
    *(f"retry.{name}" for name in RetrySettings.model_fields),
    "training.micro_batch_size",
    "training.train_iters",
    "training.lr_decay_iters",
    "training.on_nan",
    "training.on_spike",
    "training.spike_factor",
    "training.max_skipped_in_a_row",
    "training.max_rollbacks",
    "training.replay_interval",
    "training.recompute_granularity",
    "training.recompute_every",
    "training.compile",
    "training.log_interval",
    "training.eval_interval",
    "training.eval_iters",
    "training.save_interval",
    *(
        f"checkpoint.{name}"
        for name in (
            "keep_last",
            "keep_every",
            "keep_best",
            "verify",
            "save_async",
            "save_first",
            "memory_interval",
        )
    ),
    "generate.prompt",
    "generate.max_new_tokens",
    "generate.prompts",
    "generate.while_training",
)
# Megatron's shuffles depend on how many samples are asked for
FIXED_BY_MEGATRON = ("training.train_iters", "training.eval_interval", "training.eval_iters")


def changed_job(
    path: Path, sets: Sequence[str], moved: ResolvedJob | None = None
) -> tuple[dict[str, Any], Job]:
    """The job of job.json with overrides laid over it: (document job/1, job). Nothing is written.

    Args:
        path: job.json of the run.
        sets: overrides, "nodes=2".
        moved: the job on another cluster, whose table the run takes over.

    The global batch stays what it was, even where it was derived from the number of ranks. So
    does the end of the learning rate's decay where it was train_iters, unless
    training.lr_decay_iters is given: the rate must not jump because training lasts longer.

    Raises ConfigError for a key that may not change once a run has begun, for a value the schema
    refuses, and for a cluster with another root.
    """
    job = read_job(path)
    document = read_document(path, SCHEMA)
    if moved is not None:
        _move(document, job, moved)
    values = document["job"]
    origins = document["origins"]
    if sets or moved is not None:
        values["training"] |= {
            "global_batch_size": job.global_batch_size,
            "gradient_accumulation_steps": None,
        }
    given = parse_overrides(sets)
    if any(origin.path == ("training", "train_iters") for origin in given):
        values["training"]["lr_decay_iters"] = job.training.decay_iters
    problems = []
    for override in given:
        problem = _objection(job, override)
        if problem is not None:
            problems.append(problem)
        else:
            _override(values, origins, override)
    raise_problems(problems)
    try:
        return document, Job.model_validate(values)
    except ValidationError as error:
        raise ConfigError(
            [
                Problem(f"{'.'.join(map(str, e['loc']))}: {e['msg']}", SET)
                for e in error.errors(include_url=False)
            ]
        ) from None


def _objection(job: Job, override: SourcedValue) -> Problem | None:
    """Why a value may not change in a run of this job."""
    key = ".".join(override.path)
    if key not in CHANGEABLE:
        # a key that the job has was meant, and no other is near it
        hint = "train another run with it" if _is_key(job, key) else suggest(key, CHANGEABLE)
        return Problem(f"{key} cannot change once a run has begun", SET, hint)
    decides = fixes_steps(job)
    if key == "training.train_iters" and decides:
        return Problem(
            f"{key} cannot change in a run with {decides}: they follow from it, so other samples"
            " would follow",
            SET,
            "a run without them can",
        )
    if job.sample_order == "megatron" and key in FIXED_BY_MEGATRON:
        why = (
            "Megatron's order of samples depends on how many are asked for, so other samples"
            " would follow"
        )
        return Problem(
            f"{key} cannot change in a run with sample_order = 'megatron': {why}",
            SET,
            "a run with sample_order = 'native' can",
        )
    return None


def _is_key(job: Job, key: str) -> bool:
    """Whether a job has a key of this name."""
    found: object = job
    for name in key.split("."):
        if name not in getattr(type(found), "model_fields", ()):
            return False
        found = getattr(found, name)
    return True


def fixes_steps(job: Job) -> str:
    """Keys of a job by which its samples depend on the number of steps; "": none do."""
    if job.phases:
        return "phases"
    capped = next((each.name for each in job.training_datasets if each.max_epochs), None)
    return f"datasets.{capped}.max_epochs" if capped else ""


def _override(values: dict[str, Any], origins: dict[str, Any], override: SourcedValue) -> None:
    """Put a value, and where it comes from, into `job` and `origins` of a job/1 document."""
    key = ".".join(override.path)
    _put(values, override.path, override.value)
    former = origins.get(key)  # none of retry.infra, where the job had no table `retry`
    if former:
        overrode = [{"value": former["value"], "place": former["place"]}, *former["overrode"]]
    else:
        overrode = []
    origins[key] = {"value": override.value, "place": str(SET), "overrode": overrode}
    if override.path[0] != key:
        origins.pop(override.path[0], None)  # "retry is not set" is no longer true


def _put(values: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for name in path[:-1]:
        if values.get(name) is None:
            values[name] = {}
        values = values[name]
    values[path[-1]] = value


def _move(document: dict[str, Any], job: Job, moved: ResolvedJob) -> None:
    """Put another cluster's table, and where its values come from, into the document of a job."""
    before = job.cluster
    after = moved.job.cluster
    if after.root != before.root:
        raise ConfigError(
            f"cluster '{after.name}' has the root {after.root}, and the run lies in {before.root}",
            hint=f"a run stays where it is; give clusters.{after.name} that root",
        )
    document["job"]["cluster"] = after.model_dump(mode="json")
    origins = {
        key: origin for key, origin in document["origins"].items() if not key.startswith("cluster.")
    }
    document["origins"] = origins | {
        key: origin.to_json() for key, origin in moved.origins.items() if key.startswith("cluster.")
    }
