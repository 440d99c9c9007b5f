"""Files of text as a stream of documents: JSON lines, columns, plain text, alone or in archives,
compressed or not. Nothing is extracted to disk.

    .jsonl .json          one JSON object a line                                 and these three
    with .gz, .zst, .bz2 or .xz behind .txt                  one document, or what stands between
    `text_separator` .tar (.tgz)           of all of those .zip                  of all of those;
    also members without an ending, read as .txt (enwik8) .parquet              one document a
    row; .zip and .parquet are read from their end, so not while they are fetched

A text may be a list of strings: several sequences of one document, as in Megatron's
preprocess_data.py. What is no document is not raised but yielded as `BadLine`, so that the caller
decides (on_error); a file that cannot be read at all is raised.
"""

from __future__ import annotations

import codecs
import json
import lzma
import re
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import IO, Any, NamedTuple, cast

import orjson

from trainkit.base.extras import install_command
from trainkit.data.text.decompress import (
    COMPRESSED,
    BlockStream,
    ByteStream,
    bounded_blocks,
    damaged_file,
    decompressed_blocks,
)

LINES = (".jsonl", ".json")
TEXT = (".txt",)
SINGLE = tuple(kind + packed for kind in (*LINES, *TEXT) for packed in ("", *COMPRESSED))
TAR = (".tar", *(f".tar{packed}" for packed in COMPRESSED), ".tgz")
READABLE = (*SINGLE, *TAR, ".zip", ".parquet")
SHOWN = 40  # bytes either side of what is wrong with a line
ARRAY_HINT = "write one object a line instead of one array: jq -c '.[]' FILE > FILE.jsonl"
SKIP_HINT = "see datasets.X.on_error to go on without such lines"


class TextDocument(NamedTuple):
    """One document.

    line: from 1, in its file or archive member; a row of a table, a piece of a .txt.
    text: one sequence, or several.
    where: the file, and the member of an archive behind "!".
    fields: everything else that was read of it, for filters.
    """

    line: int
    text: str | list[str]
    where: str
    fields: Mapping[str, Any]


class BadLine(NamedTuple):
    """A line that is no document. `kind` is one of few words to count by; `around`: what stands
    there, cut."""

    line: int
    where: str
    kind: str
    reason: str
    around: str
    hint: str = SKIP_HINT


class SkippedMember(NamedTuple):
    """A member of an archive that is no text, by its ending."""

    where: str
    reason: str


@dataclass(frozen=True)
class ReadOptions:
    """How documents are found in a file.

    Args:
        text_key: the key that holds the text; dots go into objects. text_separator: what stands
        between the documents of a .txt; None: it is one document. max_document_bytes: of text,
        in UTF-8; longer ones are bad. A JSON line may have three times that. fields: further
        keys that are wanted, for columns.
    """

    text_key: str = "text"
    text_separator: str | None = None
    max_document_bytes: int = 2**26
    fields: tuple[str, ...] = ()


ParsedItem = TextDocument | BadLine | SkippedMember
_MISSING = object()


def field(value: Any, path: str) -> Any:
    """What stands at "a.b" in {"a.b": ..}, or else in {"a": {"b": ..}}; None where nothing does."""
    if isinstance(value, Mapping) and path in value:
        return value[path]
    for key in path.split("."):
        if isinstance(value, Mapping):
            value = value.get(key, _MISSING)
        else:
            value = _MISSING
        if value is _MISSING:
            return None
    return value


def open_documents(
    name: str, stream: ByteStream, reading: ReadOptions, where: str | None = None
) -> Iterator[ParsedItem]:
    """The documents of a file, in order, with bounded memory.

    Args:
        name: its name, whose ending says the format.
        stream: its bytes as they are stored; .zip and .parquet need seek and tell too.
        where: what errors call it; by default `name`.

    Raises ConfigError (exit 6): an ending not known, a file cut off or damaged, a bomb, a
    member's name that leaves the archive.
    """
    where = where or name
    lower = name.lower()
    if lower.endswith(TAR):
        return _tar(_unpacked_name(lower), stream, reading, where)
    if lower.endswith((".zip", ".parquet")):
        if not (hasattr(stream, "seek") and getattr(stream, "seekable", lambda: True)()):
            raise damaged_file(
                where,
                "is read from its end, which cannot be done while it is fetched",
                "set datasets.X.keep_download = true",
            )
        if lower.endswith(".zip"):
            return _zip(stream, reading, where)
        return _parquet(stream, reading, where)
    if lower.endswith(SINGLE):
        return _single(lower, decompressed_blocks(lower, stream, where), reading, where)
    raise damaged_file(
        where,
        f"cannot be read as text: its name ends in none of {', '.join(READABLE)}",
        "rename it, or leave it out",
    )


