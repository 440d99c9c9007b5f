"""Text of others for a terminal: what a program printed may hold commands to the terminal that
shows it."""

from __future__ import annotations

import re

_COLOURS = re.compile(r"\x1b\[[0-9;:]*m")
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    r"""The text without colours, and with every other control character but tab and newline
    written out, such as \x1b."""
    return _CONTROLS.sub(
        lambda match: f"\\x{ord(match[0]):02x}", _COLOURS.sub("", text.replace("\r\n", "\n"))
    )
