"""Words of hydra's command line: `model.optim.lr=0.0006`, `+model.save_xser=True`, `~model.ub`.

Grammar: hydra 1.1 to 1.3, hydra/grammar/OverrideLexer.g4 and OverrideParser.g4 ("The Override
Grammar"), and OmegaConf's interpolations. Sweeps (`a,b`) and functions (`choice(..)`) are read by
no one here: a training has one value for each key.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from trainkit.engines.options import Value

# Tokens of VALUE_MODE in the lexer's order; the longest wins, the first of equally long ones.
_UNSIGNED = r"(?:0|[1-9](?:_?[0-9])*)"
# the alternatives of one number, the longest first: a regular expression takes the first that fits
_POINTS = rf"(?:(?:{_UNSIGNED})?\.[0-9](?:_?[0-9])*|{_UNSIGNED}\.)"
_EXPONENT = rf"(?:{_POINTS}|{_UNSIGNED})[eE][+-]?[0-9](?:_?[0-9])*"
_TOKENS = {
    name: re.compile(pattern, re.DOTALL)
    for name, pattern in {
        "(": r"[ \t]*\([ \t]*",
        ",": r"[ \t]*,[ \t]*",
        ")": r"[ \t]*\)",
        "[": r"\[[ \t]*",
        "]": r"[ \t]*\]",
        "{": r"\{[ \t]*",
        "}": r"[ \t]*\}",
        ":": r"[ \t]*:[ \t]*",
        "=": r"[ \t]*=[ \t]*",
        "float": rf"[+-]?(?:{_EXPONENT}|{_POINTS}|[Ii][Nn][Ff]|[Nn][Aa][Nn])",
        "int": rf"[+-]?{_UNSIGNED}",
        "bool": r"[Tt][Rr][Uu][Ee]|[Ff][Aa][Ll][Ss][Ee]",
        "null": r"[Nn][Uu][Ll][Ll]",
        "char": r"[/\-\\+.$%*@?|]",
        "id": r"[a-zA-Z_][a-zA-Z0-9_-]*",
        "escaped": r"(?:\\\\|\\[()\[\]{}:=, \t])+",
        "space": r"[ \t]+",
        "quoted": r"\"(?:(?:\\\\)*|.*?[^\\](?:\\\\)*)\"|'(?:(?:\\\\)*|.*?[^\\](?:\\\\)*)'",
        "interpolation": r"\$\{[^}]+\}",
    }.items()
}
_PLAIN = ("id", "null", "int", "float", "bool", "interpolation", "char", ":", "escaped", "space")
_PATH = r"[A-Za-z_$][\w$-]*(?:\.(?:[A-Za-z_$][\w$-]*|[0-9]+))*"
_OVERRIDE = re.compile(rf"(~|\+\+|\+|)({_PATH})(?:=(.*))?", re.DOTALL)
Prefix = Literal["", "+", "++", "~"]


@dataclass(frozen=True)
class Override:
    """One word of the command line.

    Args:
        path: the key with dots.
        value: what it becomes; for `~` what it must be.
        prefix: "" changes a key that is there, "+" adds one, "++" does either, "~" removes it.
    """

    path: str
    value: Value
    prefix: Prefix = ""

    def word(self) -> str:
        """As hydra reads it."""
        if self.prefix == "~" and self.value is None:
            return f"~{self.path}"
        return f"{self.prefix}{self.path}={hydra_value(self.value)}"


def hydra_value(value: Value) -> str:
    """A value as the right side of an override; a string stays that string, whatever is in it.

    Raises ValueError: it is of a kind that no override has, or a text that none can say.
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{_key(k)}:{hydra_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, Sequence):
        return "[" + ",".join(hydra_value(each) for each in value) + "]"
    raise ValueError(f"{value!r} cannot be a value of hydra's command line")


def no_interpolation(text: str) -> str:
    """`text` as OmegaConf holds it so that `${` in it is two characters and nothing else
    (OmegaConf, "Escaping interpolations")."""
    return re.sub(r"(\\*)\$\{", lambda found: f"{found[1] * 2}\\${{", text)


def _key(key: object) -> str:
    text = str(key)
    if not re.fullmatch(r"[A-Za-z_][\w-]*", text):
        raise ValueError(f"{text!r} cannot be a key of hydra's command line")
    return text


