"""Numbers and lines as programs print them."""

from __future__ import annotations

import re

# Colours and cursor movements: ECMA-48, 5.4 (control sequences) and the two-character escapes.
ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[@-Z\\-_])")
# "1.098158E+01", "-3", "nan", "inf": what printf and Python's format give in the C locale.
_FLOAT = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|nan|inf|infinity)", re.I)
_WHOLE = re.compile(r"[0-9]{1,18}")


def plain(text: str) -> str:
    """`text` without colours; of a line that was overwritten, what stayed."""
    return ESCAPES.sub("", text).rstrip("\r\n").rsplit("\r", 1)[-1]


def to_float(text: str) -> float | None:
    """The number, or None if `text` is none: digits of other scripts, decimal commas and group
    separators are not guessed at."""
    text = text.strip()
    if not _FLOAT.fullmatch(text):
        return None
    return float(text)


def to_whole(text: str) -> int | None:
    """The whole number from 0, or None if `text` is none. A whole float ("3.0") counts."""
    text = text.strip()
    if text.endswith(".0"):
        text = text[:-2]
    if not _WHOLE.fullmatch(text):
        return None
    return int(text)
