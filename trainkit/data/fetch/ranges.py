"""{00..29} in an address or a path stands for every number of the range, as in a shell's brace
expansion."""

from __future__ import annotations

import re

from trainkit.base.errors import ConfigError

_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}", re.ASCII)
MOST = 10_000_000  # texts that one pattern may stand for


def expand(pattern: str) -> list[str]:
    """Every text that `pattern` stands for, in order; the last range counts fastest. Numbers
    have the digits of the wider bound if one begins with 0.

    Raises ConfigError: a range that runs backwards, or more than MOST texts.
    """
    found = _RANGE.search(pattern)
    if found is None:
        return [pattern]
    low, high = found.groups()
    if int(low) > int(high):
        raise ConfigError(
            f"the range {found.group()} of {pattern!r} runs backwards",
            hint=f"write {{{high}..{low}}}",
        )
    count = int(high) - int(low) + 1
    rest = expand(pattern[found.end() :])
    if count * len(rest) > MOST:
        raise ConfigError(f"{pattern!r} stands for {count * len(rest):,} texts, more than {MOST:,}")
    padded = any(len(bound) > 1 and bound.startswith("0") for bound in (low, high))
    width = max(len(low), len(high)) if padded else 0
    return [
        f"{pattern[: found.start()]}{number:0{width}d}{end}"
        for number in range(int(low), int(high) + 1)
        for end in rest
    ]
