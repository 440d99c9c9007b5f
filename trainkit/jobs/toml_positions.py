"""Where things stand in a TOML document. tomli gives values without positions; this gives
positions without values."""

from __future__ import annotations

import bisect
import contextlib
import re
from typing import Any, NamedTuple

import tomli

from trainkit.base.errors import ConfigError, Problem, SourceLocation

KeyPath = tuple[str | int, ...]


class TomlPosition(NamedTuple):
    """Line and column, both from 1."""

    line: int
    column: int


def parse(text: str, file: str) -> tuple[dict[str, Any], dict[KeyPath, TomlPosition]]:
    """The values of a TOML document and the spot of every key, table and array element in it.

    Args:
        text: the document.
        file: its name, for errors.

    Raises ConfigError with the line where the document is not TOML.
    """
    try:
        return tomli.loads(text), locate(text)
    except tomli.TOMLDecodeError as error:
        problem = _explained(text, error, file)
    except RecursionError:
        problem = Problem("arrays or tables are nested too deeply", SourceLocation(file))
    raise ConfigError([problem])


def _explained(text: str, error: tomli.TOMLDecodeError, file: str) -> Problem:
    """A TOML error in words that help: what is twice and where it was first, and how TOML writes
    a value."""
    here = SourceLocation(file, error.lineno)
    if error.msg.startswith(("Cannot overwrite", "Cannot declare", "Cannot mutate", "Duplicate")):
        text = text.replace("\r\n", "\n")
        end = text.find("\n", error.pos)
        if (twice := _Scanner(text if end < 0 else text[:end]).twice()) is not None:
            path, first = twice
            name = ".".join(map(str, path))
            return Problem(
                f"not TOML: {name} is given twice, first in line {first.line}",
                here,
                "keep one of the two",
            )
        return Problem(f"not TOML: {error.msg}", here, "a key or table can be given once only")
    said = f"not TOML: {error.msg} (column {error.colno})"
    word = (re.compile(r"[^\s,\]}#]*").match(text, error.pos) or [""])[0]
    if error.msg != "Invalid value":
        return Problem(said, here)
    if word.lower() in ("true", "false"):
        return Problem(f"{said}: {word}", here, f"TOML writes it in lower case: {word.lower()}")
    if word.lower() in ("none", "null", "nil"):
        return Problem(f"{said}: {word}", here, "TOML has no such value: leave the key out")
    if re.fullmatch(r"[+-]?\.\d+.*", word):
        return Problem(
            f"{said}: {word}",
            here,
            f"TOML wants a digit before the point: {word.replace('.', '0.', 1)}",
        )
    return Problem(
        f"{said}: {word}",
        here,
        f'a string needs quotes: "{word}"' if word and '"' not in word and "'" not in word else "",
    )


def locate(text: str) -> dict[KeyPath, TomlPosition]:
    """Map each key path of a valid document to where its key (of an array element: its value)
    begins.

    A table has the spot of its own header, or of its first mention where it has none.
    """
    return _Scanner(text.replace("\r\n", "\n")).document()


_SPACE = re.compile(r"[ \t]*")
_BLANK = re.compile(r"(?:[ \t\n]|#[^\n]*)*")
_KEY = re.compile(r"""[A-Za-z0-9_-]+|"(?:[^"\\]|\\.)*"|'[^']*'""")
_SCALAR = re.compile(
    r'''"""(?:[^\\]|\\.)*?""""{0,2}'''  # a multi-line string may end in up to two quotes of its own
    r"""|'''.*?''''{0,2}"""
    r'''|"(?:[^"\\]|\\.)*"'''
    r"""|'[^']*'"""
    r"""|\d{4}-\d\d-\d\d[ ]\d[^\s,\]}#]*"""  # a date and its time may be parted by a space
    r"""|[^\s,\]}#]+""",
    re.DOTALL,
)


