"""Numbers and lines as programs print them."""

from __future__ import annotations

import re

# Colours and cursor movements: ECMA-48, 5.4 (control sequences) and the two-character escapes.
ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[@-Z\\-_])")
# "1.098158E+01", "-3", "nan", "inf": what printf and Python's format give in the C locale.
_FLOAT = re.compile(
    r"[+-]?(?:[0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?|nan|inf|infinity)", re.IGNORECASE
)
_WHOLE = re.compile(r"([0-9]{1,18})(?:\.0)?")


def plain(text: str) -> str:
    """`text` without colours; of a line that was overwritten, what stayed."""
    return ESCAPES.sub("", text).rstrip("\r\n").rsplit("\r", 1)[-1]


def to_float(text: str | None) -> float | None:
    """The number, or None if `text` is none: digits of other scripts, decimal commas and group
    separators are not guessed at."""
    if text is None or not _FLOAT.fullmatch(text.strip()):
        return None
    return float(text)


def to_whole(text: str | None) -> int | None:
    """The whole number from 0, or None if `text` is none. "3.0" counts."""
    if text is None:
        return None
    found = _WHOLE.fullmatch(text.strip())
    return None if found is None else int(found.group(1))


def fields(text: str) -> dict[str, str]:
    """The `name: value |` of a line by name. What no `|` closes was cut off and may be half a
    number: it is left out."""
    found: dict[str, str] = {}
    for part in text.split("|")[:-1]:
        name, colon, value = part.partition(":")
        if colon:
            found.setdefault(name.strip(), value.strip())
    return found
