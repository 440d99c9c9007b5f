"""Putting one table together: its layers, its references replaced by the tables they name, its
paths made absolute."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from trainkit.base.errors import Problem, SourceLocation
from trainkit.base.lazy_dataclasses import dataclass, replace
from trainkit.jobs.absolute_paths import absolute_paths
from trainkit.jobs.containers import RUNTIME_TRAITS, Container
from trainkit.jobs.layers import ProblemList, compose, interpolate, overlay
from trainkit.jobs.messages import NAME_RULE, describe_value, dotted_key, schema_problems, suggest
from trainkit.jobs.provenance import BUILT_IN, SET, SourcedTable, SourcedValue
from trainkit.jobs.references import (
    ARRAYS_OF_TABLES,
    BLENDS,
    BUILT_IN_TABLES,
    REFERENCES,
    TABLES_OF_REFERENCES,
)
from trainkit.jobs.schema import (
    NAME,
    TABLES,
    Defaults,
    NotifySettings,
    Table,
)
from trainkit.jobs.table import AS_WRITTEN
from trainkit.jobs.toml_positions import KeyPath

SINGLE = ("defaults", "notify")  # tables of which the file has one

T = TypeVar("T", bound=Table)


def _built_in(path: tuple[str, ...], values: Mapping[str, Any]) -> SourcedTable:
    """A table that comes with trainkit."""
    entries: dict[str, SourcedTable | SourcedValue] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            entries[key] = _built_in((*path, key), value)
        else:
            entries[key] = SourcedValue(value, BUILT_IN, (*path, key))
    return SourcedTable(BUILT_IN, path, entries)


def _with_image(job: SourcedTable) -> SourcedTable:
    """`job` with its container's image named, where `build-container` makes one that jobs.toml
    does not name: only here the cluster's root is known."""
    container = job.entries.get("container")
    cluster = job.entries.get("cluster")
    if not isinstance(container, SourcedTable) or not isinstance(cluster, SourcedTable):
        return job
    name = container.value("name")
    tag = container.value("tag")
    root = cluster.value("root")
    made = "dockerfile" in container.entries or "source" in container.entries
    if "image" in container.entries or not made or not isinstance(root, str):
        return job
    runtime = container.value("runtime") or Container.model_fields["runtime"].default
    traits = RUNTIME_TRAITS.get(str(runtime))
    if traits is not None and traits.files:
        image = os.path.join(root, "images", f"{name}{traits.files[0]}")
    elif isinstance(tag, str):
        image = tag
    else:
        image = f"trainkit-{name}"
    filled = SourcedValue(image, BUILT_IN, (*container.path, "image"))
    return job.with_entry("container", container.with_entry("image", filled))


