"""The rows of metrics.jsonl for pictures: of a million, those that a picture needs.

Of each stretch of rows the first is kept, and those with the least and the most loss, gradient norm
and time: a spike of one step stays. Rows of evaluations are all kept. Only what is kept is parsed;
the numbers that decide are found as text, in one pass over the file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np
import orjson
from numpy.typing import NDArray

from trainkit.runs.metrics import MetricsRow

WHOLE_ROWS = 4000  # a file of fewer rows is read as it is
STRETCHES = 1500
BLOCK = 2**22  # bytes that are looked at together: what a cache holds
EVALUATION = b'"eval":'
NEWLINE = 10
_PATTERNS = tuple(  # of the numbers that decide
    re.compile(rb'"%b": ([^,}\n]+)' % key) for key in (b"lm_loss", b"grad_norm", b"elapsed_ms")
)


@dataclass(frozen=True)
class ThinnedRows:
    """Rows in the file's order.

    Args:
        rows: those that were kept.
        regular: of them, the first of each stretch: what medians may be taken of.
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
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return ThinnedRows()
    found = ThinnedRows()
    total = 0
    damaged = 0
    for block in _blocks(path):
        ends = np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == NEWLINE)
        lines = _Lines(block, ends)
        total += len(ends)
        per_stretch = 1
        rows_of_all = size * len(ends) / len(block)
        if rows_of_all > WHOLE_ROWS:
            per_stretch = max(1, int(rows_of_all / STRETCHES))
        for index, regular in _chosen(lines, per_stretch):
            row = _parse(lines[index])
            if row is None:
                damaged += 1
                continue
            found.rows.append(row)
            if regular and "eval" not in row:
                found.regular.append(row)
    return ThinnedRows(found.rows, found.regular, total, damaged)


class _Lines:
    """The lines of a block, none copied before it is asked for."""

    def __init__(self, block: bytes, ends: NDArray[np.intp]) -> None:
        self.block = block
        self.ends = ends

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> bytes:
        begin = int(self.ends[index - 1]) + 1 if index else 0
        return self.block[begin : int(self.ends[index])]

    def with_text(self, text: bytes) -> list[int]:
        """Which lines hold a text."""
        found = []
        at = self.block.find(text)
        while at >= 0:
            found.append(int(np.searchsorted(self.ends, at)))
            at = self.block.find(text, int(self.ends[found[-1]]))
        return found


def _blocks(path: Path) -> Iterator[bytes]:
    """Whole lines, many at a time; a last one without its newline is torn and left out."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        at = 0
        length = BLOCK
        while at < size:
            block = os.pread(file.fileno(), length, at)
            end = block.rfind(b"\n") + 1
            if end:
                yield block[:end]
                at += end
                length = BLOCK
            elif len(block) < length:
                return
            else:
                length *= 2  # a line that is longer


def _parse(line: bytes) -> MetricsRow | None:
    try:
        row = orjson.loads(line)
    except ValueError:
        return None
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        return None
    numbers = {key: value for key, value in row.items() if _is_sound(key, value)}
    numbers.setdefault("consumed_samples", 0)
    numbers.setdefault("lm_loss", None)
    return cast(MetricsRow, numbers)


def _is_sound(key: str, value: object) -> bool:
    """Whether a value can be what its key says: numbers, texts by name, tables."""
    if key in ("eval", "peak"):
        return isinstance(value, str) or value is None
    if isinstance(value, dict):
        return all(isinstance(item, int | float) for item in value.values())
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _chosen(lines: _Lines, per_stretch: int) -> Iterator[tuple[int, bool]]:
    """(index, whether it is the first of its stretch) of the lines to keep, in order."""
    if per_stretch == 1:
        yield from ((index, True) for index in range(len(lines)))
        return
    kept = set()
    columns, complete = _columns(lines)
    if not complete:
        kept.update(lines.with_text(EVALUATION))
    for begin in range(0, len(lines), per_stretch):
        kept.add(begin)
        for column in columns:
            kept |= _extremes(column[begin : begin + per_stretch], begin)
    yield from ((index, index % per_stretch == 0) for index in sorted(kept))


def _columns(lines: _Lines) -> tuple[list[NDArray[np.float64]], bool]:
    """The deciding numbers of every line, NaN where a line has none or it is not finite; and
    whether every line is one of a training step, which alone have all of them."""
    columns = []
    complete = True
    for pattern in _PATTERNS:
        found = pattern.findall(lines.block)
        if len(found) != len(lines):  # evaluations, torn lines, fewer columns
            complete = False
            if not found:
                continue
            found = [_first(pattern, lines[index]) for index in range(len(lines))]
        columns.append(_numbers(found))
    return columns, complete


def _first(pattern: re.Pattern[bytes], line: bytes) -> bytes:
    match = pattern.search(line)
    return match[1] if match else b"null"


def _numbers(found: Sequence[bytes]) -> NDArray[np.float64]:
    try:  # a parser of JSON reads a list of numbers three times as fast as numpy does; null is NaN
        return np.array(orjson.loads(b"[%b]" % b",".join(found)), dtype=np.float64)
    except (ValueError, TypeError):
        return np.array([_number(word) for word in found])


def _number(word: bytes) -> float:
    try:
        return float(word)
    except ValueError:
        return float("nan")


def _extremes(values: NDArray[np.float64], begin: int) -> set[int]:
    """Where the least and the most are, and the first that is not finite."""
    finite = np.isfinite(values)
    found = set()
    if finite.any():
        found.add(begin + int(np.where(finite, values, np.inf).argmin()))
        found.add(begin + int(np.where(finite, values, -np.inf).argmax()))
    if not finite.all():
        found.add(begin + int((~finite).argmax()))
    return found
