"""Parquet and Arrow files as documents: a row is one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from trainkit.base.extras import install_command
from trainkit.data.text.decompress import damaged_file
from trainkit.data.text.documents import BadLine, ParsedItem, ReadOptions, TextDocument, get_field
from trainkit.data.text.json_lines import checked_document, shown_around

TABLES = (".parquet", ".arrow")
# metadata of a string column whose values are JSON, as DocumentWriter writes it
JSON_COLUMN = {b"trainkit": b"json"}
OTHER_FIELDS = "other_fields"  # the JSON column of what stands in no column of its own
ROWS = 256  # held as Python objects
STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"  # of Arrow's IPC stream; its reader does not ask for it


def table_rows(name: str, stream: Any, reading: ReadOptions, where: str) -> Iterator[ParsedItem]:
    """The documents of a file that ends in one of `TABLES`; `stream` can be sought.

    Raises ConfigError (exit 6): as `open_documents`.
    """
    is_parquet = name.endswith(".parquet")
    kind = "a parquet" if is_parquet else "an Arrow"
    try:
        import pyarrow as arrow
    except ImportError:
        raise damaged_file(
            where, "is read by pyarrow, which is not installed", install_command()
        ) from None
    try:
        schema, batches, rows = _parquet(stream, reading) if is_parquet else _arrow(stream, where)
        encoded = _json_columns(schema)
        paths = sorted(_paths(schema))
        if reading.text_key not in paths and reading.text_key.partition(".")[0] not in encoded:
            raise damaged_file(
                where,
                f"has no column {reading.text_key!r} (it has {', '.join(paths[:20])})",
                "set datasets.X.text_key to the column that holds the text",
            )
        number = 0
        for batch in batches:
            for start in range(0, batch.num_rows, ROWS):
                for row in batch.slice(start, ROWS).to_pylist():
                    number += 1
                    yield _checked_row(number, _decoded(row, encoded), where, reading)
        if rows not in (None, number):  # a header of a page, which no sum covers
            raise arrow.ArrowInvalid(f"{number:,} of {rows:,} rows are there")
    except (
        arrow.ArrowException,
        OSError,
        UnicodeDecodeError,
        json.JSONDecodeError,
    ) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the disk's
        raise damaged_file(where, f"is not {kind} file, or a damaged one: {error}") from None


def _parquet(stream: Any, reading: ReadOptions) -> tuple[Any, Iterable[Any], int | None]:
    """Schema, batches of the columns that are wanted, and the number of rows."""
    from pyarrow import parquet

    table = parquet.ParquetFile(stream, pre_buffer=False, page_checksum_verification=True)
    schema = table.schema_arrow
    columns = None
    if reading.fields is not None:
        columns = [reading.text_key, *reading.fields]
        heads = {path.partition(".")[0] for path in columns} | {OTHER_FIELDS}
        columns += [name for name in _json_columns(schema) if name in heads]
    batches = table.iter_batches(batch_size=ROWS, columns=columns, use_threads=False)
    return schema, batches, table.metadata.num_rows


def _arrow(stream: Any, where: str) -> tuple[Any, Iterable[Any], int | None]:
    """Schema, batches and no count of a file of batches, or of a stream, as `datasets` saves."""
    from pyarrow import ipc

    begins = stream.read(6)
    if begins == b"ARROW1":
        reader = ipc.open_file(stream)
        return reader.schema, map(reader.get_batch, range(reader.num_record_batches)), None
    stream.seek(0, 2)
    stream.seek(max(0, stream.tell() - len(STREAM_END)))
    if begins and stream.read(8) != STREAM_END:
        raise damaged_file(where, "is a truncated Arrow stream: its last bytes are not its end")
    stream.seek(0)
    reader = ipc.open_stream(stream)
    return reader.schema, reader, None


def _paths(fields: Iterable[Any], front: str = "") -> Iterator[str]:
    """Columns, and what stands in them: "meta", "meta.set"."""
    import pyarrow as arrow

    for field in fields:
        yield front + field.name
        if arrow.types.is_struct(field.type):
            yield from _paths(field.type, f"{front}{field.name}.")


def _json_columns(schema: Any) -> list[str]:
    marked = JSON_COLUMN.items()
    return [field.name for field in schema if marked <= (field.metadata or {}).items()]


def _decoded(row: dict[str, object], encoded: Iterable[str]) -> Mapping[str, object]:
    for name in encoded:
        cell = row.get(name)
        if isinstance(cell, str):
            row[name] = json.loads(cell)
    others = row.pop(OTHER_FIELDS) if OTHER_FIELDS in encoded and OTHER_FIELDS in row else None
    return row | others if isinstance(others, dict) else row


def _checked_row(
    number: int, row: Mapping[str, object], where: str, reading: ReadOptions
) -> TextDocument | BadLine:
    text = get_field(row, reading.text_key)
    if isinstance(text, bytes):
        try:
            text = text.decode()
        except UnicodeDecodeError as error:
            return BadLine(
                number,
                where,
                "invalid UTF-8",
                f"holds invalid UTF-8: {error.reason} at byte {error.start}",
                shown_around(text, error.start),
            )
    return checked_document(number, text, where, row, b"", reading)
