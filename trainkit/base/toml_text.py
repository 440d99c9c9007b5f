"""Keys, values and tables as TOML writes them (TOML 1.0)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence


def toml_key(key: str) -> str:
    """A key, in quotes if it is not a bare one, such as an option of another engine."""
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else toml_value(key)


def toml_value(value: object) -> str:
    """JSON's spelling, but for tables in it and for U+007F, which TOML wants escaped."""
    if isinstance(value, Mapping):
        pairs = (f"{toml_key(str(key))} = {toml_value(each)}" for key, each in value.items())
        return "{ " + ", ".join(pairs) + " }"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def toml_table(path: Sequence[str], values: Mapping[str, object]) -> Iterator[str]:
    """The lines of a table. Tables in it are written in line; what is None is left out."""
    yield f"[{'.'.join(map(toml_key, path))}]"
    for key, value in values.items():
        if value is not None:
            yield f"{toml_key(key)} = {toml_value(value)}"
