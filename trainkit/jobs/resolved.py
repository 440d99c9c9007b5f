"""The resolved job: complete, frozen, each value with its origin; and as job.json, the file that
travels to the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trainkit.base.documents import document, read_document
from trainkit.base.errors import ConfigError, Problem, SourceLocation
from trainkit.base.files import write_json
from trainkit.base.lazy_dataclasses import dataclass, replace
from trainkit.jobs.provenance import BUILT_IN, SourcedTable, SourcedValue
from trainkit.jobs.schema import Job, Table

SCHEMA = "job/1"


@dataclass(frozen=True)
class ResolvedJob:
    """A job and where its values come from.

    Args:
        job: the job.
        origins: by resolved path, "training.lr"; one for every value, in the schema's order.
    """

    job: Job
    origins: dict[str, SourcedValue]

    def to_json(self) -> dict[str, object]:
        """The document job/1."""
        origins = {path: origin.to_json() for path, origin in self.origins.items()}
        return document(SCHEMA, job=self.job.model_dump(mode="json"), origins=origins)


def provenance_of(
    table: Table, section: SourcedTable, above: str = ""
) -> Iterator[tuple[str, SourcedValue]]:
    """The origin of every value of `table`, which was made from `section`; built-in defaults
    included."""
    for key, field in type(table).model_fields.items():
        value = getattr(table, key)
        node = section.entries.get(key)
        path = above + key
        inner = node if isinstance(node, SourcedTable) else SourcedTable(section.place)
        if isinstance(value, Table):
            yield from provenance_of(value, inner, f"{path}.")
        elif (tables := _tables_in(value)) and isinstance(node, SourcedTable):
            for name, item in tables.items():
                below = node.entries[name]
                assert isinstance(below, SourcedTable)
                yield from provenance_of(item, below, f"{path}.{name}.")
        elif isinstance(value, dict):
            yield from _written(inner, path)
        else:
            if field.is_required() or key == "name":
                default = None
            else:
                default = SourcedValue(field.get_default(call_default_factory=True), BUILT_IN)
            if tables:  # an array that was read as one value, such as curate.steps
                value = [item.model_dump(mode="json") for item in tables.values()]
            yield path, _origin(value, node if isinstance(node, SourcedValue) else None, default)


def _tables_in(value: object) -> dict[str, Table]:
    """The tables of a key that holds tables by name, or an array of them."""
    if isinstance(value, tuple):
        value = {str(number): item for number, item in enumerate(value)}
    items = value.items() if isinstance(value, dict) else ()
    return {name: item for name, item in items if isinstance(item, Table)}


def _written(section: SourcedTable, path: str) -> Iterator[tuple[str, SourcedValue]]:
    """The origin of every value in a table without a schema, such as engine_args."""
    for name, node in section.entries.items():
        if isinstance(node, SourcedTable):
            yield from _written(node, f"{path}.{name}")
        else:
            yield f"{path}.{name}", node


def _origin(value: Any, written: SourcedValue | None, default: SourcedValue | None) -> SourcedValue:
    """A value's origin: where it was written, over the built-in default."""
    if written is None:
        assert default, "the schema lets no required value be absent"
        return default
    origin = replace(written, value=value)
    known = any(each.place == BUILT_IN for each in (written, *written.overrode))
    return origin if known or default is None else origin.over(default)


def write_job(path: Path, resolved: ResolvedJob) -> None:
    """Write job.json, whole or not at all."""
    write_json(path, resolved.to_json())


def read_job(path: Path) -> Job:
    """Read job.json; needs neither jobs.toml nor the environment. Raises ConfigError where it is
    not a job of this version."""
    value = read_document(path, SCHEMA)
    try:
        return Job.model_validate(value.get("job"))
    except ValidationError as error:
        wrong = [
            (".".join(map(str, found["loc"])) or "job", found["msg"])
            for found in error.errors(include_url=False)
        ]
    hint = "it was written by another version of trainkit, or by hand"
    raise ConfigError(
        [Problem(f"{key}: {message}", SourceLocation(str(path)), hint) for key, message in wrong]
    )