def _unpacked_name(name: str) -> str:
    if name.endswith(".tgz"):
        return name.removesuffix(".tgz") + ".tar.gz"
    return name


def _single(
    name: str, data: Iterator[bytes], reading: ReadOptions, where: str
) -> Iterator[ParsedItem]:
    kind = name.removesuffix(next((packed for packed in COMPRESSED if name.endswith(packed)), ""))
    if kind.endswith(LINES):
        return _json_lines(data, reading, where)
    return _pieces(data, reading, where)


# ---- JSON lines


def _lines(data: Iterator[bytes], limit: int) -> Iterator[bytes | memoryview | int]:
    """Lines without their newline, the last one too if it has none; of a line that grows beyond
    `limit` only its length.

    Those that lie within a block are views of it: copying them would take as long as all the
    rest of this.
    """
    rest: list[bytes] = []  # pieces of a line that is not at its end yet
    held = 0
    for block in data:
        end = block.find(b"\n")
        rest.append(block[:end] if end >= 0 else block)
        held += len(rest[-1])
        if held > limit:
            rest.clear()  # the count goes on
        if end < 0:
            continue
        yield held if held > limit else b"".join(rest)
        start = end + 1
        view = memoryview(block)
        while (end := block.find(b"\n", start)) >= 0:
            yield view[start:end]
            start = end + 1
        rest = [block[start:]]
        held = len(block) - start
    yield held if held > limit else b"".join(rest)


def _json_lines(data: Iterator[bytes], reading: ReadOptions, where: str) -> Iterator[ParsedItem]:
    key = reading.text_key
    nested = "." in reading.text_key
    most = reading.max_document_bytes
    for number, line in enumerate(_lines(data, 3 * most + 2**20), 1):
        if not line:
            continue
        if isinstance(line, int):
            yield _too_long(number, where, line, "", most)
            continue
        try:
            value = orjson.loads(line)
        except ValueError:
            if not bytes(line).strip():
                continue
            value = _second_try(bytes(line), number, where, key)
            if isinstance(value, BadLine):
                yield value
                continue
        if isinstance(value, dict):
            if nested:
                text = field(value, key)
            else:
                text = value.get(key)
        else:
            text = None
        yield _record(number, text, where, value, line, reading)


def _record(
    number: int, text: Any, where: str, value: Any, line: bytes | memoryview, reading: ReadOptions
) -> TextDocument | BadLine:
    """The document, or why it is none. Sizes: `len` of a str is at most its bytes, so that few
    texts have to be encoded for it."""
    if isinstance(text, str):
        parts = [text]
    elif isinstance(text, list) and all(isinstance(part, str) for part in text):
        parts = text
    else:
        parts = None
    if parts is None:
        if isinstance(value, dict):
            found = f"keys {', '.join(map(repr, list(value)[:20]))}"
        else:
            found = type(value).__name__
        hint = "set datasets.X.text_key to the key that holds the text, or see datasets.X.on_error"
        if (
            isinstance(value, list)
            and number == 1
            and any(isinstance(item, dict) for item in value)
        ):
            hint = ARRAY_HINT
        return BadLine(
            number,
            where,
            "no text",
            f"has no text under the key {reading.text_key!r} (found {found})",
            _shown(line, 0),
            hint,
        )
    most = reading.max_document_bytes
    if (
        sum(map(len, parts)) * 4 > most
        and (size := sum(len(part.encode()) for part in parts)) > most
    ):
        return _too_long(number, where, size, _shown(line, 0), most)
    return TextDocument(number, text, where, value if isinstance(value, dict) else {})


def _too_long(number: int, where: str, size: int, around: str, most: int) -> BadLine:
    hint = "set datasets.X.max_document_bytes to more, or see datasets.X.on_error"
    return BadLine(
        number,
        where,
        "too long",
        f"has {size:,} bytes, more than max_document_bytes = {most:,} allows",
        around,
        hint,
    )


