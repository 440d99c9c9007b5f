"""The layers a table is made of: jobs.toml, jobs.local.toml over it, `extends` below it, --set
on top, ${...} last."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli

from trainkit.base.errors import ConfigError, Problem, SourceLocation, raise_problems
from trainkit.base.lazy_dataclasses import dataclass, field, replace
from trainkit.jobs.messages import describe_value, suggest
from trainkit.jobs.provenance import SET, SourcedTable, SourcedValue
from trainkit.jobs.references import ARRAYS_OF_TABLES
from trainkit.jobs.toml_positions import KeyPath, TomlPosition, parse

JOBS_FILE = "jobs.toml"
LOCAL_FILE = "jobs.local.toml"


@dataclass
class ProblemList:
    """Problems found while a table is put together, and what need not be complained about again.

    Args:
        problems: what was found.
        reported: places in the table (key paths) below which the schema's complaints only repeat a
            problem.
        partial: places below which missing keys are not complained about.
    """

    problems: list[Problem] = field(default_factory=list)
    reported: set[KeyPath] = field(default_factory=set)
    partial: set[KeyPath] = field(default_factory=set)

    def add(self, message: str, place: SourceLocation, hint: str = "") -> None:
        self.problems.append(Problem(message, place, hint))


def read(root: Path) -> SourcedTable:
    """jobs.toml of `root` with the files it includes, and jobs.local.toml, where there is one,
    laid over them. Raises ConfigError."""
    document = _included(root, _read_file(root / JOBS_FILE))
    if (root / LOCAL_FILE).exists():
        document = _read_file(root / LOCAL_FILE).over(document, keep_place=True)
    return document


def _included(root: Path, document: SourcedTable) -> SourcedTable:
    """`document` with the tables of the files that its `include` matches; each table stands in
    one file only."""
    include = document.entries.get("include")
    if include is None:
        return document
    given = include.value if isinstance(include, SourcedValue) else None
    patterns = [item for item in given if isinstance(item, str)] if isinstance(given, list) else []
    if not isinstance(given, list) or len(patterns) != len(given):
        raise ConfigError(
            [
                Problem(
                    "include: expected an array of file patterns",
                    include.place,
                    'for example include = ["jobs/*.toml"]',
                )
            ]
        )
    document = document.without("include")
    problems = []
    for pattern in patterns:
        paths = sorted(path for path in root.glob(pattern) if path.is_file())
        if not paths:
            problems.append(Problem(f"include: no file matches '{pattern}'", include.place))
        for path in paths:
            part = _read_file(path, str(path.relative_to(root)))
            problems += _twice(document, part)
            # no table is in both: only the order of the listing hangs on it
            document = part.over(document, keep_place=True)
    raise_problems(problems)
    return document


def _twice(document: SourcedTable, part: SourcedTable) -> list[Problem]:
    """Tables of `part` that `document` has already."""
    known = {
        (kind, name): node.place
        for kind, group in document.sections()
        for name, node in group.entries.items()
    }
    return [
        Problem(
            f"[{kind}.{name}] is at {known[kind, name]} already",
            node.place,
            "define each table in one file only; to build on another table, use extends",
        )
        for kind, group in part.sections()
        for name, node in group.entries.items()
        if (kind, name) in known
    ]


def _read_file(path: Path, shown: str = "") -> SourcedTable:
    shown = shown or path.name
    try:
        data = path.read_bytes()
        # some editors begin a file with a byte order mark
        values, spots = parse(data.decode("utf-8-sig"), shown)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            [Problem("not UTF-8, as TOML must be", SourceLocation(shown, line))]
        ) from None
    places = {tuple(map(str, path)): spot for path, spot in spots.items()}
    document = _section(values, (), places, shown)
    raise_problems(_too_large(document))
    return document


def _too_large(section: SourcedTable) -> Iterator[Problem]:
    """Integers beyond TOML's 64 bits, which tomli reads all the same."""
    for node in section.entries.values():
        if isinstance(node, SourcedTable):
            yield from _too_large(node)
        elif _has_large(node.value):
            yield Problem(
                f"{'.'.join(node.path)}: an integer of TOML has 64 bits, from -2^63 to 2^63 - 1",
                node.place,
            )


def _has_large(value: Any) -> bool:
    if isinstance(value, list):
        return any(_has_large(item) for item in value)
    if isinstance(value, dict):
        return any(_has_large(item) for item in value.values())
    return isinstance(value, int) and not -(2**63) <= value < 2**63


