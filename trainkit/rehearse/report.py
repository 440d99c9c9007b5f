"""What a rehearsal found, check by check."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from trainkit.base.documents import document
from trainkit.base.errors import Exit, TrainkitError

State = Literal["held", "failed", "not looked at"]


class NotLookedAt(Exception):
    """Raised by a check that cannot be made here; its text says why."""


@dataclass(frozen=True)
class RehearsedCheck:
    """One check.

    Args:
        name: "hosts", "collectives", ...
        state: how it went.
        message: what held, what failed, or why it was not looked at.
        hint: the way out of a failure.
        place: file and line that a failure is about; "" for none.
        exit: the code of the failure; DONE of all others.
        seconds: it took.
    """

    name: str
    state: State
    message: str
    hint: str = ""
    place: str = ""
    exit: Exit = Exit.DONE
    seconds: float = 0.0

    def to_json(self) -> dict[str, object]:
        return {**vars(self), "exit": int(self.exit), "seconds": round(self.seconds, 3)}


def failed_checks(name: str, error: TrainkitError, seconds: float) -> Iterator[RehearsedCheck]:
    """A check for every problem of an error."""
    for problem in error.problems():
        place = str(problem["file"] or "")
        if problem["line"]:
            place += f":{problem['line']}"
        yield RehearsedCheck(
            name,
            "failed",
            str(problem["message"]),
            str(problem["hint"] or ""),
            place,
            error.exit,
            seconds,
        )


@dataclass(frozen=True)
class RehearsalReport:
    """All checks of a job, in order.

    Args:
        job: its name.
        checks: what was found.
        seconds: the whole rehearsal took.
    """

    job: str
    checks: Sequence[RehearsedCheck]
    seconds: float

    @property
    def exit(self) -> Exit:
        """The code of the first failure; without any, NOT_KNOWN where something was not looked
        at."""
        failed = next((each.exit for each in self.checks if each.state == "failed"), None)
        return failed or (Exit.NOT_KNOWN if self.not_known else Exit.DONE)

    @property
    def not_known(self) -> list[str]:
        """The checks that could not be made."""
        return [each.name for each in self.checks if each.state == "not looked at"]

    def count(self, state: State) -> int:
        """How many checks ended so."""
        return sum(each.state == state for each in self.checks)

    def to_json(self) -> dict[str, object]:
        """The document rehearsal/1."""
        return document(
            "rehearsal/1",
            job=self.job,
            exit=int(self.exit),
            seconds=round(self.seconds, 3),
            held=self.count("held"),
            failed=self.count("failed"),
            not_looked_at=self.count("not looked at"),
            not_known=self.not_known,
            checks=[each.to_json() for each in self.checks],
        )
