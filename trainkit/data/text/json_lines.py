"""JSON lines: one object a line, its text under a key. What is not a document is yielded as
`BadLine`."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from typing import Any

import orjson

from trainkit.data.text.documents import BadLine, ParsedItem, ReadOptions, TextDocument, get_field

SHOWN = 40  # bytes either side of what is wrong with a line
ARRAY_HINT = "write one object a line instead of one array: jq -c '.[]' FILE > FILE.jsonl"


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


def json_lines(data: Iterator[bytes], reading: ReadOptions, where: str) -> Iterator[ParsedItem]:
    key = reading.text_key
    nested = "." in reading.text_key
    exact = reading.fields is None
    most = reading.max_document_bytes
    for number, line in enumerate(_lines(data, 3 * most + 2**20), 1):
        if not line:
            continue
        if isinstance(line, int):
            yield too_long(number, where, line, "", most)
            continue
        try:
            if exact and _LONG_NUMBER.search(line):
                raise ValueError("orjson would make a float of it")
            value = orjson.loads(line)
            if exact and _has_large_float(value):
                raise ValueError("orjson may have made it of a whole number")
        except ValueError:
            if not bytes(line).strip():
                continue
            value = _second_try(bytes(line), number, where, key)
            if isinstance(value, BadLine):
                yield value
                continue
        if isinstance(value, dict):
            text = get_field(value, key) if nested else value.get(key)
        else:
            text = None
        yield checked_document(number, text, where, value, line, reading)


def checked_document(
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
            shown_around(line, 0),
            hint,
        )
    most = reading.max_document_bytes
    if (
        sum(map(len, parts)) * 4 > most
        and (size := sum(len(part.encode()) for part in parts)) > most
    ):
        return too_long(number, where, size, shown_around(line, 0), most)
    return TextDocument(number, text, where, value if isinstance(value, dict) else {})


def too_long(number: int, where: str, size: int, around: str, most: int) -> BadLine:
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
            shown_around(line, error.start),
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
                shown_around(line, at),
                ARRAY_HINT,
            )
        return BadLine(
            number,
            where,
            "not JSON",
            f"is not JSON: {error.msg} at byte {at}",
            shown_around(line, at),
        )
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits, brackets 5,000 deep
        return BadLine(
            number,
            where,
            "not JSON",
            f"is not JSON that can be read: {error}",
            shown_around(line, 0),
        )
    character = _lone_surrogate(get_field(value, key))
    if character is None:
        return value
    escape = _SURROGATE_ESCAPE.search(text)
    byte = len(text[: escape.start()].encode()) if escape else 0
    return BadLine(
        number,
        where,
        "lone surrogate",
        f"holds a lone surrogate, half of a character, at character {character} of its text",
        shown_around(line, byte),
    )


def _has_large_float(value: object) -> bool:
    if isinstance(value, dict):
        return any(map(_has_large_float, value.values()))
    if isinstance(value, list):
        return any(map(_has_large_float, value))
    return isinstance(value, float) and abs(value) >= 2**63


def _lone_surrogate(field: object) -> int | None:
    """Where the text of a field, or one of several, has a character that UTF-8 cannot hold."""
    for part in field if isinstance(field, list) else [field]:
        try:
            _ = part.encode() if isinstance(part, str) else b""
        except UnicodeEncodeError as error:
            return error.start
    return None


_LONG_NUMBER = re.compile(rb"[0-9]{19}")
_SURROGATE_ESCAPE = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)


def shown_around(line: bytes | bytearray | memoryview, at: int) -> str:
    """The bytes around a place, printable."""
    low = max(0, at - SHOWN)
    high = at + SHOWN
    return (
        ("..." if low else "")
        + bytes(line[low:high]).decode("utf-8", "backslashreplace")
        + ("..." if high < len(line) else "")
    )
