"""Why a job cannot run as it is asked for, and which changes would remove the reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from trainkit.base.errors import Problem
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.base.records import Record
from trainkit.jobs.schema import Job, Table

T = TypeVar("T", bound=Table)
Value = str | int | bool
# paths of the resolved job, "parallelism.zero_stage", and their new values
Change = Mapping[str, Value]


@dataclass(frozen=True)
class Objection(Record):
    """One reason why the job cannot run, or, among notes, something worth knowing before it does.

    Args:
        code: what kind of reason, for programs.
        key: the path of the resolved job that it is about.
        message: the value, the limit and the way out.
        changes: each alone would remove it without raising another.
    """

    code: str
    key: str
    message: str
    changes: tuple[Change, ...] = ()

    def problem(self, job: str) -> Problem:
        """The same among what else is wrong with a job of this name."""
        return Problem(f"{self.key}: {self.message}", hint=f"invoke plan {job} says more")


def with_change(job: Job, change: Change) -> Job:
    """`job` with the values of `change`. Raises pydantic's ValidationError, a ValueError, where
    the schema refuses them together."""
    tables: dict[str, dict[str, Value]] = {}
    for path, value in change.items():
        table, _, key = path.rpartition(".")
        tables.setdefault(table, {})[key] = value
    for table, values in tables.items():
        job = _with_values(job, table.split(".") if table else [], values)
    return job


def _with_values(table: T, path: Sequence[str], values: Mapping[str, Value]) -> T:
    new: Mapping[str, Any] = values
    if path:
        inner = getattr(table, path[0])
        plain = isinstance(inner, dict)  # engine_args, slurm
        new = {path[0]: {**inner, **values} if plain else _with_values(inner, path[1:], values)}
    return type(table).model_validate({**dict(table), **new})


def try_change(job: Job, change: Change) -> Job | None:
    """`with_change`, or None where the schema refuses it."""
    try:
        return with_change(job, change)
    except ValueError:
        return None


def describe_changes(changes: Sequence[Change], key: str) -> str:
    """The way out: "nearest: 12 or 18" where all change `key` alone, "nearest: nodes 30 with
    pipeline_model_parallel_size 30" else."""
    if not changes:
        return ""
    if all(list(change) == [key] for change in changes):
        return "nearest: " + " or ".join(str(change[key]) for change in changes)
    return "nearest: " + ", or ".join(
        " with ".join(f"{path.rpartition('.')[2]} {value}" for path, value in change.items())
        for change in changes
    )
