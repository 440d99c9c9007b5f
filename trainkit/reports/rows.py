"""The rows of metrics.jsonl for pictures: of a million, those that a picture needs.

Of each stretch of rows the first is kept, and those with the least and the most loss, gradient norm
and time: a spike of one step stays. Rows of evaluations are all kept.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import cast

from trainkit.runs.metrics import MetricsRow, parse_row

WHOLE_ROWS = 4000  # a file of fewer rows is read as it is
STRETCHES = 1500
HEAD = 2**20  # bytes at the begin of a file that say how long its rows are
DECIDING = ("lm_loss", "grad_norm", "elapsed_ms")
NUMBER = (int, float)  # to ask for by isinstance, twice as fast as `int | float`


@dataclass(frozen=True)
class ThinnedRows:
    """Rows in the file's order.

    Args:
        rows: those that were kept.
        regular: of them, the first training step's of each stretch: what medians may be taken of.
        total: how many the file has.
        damaged: lines that are no row.
    """

    rows: list[MetricsRow] = field(default_factory=list)
    regular: list[MetricsRow] = field(default_factory=list)
    total: int = 0
    damaged: int = 0

    @property
    def thinned(self) -> bool:
        """Whether any row was left out."""
        return len(self.rows) + self.damaged < self.total


def read_thinned(path: Path) -> ThinnedRows:
    """Read a file of metrics; empty where there is none. Raises OSError where it cannot be
    read."""
    kept: list[MetricsRow] = []
    regular: list[MetricsRow] = []
    total = 0
    damaged = 0
    for lines in _stretches(path):
        rows = [row for line in lines if (row := parse_row(line)) is not None]
        total += len(lines)
        damaged += len(lines) - len(rows)
        chosen = [_sound(row) for row in _chosen(rows)]
        kept += chosen
        regular += [row for row in chosen if "eval" not in row][:1]
    return ThinnedRows(kept, regular, total, damaged)


def _stretches(path: Path) -> Iterator[list[bytes]]:
    """The lines of the file, STRETCHES times so many, one at a time in a short file; a last one
    without its newline is torn and left out."""
    if not path.exists():
        return
    with open(path, "rb") as file:
        head = file.read(HEAD)
        size = os.fstat(file.fileno()).st_size
        rows = head.count(b"\n") * size / max(1, len(head))
        length = int(rows / STRETCHES) if rows > WHOLE_ROWS else 1
        file.seek(0)
        while lines := list(islice(file, length)):
            if not lines[-1].endswith(b"\n"):
                yield lines[:-1]
                return
            yield lines


def _chosen(rows: Sequence[MetricsRow]) -> list[MetricsRow]:
    """Those of a stretch to keep, in order: evaluations, the first training step, and by each
    number that decides the least, the most, and the first that was not finite."""
    training = [index for index, row in enumerate(rows) if "eval" not in row]
    kept = {index for index, row in enumerate(rows) if "eval" in row} | set(training[:1])
    for key in DECIDING:
        values = [rows[index].get(key) for index in training]
        finite = [value for value in values if isinstance(value, NUMBER)]
        if finite:
            kept.add(training[values.index(min(finite))])
            kept.add(training[values.index(max(finite))])
        if None in values:
            kept.add(training[values.index(None)])
    return [rows[index] for index in sorted(kept)]


def _sound(row: MetricsRow) -> MetricsRow:
    """Without values that cannot be what their key says, and with all that every row has."""
    values = {key: value for key, value in row.items() if _is_sound(key, value)}
    return cast(MetricsRow, {"consumed_samples": 0, "lm_loss": None, **values})


def _is_sound(key: str, value: object) -> bool:
    """Whether a value can be what its key says: numbers, texts by name, tables."""
    if key in ("eval", "peak"):
        return isinstance(value, str) or value is None
    if isinstance(value, dict):
        return all(isinstance(item, int | float) for item in value.values())
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))
