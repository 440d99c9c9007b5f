"""Configurations of hydra and OmegaConf as they are written, read without running anything.

What is understood: YAML with OmegaConf's numbers, a defaults list, KEY=VALUE words over it, and
interpolations: ${absolute.key}, ${.relative}, ${..above}, and ${multiply:a,b}, divide_floor and
divide_ceil, which NeMo's launcher adds (hydra 1.1 to 1.3, "The Defaults List"; OmegaConf 2.1 to
2.3, "Variable interpolation"). OmegaConf's own parser reads them; what they come to is worked out
here, as its resolvers belong to the whole process, read the environment and know no limits.
"""

from __future__ import annotations

import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from trainkit.base.errors import ConfigError
from trainkit.base.lazy_dataclasses import dataclass, field
from trainkit.engines.hydra_words import Override, no_hydra, read_override

MISSING = "???"
LARGEST = 4 * 2**20  # bytes of a file
MOST = 20_000  # values of a configuration
DEEPEST = 25  # interpolations in interpolations, and tables in tables
LONGEST = 10**5  # characters of a value
# OmegaConf's numbers, omegaconf/_utils.py get_yaml_loader: 1e-5 is one, which YAML 1.1 has not
_FLOAT = r"""(?:[-+]?(?:[0-9][0-9_]*)\.[0-9_]*(?:[eE][-+]?[0-9]+)?
    |[-+]?(?:[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)|\.[0-9_]+(?:[eE][-+][0-9]+)?
    |[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))"""


@dataclass(frozen=True)
class Unknown:
    """A value that the files do not say.

    Args:
        why: in words.
        key: the one that would have to be given.
    """

    why: str
    key: str


def parse_yaml(text: str, place: str) -> dict[str, object]:
    """The table of one file.

    Args:
        text: of the file.
        place: its name, for messages.

    Raises ConfigError: it is not YAML or a table of names, has a key twice, or is too deep.
    """
    import yaml  # 20 ms, for one task

    class ConfigLoader(yaml.SafeLoader):  # type: ignore[misc]
        """With OmegaConf's numbers, and without dates and keys that are there twice."""

    def table(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[object, object]:
        keys = Counter(str(key.value) for key, _ in node.value)
        for key, times in keys.most_common(1):
            if times > 1:
                raise ConfigError(f"{place} has {key} twice in one table")
        loader.flatten_mapping(node)
        return dict(loader.construct_pairs(node, deep=True))

    ConfigLoader.yaml_implicit_resolvers = {
        first: [each for each in found if each[0] != "tag:yaml.org,2002:timestamp"]
        for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    ConfigLoader.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(f"^{_FLOAT}$", re.VERBOSE), list("-+0123456789.")
    )
    ConfigLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, table)
    try:
        found = yaml.load(text, ConfigLoader)
    except (yaml.YAMLError, TypeError, ValueError) as error:
        where = " ".join(str(error).split())
        raise ConfigError(f"{place} is not YAML: {where}") from None
    except RecursionError:
        raise ConfigError(f"{place} is not a configuration: its tables are too deep") from None
    if found is None:
        found = {}
    if not isinstance(found, dict):
        raise ConfigError(f"{place} is not a table of names")
    _check(found, place)
    return found


def _check(found: Mapping[object, object], place: str) -> None:
    """Names of text, and no more of them, nor deeper, than a configuration has: references in
    YAML make few bytes to as many values as they like."""
    left = MOST
    level: list[object] = [found]
    for _ in range(DEEPEST):
        below: list[object] = []
        for each in level:
            if isinstance(each, Mapping):
                if wrong := [key for key in each if not isinstance(key, str)]:
                    raise ConfigError(f"{place}: the key {wrong[0]!r} is not a name")
                below += each.values()
            elif isinstance(each, list):
                below += each
        left -= len(below)
        level = below
        if left < 0:
            raise ConfigError(f"{place} has more than {MOST:,} values")
        if not level:
            return
    raise ConfigError(f"{place} is not a configuration: its tables are too deep")


def read_config(path: Path) -> dict[str, object]:
    """The table of a file. Raises ConfigError: it cannot be read, or see `parse_yaml`."""
    try:
        if path.stat().st_size > LARGEST:
            raise ConfigError(
                f"{path} has more than {LARGEST >> 20} MiB: it is not a configuration"
            )
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    return parse_yaml(text, str(path))


@dataclass
class Composed:
    """A configuration of several files.

    Args:
        root: the table, with interpolations as they were written.
        choices: which file of each group was taken.
        left: what was not read, a line each.
    """

    root: dict[str, object]
    choices: dict[str, str] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)


