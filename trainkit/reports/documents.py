"""JSON of a run folder for a report: what cannot be read is empty, and never an error."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

Table = Mapping[str, object]


def read_table(path: Path) -> Table:
    """A JSON table; empty where there is none."""
    try:
        return as_table(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError):
        return {}


def as_table(value: object) -> Table:
    """The value if it is a table, else an empty one."""
    return value if isinstance(value, dict) else {}


def as_number(value: object) -> float | None:
    """The value if it is a number, else None."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    return None
