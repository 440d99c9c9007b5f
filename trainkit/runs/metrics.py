"""metrics.jsonl: one JSON object a line, appended by rank 0. A last line without its newline is
torn and does not count. The keys of its rows are described in docs/run-folder.md.

For pictures, of a million rows those that a picture needs: of each stretch the first is kept, and
those with the least and the most loss, gradient norm and time: a spike of one step stays. Rows of
evaluations are all kept.
"""

from __future__ import annotations

import contextlib
import json
import os
from array import array
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, Required, TypedDict, cast

import orjson

from trainkit.base.files import atomic_open
from trainkit.base.lazy_dataclasses import dataclass, field

NEAR_END = 2**16  # bytes


class Throughput(TypedDict, total=False):
    """How much of a device is used, in a row of a training step: TFLOP/s per device that the model
    needs, and with what is computed again; both as parts of the peak, 0 to 1, None where no peak
    is known; what they are measured against, in words."""

    model_tflops: float
    hardware_tflops: float
    mfu: float | None
    hfu: float | None
    peak: str | None


class MetricsRow(Throughput, total=False):
    """A row: those of training steps have all keys but `eval` (`ranks` and `pipeline` where there
    are several, `experts` and `mtp_loss` where a model has them, `phase` where a job has phases),
    and sum up the steps since the row before; those of evaluations have `eval`, the validation set,
    and the first three. In the file losses and norms that are not finite are null. Rows of older
    versions and of other engines may lack some.
    """

    step: Required[int]
    consumed_samples: Required[int]
    lm_loss: Required[float | None]
    eval: str
    global_batch_size: int
    phase: int
    mtp_loss: float | None
    grad_norm: float | None
    learning_rate: float
    loss_scale: float
    skipped_iterations: int
    nan_iterations: int
    rollbacks: int
    elapsed_ms: float
    tokens_per_second: float
    samples_per_second: float
    batch_checksum: int
    times_ms: dict[str, float]
    memory_bytes: dict[str, int]
    ranks: dict[str, float]
    pipeline: dict[str, float]
    experts: dict[str, float]


def parse_row(line: bytes) -> MetricsRow | None:
    """The row of a line; None where it is none."""
    try:
        row = orjson.loads(line)
    except ValueError:
        try:  # older rows may hold NaN and Infinity, which JSON has not
            row = json.loads(line, parse_constant=lambda name: None)
        except (ValueError, RecursionError):
            return None
    if isinstance(row, dict) and isinstance(row.get("step"), int):
        return cast(MetricsRow, row)
    return None


def _whole_lines(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []


def read_rows(path: Path) -> list[MetricsRow]:
    """All rows, in order; training rows, and rows of evaluations with the key `eval`. Empty
    where there is no file."""
    return [row for line in _whole_lines(path) if (row := parse_row(line)) is not None]


def newest_row(path: Path) -> MetricsRow | None:
    """The last row of a training step, where it stands near the end of the file; else None."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - NEAR_END))
            lines = file.read().split(b"\n")[:-1]
    except FileNotFoundError:
        return None
    rows = (parse_row(line) for line in reversed(lines))
    return next((row for row in rows if row is not None and "eval" not in row), None)


def taken_back_path(path: Path) -> Path:
    """Where the rows lie that were taken back from metrics.jsonl, for reports: what an attempt
    had logged before it was killed."""
    return path.with_name("metrics-taken-back.jsonl")


def _set_aside(path: Path, lines: list[bytes]) -> None:
    """Append rows that are taken back. A disk that has no room for them must not keep a run from
    going on: they serve a picture."""
    with contextlib.suppress(OSError), open(path, "ab") as file:
        file.write(b"".join(lines))


def truncate_metrics(path: Path, step: int) -> None:
    """Take back the rows of steps after `step`, and what is torn, so that a resumed run writes
    them again. Whole or not at all.

    It is another file then, even where nothing is taken back: what an attempt that was taken for
    dead still writes goes to nobody.
    """
    kept = []
    lost = []
    for line in _whole_lines(path):
        row = parse_row(line)
        if row is not None and row["step"] <= step:
            kept.append(line + b"\n")
        elif row is not None:
            lost.append(line + b"\n")
    if lost:
        _set_aside(taken_back_path(path), lost)
    if path.exists():
        with atomic_open(path) as file:
            file.write(b"".join(kept))


class MetricsTail:
    """Follows the file while it grows, by polling. Where it was cut in between, steps that were
    returned and written again are returned again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._file = (0, 0)  # device and inode
        self._returned = array("q")  # a hash of every line that was read

    def new_rows(self) -> list[MetricsRow]:
        """The rows that have been completed since the last call; never waits."""
        try:
            with open(self.path, "rb") as file:
                self._find_place(file)
                lines = file.readlines()
        except FileNotFoundError:
            return []
        whole = [line for line in lines if line.endswith(b"\n")]
        self._offset += sum(map(len, whole))
        self._returned.extend(map(hash, whole))
        return [row for line in whole if (row := parse_row(line)) is not None]

    def _find_place(self, file: IO[bytes]) -> None:
        """Go behind the last row that was returned and is still there. `truncate_metrics` puts
        another file in place, which may have outgrown the old one since."""
        status = os.fstat(file.fileno())
        identity = (status.st_dev, status.st_ino)
        if identity != self._file or status.st_size < self._offset:
            self._file = identity
            self._offset = 0
            kept = 0
            for returned, line in zip(self._returned, file, strict=False):
                if hash(line) != returned:
                    break
                self._offset = self._offset + len(line)
                kept = kept + 1
            del self._returned[kept:]
        file.seek(self._offset)


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
        damaged: lines that are not rows.
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
