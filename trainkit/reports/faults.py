"""What each fault of a run cost, from the moment it happened until its steps were made again: a
bill of stages that follow each other without a gap, so that they sum to the time that was lost.

Like the ledger it knows only what was written when it happened. docs/reports.md says what counts as
what.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Literal, get_args

from trainkit.base.lazy_dataclasses import dataclass
from trainkit.reports.ledger import STEPS, WORK, AttemptTimes, RunTimes
from trainkit.reports.words import duration

Stage = Literal["detection", "end", "start", "imports", "load", "repeat"]
STAGES: tuple[Stage, ...] = get_args(Stage)
HEADINGS = (
    "attempt",
    "fault",
    *STAGES,
    "seconds",
    "steps lost",
    "went on from",
)
REPEATED = ("compile", "again")


@dataclass(frozen=True)
class FaultCost:
    """The bill of one fault.

    Args:
        attempt: the attempt that failed; the next one went on.
        what: why, in words.
        failure_class: infra, hang and so on.
        time: when it happened, seconds since 1970 by the supervisor's clock.
        seconds: by stage.
        steps_lost: steps that had been made and were not kept; None: training has not gone on.
        source: what training went on from: disk, memory, or a partner's memory.
        step: of that state; None as well.
    """

    attempt: int
    what: str
    failure_class: str
    time: float
    seconds: dict[Stage, float]
    steps_lost: int | None
    source: str
    step: int | None

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @property
    def reached(self) -> int:
        """The furthest step that the attempt had made, where training has gone on."""
        return (self.step or 0) + (self.steps_lost or 0)

    @property
    def cells(self) -> list[str]:
        """As `HEADINGS`."""
        stages = [f"{self.seconds[stage]:.2f}" for stage in STAGES]
        lost = "n/a"
        origin = "not yet"
        if self.step is not None:
            lost = str(self.steps_lost)
            origin = f"{self.source}, step {self.step}"
        return [str(self.attempt), self.what, *stages, f"{self.total:.2f}", lost, origin]

    def to_json(self) -> dict[str, object]:
        """An entry of the key `faults` of report/1 and why/1."""
        return {**vars(self), "total_seconds": self.total}


def build_faults(times: RunTimes) -> list[FaultCost]:
    """One for each failed attempt that another followed."""
    return [
        _cost(attempt, following)
        for attempt, following in itertools.pairwise(times.attempts)
        if attempt.fault is not None
    ]


def _cost(attempt: AttemptTimes, following: AttemptTimes) -> FaultCost:
    fault = attempt.fault
    assert fault is not None
    limit = following.fault.time if following.fault is not None else following.ended
    marks = [fault.known, attempt.ended, *_marks(following)]
    seconds: dict[Stage, float] = {}
    before = fault.time
    for number, stage in enumerate(STAGES):
        mark = marks[number]
        if mark is None:  # it was not written, or never came
            mark = before if any(marks[number:]) else limit
        at = max(before, min(mark, limit))
        seconds[stage] = at - before
        before = at
    resumed = following.resumed_at
    lost = None
    if resumed is not None:
        lost = max(0, _reached(attempt, following) - resumed)
    what = (fault.what.splitlines() or [""])[0]
    return FaultCost(
        attempt.number,
        what,
        fault.failure_class,
        fault.time,
        seconds,
        lost,
        following.source,
        resumed,
    )


def _marks(attempt: AttemptTimes) -> list[float | None]:
    """When its ranks ran, began to load, began their first work, and were where those before had
    been."""
    if not attempt.phases:
        return [attempt.go] * 4
    load = next((each.time for each in attempt.phases if each.phase == "load"), None)
    work = next((each.time for each in attempt.phases if each.phase in WORK), None)
    repeats = [i for i, each in enumerate(attempt.phases) if each.phase in REPEATED]
    after = attempt.phases[repeats[-1] + 1 :] if repeats else ()
    if repeats:
        return [attempt.go, load, work, after[0].time if after else None]
    return [attempt.go, load, work, work]


def _reached(attempt: AttemptTimes, following: AttemptTimes) -> int:
    """The furthest step of an attempt that failed. Its heartbeats may be some steps behind; rank 0
    of the following one knew it, unless another attempt before had come further."""
    assert attempt.fault is not None
    known = [attempt.fault.step, attempt.sign[1], *(each.step for each in attempt.phases)]
    steps = [each.phase for each in attempt.phases if each.phase in STEPS]
    repeats = [i for i, each in enumerate(following.phases) if each.phase == "again"]
    if repeats and steps and steps[-1] != "again":
        known += [each.step for each in following.phases[repeats[-1] + 1 :][:1]]
    return max(known)


def faults_in_words(faults: Sequence[FaultCost]) -> Iterator[str]:
    """All of them in one line; nothing where there are none."""
    if not faults:
        return
    parts = [(stage, sum(each.seconds[stage] for each in faults)) for stage in STAGES]
    count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
    lost = sum(each.steps_lost or 0 for each in faults)
    yield (
        f"{count} cost {duration(sum(each.total for each in faults))} and {lost} steps:"
        f" {', '.join(f'{stage} {duration(seconds)}' for stage, seconds in parts)}"
    )