def _text(text: str) -> str:
    # of the characters that need no quotation those that hydra 1.1 knows too
    if re.fullmatch(r"[A-Za-z0-9_/.+@%*-]+", text) and read_value(text) == text:
        return text
    text = no_interpolation(text)
    # backslashes count only in front of a quotation mark, as that of the end
    inner = re.sub(r"(\\*)('|\Z)", _escape_quote, text)
    return f"'{inner}'"


def _escape_quote(found: re.Match[str]) -> str:
    return f"{found[1] * 2}\\'" if found[2] else found[1] * 2


def read_override(word: str) -> Override:
    """The inverse of `Override.word`. Raises ValueError for what is not an override."""
    found = _OVERRIDE.fullmatch(word)
    if found is None or (found[3] is None and found[1] != "~"):
        raise ValueError(f"{word!r} is not an override of hydra's: KEY=VALUE is one")
    prefix: Prefix = found[1]  # type: ignore[assignment]
    if found[3] is None:
        return Override(found[2], None, prefix)
    return Override(found[2], read_value(found[3].lstrip(" \t")), prefix)


def read_value(text: str) -> Value:
    """What hydra reads from the right side of an override. An interpolation stays as it is, a
    string. Raises ValueError for what its grammar has not, for sweeps and functions."""
    if not text:
        return ""
    reader = _Reader(text, _tokens(text))
    value = reader.element()
    if reader.tokens:
        raise reader.error()
    return value


def _tokens(text: str) -> list[tuple[str, str]]:
    found = []
    at = 0
    while at < len(text):
        best = ("", "")
        for name, pattern in _TOKENS.items():
            match = pattern.match(text, at)
            if match is not None and len(match[0]) > len(best[1]):
                best = (name, match[0])
        if not best[0]:
            raise ValueError(f"{text!r}: hydra reads no {text[at]!r} there; quote it")
        found.append(best)
        at += len(best[1])
    return found


class _Reader:
    """Reads the tokens of one value from left to right."""

    def __init__(self, text: str, tokens: list[tuple[str, str]]) -> None:
        self.text = text
        self.tokens = tokens

    def error(self) -> ValueError:
        return ValueError(f"{self.text!r} is no single value of hydra's command line")

    def element(self) -> Value:
        kind = self._next()
        if kind == "[":
            return self._list()
        if kind == "{":
            return self._table()
        if kind == "quoted":
            return _unquoted(self.tokens.pop(0)[1])
        return self._primitive(_PLAIN)

    def _next(self) -> str:
        if not self.tokens:
            raise self.error()
        return self.tokens[0][0]

    def _take(self, kind: str) -> None:
        if self._next() != kind:
            raise self.error()
        self.tokens.pop(0)

    def _list(self) -> list[Value]:
        self._take("[")
        found: list[Value] = []
        while self._next() != "]":
            if found:
                self._take(",")
            found.append(self.element())
        self._take("]")
        return found

    def _table(self) -> dict[Value, Value]:
        self._take("{")
        found: dict[Value, Value] = {}
        while self._next() != "}":
            if found:
                self._take(",")
            key = self._primitive([kind for kind in _PLAIN if kind not in (":", "interpolation")])
            self._take(":")
            found[key] = self.element()
        self._take("}")
        return found

    def _primitive(self, kinds: Sequence[str]) -> Value:
        parts = []
        while self.tokens and self.tokens[0][0] in kinds:
            parts.append(self.tokens.pop(0))
        if parts and parts[0][0] == "space":
            parts.pop(0)
        if parts and parts[-1][0] == "space":
            parts.pop()
        if not parts:
            raise self.error()
        if len(parts) == 1:
            return _single(*parts[0])
        return "".join(text[1::2] if kind == "escaped" else text for kind, text in parts)


def _single(kind: str, text: str) -> Value:
    if kind == "int":
        return int(text)
    if kind == "float":
        return float(text)
    if kind == "bool":
        return text.lower() == "true"
    if kind == "null":
        return None
    if kind == "escaped":
        return text[1::2]
    return text


def _unquoted(text: str) -> str:
    """The inverse of the quotation: a backslash counts only in front of a quotation mark."""
    mark = text[0]
    # with the mark of the end, whose backslashes count too
    inner = re.sub(rf"\\+{mark}", lambda found: found[0][1::2], text[1:])
    return inner if text[1:-1].endswith("\\") else inner[:-1]
