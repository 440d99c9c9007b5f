"""Text shards: JSON lines, plain or zstandard-compressed, read and written as a stream."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import zstandard

from trainkit.base.errors import ConfigError, Exit, Place, Problem
from trainkit.base.files import atomic_open

READABLE = (".jsonl", ".jsonl.zst")


@dataclass(frozen=True)
class Document:
    """One document and the line it stands in, from 1."""

    line: int
    text: str


def _bad(path: Path, line: int, message: str, hint: str = "") -> ConfigError:
    return ConfigError([Problem(message, Place(str(path), line), hint)], exit=Exit.STAGE_FAILED)


def _lines(path: Path) -> Iterator[bytes]:
    if not path.name.endswith(READABLE):
        raise _bad(path, 0, f"cannot be read as text: its name ends in none of {', '.join(READABLE)}")
    with open(path, "rb") as raw:
        if not path.name.endswith(".zst"):
            yield from raw
            return
        reader = zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True)
        try:
            yield from io.BufferedReader(reader, 2**20)
        except zstandard.ZstdError as error:
            raise _bad(path, 0, f"is no whole zstandard file: {error}", "fetch or write it again") from None


def read_documents(path: Path, text_key: str) -> Iterator[Document]:
    """Documents of a .jsonl or .jsonl.zst file. Blank lines are skipped; the last line needs no newline.

    Raises ConfigError (exit 6) with file and line for malformed JSON, a missing or non-text key, invalid UTF-8 and lone surrogates.
    """
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise _bad(path, number, f"is not JSON: {error}: {line[:80]!r}") from None
        text = value.get(text_key) if isinstance(value, dict) else None
        if not isinstance(text, str):
            found = f"keys {', '.join(map(repr, value))}" if isinstance(value, dict) else type(value).__name__
            raise _bad(path, number, f"has no text under the key {text_key!r} (found {found})", "set datasets.X.text_key to the key that holds the text")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise _bad(path, number, f"holds a lone surrogate: {error.reason} at character {error.start}") from None
        yield Document(number, text)


def write_documents(path: Path, texts: Iterable[str], text_key: str) -> tuple[int, int]:
    """Write texts as .jsonl.zst, whole or not at all. Returns (documents, bytes of text in UTF-8)."""
    documents = size = 0
    with atomic_open(path) as raw, zstandard.ZstdCompressor(level=3).stream_writer(raw, closefd=False) as file:
        for text in texts:
            file.write((json.dumps({text_key: text}, ensure_ascii=False) + "\n").encode())
            documents += 1
            size += len(text.encode())
    return documents, size
