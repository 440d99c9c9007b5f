"""Keeps secret values out of logs and records, wherever they come from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

SHORTEST = 6  # characters; shorter values would blot out ordinary words


class Redactor:
    """Replaces every occurrence of the given values by ***; of a value with several lines, every line too: logs are read by lines."""

    def __init__(self, values: Iterable[str]) -> None:
        parts = {part for value in values for part in (value, *value.splitlines()) if len(part) >= SHORTEST}
        self._values = sorted((part.encode("utf-8", "surrogateescape") for part in parts), key=len, reverse=True)

    def bytes(self, data: bytes) -> bytes:
        for value in self._values:
            data = data.replace(value, b"***")
        return data

    def text(self, text: str) -> str:
        return self.bytes(text.encode("utf-8", "surrogateescape")).decode("utf-8", "surrogateescape")

    def value(self, value: Any) -> Any:
        """A JSON value with every text in it redacted."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self.value(item) for item in value]
        return {key: self.value(item) for key, item in value.items()} if isinstance(value, dict) else value
