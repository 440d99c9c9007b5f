"""Text shards: JSON lines, plain or zstandard-compressed, read and written as a stream."""

from __future__ import annotations

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


def _blocks(path: Path) -> Iterator[bytes]:
    """A file's bytes, decompressed. A zstandard file may hold several frames; each must be whole."""
    with open(path, "rb") as raw:
        if not path.name.endswith(".zst"):
            yield from iter(lambda: raw.read(2**20), b"")
            return
        frame = None
        try:
            for block in iter(lambda: raw.read(2**16), b""):
                rest = block
                while rest:
                    frame = frame or zstandard.ZstdDecompressor().decompressobj()
                    yield frame.decompress(rest)
                    rest, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
        except zstandard.ZstdError as error:
            raise _bad(path, 0, f"is no zstandard file: {error}", "fetch or write it again") from None
        if frame is not None:
            raise _bad(path, 0, "is a truncated zstandard file: its last frame has no end", "fetch or write it again")


def _lines(path: Path) -> Iterator[bytes]:
    if not path.name.endswith(READABLE):
        raise _bad(path, 0, f"cannot be read as text: its name ends in none of {', '.join(READABLE)}")
    rest: list[bytes] = []  # pieces of a line that is not at its end yet
    for block in _blocks(path):
        first, *lines = block.split(b"\n")
        rest.append(first)
        for line in lines:
            yield b"".join(rest)
            rest = [line]
    yield b"".join(rest)


def read_documents(path: Path, text_key: str) -> Iterator[Document]:
    """Documents of a .jsonl or .jsonl.zst file. Blank lines are skipped; the last line needs no newline.

    Raises ConfigError (exit 6) with file and line for malformed JSON, a missing or non-text key, invalid UTF-8 and lone surrogates.
    """
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:  # also a number of 5,000 digits, and brackets 5,000 deep
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
