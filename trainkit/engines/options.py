"""Which options an engine has, by version, and whether a job's `engine_args` are among them.

A table is a file of option_tables/, made by extract_options.py from the engine's own tree:

    {"engine": .., "version": .., "commit": .., "not_seen": [..], "options": {NAME: {..}, ..}}
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from importlib import resources
from typing import Literal

from trainkit.base.errors import ConfigError, Problem
from trainkit.base.lazy_dataclasses import dataclass, replace
from trainkit.jobs.messages import closest_name, describe_value, suggest
from trainkit.jobs.schema import Job

_FOLDER = "option_tables"
Action = Literal["store", "store_true", "store_false", "switch"]
_EXPECTED = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "list": "an array",
    "dict": "a table",
}
_TYPES: Mapping[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "list": (list, tuple),
    "dict": (Mapping,),
}
# a value as TOML and JSON have them
Value = object


@dataclass(frozen=True)
class Option:
    """One option of an engine.

    Args:
        name: as the engine spells it, without the dashes before it.
        type: int, float, str, bool, dict, list, several of them joined by |, or any.
        action: store: a value follows; store_true and store_false: the name alone; switch: the
            name alone, or with `no-` before it.
        nargs: how many values, as argparse says it; None: one.
        choices: the only values, where the engine lists them.
        aliases: its other names.
        default: what the engine takes by itself, where its source says it.
        condition: what the engine asks before it has the option at all; "": nothing.
    """

    name: str
    type: str = "str"
    action: Action = "store"
    nargs: str | int | None = None
    choices: tuple[Value, ...] | None = None
    aliases: tuple[str, ...] = ()
    default: Value = None
    condition: str = ""

    def to_json(self) -> dict[str, object]:
        """As its line in a table."""
        found: dict[str, object] = {}
        if self.action == "store":
            found["type"] = self.type
        else:
            found["action"] = self.action
        for key in ("nargs", "choices", "aliases", "default", "condition"):
            value = getattr(self, key)
            if value is not None and value not in ("", ()):
                found[key] = value
        return found

    @classmethod
    def from_json(cls, name: str, found: Mapping[str, object]) -> Option:
        """The inverse of `to_json`."""
        given = {
            key: tuple(value) if isinstance(value, list) and key != "default" else value
            for key, value in found.items()
        }
        if "action" in given:
            given["type"] = "bool"
        return cls(name=name, **given)  # type: ignore[arg-type]

    def words(self, value: Value) -> tuple[str, ...]:
        """`value` on an argparse command line; nothing where a flag is false."""
        flag = f"--{self.name}"
        if self.action == "switch" and value is False:
            return (f"--no-{self.name}",)
        if self.action != "store":
            return (flag,) if value else ()
        if isinstance(value, Sequence) and not isinstance(value, str):
            return (flag, *(_word(each) for each in value))
        return (flag, _word(value))


def _word(value: Value) -> str:
    """A value as argparse reads it: `type=bool` takes every word for true but the empty one."""
    return "" if value is False else str(value)


@dataclass(frozen=True)
class OptionTable:
    """The options of one version of an engine.

    Args:
        engine: its name in jobs.toml.
        version: of the tree that was read.
        commit: of that tree, where it was known.
        options: by name.
        not_seen: what reading the source without running it did not tell.
        notice: how `version` is not what was asked for, in words; "": it is.
    """

    engine: str
    version: str
    commit: str
    options: Mapping[str, Option]
    not_seen: tuple[str, ...] = ()
    notice: str = ""

    @cached_property
    def _by_spelling(self) -> dict[str, Option]:
        return {
            _plain(name): option
            for option in self.options.values()
            for name in (option.name, *option.aliases)
        }

    def find(self, name: str) -> Option | None:
        """The option of that name, in either spelling: - and _ are the same."""
        return self._by_spelling.get(_plain(name))

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.find(name) is not None


def _plain(name: str) -> str:
    return name.removeprefix("--").replace("_", "-").lower()


def dump_table(table: OptionTable) -> str:
    """The text of a table's file: one option a line."""
    heads = [
        f" {json.dumps(key)}: {json.dumps(getattr(table, key))},"
        for key in ("engine", "version", "commit", "not_seen")
    ]
    options = [
        f"  {json.dumps(name)}: {json.dumps(option.to_json())}"
        for name, option in sorted(table.options.items())
    ]
    return "\n".join(["{", *heads, ' "options": {', ",\n".join(options), " }", "}", ""])


def parse_table(text: str) -> OptionTable:
    """The inverse of `dump_table`."""
    found = json.loads(text)
    options = {name: Option.from_json(name, each) for name, each in found["options"].items()}
    return OptionTable(
        found["engine"], found["version"], found["commit"], options, tuple(found["not_seen"])
    )


def release(version: str) -> tuple[int, ...]:
    """A version as something to sort by: "core-0.12.0rc0" is before "core-0.12.0", and "2021"
    before both."""
    numbers = re.findall(r"\d+", version.partition("rc")[0])
    candidate = re.search(r"rc(\d+)", version)
    parts = [int(number) for number in numbers][:3]
    if not version.startswith("core"):
        parts = [0, 0, 0] if version.isdigit() else parts
    parts += [0] * (3 - len(parts))
    return (*parts, 0, int(candidate[1])) if candidate else (*parts, 1, 0)


