"""A shard of documents with their metadata, written for others to read: JSON lines or Parquet."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import zstandard

from trainkit.base.files import atomic_open
from trainkit.data.text.tables import JSON_COLUMN, OTHER_FIELDS

WRITABLE = (".jsonl.zst", ".parquet")
ROW_GROUP = 2**26  # bytes of documents held for a row group
DOCUMENT = 2**9  # bytes that a document is counted for besides its text and fields
COLUMNS = 256  # of fields at most: a key that is an id would give each document one of its own
EXACT = 2**53  # up to here a float is every integer


class DocumentWriter:
    """Writes documents one after another, with bounded memory; the same documents give the same
    bytes. A context manager: the file is there, whole, when the block ends without an exception.

    .jsonl.zst: an object a line, the text first. NaN is written as Python's json does, a lone
    surrogate of a field as an escape.

    .parquet: the text and each field are a column. A field has the type (string, bool, int64,
    double) that all its values in the first row group have; of other fields, nested ones and
    values of unlike types, the column is a string of JSON, which the column's metadata say
    (`JSON_COLUMN`). What does not fit the columns later on (a new field, a value of another
    type) stands in the column `OTHER_FIELDS`, a JSON object. open_documents puts all that back;
    None and a field that is not there are the same.

    Dates are written as ISO 8601, bytes as UTF-8, what else JSON does not have as `str` gives it.

    Args:
        path: ends in one of `WRITABLE`.
        text_key: the key of the text. A field of this name is left out.

    Attributes:
        documents: so far. text_bytes: of their texts, in UTF-8.

    Raises ValueError: another ending.
    """

    def __init__(self, path: Path, text_key: str = "text") -> None:
        if not path.name.endswith(WRITABLE):
            raise ValueError(f"{path} ends in none of {', '.join(WRITABLE)}")
        self.path = path
        self.text_key = text_key
        self.documents = self.text_bytes = 0
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        raw = self._stack.enter_context(atomic_open(self.path))
        make = _Lines if self.path.name.endswith(".jsonl.zst") else _RowGroups
        self._sink = make(raw, self.text_key, self._stack)
        return self

    def add(self, text: str, fields: Mapping[str, object]) -> None:
        """Write one document. Raises UnicodeEncodeError: its text has a lone surrogate."""
        data = text.encode()
        kept = {
            name: _plain(value)
            for name, value in fields.items()
            if value is not None and name != self.text_key
        }
        self._sink.add(text, data, kept)
        self.documents += 1
        self.text_bytes += len(data)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._stack.__exit__(kind, error, trace)
            return
        with self._stack:
            self._sink.finish()


class _Lines:
    def __init__(self, raw: IO[bytes], text_key: str, stack: contextlib.ExitStack) -> None:
        packer = zstandard.ZstdCompressor(level=3, write_checksum=True)
        self._file: Any = packer.stream_writer(raw, closefd=False)
        self._text_key = text_key

    def add(self, text: str, data: bytes, fields: Mapping[str, object]) -> None:
        self._file.write(_json({self._text_key: text, **fields}) + b"\n")

    def finish(self) -> None:
        self._file.close()


class _RowGroups:
    def __init__(self, raw: IO[bytes], text_key: str, stack: contextlib.ExitStack) -> None:
        self._raw = raw
        self._text_key = text_key
        self._stack = stack
        self._rows: list[tuple[bytes, dict[str, object]]] = []
        self._held = 0
        self._writer: Any = None
        self._columns: dict[str, str] = {}  # field -> key of _CELLS

    def add(self, text: str, data: bytes, fields: dict[str, object]) -> None:
        self._rows.append((data, fields))
        self._held += len(data) + len(_json(fields)) + DOCUMENT
        if self._held >= ROW_GROUP:
            self._write_group()

    def finish(self) -> None:
        if self._rows or self._writer is None:
            self._write_group()

    def _write_group(self) -> None:
        import pyarrow as arrow

        if self._writer is None:
            self._begin()
        columns = [arrow.array([data for data, _ in self._rows], arrow.string())]
        for name, kind in self._columns.items():
            cells = [_CELLS[kind](fields.get(name)) for _, fields in self._rows]
            for cell, (_, fields) in zip(cells, self._rows, strict=True):
                if cell is not None:
                    del fields[name]
            columns.append(arrow.array(cells, _arrow_type(kind)))
        rest = [_json(fields) if fields else None for _, fields in self._rows]
        columns.append(arrow.array(rest, arrow.string()))
        self._writer.write_table(arrow.Table.from_arrays(columns, schema=self._writer.schema))
        self._rows.clear()
        self._held = 0

    def _begin(self) -> None:
        import pyarrow as arrow
        from pyarrow import parquet

        names: dict[str, None] = {}
        for _, fields in self._rows:
            names.update(dict.fromkeys(fields))
        usable = [name for name in names if _text_cell(name) and name != OTHER_FIELDS][:COLUMNS]
        for name in usable:
            values = [fields[name] for _, fields in self._rows if name in fields]
            self._columns[name] = next(
                kind
                for kind, cell in _CELLS.items()
                if all(cell(value) is not None for value in values)
            )
        columns = [
            arrow.field(name, _arrow_type(kind), metadata=JSON_COLUMN if kind == "json" else None)
            for name, kind in self._columns.items()
        ]
        others = arrow.field(OTHER_FIELDS, arrow.string(), metadata=JSON_COLUMN)
        schema = arrow.schema([arrow.field(self._text_key, arrow.string()), *columns, others])
        self._writer = self._stack.enter_context(
            parquet.ParquetWriter(
                self._raw,
                schema,
                compression="zstd",
                compression_level=3,
                write_page_checksum=True,
                write_statistics=list(self._columns),  # of texts they would be no use
            )
        )


def _plain(value: object) -> object:
    """A value as JSON can have it, at its top."""
    if value is None or isinstance(value, (str, int, float, dict, list, tuple)):
        return value
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def _json(value: object) -> bytes:
    try:
        return json.dumps(value, ensure_ascii=False, default=_plain).encode()
    except UnicodeEncodeError:  # a lone surrogate
        return json.dumps(value, default=_plain).encode()


# ---- what a column holds for a value; None: the value is not of its type


def _text_cell(value: object) -> bytes | None:
    try:
        return value.encode() if isinstance(value, str) else None
    except UnicodeEncodeError:
        return None


def _int_cell(value: object) -> int | None:
    return value if type(value) is int and -(2**63) <= value < 2**63 else None


def _float_cell(value: object) -> float | None:
    if type(value) is int and abs(value) <= EXACT:
        return float(value)
    return value if isinstance(value, float) else None


# in the order in which they are tried
_CELLS: dict[str, Callable[[object], Any]] = {
    "string": _text_cell,
    "bool_": lambda value: value if isinstance(value, bool) else None,
    "int64": _int_cell,
    "float64": _float_cell,
    "json": lambda value: None if value is None else _json(value),
}


def _arrow_type(kind: str) -> Any:
    import pyarrow as arrow

    return arrow.string() if kind == "json" else getattr(arrow, kind)()
