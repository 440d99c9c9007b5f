"""One shard of text: opened where it lies or while it is fetched."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any

import xxhash

from trainkit.data.fetch.recipe import FetchRecipe


class CountedStream:
    """A stream that knows how much of it was read, and the sum of that. A class of its own for
    files that can be sought: not all can.

    Attributes:
        position: bytes so far.
        digest: XXH128 of them.
        in_order: whether they were one after another.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.position = 0
        self.digest = xxhash.xxh3_128()
        self.in_order = True

    def read(self, size: int = -1, /) -> bytes:
        data: bytes = self._stream.read(size)
        self.position += len(data)
        self.digest.update(data)
        return data

    def seek(self, *where: int) -> int:
        """Of streams that can."""
        self.in_order = False
        return int(self._stream.seek(*where))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def open_shard(path: Path, recipe: FetchRecipe | None = None) -> AbstractContextManager[IO[bytes]]:
    """The bytes of a shard as stored: of the file at `path`, or of what `recipe` fetches, while
    it comes."""
    if recipe is None:
        return open(path, "rb")
    from trainkit.data.fetch.worker import open_stream

    return open_stream(recipe)


def file_size(path: Path) -> int | None:
    """Bytes of a file; None where it is not there (yet)."""
    try:
        return os.stat(path).st_size
    except OSError:
        return None
