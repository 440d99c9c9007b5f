"""Whether the version of a package is one that a requirement line allows, with the standard library
of Python 3.8 alone.

Of PEP 440 what such lines use: release numbers and the operators ==, !=, >=, <=, <, >, ~= and
`==1.2.*`. Parts after the release (rc1, .post1, +cpu) are not compared.
"""

from __future__ import annotations

import re
from typing import Tuple

_RELEASE = re.compile(r"\s*v?(\d+(?:\.\d+)*)")
_NAME = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[^\]]*\])?")
_BOUND = re.compile(r"(===|==|!=|>=|<=|~=|<|>)\s*([\w.*+!-]+)")

Release = Tuple[int, ...]


def bounded_package(line: str) -> str | None:
    """The package of a requirement line that says which versions; None for any other line."""
    name = _NAME.match(line)
    if name is None or "@" in line or not _BOUND.match(line[name.end() :].strip()):
        return None
    return name[1]


def allows(line: str, version: str) -> bool:
    """Whether a requirement line allows a version; True where one of them cannot be read."""
    there = _release(version)
    bounds = _BOUND.findall(line.partition(";")[0])
    return there is None or all(_allowed(there, operator, asked) for operator, asked in bounds)


def _release(text: str) -> Release | None:
    found = _RELEASE.match(text)
    if found is None:
        return None
    return tuple(int(part) for part in found[1].split("."))


def _allowed(there: Release, operator: str, asked: str) -> bool:
    bound = _release(asked)
    if bound is None:
        return True
    if operator == "~=":  # >= bound, and the same but for the last number (PEP 440)
        return _order(there, bound) >= 0 and there[: len(bound) - 1] == bound[:-1]
    if asked.endswith(".*"):
        return (there[: len(bound)] == bound) == (operator != "!=")
    order = _order(there, bound)
    return {
        "===": order == 0,
        "==": order == 0,
        "!=": order != 0,
        ">=": order >= 0,
        "<=": order <= 0,
        "<": order < 0,
        ">": order > 0,
    }[operator]


def _order(one: Release, other: Release) -> int:
    """-1, 0 or 1; 1.2 and 1.2.0 are the same."""
    longest = max(len(one), len(other))
    padded = [each + (0,) * (longest - len(each)) for each in (one, other)]
    return (padded[0] > padded[1]) - (padded[0] < padded[1])
