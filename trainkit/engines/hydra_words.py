"""Words of hydra's command line: `model.optim.lr=0.0006`, `+model.save_xser=True`, `~model.ub`.

Grammar: hydra 1.1 to 1.3, hydra/grammar/OverrideLexer.g4 and OverrideParser.g4 ("The Override
Grammar"). To write needs nothing, to read hydra's own parser. Sweeps (`a,b`) and functions
(`choice(..)`) are read by no one here: a training has one value for each key.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal

from trainkit.base.extras import MissingExtra
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.engines.options import Value

# what hydra reads as another kind where it is not quoted: a number, a bool, null
_DIGITS = r"[0-9](?:_?[0-9])*"
_WHOLE = r"(?:0|[1-9](?:_?[0-9])*)"
_NO_TEXT = re.compile(
    rf"[+-]?(?:(?:{_WHOLE}\.?|{_WHOLE}?\.{_DIGITS})(?:e[+-]?{_DIGITS})?|inf|nan)|true|false|null",
    re.IGNORECASE,
)
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
    if re.fullmatch(r"[A-Za-z0-9_/.+@%*-]+", text) and not _NO_TEXT.fullmatch(text):
        return text
    text = no_interpolation(text)
    # backslashes count only in front of a quotation mark, as that of the end
    inner = re.sub(r"(\\*)('|\Z)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), text)
    return f"'{inner}'"


def read_override(word: str) -> Override:
    """The inverse of `Override.word`, by hydra's own parser. An interpolation stays as it is, a
    string.

    Raises ValueError for what its grammar has not, for groups of files, sweeps and functions;
    MissingExtra without hydra-core.
    """
    try:
        from hydra._internal.grammar.functions import Functions
        from hydra.core.override_parser.overrides_parser import OverridesParser
        from hydra.core.override_parser.types import Sweep
        from hydra.errors import HydraException
    except ImportError:
        raise no_hydra() from None
    try:
        found = OverridesParser(Functions()).parse_override(word)  # no function is known to it
    except HydraException as error:
        why = str(error).partition("\n")[0]
        raise ValueError(f"{word!r} is not an override of hydra's, KEY=VALUE: {why}") from None
    except RecursionError:
        raise ValueError(f"an override of hydra's is too deep: {word[:40]!r}") from None
    key, value = found.key_or_group, found.value()
    if not key or "/" in key or found.package is not None:
        raise ValueError(f"{word!r} is not an override of hydra's: KEY=VALUE is one")
    if isinstance(value, Sweep):
        raise ValueError(f"{word!r} is a sweep of hydra's, no single value")
    prefix: Prefix = word[: len(word) - len(word.lstrip("+~"))]  # type: ignore[assignment]
    return Override(key, value, prefix)


def no_hydra() -> MissingExtra:
    """The error where configurations of hydra are to be read without its libraries."""
    return MissingExtra(
        "configurations of hydra are read by hydra-core and omegaconf, which are not installed",
        "hydra",
    )
