"""The tasks about jobs.toml, and what they print: jobs, show, check."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from rich.markup import escape

from trainkit.base.documents import document
from trainkit.base.errors import ConfigError, raise_problems
from trainkit.base.toml_text import toml_key, toml_value
from trainkit.cli.tables import Listing
from trainkit.cli.wrapper import TaskContext, TaskResult
from trainkit.jobs.load import Jobs, JobSummary, find_root, load
from trainkit.jobs.messages import closest_name, suggest
from trainkit.jobs.provenance import SourcedValue
from trainkit.jobs.resolved import ResolvedJob
from trainkit.jobs.schema import Job

MAX_COLUMN = 48  # at which the comments of a resolved job begin


def jobs_table(jobs: Iterable[JobSummary], default: str | None) -> Listing:
    """The jobs as a table; the default job has a star."""
    table = Listing(
        "job",
        "engine",
        "cluster",
        "model",
        "dataset",
        "nodes",
        "description",
        right=["nodes"],
        drop=["engine", "dataset", "model", "nodes", "cluster"],
    )
    for job in jobs:
        name = f"{job.name} *" if job.name == default else job.name
        cells = (name, job.engine, job.cluster, job.model, job.dataset, str(job.nodes))
        table.add_row(*map(escape, (*cells, job.description)))
    return table


def job_as_toml(resolved: ResolvedJob) -> str:
    """The resolved job as TOML, each value with its origin as a comment. A value that is not set
    is a comment only."""
    lines = list(_lines(resolved.job.model_dump(mode="json"), (), (), resolved.origins))
    width = min(MAX_COLUMN, max((len(text) for text, place in lines if place), default=0))
    with_places = (f"{text:<{width}}  # {place}" if place else text for text, place in lines)
    return "\n".join(with_places) + "\n"


def _lines(
    table: Mapping[str, object],
    path: tuple[str, ...],
    header: tuple[str, ...],
    origins: Mapping[str, SourcedValue],
) -> Iterator[tuple[str, str]]:
    """(line, place where it was written) of a table, values before the tables in it.

    Args:
        table: its values.
        path: its key, with the numbers of arrays of tables in it.
        header: the same without them.
        origins: of the job's values.
    """
    inner = {
        key: value
        for key, value in table.items()
        # one of engine_args may be a table that was given as one value, by --set
        if isinstance(value, dict | list) and ".".join((*path, key)) not in origins
    }
    for key, value in table.items():
        if key in inner:
            continue
        place = str(origins[".".join((*path, key))].place)
        if value is None:
            yield f"# {key} is not set", place
        else:
            yield f"{toml_key(key)} = {toml_value(value)}", place
    for key, value in inner.items():
        name = (*header, key)
        if isinstance(value, list):
            for number, item in enumerate(value):
                yield from (("", ""), (f"[[{'.'.join(name)}]]", ""))
                yield from _lines(item, (*path, key, str(number)), name, origins)
        else:
            yield from (("", ""), (f"[{'.'.join(name)}]", ""))
            yield from _lines(value, (*path, key), name, origins)


def find_value(resolved: ResolvedJob, key: str) -> SourcedValue:
    """A value, where it was written and all that it overrode, newest first.

    Args:
        resolved: the job.
        key: a resolved path, "training.lr"; for "cluster", "model" and the like: which table was
            named.

    Raises:
        ConfigError: there is no such key; it names the nearest.
    """
    origins = resolved.origins
    for path in (key, f"{key}.name"):
        if path in origins:
            return origins[path]
    below = [known for known in origins if known.startswith(f"{key}.")]
    if below:
        raise ConfigError(
            f"'{key}' is a table of job {resolved.job.name}", hint=f"its keys: {', '.join(below)}"
        )
    # a key is often typed without its table
    same_end = [known for known in origins if known.rpartition(".")[2] == key]
    if same_end:
        hint = f"did you mean '{same_end[0]}'?"
    elif closest_name(key, origins):
        hint = suggest(key, origins)
    else:
        tables = sorted({known.partition(".")[0] for known in origins})
        hint = f"keys begin with: {', '.join(tables)}"
    raise ConfigError(f"job {resolved.job.name} has no key '{key}'", hint=hint)


def explain_value(key: str, found: SourcedValue) -> str:
    """Where a value comes from: one line per place that sets it."""
    layers = [found, *found.overrode]
    values = [
        f"{key} is not set" if layer.value is None else f"{key} = {toml_value(layer.value)}"
        for layer in layers
    ]
    width = max(map(len, values))
    marks = ["", *["  overridden"] * (len(layers) - 1)]
    return "\n".join(
        f"{value:<{width}}  {layer.place}{mark}"
        for value, layer, mark in zip(values, layers, marks, strict=True)
    )


def load_jobs(task: TaskContext) -> Jobs:
    """The jobs.toml at or above the current folder."""
    return load(find_root(task.folder))


def refuse_weights(job: Job) -> Job:
    """The job. Raises ConfigError as `train` does: `init_from` names no folder here, or weights
    of another model. A job of other machines is not asked: this one may lack their folders."""
    if job.init_from is not None and job.cluster.launcher_traits.one_machine:
        from trainkit.stages.weights import WeightsStage

        WeightsStage().needs(job, Path())
    return job


def jobs(task: TaskContext) -> TaskResult:
    """The task `jobs`."""
    loaded = load_jobs(task)
    described = loaded.describe()
    return TaskResult(
        document(
            "jobs/1",
            root=str(loaded.root),
            default=loaded.default_job,
            jobs=[asdict(job) for job in described],
        ),
        page=[jobs_table(described, loaded.default_job)],
    )


def show(task: TaskContext, job: str, explain: str, format: str, sets: Sequence[str]) -> TaskResult:
    """The task `show`.

    Args:
        task: how it was called.
        job: its name.
        explain: only this key; "": all.
        format: toml or json.
        sets: overrides, KEY=VALUE.

    Raises:
        ConfigError: another format; as Jobs.resolve; no key `explain`.
    """
    if format not in ("toml", "json"):
        raise ConfigError(f"--format {format!r} is neither toml nor json")
    resolved = load_jobs(task).resolve(job, sets)
    if explain:
        found = find_value(resolved, explain)
        values = document("explain/1", job=resolved.job.name, key=explain, **found.to_json())
        text = explain_value(explain, found)
    else:
        values = resolved.to_json()
        text = job_as_toml(resolved).rstrip("\n")
    return TaskResult(values, page=[json.dumps(values, indent=2) if format == "json" else text])


def check(task: TaskContext) -> TaskResult:
    """The task `check`. Raises ConfigError with every problem of the file."""
    loaded = load_jobs(task)
    problems = loaded.check()
    for name in loaded.names() if not problems else ():
        with suppress(ConfigError):  # a table that others extend may be incomplete
            job = loaded.resolve(name).job
            try:
                refuse_weights(job)
            except ConfigError as error:
                problems += error.list
    raise_problems(problems)
    return TaskResult(
        document("check/1", root=str(loaded.root), jobs=loaded.names(), problems=[]),
        page=[f"{loaded.root / 'jobs.toml'}: {len(loaded.names())} jobs, no problems"],
    )
