"""The rehearsal of a job: every check, in an order in which the first failure says most, and what
was found."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Literal

from trainkit.base.documents import document
from trainkit.base.errors import ConfigError, Exit, TrainkitError
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.experiment.options import RehearseOptions
from trainkit.jobs.load import Jobs
from trainkit.rehearse import place_checks
from trainkit.rehearse.rank_checks import checks_of_ranks
from trainkit.rehearse.scene import Check, NotLookedAt, RehearsalScene, scene_of

State = Literal["held", "failed", "not looked at"]
OF_THE_PLACE: tuple[tuple[str, Check], ...] = (
    ("plan", place_checks.check_plan),
    ("engine", place_checks.check_launchable),
    ("hosts", place_checks.check_hosts),
    ("programs", place_checks.check_programs),
    ("secrets", place_checks.check_secrets),
    ("container", place_checks.check_mounts),
    ("root", place_checks.check_root),
    ("disk", place_checks.check_disk),
    ("stages", place_checks.check_stages),
    ("engine's parser", place_checks.check_parser),
)


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


def rehearse(jobs: Jobs, name: str, options: RehearseOptions) -> RehearsalReport:
    """Look at a job from end to end. Nothing is written but a temporary folder.

    Args:
        jobs: those of a jobs.toml.
        name: which of them.
        options: how it would be started.
    """
    began = time.perf_counter()
    checks = list(_checks(jobs, name, options))
    return RehearsalReport(name, checks, time.perf_counter() - began)


def _checks(jobs: Jobs, name: str, options: RehearseOptions) -> Iterator[RehearsedCheck]:
    began = time.perf_counter()
    try:
        scene = scene_of(jobs, name, options)
    except TrainkitError as error:
        yield from _failed("job", error, began)
        return
    right = f"all keys of job {name} are right"
    yield RehearsedCheck("job", "held", right, seconds=time.perf_counter() - began)
    with checks_of_ranks(scene) as of_ranks:  # traced beside all that follows
        for title, check in OF_THE_PLACE:
            yield from _made(title, check, scene)
        from trainkit.rehearse import data_checks  # torch: a second, beside the ranks' process

        for title, check in (*data_checks.OF_THE_DATA, *of_ranks.checks):
            yield from _made(title, check, scene)


def _made(name: str, check: Check, scene: RehearsalScene) -> Iterator[RehearsedCheck]:
    """What became of one check."""
    began = time.perf_counter()
    try:
        state: State = "held"
        message = check(scene)
    except NotLookedAt as why:
        state = "not looked at"
        message = str(why)
    except TrainkitError as error:
        yield from _failed(name, error, began)
        return
    except OSError as error:
        broken = ConfigError(f"{error.strerror or error}: {error.filename or name}")
        yield from _failed(name, broken, began)
        return
    yield RehearsedCheck(name, state, message, seconds=time.perf_counter() - began)


def _failed(name: str, error: TrainkitError, began: float) -> Iterator[RehearsedCheck]:
    """A check for every problem of an error."""
    seconds = time.perf_counter() - began
    for problem in error.list:
        place = str(problem.place or "")
        yield RehearsedCheck(
            name, "failed", problem.message, problem.hint, place, error.exit, seconds
        )