class _Scanner:
    """One pass over a document that tomli has accepted; so nothing is checked twice."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.newlines = [match.start() for match in re.finditer("\n", text)]
        self.spots: dict[KeyPath, TomlPosition] = {}
        self.elements: dict[KeyPath, int] = {}  # the newest element of each array of tables
        self.headers: set[KeyPath] = set()
        self.last_twice: tuple[KeyPath, TomlPosition] | None = None

    def twice(self) -> tuple[KeyPath, TomlPosition] | None:
        """What the document gives a second time, and where it is first; None where that cannot
        be said. For text that ends with that second time."""
        with contextlib.suppress(IndexError, AssertionError):
            self.document()
        return self.last_twice

    def document(self) -> dict[KeyPath, TomlPosition]:
        table: KeyPath = ()
        while self._skip(_BLANK) < len(self.text):
            if self.text[self.at] == "[":
                table = self._header()
            else:
                self._pair(table)
        return self.spots

    def _skip(self, pattern: re.Pattern[str]) -> int:
        self.at = self._match(pattern).end()
        return self.at

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str]:
        match = pattern.match(self.text, self.at)
        assert match, f"the locator lost its way at offset {self.at}"
        return match

    def _spot(self, offset: int) -> TomlPosition:
        before = bisect.bisect_left(self.newlines, offset)
        return TomlPosition(before + 1, offset - (self.newlines[before - 1] if before else -1))

    def _key(self) -> list[tuple[str, int]]:
        """The parts of a dotted key, each with its offset."""
        parts = []
        while True:
            start = self._skip(_SPACE)
            part = self._match(_KEY).group()
            self.at += len(part)
            parts.append((_unquote(part), start))
            self._skip(_SPACE)
            if not self.text.startswith(".", self.at):
                return parts
            self.at += 1

    def _header(self) -> KeyPath:
        """[a.b] or [[a.b]]: returns the path that the keys below it have."""
        start = self.at
        double = self.text.startswith("[[", self.at)
        self.at += 2 if double else 1
        parts = self._key()
        self.at += 2 if double else 1
        path: KeyPath = ()
        for name, offset in parts[:-1]:
            path = self._enter(path, name, offset)
        name, offset = parts[-1]
        if double:
            self.spots.setdefault((*path, name), self._spot(offset))
            number = self.elements.get((*path, name), -1) + 1
            self.elements[(*path, name)] = number
            path = (*path, name, number)
            self.spots[path] = self._spot(start)
        else:
            path = (*path, name)
            if path in self.headers:
                self.last_twice = path, self.spots[path]
            self.headers.add(path)
            self.spots[path] = self._spot(offset)
        return path

    def _enter(self, path: KeyPath, name: str, offset: int) -> KeyPath:
        """The path of a table that is passed through; of an array of tables, its newest element."""
        path = (*path, name)
        self.spots.setdefault(path, self._spot(offset))
        return (*path, self.elements[path]) if path in self.elements else path

    def _pair(self, path: KeyPath) -> None:
        known = False
        for name, offset in self._key():
            path = (*path, name)
            known = path in self.spots
            self.spots.setdefault(path, self._spot(offset))
        if known:
            self.last_twice = path, self.spots[path]
        self.at += 1  # the equals sign
        self._skip(_SPACE)
        self._value(path)

    def _value(self, path: KeyPath) -> None:
        opening = self.text[self.at]
        if opening not in "[{":
            self._skip(_SCALAR)
            return
        self.at += 1
        number = 0
        while self.text[self._skip(_BLANK)] not in "]}":
            if self.text[self.at] == ",":
                self.at += 1
            elif opening == "{":
                self._pair(path)
            else:
                self.spots[(*path, number)] = self._spot(self.at)
                self._value((*path, number))
                number += 1
        self.at += 1


def _unquote(part: str) -> str:
    if part[0] == '"':
        return str(tomli.loads(f"key = {part}")["key"])
    return part.strip("'")