def _second_try(line: bytes, number: int, where: str, key: str) -> Any:
    """What orjson refuses and Python's json, with which others read, may not (NaN, a BOM, a lone
    surrogate in a key not used); or Bad."""
    if number == 1:
        line = line.removeprefix(codecs.BOM_UTF8)
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        return BadLine(
            number,
            where,
            "invalid UTF-8",
            f"holds invalid UTF-8: {error.reason} at byte {error.start}",
            _shown(line, error.start),
        )
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        at = len(text[: error.pos].encode())
        if number == 1 and text.lstrip().startswith("["):
            return BadLine(
                number,
                where,
                "not JSON",
                "is the beginning of a JSON array, not one object",
                _shown(line, at),
                ARRAY_HINT,
            )
        return BadLine(
            number, where, "not JSON", f"is not JSON: {error.msg} at byte {at}", _shown(line, at)
        )
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits, brackets 5,000 deep
        return BadLine(
            number, where, "not JSON", f"is not JSON that can be read: {error}", _shown(line, 0)
        )
    wanted = field(value, key)
    try:
        for part in wanted if isinstance(wanted, list) else [wanted]:
            if isinstance(part, str):
                _ = part.encode()
            else:
                _ = b""
    except UnicodeEncodeError as error:
        escape = _SURROGATE_ESCAPE.search(text)
        if escape:
            at = len(text[: escape.start()].encode())
        else:
            at = 0
        return BadLine(
            number,
            where,
            "lone surrogate",
            f"holds a lone surrogate, half of a character, at character {error.start} of its text",
            _shown(line, at),
        )
    return value


_SURROGATE_ESCAPE = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)


def _shown(line: bytes | bytearray | memoryview, at: int) -> str:
    """The bytes around a place, printable."""
    low = max(0, at - SHOWN)
    high = at + SHOWN
    return (
        ("..." if low else "")
        + bytes(line[low:high]).decode("utf-8", "backslashreplace")
        + ("..." if high < len(line) else "")
    )


# ---- plain text


def _pieces(data: Iterator[bytes], reading: ReadOptions, where: str) -> Iterator[ParsedItem]:
    """Documents of a .txt, numbered from 1. Nothing between two separators is no document."""
    separator = (reading.text_separator or "").encode()
    most = reading.max_document_bytes
    # `dropped`: bytes of a piece above the limit that are not held
    buffer = bytearray()
    number = 0
    dropped = 0
    for block in data:
        unseen = max(0, len(buffer) - len(separator) + 1)
        buffer += block
        if separator and buffer.find(separator, unseen) >= 0:
            *pieces, buffer = buffer.split(separator)
            for piece in pieces:
                number += 1
                if found := _piece(piece, number, where, dropped, reading):
                    yield found
                dropped = 0
        if len(buffer) > most + len(separator):
            unheld = len(buffer) - max(0, len(separator) - 1)  # the rest may begin a separator
            dropped += unheld
            del buffer[:unheld]
    if found := _piece(buffer, number + 1, where, dropped, reading):
        yield found


def _piece(
    piece: bytearray, number: int, where: str, dropped: int, reading: ReadOptions
) -> ParsedItem | None:
    if dropped or len(piece) > reading.max_document_bytes:
        return _too_long(
            number,
            where,
            dropped + len(piece),
            "" if dropped else _shown(piece, 0),
            reading.max_document_bytes,
        )
    if not piece.strip():
        return None
    try:
        return TextDocument(number, piece.decode(), where, {})
    except UnicodeDecodeError as error:
        return BadLine(
            number,
            where,
            "invalid UTF-8",
            f"holds invalid UTF-8: {error.reason} at byte {error.start}",
            _shown(piece, error.start),
        )


# ---- archives


def _member_name(name: str, where: str) -> str:
    parts = PurePosixPath(name.replace("\\", "/"))
    if parts.is_absolute() or ".." in parts.parts or re.match(r"[A-Za-z]:", name):
        raise damaged_file(
            where,
            f"has a member named {name!r}, which leads out of the archive",
            "such archives are made to do harm: fetch it elsewhere",
        )
    return f"{where}!{name}"