def compose(
    folder: Path, name: str, groups: Sequence[str], overrides: Sequence[Override]
) -> Composed:
    """A configuration with the groups of its defaults list that are asked for.

    Args:
        folder: of the configuration.
        name: of its first file, without the ending.
        groups: those of the list that are read.
        overrides: GROUP=FILE and KEY=VALUE.

    Raises ConfigError: a file that cannot be read, lies outside of the folder, or is named by
    itself; an override that is none of the two.
    """
    composed = Composed(read_config(folder / f"{name}.yaml"))
    for each in _defaults(composed.root, f"{folder / name}.yaml"):
        if each.group and each.group not in groups:
            composed.choices[each.group] = each.name
    wanted = {each.group: each.name for each in _defaults(composed.root, name) if each.name}
    wanted |= {each.path: str(each.value) for each in overrides if each.path in groups}
    composed.root.pop("defaults", None)
    for group in groups:
        if group not in wanted:
            raise ConfigError(
                f"{folder / name}.yaml: its defaults have no {group}",
                hint=f"name it: {group}=FILE",
            )
        composed.choices[group] = wanted[group]
        found = _with_defaults(folder, group, wanted[group], composed.left, ())
        composed.root[group] = merged(composed.root.get(group, {}), found)
    for override in overrides:
        if override.path not in groups:
            put(composed.root, override)
    return composed


def words_of(words: Sequence[str]) -> list[Override]:
    """KEY=VALUE words. Raises ConfigError for anything else."""
    try:
        return [read_override(word) for word in words]
    except ValueError as error:
        raise ConfigError(str(error)) from None