@dataclass(frozen=True)
class TableBuilder:
    """The document and what its values may refer to.

    Args:
        root: the folder of jobs.toml.
        document: jobs.toml and jobs.local.toml.
        environ: where ${host:VAR} is looked up.
    """

    root: Path
    document: SourcedTable
    environ: Mapping[str, str]

    def tables(self, kind: str) -> dict[str, SourcedTable]:
        """The tables of a kind, as written."""
        group = self.document.entries.get(kind)
        return dict(group.sections()) if isinstance(group, SourcedTable) else {}

    def build(
        self,
        kind: str,
        name: str,
        sets: Sequence[tuple[tuple[str, ...], SourcedValue]],
        findings: ProblemList,
        at: KeyPath = (),
    ) -> SourcedTable:
        """A table as the schema's model of it wants it. What is wrong is added to `findings`;
        the result may then be incomplete.

        Args:
            kind: "clusters", "jobs", ...
            name: an existing table of that kind.
            sets: overrides, each with its path below this table.
            findings: where problems go.
            at: where the table will be in the job.
        """
        tables = self._referable(kind)
        references = REFERENCES.get(kind, {})
        groups = TABLES_OF_REFERENCES.get(kind, {})
        if not re.fullmatch(NAME, name):
            findings.add(f"'{name}' cannot name a table of [{kind}]", tables[name].place, NAME_RULE)
            findings.reported.add((*at, "name"))
        section = compose(tables, name, findings, at)
        for path, origin in sets:
            if len(path) == 1 or (
                path[0] not in references and (path[0] not in groups or len(path) == 2)
            ):
                section = overlay(section, path, origin)
        section = self._filled_in(kind, section)
        if "name" in section.entries:
            findings.add(
                f"'{dotted_key(section.entries['name'])}' cannot be set: a table is named by its"
                " header",
                section.entries["name"].place,
                "remove it",
            )
        section = interpolate(section, self.environ, findings, at).with_entry(
            "name", SourcedValue(name, section.place, (*section.path, "name"))
        )
        section = absolute_paths(section, kind, self.root)
        image = section.entries.get("container")  # "none" takes away what a base refers to
        if kind == "jobs" and isinstance(image, SourcedValue) and image.value == "none":
            section = section.without("container")
        for refer, names, parts in ((self._refer, references, 1), (self._refer_all, groups, 2)):
            for key, other in names.items():
                below = [
                    (path[1:], origin)
                    for path, origin in sets
                    if path[0] == key and len(path) > parts
                ]
                section = refer(section, key, other, below, findings, (*at, key))
        for key in BLENDS if kind == "datasets" else ():
            section = self._refer_blend(section, key, findings, (*at, key))
        if kind == "datasets":
            self._find_compared(section, findings)
        if kind == "jobs":
            section = _with_image(self._refer_arrays(section, kind, findings, at))
        return section

    def _refer_arrays(
        self, section: SourcedTable, kind: str, findings: ProblemList, at: KeyPath
    ) -> SourcedTable:
        """`section` with the names in its arrays of tables replaced by the tables they name."""
        for key, references in ARRAYS_OF_TABLES[kind].items():
            section = self._refer_array(section, key, references, findings, (*at, key))
        return section

    def _refer_array(
        self,
        section: SourcedTable,
        key: str,
        references: Mapping[str, str],
        findings: ProblemList,
        at: KeyPath,
    ) -> SourcedTable:
        array = section.entries.get(key)
        if not isinstance(array, SourcedTable) or not array.is_array:
            return section  # not there, or for the schema to refuse
        known = [str(number) for number in range(len(array.entries))]
        for number, table in array.sections():
            if number not in known:
                findings.add(
                    f"{dotted_key(table)}: {dotted_key(array)} has no such entry",
                    table.place,
                    f"its entries are counted from 0: {', '.join(known[:-1])}",
                )
                findings.reported.add(at)
                return section
            for name, kind in references.items():
                place = (*at, int(number), name)
                table = self._refer_names(table, name, kind, findings, place)
            array = array.with_entry(number, table)
        return section.with_entry(key, array)

    def _refer_names(
        self, section: SourcedTable, key: str, kind: str, findings: ProblemList, at: KeyPath
    ) -> SourcedTable:
        """`section` with the name under `key`, or each name of a list there, replaced by the table
        it names."""
        node = section.entries.get(key)
        if not isinstance(node, SourcedValue) or not isinstance(node.value, list):
            return self._refer(section, key, kind, [], findings, at)
        named = SourcedTable(node.place, node.path, is_array=True)
        for number, name in enumerate(node.value):
            one = replace(node, value=name, path=(*node.path, str(number)))
            named = self._refer(
                named.with_entry(str(number), one), str(number), kind, [], findings, (*at, number)
            )
        return section.with_entry(key, named) if node.value else section

    def _refer_blend(
        self, section: SourcedTable, key: str, findings: ProblemList, at: KeyPath
    ) -> SourcedTable:
        """`section` with { NAME = weight } or [NAME] under `key` as the tables of a blend: {
        NAME = { weight, dataset } }. A blend takes its parts' tokenizer where it names none."""
        node = section.entries.get(key)
        if (
            isinstance(node, SourcedValue)
            and isinstance(node.value, list)
            and all(isinstance(name, str) for name in node.value)
        ):
            entries: dict[str, SourcedTable | SourcedValue] = {
                name: replace(node, value=None) for name in node.value
            }
            if len(entries) < len(node.value):
                findings.add(
                    f"{dotted_key(node)} names a dataset twice",
                    node.place,
                    "name it once, with its whole weight",
                )
        elif isinstance(node, SourcedTable):
            entries = node.entries
        else:
            return section  # not there, or for the schema to refuse
        if len(at) > 3 and at[-4] in BLENDS:
            findings.reported.add(at)  # by the blend that it is a part of, which names it
            findings.partial.add(at[:-1])
            return section
        blend = SourcedTable(node.place, node.path)
        for name, weight in entries.items():
            place = weight.place
            part = SourcedTable(
                place,
                (*node.path, name),
                {"dataset": SourcedValue(name, place, (*node.path, name))},
            )
            if not isinstance(weight, SourcedValue) or weight.value is not None:
                part = part.with_entry("weight", weight)
            part = self._refer(part, "dataset", "datasets", [], findings, (*at, name, "dataset"))
            inner = part.entries.get("dataset")
            if isinstance(inner, SourcedTable) and not inner.entries.keys().isdisjoint(BLENDS):
                findings.add(
                    f"{dotted_key(part)}: a blend cannot be a part of a blend",
                    place,
                    "name the datasets themselves",
                )
            blend = blend.with_entry(name, part)
        section = section.with_entry(key, blend)
        first = next((part.entries["dataset"] for _, part in blend.sections()), None)
        if (
            "tokenizer" not in section.entries
            and isinstance(first, SourcedTable)
            and "tokenizer" in first.entries
        ):
            section = section.with_entry("tokenizer", first.entries["tokenizer"])
        return section

    def _find_compared(self, section: SourcedTable, findings: ProblemList) -> None:
        """Whether the datasets that curation compares this one with are there."""
        curate = section.entries.get("curate")
        node = curate.entries.get("steps") if isinstance(curate, SourcedTable) else None
        if not isinstance(node, SourcedValue) or not isinstance(node.value, list):
            return
        known = self.tables("datasets")
        named = [step.get("against") for step in node.value if isinstance(step, dict)]
        for name in itertools.chain(*(names for names in named if isinstance(names, list))):
            if isinstance(name, str) and name not in known:
                findings.add(
                    f"{dotted_key(node)}: against '{name}' names no [datasets.X] table",
                    node.place,
                    suggest(name, known),
                )

    def _refer_all(
        self,
        section: SourcedTable,
        key: str,
        kind: str,
        sets: list[tuple[tuple[str, ...], SourcedValue]],
        findings: ProblemList,
        at: KeyPath,
    ) -> SourcedTable:
        """`section` with every name in the table under `key` replaced by the table it names."""
        group = section.entries.get(key)
        known = set(group.entries) if isinstance(group, SourcedTable) else set()
        for path, origin in sets:
            if path[0] not in known:
                table = ".".join(map(str, (*at, path[0])))
                findings.add(
                    f"{dotted_key(origin)} has no table to go to: {table} is not given",
                    SET,
                    f"add --set {table}=NAME",
                )
        if not isinstance(group, SourcedTable):
            return section
        for name in list(group.entries):
            below = [(path[1:], origin) for path, origin in sets if path[0] == name]
            group = self._refer(group, name, kind, below, findings, (*at, name))
        return section.with_entry(key, group)

    def _referable(self, kind: str) -> dict[str, SourcedTable]:
        tables = self.tables(kind)
        given = {
            name: _built_in((kind, name), values)
            for name, values in BUILT_IN_TABLES.get(kind, {}).items()
        }
        # a row of the same name lies over the one that comes with trainkit; a dataset called mock
        # is one's own
        own = {
            name: table.over(given[name]) if kind == "devices" and name in given else table
            for name, table in tables.items()
        }
        return {**given, **own}

    def _filled_in(self, kind: str, section: SourcedTable) -> SourcedTable:
        """`section` over the defaults that only this checkout knows."""
        if kind == "clusters":
            defaults = {"root": str(self.root), "device": "cpu"}
            return section.over(_built_in(section.path, defaults))
        if kind == "containers" and "dockerfile" in section.entries:
            return section.over(_built_in(section.path, {"context": str(self.root)}))
        notify = self.document.entries.get("notify")
        if kind == "jobs" and isinstance(notify, SourcedTable):
            own = section.entries.get("notify")
            if own is None:
                section = section.with_entry("notify", notify)
            elif isinstance(own, SourcedTable):  # else it is for the schema to refuse
                section = section.with_entry("notify", own.over(notify))
        engine = section.value("engine")
        if kind == "jobs" and isinstance(engine, str) and engine in self.tables("engines"):
            return section.over(_built_in(section.path, {"engine_source": engine}))
        return section

    def _refer(
        self,
        section: SourcedTable,
        key: str,
        kind: str,
        sets: list[tuple[tuple[str, ...], SourcedValue]],
        findings: ProblemList,
        at: KeyPath,
    ) -> SourcedTable:
        """`section` with the name under `key` replaced by the table it names."""
        node = section.entries.get(key)
        if node is None:
            for _, origin in sets:
                findings.add(
                    f"{dotted_key(origin)} has no table to go to: {'.'.join(map(str, at))} is not"
                    " given",
                    SET,
                    f"add --set {'.'.join(map(str, at))}=NAME",
                )
            return section
        name = node.value if isinstance(node, SourcedValue) else {}
        known = self._referable(kind)
        if at in findings.reported:
            return section
        if not isinstance(node, SourcedValue) or not isinstance(name, str):
            findings.add(
                f"{dotted_key(node)}: expected the name of a [{kind}.X] table, got"
                f" {describe_value(name)}",
                node.place,
                suggest("", known),
            )
        elif name not in known:
            findings.add(
                f"{dotted_key(node)} = '{name}' names no [{kind}.X] table",
                node.place,
                suggest(name, known),
            )
        else:
            table = self.build(kind, name, sets, findings, at)
            return section.with_entry(key, table.with_entry("name", node))
        findings.reported.add(at)
        return section

    def outline_problems(self) -> list[Problem]:
        """What is wrong at the top level: unknown tables, and [defaults]."""
        findings = ProblemList()
        for key, node in self.document.entries.items():
            if key not in TABLES and key not in SINGLE:
                if isinstance(node, SourcedTable):
                    what = f"table [{key}]"
                else:
                    what = f"key '{key}' at the top level"
                findings.add(f"unknown {what}", node.place, suggest(key, [*TABLES, *SINGLE]))
            elif not isinstance(node, SourcedTable):
                findings.add(
                    f"{key}: expected tables such as [{key}.NAME], got"
                    f" {describe_value(node.value)}",
                    node.place,
                )
        if taken := self.tables("containers").get("none"):
            findings.add(
                "[containers.none]: container = 'none' is what a job says that runs without one",
                taken.place,
                "give the table another name",
            )
        notify = self.document.entries.get("notify")
        if isinstance(notify, SourcedTable):
            validate(NotifySettings, notify, findings)
        defaults = self.document.entries.get("defaults")
        if isinstance(defaults, SourcedTable):
            validate(Defaults, defaults, findings)
            job = defaults.entries.get("job")
            if (
                isinstance(job, SourcedValue)
                and isinstance(job.value, str)
                and job.value not in self.tables("jobs")
            ):
                findings.add(
                    f"defaults.job = '{job.value}' names no [jobs.X] table",
                    job.place,
                    suggest(job.value, self.tables("jobs")),
                )
        return findings.problems

    def stray_problems(self) -> list[Problem]:
        """Values where a table of a kind should be: jobs.demo = 3."""
        groups = [group for kind, group in self.document.sections() if kind in TABLES]
        strays = [
            node
            for group in groups
            for node in group.entries.values()
            if isinstance(node, SourcedValue)
        ]
        return [
            Problem(
                f"{dotted_key(node)}: expected a table, got {describe_value(node.value)}",
                node.place,
            )
            for node in strays
        ]

    def extended(self, kind: str) -> set[str]:
        """The tables of a kind that others extend: they need not be complete."""
        names: set[str] = set()
        for section in self.tables(kind).values():
            value = section.value("extends")
            names |= {
                name
                for name in (value if isinstance(value, list) else [value])
                if isinstance(name, str)
            }
        return names


def validate(model: type[T], section: SourcedTable, findings: ProblemList) -> T | None:
    """The schema's model of a table, or None with what is wrong added to `findings`."""
    try:
        return model.model_validate(section.plain(), context=AS_WRITTEN)
    except ValidationError as error:
        for loc, kind, problem in schema_problems(error, model, section):
            prefixes = {loc[:depth] for depth in range(len(loc) + 1)}
            reported = prefixes & findings.reported or (
                kind in ("missing", "needs") and prefixes & findings.partial
            )
            if not reported:
                findings.problems.append(problem)
        return None


def in_order(problems: list[Problem]) -> list[Problem]:
    """Each problem once, by file and line."""
    return sorted(dict.fromkeys(problems), key=lambda problem: problem.place or SourceLocation(""))
