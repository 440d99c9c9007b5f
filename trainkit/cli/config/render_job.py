"""What `jobs` and `show` print: the listing, a resolved job as TOML or JSON, and where one of
its values comes from."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape

from trainkit.base.documents import document
from trainkit.base.errors import ConfigError
from trainkit.cli.tables import Listing
from trainkit.jobs.load import Jobs
from trainkit.jobs.messages import closest_name, suggest
from trainkit.jobs.provenance import SourcedValue
from trainkit.jobs.resolved import ResolvedJob


def jobs_document(jobs: Jobs) -> dict[str, Any]:
    """The document jobs/1."""
    return document(
        "jobs/1",
        root=str(jobs.root),
        default=jobs.default_job,
        jobs=[asdict(row) for row in jobs.describe()],
    )


def print_jobs(jobs: Jobs, console: Console) -> None:
    """The jobs as a table; the default job has a star."""
    table = Listing(
        "job",
        "engine",
        "cluster",
        "model",
        "dataset",
        "nodes",
        "what it is",
        right=["nodes"],
        drop=["engine", "dataset", "model", "nodes", "cluster"],
    )
    for row in jobs.describe():
        if row.name == jobs.default_job:
            name = f"{row.name} *"
        else:
            name = row.name
        table.add_row(
            *map(
                escape,
                (
                    name,
                    row.engine,
                    row.cluster,
                    row.model,
                    row.dataset,
                    str(row.nodes),
                    row.description,
                ),
            )
        )
    console.print(table)


def show_document(resolved: ResolvedJob) -> dict[str, Any]:
    """The document job/1: the job, and the origin of every value."""
    return resolved.to_json()


def show_toml(resolved: ResolvedJob) -> str:
    """The resolved job as TOML, each value with its origin as a comment. A value that is not set
    is a comment only."""
    lines = list(_lines(resolved.job.model_dump(mode="json"), (), resolved.origins))
    width = min(48, max((len(text) for text, place in lines if place), default=0))
    return (
        "\n".join(f"{text:<{width}}  # {place}" if place else text for text, place in lines) + "\n"
    )


def _lines(
    table: dict[str, Any], path: tuple[str, ...], origins: dict[str, SourcedValue]
) -> Iterator[tuple[str, str]]:
    """The lines of a table, values before the tables in it, each with the place it was written
    at."""
    if path:
        yield "", ""
        yield f"[{'.'.join(path)}]", ""
    inner = {key: value for key, value in table.items() if isinstance(value, dict)}
    for key in (key for key in table if key not in inner):
        value = table[key]
        place = str(origins[".".join((*path, key))].place)
        yield (f"# {key} is not set" if value is None else f"{_key(key)} = {_value(value)}"), place
    for key, value in inner.items():
        yield from _lines(value, (*path, key), origins)


def _key(key: str) -> str:
    """A key as TOML: in quotes where it is not bare, such as an option of another engine."""
    if re.fullmatch(r"[A-Za-z0-9_-]+", key):
        return key
    return _value(key)


def _value(value: Any) -> str:
    """A value of a job as TOML: JSON's spelling but for U+007F, which TOML wants escaped."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def explain(resolved: ResolvedJob, key: str) -> dict[str, Any]:
    """The document explain/1: a value, where it was written and all that it overrode, newest first.

    Args:
        resolved: the job. key: a resolved path, "training.lr"; for "cluster", "model" and the
        like: which table was named.

    Raises ConfigError with the nearest key where there is none of that path.
    """
    origins = resolved.origins
    if key in origins:
        path = key
    else:
        path = f"{key}.name"
    if path in origins:
        return document("explain/1", job=resolved.job.name, key=key, **origins[path].to_json())
    below = [known for known in origins if known.startswith(f"{key}.")]
    if below:
        raise ConfigError(
            f"'{key}' is a table of job {resolved.job.name}", hint=f"its keys: {', '.join(below)}"
        )
    # a key is often typed without its table
    last = [known for known in origins if known.rpartition(".")[2] == key]
    tables = sorted({known.partition(".")[0] for known in origins})
    if last:
        hint = f"did you mean '{last[0]}'?"
    elif closest_name(key, origins):
        hint = suggest(key, origins)
    else:
        hint = f"keys begin with: {', '.join(tables)}"
    raise ConfigError(f"job {resolved.job.name} has no key '{key}'", hint=hint)


def explain_text(resolved: ResolvedJob, key: str) -> str:
    """`explain` for people: one line a layer."""
    answer = explain(resolved, key)
    layers = [answer, *answer["overrode"]]
    values = [
        f"{key} = {_value(layer['value'])}" if layer["value"] is not None else f"{key} is not set"
        for layer in layers
    ]
    width = max(map(len, values))
    marks = ["", *["  overridden"] * (len(layers) - 1)]
    return "\n".join(
        f"{value:<{width}}  {layer['place']}{mark}"
        for value, layer, mark in zip(values, layers, marks, strict=True)
    )
