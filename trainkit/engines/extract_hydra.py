"""Reads which keys a hydra configuration has, from its YAML, without importing its engine:

    python -m trainkit.engines.extract_hydra CONF.yaml.. --engine E --version V --commit C

Every leaf is an option by its dotted path. What is null, missing (`???`) or an interpolation
there has no type of its own; of several files the first that has a type for it says it.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from trainkit.engines.options import Option, OptionTable, dump_table

# numbers that YAML 1.1 takes for text and OmegaConf for numbers: 1e-5
_FLOAT = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")


def hydra_options(text: str) -> dict[str, Option]:
    """The leaves of a configuration by their dotted paths."""
    import yaml  # 20 ms, for one task

    return {option.name: option for option in _leaves("", yaml.safe_load(text))}


def joined_options(texts: Sequence[str]) -> dict[str, Option]:
    """The leaves of several configurations, without what hydra keeps for itself."""
    found: dict[str, Option] = {}
    for text in texts:
        for name, option in hydra_options(text).items():
            known = found.get(name)
            if name.partition(".")[0] in ("hydra", "defaults"):
                continue
            if known is None or (known.type == "any" and known.default is None):
                found[name] = option
    return found


def _leaves(path: str, value: object) -> Iterator[Option]:
    if isinstance(value, Mapping) and value:
        for key, each in value.items():
            yield from _leaves(f"{path}.{key}".lstrip("."), each)
        return
    if isinstance(value, str) and _FLOAT.fullmatch(value):
        value = float(value)
    unknown = value is None or (isinstance(value, str) and ("${" in value or value == "???"))
    if unknown:
        yield Option(path, "any")
    else:
        yield Option(path, _kind(value), default=value)


def _kind(value: object) -> str:
    for kind, name in ((bool, "bool"), (int, "int"), (float, "float"), (list, "list")):
        if isinstance(value, kind):
            return name
    return "dict" if isinstance(value, Mapping) else "str"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table of a configuration."""
    parser = argparse.ArgumentParser(prog="extract_hydra", description=__doc__)
    parser.add_argument("files", type=Path, nargs="+", help="the configuration")
    for name in ("engine", "version", "commit"):
        parser.add_argument(f"--{name}", required=True)
    given = parser.parse_args(argv)
    options = joined_options([file.read_text(encoding="utf-8") for file in given.files])
    print(dump_table(OptionTable(given.engine, given.version, given.commit, options)), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