def _section(
    values: Mapping[str, Any],
    path: tuple[str, ...],
    spots: Mapping[tuple[str, ...], TomlPosition],
    file: str,
) -> SourcedTable:
    """A parsed table with places. A table without a line of its own (the document itself) stands
    at line 1."""
    entries: dict[str, SourcedTable | SourcedValue] = {}
    for key, value in values.items():
        inner = (*path, key)
        if isinstance(value, dict):
            entries[key] = _section(value, inner, spots, file)
        elif _holds_tables(inner, value):
            array = _section(_by_number(value), inner, spots, file)
            entries[key] = replace(array, is_array=True)
        else:
            entries[key] = SourcedValue(value, SourceLocation(file, spots[inner].line), inner)
    return SourcedTable(SourceLocation(file, spots[path].line if path else 1), path, entries)


def _holds_tables(path: Sequence[str], value: Any) -> bool:
    """Whether the value of a key is an array of tables with a schema.

    Args:
        path: kind and name of its table, and the key.
        value: it.
    """
    known = len(path) == 3 and path[2] in ARRAYS_OF_TABLES.get(path[0], {})
    return (
        known
        and bool(value)
        and isinstance(value, list)
        and all(isinstance(each, dict) for each in value)
    )


def _by_number(values: Sequence[object]) -> Mapping[str, object]:
    return {str(number): value for number, value in enumerate(values)}


def compose(
    tables: Mapping[str, SourcedTable], name: str, findings: ProblemList, at: KeyPath
) -> SourcedTable:
    """A table with what it extends below it.

    Each table of the chain is laid down once, after all that it extends; of several bases a
    later one lies over an earlier.

    Args:
        tables: the tables of that kind.
        name: which one.
        findings: where a missing base or a circle is reported.
        at: where the table will be in the job.
    """
    order = _bases_first(tables, name, findings, at)
    whole = tables[order[0]].without("extends")
    for higher in order[1:]:
        whole = tables[higher].without("extends").over(whole)
    return whole


def _bases_first(
    tables: Mapping[str, SourcedTable], name: str, findings: ProblemList, at: KeyPath
) -> list[str]:
    order: list[str] = []

    def fail(message: str, place: SourceLocation, hint: str = "") -> None:
        findings.add(message, place, hint)
        findings.partial.add(at)

    def visit(current: str, chain: tuple[str, ...]) -> None:
        extends = tables[current].entries.get("extends")
        header = f"[{'.'.join(tables[current].path)}]"
        if isinstance(extends, SourcedTable):
            fail(
                f"{header} extends: expected a table's name or an array of names, got a table",
                extends.place,
            )
            extends = None
        for base in _names(extends):
            assert extends
            if not isinstance(base, str):
                fail(
                    f"{header} extends: expected a table's name or an array of names, got"
                    f" {describe_value(base)}",
                    extends.place,
                )
            elif base not in tables:
                fail(
                    f"{header} extends '{base}', which names no [{tables[current].path[0]}.X]"
                    " table",
                    extends.place,
                    suggest(base, tables),
                )
            elif base in (*chain, current):
                circle = (*chain, current)[(*chain, current).index(base) :]
                first = circle.index(min(circle))  # the same words wherever one enters the circle
                words = " -> ".join([*circle[first:], *circle[: first + 1]])
                fail(
                    f"extends goes round in a circle: {words}",
                    min(tables[t].entries["extends"].place for t in circle),
                )
            elif base not in order:
                visit(base, (*chain, current))
        order.append(current)

    visit(name, ())
    return order


def _names(extends: SourcedValue | None) -> list[Any]:
    if extends is None:
        return []
    if isinstance(extends.value, list):
        return extends.value
    return [extends.value]


def parse_overrides(words: Sequence[str]) -> list[SourcedValue]:
    """`--set a.b=value` as origins: the value as TOML reads it, else as a string. Raises
    ConfigError for all malformed ones."""
    origins = []
    problems = []
    for word in words:
        key, equals, text = _split_override(word)
        path = tuple(_key_parts(key))
        if not equals or not all(path):
            problems.append(
                Problem(
                    f"expected KEY=VALUE, got '{word}'", SET, "for example --set training.lr=1e-4"
                )
            )
            continue
        value = _parse_value(text)
        if _has_large(value):
            problems.append(
                Problem(
                    f"{key.strip()}: an integer of TOML has 64 bits, from -2^63 to 2^63 - 1", SET
                )
            )
            continue
        origins.append(SourcedValue(value, SET, path))
    raise_problems(problems)
    return origins


