"""Keeps secret values out of logs and records, wherever they come from."""

from __future__ import annotations

from collections.abc import Iterable

SHORTEST = 6  # shorter values would blot out ordinary words


class Redactor:
    """Replaces every occurrence of the given values by ***."""

    def __init__(self, values: Iterable[str]) -> None:
        self._values = sorted({v.encode() for v in values if len(v) >= SHORTEST}, key=len, reverse=True)

    def bytes(self, data: bytes) -> bytes:
        for value in self._values:
            data = data.replace(value, b"***")
        return data

    def text(self, text: str) -> str:
        return self.bytes(text.encode("utf-8", "surrogateescape")).decode("utf-8", "surrogateescape")
