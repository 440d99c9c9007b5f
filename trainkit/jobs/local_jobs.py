"""Jobs that trainkit itself writes into jobs.local.toml: each extends one that a person wrote."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

from pydantic import JsonValue

from trainkit.base.errors import ConfigError
from trainkit.base.files import write_text
from trainkit.jobs.layers import LOCAL_FILE
from trainkit.jobs.load import Jobs
from trainkit.jobs.references import REFERENCES
from trainkit.jobs.schema import Job
from trainkit.jobs.table import NAME, Table


def refuse_name(jobs: Jobs, name: str, option: str) -> None:
    """Raise ConfigError for a name that no new job can have.

    Args:
        jobs: those of a jobs.toml.
        name: the name.
        option: of the command line, that gave it.
    """
    if not re.fullmatch(NAME, name):
        raise ConfigError(f"{option} '{name}' is not a name of a job: it has to match {NAME}")
    for kind in ("jobs", *REFERENCES["jobs"].values()):  # a model of its own has the job's name
        if name in jobs.names(kind):
            raise ConfigError(
                f"{option} '{name}': there is a {kind[:-1]} of that name", hint="give another name"
            )


def add_job(
    jobs: Jobs, name: str, base: str, values: Mapping[str, JsonValue], comment: str
) -> None:
    """Add a job to jobs.local.toml. Where a value is one of the model, say, that the job names,
    the job gets a model of its own, which extends that.

    Args:
        jobs: those of a jobs.toml.
        name: of the new job; see `refuse_name`.
        base: of the job that it extends.
        values: those that differ, by dotted key.
        comment: one line: where it comes from.
    """
    path = jobs.root / LOCAL_FILE
    before = path.read_text() if path.exists() else ""
    lines = ["", f"# {comment}", *job_lines(name, jobs.resolve(base).job, values)]
    write_text(path, before + "\n".join(lines[:-1]) + "\n")


def job_lines(name: str, base: Job, values: Mapping[str, JsonValue]) -> list[str]:
    """A job as `add_job` writes it: its lines, an empty one after each table. Arguments as there,
    but for the job that it extends, which is resolved."""
    return [line for table in _tables("jobs", name, base, values) for line in (*table, "")]


def _tables(
    kind: str, name: str, base: Table, values: Mapping[str, JsonValue]
) -> Iterator[list[str]]:
    """The lines of each table that is written.

    Args:
        kind: "jobs", "models", ...
        name: of the new table.
        base: the table that it extends.
        values: by dotted key below it.
    """
    references = REFERENCES.get(kind, {})
    lines = [f"[{kind}.{name}]", f"extends = {json.dumps(getattr(base, 'name', ''))}"]
    further: dict[str, dict[str, JsonValue]] = {}
    for key, value in values.items():
        first, _, rest = key.partition(".")
        if first in references and rest:
            further.setdefault(first, {})[rest] = value
        else:
            lines.append(f"{key} = {json.dumps(value)}")
    lines += [f"{key} = {json.dumps(name)}" for key in further]
    yield lines
    for key, below in further.items():
        yield from _tables(references[key], name, getattr(base, key), below)
