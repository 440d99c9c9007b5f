"""Errors that carry their exit code. Every one names the value, the place and the way out."""

from __future__ import annotations

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
        if self.line:
            return f"{self.file}:{self.line}"
        return self.file


class TrainkitError(Exception):
    """An error the user can act on: printed without a traceback, ends the task with `exit`.

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

    def problems(self) -> list[dict[str, object]]:
        """The error as data, for `--json`."""
        return [{"message": self.message, "hint": self.hint, **_place_keys(self.place)}]

    def __str__(self) -> str:
        text = f"{self.place}: {self.message}" if self.place else self.message
        if self.hint:
            return f"{text}\n  {self.hint}"
        return text


@dataclass(frozen=True)
class Problem:
    """One of several things wrong with a configuration."""

    message: str
    place: SourceLocation | None = None
    hint: str = ""

    def __str__(self) -> str:
        text = f"{self.place}: {self.message}" if self.place else self.message
        if self.hint:
            return f"{text}\n  {self.hint}"
        return text


class ConfigError(TrainkitError):
    """Everything wrong with a jobs.toml, an override or a file of data, all at once (exit 3
    by default)."""

    def __init__(
        self, problems: list[Problem] | str, *, exit: Exit = Exit.CONFIG, hint: str = ""
    ) -> None:
        if isinstance(problems, str):
            self.list = [Problem(problems, hint=hint)]
        else:
            self.list = list(problems)
        super().__init__("\n".join(str(p) for p in self.list), exit=exit)

    def problems(self) -> list[dict[str, object]]:
        return [{"message": p.message, "hint": p.hint, **_place_keys(p.place)} for p in self.list]


def _place_keys(place: SourceLocation | None) -> dict[str, object]:
    return {"file": place.file if place else None, "line": place.line if place else None}