def tables_of(engine: str) -> dict[str, str]:
    """The names of an engine's table files by version, the oldest first."""
    folder = resources.files("trainkit.engines").joinpath(_FOLDER)
    beginning = f"{engine}-"
    found = {
        each.name.removeprefix(beginning).removesuffix(".json"): each.name
        for each in folder.iterdir()
        if each.name.startswith(beginning) and each.name.endswith(".json")
    }
    return dict(sorted(found.items(), key=lambda item: release(item[0])))


def newest_version(engine: str) -> str:
    """Of an engine's tables."""
    return list(tables_of(engine))[-1]


def load_table(engine: str, version: str) -> OptionTable:
    """The options of `version`; where there is no such table, those of the nearest older one of
    the engine, or of the oldest, which `notice` says.

    Args:
        engine: its name in jobs.toml.
        version: as `ForeignEngine.version_of_tree` says it: "core-0.12.0", "2021", "2.0.0".

    Raises ConfigError: there is no table of that engine.
    """
    tables = tables_of(engine)
    if not tables:
        raise ConfigError(f"trainkit has no table of the options of engine '{engine}'")
    near = next(iter(tables))
    for each in tables:
        if release(each) <= release(version):
            near = each
    if version in tables:
        near = version
    folder = resources.files("trainkit.engines").joinpath(_FOLDER)
    table = parse_table(folder.joinpath(tables[near]).read_text(encoding="utf-8"))
    if near == version:
        return table
    notice = (
        f"trainkit has no table of the options of {engine} {version}; engine_args are checked"
        f" against {near}"
    )
    return replace(table, notice=notice)


def version_at(engine: str, revision: str) -> str | None:
    """The version of a table that was made from this commit: None where there is none."""
    if not re.fullmatch(r"[0-9a-f]{7,40}", revision):
        return None
    folder = resources.files("trainkit.engines").joinpath(_FOLDER)
    for version, name in tables_of(engine).items():
        commit = parse_table(folder.joinpath(name).read_text(encoding="utf-8")).commit
        if commit.startswith(revision) or (commit and revision.startswith(commit)):
            return version
    return None


def check_engine_args(job: Job, table: OptionTable, set_by: Mapping[str, str]) -> list[Problem]:
    """Everything wrong with `job.engine_args`.

    Args:
        job: the job.
        table: the options its engine has.
        set_by: options that trainkit sets itself, and the keys of jobs.toml that say them.
    """
    return list(_wrong_args(job, table, {_plain(name): key for name, key in set_by.items()}))


def _wrong_args(job: Job, table: OptionTable, set_by: Mapping[str, str]) -> Iterator[Problem]:
    seen: dict[str, str] = {}
    for name, value in job.engine_args.items():
        key = f"engine_args.{name}"
        option = table.find(name)
        if option is None:
            yield _unknown(key, name, table, set_by)
            continue
        if earlier := seen.get(option.name):
            yield Problem(f"{key} and engine_args.{earlier} are one option of {job.engine}")
        seen[option.name] = name
        own = next((_plain(each) for each in (option.name, *option.aliases)
                    if _plain(each) in set_by), None)  # fmt: skip
        if own:
            yield Problem(
                f"{key}: trainkit sets {option.name} itself", hint=f"use {set_by[own]} for it"
            )
        elif said := wrong_value(option, value):
            choices = ", ".join(str(choice) for choice in option.choices or ())
            yield Problem(f"{key}: {said}", hint=f"one of {choices}" if choices else "")


def _unknown(key: str, name: str, table: OptionTable, set_by: Mapping[str, str]) -> Problem:
    message = f"{key}: {table.engine} {table.version} has no option '{name}'"
    if _plain(name) in set_by:
        return Problem(message, hint=f"use {set_by[_plain(name)]} for it")
    if table.notice:
        message += f" ({table.notice})"
    names = [each.name for each in table.options.values()]
    names += [alias for each in table.options.values() for alias in each.aliases]
    plain = name.removeprefix("--")
    if closest_name(plain, names):
        return Problem(message, hint=suggest(plain, names))
    return Problem(
        message, hint='args = ["--word", ..] passes words of the command line as they are'
    )


def wrong_value(option: Option, value: Value) -> str:
    """What is wrong with a value for an option; "" where nothing is."""
    if option.action != "store":
        if isinstance(value, bool):
            return ""
        return f"expected true or false, got {describe_value(value)}"
    if option.nargs is None:
        return _wrong_one(option, value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        values: Sequence[Value] = value
    else:
        values = [value]
    if isinstance(option.nargs, int) and len(values) != option.nargs:
        return f"expected {option.nargs} values in an array, got {len(values)}"
    if option.nargs == "+" and not values:
        return "expected at least one value in the array"
    return next((said for each in values if (said := _wrong_one(option, each))), "")


def _wrong_one(option: Option, value: Value) -> str:
    types = option.type.split("|")
    if "any" not in types and not any(_is(value, each) for each in types):
        expected = " or ".join(_EXPECTED.get(each, each) for each in types)
        return f"expected {expected}, got {describe_value(value)}"
    if option.choices is not None and value not in option.choices:
        return f"{describe_value(value)} is none of its values"
    return ""


def _is(value: Value, type_: str) -> bool:
    """Whether a TOML value is of a type; an integer is a number too."""
    if isinstance(value, bool):
        return type_ == "bool"
    return isinstance(value, _TYPES.get(type_, (str,)))
