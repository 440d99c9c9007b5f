"""What a job says by its dotted keys, and that an engine has nothing like it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from trainkit.base.errors import Problem
from trainkit.jobs.schema import Job
from trainkit.jobs.table import Table


def value_and_default(job: Job, key: str) -> tuple[object, object]:
    """What a dotted key of the job says, and what it says by default."""
    *path, last = key.split(".")
    table: Table = job
    for name in path:
        table = getattr(table, name)
    default = type(table).model_fields[last].get_default(call_default_factory=True)
    return getattr(table, last), default


def said(value: object) -> str:
    """A value as jobs.toml has it."""
    if isinstance(value, str):
        return f"'{value}'"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return f"{{{', '.join(value)}}}"
    if isinstance(value, Table):
        return "{...}"
    return str(value)


def counterpart_problems(
    job: Job, engine: str, none: Mapping[str, str], some: Mapping[str, Sequence[str]]
) -> Iterator[Problem]:
    """Values of a job that an engine cannot be given.

    Args:
        job: the job.
        engine: as messages name it.
        none: keys that only have their default with it, and why.
        some: keys of which it knows some values, and these.
    """
    for key, why in none.items():
        value, usual = value_and_default(job, key)
        if value != usual:
            yield Problem(
                f"{key} = {said(value)} has no counterpart in {engine}: {why}",
                hint=f"leave {key} out, or train with --set engine=native",
            )
    for key, known in some.items():
        value, _ = value_and_default(job, key)
        if value not in known:
            yield Problem(
                f"{key} = {said(value)} has no counterpart in {engine}",
                hint=f"it knows {', '.join(known)}",
            )