# a part of a dotted key, bare or in quotation marks as TOML has them
_PART = re.compile(r"""\s*(?:"([^"]*)"|'([^']*)'|([^."']*?))\s*(?:\.|$)""")
_QUOTED_KEY = re.compile(r"""((?:[^="']|"[^"]*"|'[^']*')*)(=?)(.*)""", re.DOTALL)


def _split_override(word: str) -> tuple[str, str, str]:
    """KEY, "=" and VALUE; "=" and VALUE are empty where there is none."""
    found = _QUOTED_KEY.fullmatch(word)
    if found is None or (found[3] and not found[2]):
        return word.partition("=")
    return found[1], found[2], found[3]


def _key_parts(key: str) -> list[str]:
    """The parts of `a."b.c".d`; one of them is empty where it is not a key."""
    parts: list[str] = []
    at = 0
    while at < len(key) or not parts:
        found = _PART.match(key, at)
        if found is None:
            return [""]
        parts.append((found[1] or found[2] or found[3] or "").strip())
        at = found.end()
    return ["", *parts] if key.endswith(".") else parts


def _parse_value(text: str) -> Any:
    try:
        values = tomli.loads(f"value = {text}")
    except (tomli.TOMLDecodeError, RecursionError):
        return text
    return values["value"] if len(values) == 1 else text


def overlay(section: SourcedTable, path: tuple[str, ...], origin: SourcedValue) -> SourcedTable:
    """`section` with `origin` laid over it at `path`."""
    node: SourcedTable | SourcedValue
    if isinstance(origin.value, dict):
        node = _as_section(origin, origin.path)
    elif _holds_tables(("jobs", "", *origin.path), origin.value):
        tables = replace(origin, value=_by_number(origin.value))
        node = replace(_as_section(tables, origin.path), is_array=True)
    else:
        node = origin
    for depth in range(len(path) - 1, -1, -1):
        above = origin.path[: len(origin.path) - len(path) + depth]
        node = SourcedTable(origin.place, above, {path[depth]: node})
    assert isinstance(node, SourcedTable)
    return node.over(section, keep_place=True)


def _as_section(origin: SourcedValue, path: tuple[str, ...]) -> SourcedTable:
    entries: dict[str, SourcedTable | SourcedValue] = {}
    for key, value in origin.value.items():
        inner = SourcedValue(value, origin.place, (*path, key))
        if isinstance(value, dict):
            entries[key] = _as_section(inner, inner.path)
        else:
            entries[key] = inner
    return SourcedTable(origin.place, path, entries)


_VARIABLE = re.compile(r"\$\{([^}]*)\}")
_HOST = re.compile(r"host:([A-Za-z_][A-Za-z0-9_]*)")
_NODE = re.compile(r"node:[A-Za-z_][A-Za-z0-9_]*")


def interpolate(
    section: SourcedTable, environ: Mapping[str, str], findings: ProblemList, at: KeyPath
) -> SourcedTable:
    """`section` with every ${host:VAR} replaced from `environ`; ${node:VAR} stays, and only
    inside `env`."""
    entries: dict[str, SourcedTable | SourcedValue] = {}
    for key, node in section.entries.items():
        if isinstance(node, SourcedTable):
            entries[key] = interpolate(node, environ, findings, (*at, key))
            continue
        known = len(findings.problems)
        entries[key] = replace(
            node, value=_filled(node.value, node, environ, findings, in_env=at[-1:] == ("env",))
        )
        if len(findings.problems) > known:
            findings.reported.add((*at, key))
    return replace(section, entries=entries)


def _filled(
    value: Any,
    origin: SourcedValue,
    environ: Mapping[str, str],
    findings: ProblemList,
    in_env: bool,
) -> Any:
    if isinstance(value, list):
        return [_filled(item, origin, environ, findings, in_env) for item in value]
    if not isinstance(value, str):
        return value
    key = ".".join(origin.path)

    def fill(match: re.Match[str]) -> str:
        host = _HOST.fullmatch(match[1])
        if host and host[1] in environ:
            return environ[host[1]]
        if host:
            findings.add(
                f"{key}: the environment has no variable {host[1]} for {match[0]}",
                origin.place,
                f"export {host[1]}=... first",
            )
        elif not _NODE.fullmatch(match[1]):
            findings.add(
                f"{key}: '{match[0]}' is neither ${{host:VAR}} (filled in here) nor ${{node:VAR}}"
                " (left for the node)",
                origin.place,
            )
        elif not in_env:
            findings.add(
                f"{key}: '{match[0]}' may stand in env only; here nothing replaces it",
                origin.place,
                "${host:VAR} is filled in where you type",
            )
        return match[0]

    return _VARIABLE.sub(fill, value)
