"""Keeps secret values out of logs and records, wherever they come from."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

SHORTEST = 6  # characters; shorter values would blot out ordinary words


class Redactor:
    """Replaces every occurrence of the given values by ***; of a value with several lines, every
    line too: logs are read by lines."""

    def __init__(self, values: Iterable[str]) -> None:
        parts = {
            part
            for value in values
            for part in (value, *value.splitlines())
            if len(part) >= SHORTEST
        }
        self.values = sorted(
            (part.encode("utf-8", "surrogateescape") for part in parts), key=len, reverse=True
        )

    def bytes(self, data: bytes) -> bytes:
        for value in self.values:
            data = data.replace(value, b"***")
        return data

    def text(self, text: str) -> str:
        return self.bytes(text.encode("utf-8", "surrogateescape")).decode(
            "utf-8", "surrogateescape"
        )

    def value(self, value: Any) -> Any:
        """A JSON value with every text in it redacted."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self.value(item) for item in value]
        if isinstance(value, dict):
            return {key: self.value(item) for key, item in value.items()}
        return value


class RedactedStream:
    """Redacts bytes that come in pieces: a secret split over two of them is found too.

    What may be the beginning of a secret is kept back until it is clear what it is.
    """

    def __init__(self, redactor: Redactor) -> None:
        self._values = redactor.values
        self._any = (
            re.compile(b"|".join(re.escape(value) for value in self._values))
            if self._values
            else None
        )
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """The next piece, without secrets and without what is kept back."""
        if self._any is None:
            return data
        whole = self._held + data
        cut = len(whole) - self._overlap(whole)
        at = 0
        parts = []
        for match in self._any.finditer(whole):
            if match.start() >= cut:
                break
            parts += [whole[at : match.start()], b"***"]
            at = match.end()
        end = max(at, cut)
        self._held = whole[end:]
        return b"".join((*parts, whole[at:end]))

    def end(self) -> bytes:
        """What was kept back: nothing follows."""
        held = self._held
        self._held = b""
        return self._any.sub(b"***", held) if self._any else held

    def _overlap(self, data: bytes) -> int:
        """Bytes at the end of `data` that are the beginning, not the whole, of a secret: the
        most."""
        for length in range(min(len(data), max(map(len, self._values)) - 1), 0, -1):
            tail = data[-length:]
            if any(len(value) > length and value.startswith(tail) for value in self._values):
                return length
        return 0