def _tar(name: str, stream: ByteStream, reading: ReadOptions, where: str) -> Iterator[ParsedItem]:
    joined = BlockStream(decompressed_blocks(name, stream, where))
    readable = 0
    try:
        with tarfile.open(fileobj=cast(IO[bytes], joined), mode="r|") as archive:
            for member in archive:
                at = _member_name(member.name, where)
                if member.isdir():
                    continue
                if not member.isfile() or not member.name.lower().endswith(SINGLE):
                    yield SkippedMember(
                        at, "a link or device" if not member.isfile() else "no text by its ending"
                    )
                    continue
                file = archive.extractfile(member)
                assert file is not None
                readable += 1
                lower = member.name.lower()
                yield from _single(lower, decompressed_blocks(lower, file, at), reading, at)
            # where tarfile saw no header: it takes a damaged one for the end, too
            end = archive.offset
        while joined.read(2**20):
            pass  # what follows the end: it belongs to the file, whose own end must be there
    except (tarfile.TarError, EOFError) as error:
        raise damaged_file(where, f"is no tar file, or a truncated one: {error}") from None
    if joined.content > end:
        hint = "fetch or write it again; of several tar files joined into one, give each by itself"
        raise damaged_file(
            where,
            f"is a damaged tar file: at byte {end:,} of it stands neither a header nor its end",
            hint,
        )
    if not joined.zeros:
        raise damaged_file(
            where, "is a truncated tar file: the block of zeros at its end is not there"
        )
    if not readable:
        raise damaged_file(
            where, f"holds no member that can be read: none ends in {', '.join(SINGLE)}"
        )


def _zip(stream: Any, reading: ReadOptions, where: str) -> Iterator[ParsedItem]:
    readable = 0
    try:
        with zipfile.ZipFile(stream) as archive:
            for info in archive.infolist():
                at = _member_name(info.filename, where)
                if info.is_dir():
                    continue
                lower = info.filename.lower()
                bare = "." not in PurePosixPath(lower).name
                if not bare and not lower.endswith(SINGLE):
                    yield SkippedMember(at, "no text by its ending")
                    continue
                readable += 1
                with archive.open(info) as file:
                    plain = BlockStream(bounded_blocks(file, at, info.compress_size))
                    yield from _single(
                        ".txt" if bare else lower,
                        decompressed_blocks(lower, plain, at),
                        reading,
                        at,
                    )
    except (
        zipfile.BadZipFile,
        zlib.error,
        lzma.LZMAError,
        EOFError,
        NotImplementedError,
        RuntimeError,
        OSError,
    ) as error:
        # NotImplementedError, RuntimeError: a method not known, a password; OSError without a
        # number: bzip2's word for damage
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise damaged_file(where, f"is no zip file, or a damaged one: {error}") from None
    if not readable:
        raise damaged_file(
            where, f"holds no member that can be read: none ends in {', '.join(SINGLE)}"
        )


# ---- tables


def _parquet(stream: Any, reading: ReadOptions, where: str) -> Iterator[ParsedItem]:
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ImportError:
        raise damaged_file(
            where, ".parquet is read by pyarrow, which is not installed", install_command()
        ) from None
    try:
        table = parquet.ParquetFile(stream, pre_buffer=False)
        columns = [reading.text_key, *reading.fields]
        known = {table.schema.column(i).path for i in range(len(table.schema))}
        if not any(
            path == reading.text_key or path.startswith(f"{reading.text_key}.") for path in known
        ):
            hint = "set datasets.X.text_key to the column that holds the text"
            raise damaged_file(
                where,
                f"has no column {reading.text_key!r} (it has {', '.join(sorted(known)[:20])})",
                hint,
            )
        number = 0
        for batch in table.iter_batches(batch_size=256, columns=columns, use_threads=False):
            for row in batch.to_pylist():
                number += 1
                yield _checked_row(number, row, where, reading)
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the disk's
        raise damaged_file(where, f"is no parquet file, or a damaged one: {error}") from None


def _checked_row(
    number: int, row: dict[str, Any], where: str, reading: ReadOptions
) -> TextDocument | BadLine:
    text = field(row, reading.text_key)
    if isinstance(text, bytes):
        try:
            text = text.decode()
        except UnicodeDecodeError as error:
            return BadLine(
                number,
                where,
                "invalid UTF-8",
                f"holds invalid UTF-8: {error.reason} at byte {error.start}",
                _shown(text, error.start),
            )
    return _record(number, text, where, row, b"", reading)
