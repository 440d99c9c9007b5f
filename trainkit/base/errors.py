"""Errors that carry their exit code. Every one names the value, the place and the way out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum


class Exit(IntEnum):
    """trainkit's exit codes. 1 stays Invoke's own usage error."""

    DONE = 0
    USAGE = 1
    BUG = 2
    CONFIG = 3
    PLAN = 4
    STAGE_STALE = 5
    STAGE_FAILED = 6
    HEALTH = 7
    START = 8
    RANK_USER = 9
    RANK_INFRA = 10
    HANG = 11
    PREEMPTED = 12
    CONTACT_LOST = 13
    NO_PROGRESS = 14
    CANCELLED = 15
    NO_CHECKPOINT = 16
    HOSTS_BUSY = 17
    NOT_KNOWN = 18
    INTERRUPTED = 130


@dataclass(frozen=True, order=True)
class SourceLocation:
    """Where a value was written. `line` counts from 1; 0 means the whole file."""

    file: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file


@dataclass(frozen=True)
class Problem:
    """One of several things wrong with a configuration."""

    message: str
    place: SourceLocation | None = None
    hint: str = ""

    def __str__(self) -> str:
        text = f"{self.place}: {self.message}" if self.place else self.message
        return f"{text}\n  {self.hint}" if self.hint else text

    def to_json(self) -> dict[str, object]:
        """For `--json`; `line` is null where the whole file is meant."""
        file, line = (self.place.file, self.place.line or None) if self.place else (None, None)
        return {"message": self.message, "hint": self.hint, "file": file, "line": line}


class TrainkitError(Exception):
    """An error the user can act on: printed without a traceback, ends the task with `exit`.

    Its `list` has everything that is wrong, one problem but for a ConfigError.

    Args:
        message: what is wrong, with the value in it.
        exit: the process's exit code.
        hint: the way out, on a line of its own.
        place: file and line the message is about.
    """

    def __init__(
        self, message: str, *, exit: Exit, hint: str = "", place: SourceLocation | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.exit = exit
        self.hint = hint
        self.place = place
        self.list = [Problem(message, place, hint)]

    def problems(self) -> list[dict[str, object]]:
        """The error as data, for `--json`."""
        return [problem.to_json() for problem in self.list]

    def __str__(self) -> str:
        return "\n".join(map(str, self.list))


class ConfigError(TrainkitError):
    """Everything wrong with a jobs.toml, an override or a file of data, all at once (exit 3
    by default)."""

    def __init__(
        self, problems: list[Problem] | str, *, exit: Exit = Exit.CONFIG, hint: str = ""
    ) -> None:
        found = [Problem(problems, hint=hint)] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(map(str, found)), exit=exit)
        self.list = found


def raise_problems(problems: Iterable[Problem], exit: Exit = Exit.CONFIG) -> None:
    """Raise ConfigError with everything that checks have found; nothing where that is nothing."""
    if found := list(problems):
        raise ConfigError(found, exit=exit)
