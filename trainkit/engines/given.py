"""What another engine's files say, while it becomes a job."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress

from trainkit.base.errors import ConfigError
from trainkit.base.lazy_dataclasses import dataclass, field

LARGEST = 2**62  # of a whole number


def number_of(key: str, found: object) -> float:
    """A value that is to be a finite number. Raises ConfigError for anything else."""
    with suppress(ValueError):
        if math.isfinite(number := float(str(found))):
            return number
    raise ConfigError(f"{key} = {found!r}: a number is needed here")


@dataclass
class Given:
    """The values of the files, and what is taken out of them.

    Args:
        given: values by their names that nobody has taken yet.
        defaults: what the engine takes by itself where its files are silent.
        engine_args: what stays in the engine's own words.
        left: what has no place in a job, a line each.
    """

    given: dict[str, object]
    defaults: Mapping[str, object]
    engine_args: dict[str, object] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)

    def peek(self, key: str) -> object:
        """The value of an option, without taking it."""
        return self.given.get(key, self.defaults.get(key))

    def take(self, key: str) -> object:
        """The value of an option, which then is no longer there."""
        found = self.peek(key)
        self.given.pop(key, None)
        return found

    def drop(self, key: str) -> None:
        """Take an option that says nothing of its own."""
        self.given.pop(key, None)

    def drop_implied(self, key: str, value: object) -> None:
        """Take an option that says what follows from others, where it does."""
        if self.given.get(key) == value:
            del self.given[key]

    def whole(self, key: str, least: int | None = None) -> int | None:
        """Take a whole number, one of at least `least` where that is given. Raises ConfigError
        for anything else."""
        found = self.take(key)
        if found is None and least is None:
            return None
        if isinstance(found, float) and found.is_integer():
            found = int(found)
        if isinstance(found, bool) or not isinstance(found, int) or abs(found) >= LARGEST:
            raise ConfigError(f"{key} = {found!r}: a whole number is needed here")
        if least is not None and found < least:
            raise ConfigError(f"{key} = {found}: it is {least} at least")
        return found

    def count(self, key: str) -> int:
        """Take a number from 1. Raises ConfigError for anything else."""
        return self.whole(key, 1) or 1

    def number(self, key: str) -> float | None:
        """Take a number; YAML 1.1 reads 1e-8 as a text. Raises ConfigError for anything else."""
        found = self.take(key)
        return None if found is None else number_of(key, found)

    def flag(self, key: str) -> bool:
        """Take true or false; null is false. Raises ConfigError for anything else."""
        found = self.take(key)
        if found in (None, True, False):
            return bool(found)
        raise ConfigError(f"{key} = {found!r}: true or false is needed here")

    def table(self, key: str) -> dict[str, object] | None:
        """Take a table, as a copy. Raises ConfigError for anything else."""
        found = self.take(key)
        if found is None or isinstance(found, Mapping):
            return None if found is None else dict(found)
        raise ConfigError(f"{key} = {found!r}: a table is needed here")

    def leave(self, key: str, value: object, why: str) -> None:
        """Note that a value is not taken."""
        self.left.append(f"{key} = {value!r}: {why}")