def put(root: dict[str, object], override: Override) -> None:
    """Set one value of a table, where hydra would. Raises ConfigError where a value is not a table,
    or a key is not there that only "+" adds."""
    *above, last = override.path.split(".")
    table = root
    for name in above:
        inner = table.setdefault(name, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{override.path}: {name} is {inner!r}, no table")
        table = inner
    if override.prefix == "~":
        table.pop(last, None)
        return
    table[last] = override.value


@dataclass(frozen=True)
class _Default:
    group: str
    name: str
    package: str = ""
    optional: bool = False


def _defaults(table: Mapping[str, object], place: str) -> list[_Default]:
    """The entries of a defaults list, without what is hydra's own."""
    entries = table.get("defaults", [])
    if not isinstance(entries, list):
        raise ConfigError(f"{place}: defaults is {entries!r}, no list")
    found = []
    for entry in entries:
        if isinstance(entry, str):
            name, _, package = entry.partition("@")
            found.append(_Default("", name, package))
            continue
        if not isinstance(entry, dict) or len(entry) != 1:
            raise ConfigError(f"{place}: {entry!r} is not an entry of a defaults list")
        (key, name), *_ = entry.items()
        words = str(key).split()
        group, _, package = words[-1].partition("@")
        if "override" in words:
            continue
        if name is not None and not isinstance(name, str):
            raise ConfigError(
                f"{place}: defaults has {group}: {name!r}, which is not a file's name"
            )
        found.append(_Default(group, name or "", package, "optional" in words))
    return found


def _with_defaults(
    folder: Path, group: str, name: str, left: list[str], above: tuple[Path, ...]
) -> dict[str, object]:
    """A file of a group over those of its own defaults list."""
    path = _inside(folder, f"{group}/{name.removesuffix('.yaml')}.yaml")
    if path in above:
        chain = " -> ".join(str(each.relative_to(folder.resolve())) for each in (*above, path))
        raise ConfigError(f"the defaults lists go in a circle: {chain}")
    table = read_config(path)
    base: dict[str, object] = {}
    entries = _defaults(table, str(path))
    if all(each.name != "_self_" for each in entries):
        entries.append(_Default("", "_self_"))
    table.pop("defaults", None)
    for each in entries:
        if each.name == "_self_":
            base = merged(base, table)
        if each.name in ("", "_self_"):
            continue
        if each.optional and not _inside(folder, f"{each.group}/{each.name}.yaml").exists():
            left.append(
                f"{group}/{name}: the optional default {each.group}: {each.name} is in another"
                " folder, of NeMo's own tree"
            )
            continue
        found = _with_defaults(folder, each.group or group, each.name, left, (*above, path))
        base = merged(base, _below(each.package, found))
    return base


def _below(package: str, table: dict[str, object]) -> dict[str, object]:
    for name in reversed(package.split(".")):
        table = table if name in ("", "_here_") else {name: table}
    return table


def _inside(folder: Path, name: str) -> Path:
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise ConfigError(f"{name} is outside of {folder}")
    return path


def merged(first: object, second: object) -> dict[str, object]:
    """Two tables, the second over the first; lists are not joined."""
    result = dict(first) if isinstance(first, dict) else {}
    for key, value in second.items() if isinstance(second, dict) else ():
        if isinstance(value, dict) and isinstance(result.get(key), dict):
            value = merged(result[key], value)
        result[key] = value
    return result


_RESOLVERS: Mapping[str, Callable[[float, float], float]] = {
    "multiply": operator.mul,
    "divide_ceil": lambda first, second: math.ceil(first / second),
    "divide_floor": lambda first, second: math.floor(first / second),
}
_NOWHERE = object()


class _Unsaid(Exception):
    """An interpolation has no value; with the `Unknown` that says why."""


class Resolved:
    """A configuration whose interpolations are worked out when they are asked for."""

    def __init__(self, root: Mapping[str, object], choices: Mapping[str, str]) -> None:
        self.root = root
        self.choices = choices
        self._done: dict[tuple[str, ...], object] = {}

    def leaves(self, *path: str) -> dict[str, object]:
        """Values below a table by their names from there with dots; one that the files do not
        say is an `Unknown`. Raises ConfigError: interpolations in a circle, or too long."""
        found = self._at(path)
        if found is None or found is _NOWHERE:
            return {}
        if not isinstance(found, Mapping):
            raise ConfigError(f"{'.'.join(path)} is {found!r}, no table")
        return {
            ".".join(inner[len(path) :]): self._value(inner, ()) for inner in _paths(found, path)
        }

    def _at(self, path: Sequence[str]) -> object:
        found: object = self.root
        for name in path:
            if isinstance(found, Mapping):
                found = found.get(name, _NOWHERE)
            elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            else:
                return _NOWHERE
        return found

    def _value(self, path: tuple[str, ...], above: tuple[tuple[str, ...], ...]) -> object:
        if path in self._done:
            return self._done[path]
        if path in above or len(above) > DEEPEST:
            chain = " -> ".join(".".join(each) for each in (*above, path)[-4:])
            raise ConfigError(f"interpolations go in a circle: {chain}")
        raw = self._at(path)
        self._done[path] = found = self._of(raw, path, (*above, path))
        return found

    def _of(self, raw: object, path: tuple[str, ...], above: tuple[tuple[str, ...], ...]) -> object:
        if isinstance(raw, list):
            items = [self._value((*path, str(at)), above) for at in range(len(raw))]
            return next((each for each in items if isinstance(each, Unknown)), items)
        if isinstance(raw, Mapping):
            return {key: self._value((*path, key), above) for key in raw}
        if raw == MISSING:
            key = ".".join(path)
            return Unknown(f"{key} is ???, which is to be given", key)
        if not isinstance(raw, str) or "${" not in raw:
            return raw
        return self._text(raw, path, above)

    def _text(self, text: str, path: tuple[str, ...], above: tuple[tuple[str, ...], ...]) -> object:
        """A text with interpolations, by OmegaConf's grammar and none of its resolvers: a single
        one keeps its kind."""
        try:
            from omegaconf.errors import OmegaConfBaseException
            from omegaconf.grammar_parser import parse
            from omegaconf.grammar_visitor import GrammarVisitor
        except ImportError:
            raise no_hydra() from None
        visitor = GrammarVisitor(
            node_interpolation_callback=lambda key, _: self._node(key, path, above),
            resolver_interpolation_callback=partial(self._function, ".".join(path)),
            memo=None,
        )
        found: object = text
        try:
            if len(text) <= LONGEST:
                found = visitor.visit(parse(text))
        except _Unsaid as unsaid:
            return unsaid.args[0]
        except RecursionError:
            raise ConfigError(f"{'.'.join(path)}: its interpolations are too deep") from None
        except (OmegaConfBaseException, ValueError) as error:
            why = f"an interpolation has no end or is none of OmegaConf's: {error}"
            raise ConfigError(f"{'.'.join(path)} = {text[:80]!r}: {why}") from None
        if isinstance(found, str) and len(found) > LONGEST:
            raise ConfigError(f"{'.'.join(path)} has more than {LONGEST:,} characters")
        return found

    def _node(self, key: str, path: tuple[str, ...], above: tuple[tuple[str, ...], ...]) -> Any:
        """The value that an interpolation in `path` asks for: a.b, a[b], .relative."""
        up = len(key) - len(key.lstrip("."))
        target = (*path[: max(0, len(path) - up) if up else 0], *re.findall(r"[^.\[\]]+", key))
        if self._at(target) is _NOWHERE:
            asked = ".".join(target)
            why = f"{'.'.join(path)} asks for {asked}, which is not there"
            raise _Unsaid(Unknown(why, asked))
        found = self._value(target, above)
        if isinstance(found, Unknown):
            raise _Unsaid(found)
        return found

    def _function(
        self, place: str, *, name: str, args: Sequence[object], args_str: Sequence[str]
    ) -> object:
        asked = f"${{{name}:{','.join(args_str)}}}"
        if name == "hydra":
            return self.choices.get(asked[:-1].partition("runtime.choices.")[2])
        if name not in _RESOLVERS:
            why = f"{place} asks for ${{{name}:..}}, which nothing here works out"
            raise _Unsaid(Unknown(why, place))
        numbers = [each for each in args if isinstance(each, (int, float))]
        if len(args) != 2 or len(numbers) != 2:
            raise ConfigError(f"{place} = {asked}: it is for two numbers")
        try:
            found = _RESOLVERS[name](*numbers)
            float(found)  # a product of products can be too long to be shown
        except (ArithmeticError, ValueError) as error:
            raise ConfigError(f"{place} = {asked}: {error}") from None
        return found


def _paths(table: Mapping[str, object], path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from _paths(value, (*path, key))
        else:
            yield (*path, key)
