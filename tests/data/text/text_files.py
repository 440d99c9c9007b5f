"""Files of text made for tests: packed, as archives, and what is read from them."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard

from trainkit.base.errors import ConfigError, Exit
from trainkit.data.text.documents import BadLine, ParsedItem, ReadOptions, TextDocument
from trainkit.data.text.formats import open_documents
from trainkit.data.text.rejects import raise_bad

TEXTS = ["one", "zwei: äöü \U0001f600\n", "", "three " * 50]


LINES = "".join(
    json.dumps({"text": text, "meta": {"set": "A", "n": number}}) + "\n"
    for number, text in enumerate(TEXTS)
).encode()


PLAIN = b"one<sep>two\r\n<sep>\n<sep>three"


def found(name: str, data: bytes, **reading: Any) -> list[ParsedItem]:
    return list(open_documents(name, io.BytesIO(data), ReadOptions(**reading)))


def texts(name: str, data: bytes, **reading: Any) -> list[str | list[str]]:
    """The texts, where all of it is documents."""
    all_found = found(name, data, **reading)
    assert all(isinstance(item, TextDocument) for item in all_found), all_found
    return [item.text for item in all_found if isinstance(item, TextDocument)]


def the_bad(line: bytes, **reading: Any) -> BadLine:
    """What is said of a bad second line of three; the others must come through."""
    first, second, third = found(
        "x.jsonl", b'{"text": "a"}\n' + line + b'\n{"text": "b"}', **reading
    )
    assert (
        isinstance(first, TextDocument)
        and isinstance(second, BadLine)
        and isinstance(third, TextDocument)
    )
    assert (first.line, second.line, third.line) == (1, 2, 3)
    assert second.where == "x.jsonl"
    return second


def packed(name: str, data: bytes) -> bytes:
    """`data` as the ending of `name` says."""
    ways: dict[str, Callable[[bytes], bytes]] = {
        ".zst": zstandard.compress,
        ".gz": gzip.compress,
        ".bz2": bz2.compress,
        ".xz": lzma.compress,
    }
    return next((pack(data) for ending, pack in ways.items() if name.endswith(ending)), data)


def tar(members: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def zipped(members: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return out.getvalue()


def error_of(name: str, data: bytes, words: str, **reading: Any) -> ConfigError:
    with pytest.raises(ConfigError, match=words) as caught:
        found(name, data, **reading)
    assert caught.value.exit == Exit.STAGE_FAILED
    assert name in str(caught.value)
    return caught.value


def read_documents(path: Path, text_key: str) -> Iterator[TextDocument]:
    """Documents of any file that `open_documents` reads, by its name.

    Raises ConfigError (exit 6) with file and line for what is not a document.
    """
    with open(path, "rb") as file:
        documents = open_documents(path.name, file, ReadOptions(text_key), str(path))
        for found in documents:
            if isinstance(found, BadLine):
                raise_bad(found, documents)
            if isinstance(found, TextDocument):
                yield found
