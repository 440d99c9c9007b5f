"""How each attempt of a run went, and which failed first."""

from __future__ import annotations

from collections.abc import Sequence

from trainkit.base.errors import ConfigError, Exit
from trainkit.base.lazy_dataclasses import dataclass, field, replace
from trainkit.base.records import Record
from trainkit.runs.events import (
    AttemptEnded,
    AttemptStarted,
    FailureClass,
    RankEnded,
    RankStarted,
    RootCause,
    events_of,
    first_event,
    last_event,
    read_events,
)
from trainkit.runs.folder import AttemptFolder, RunFolder
from trainkit.runs.record import RunRecord


@dataclass(frozen=True)
class AttemptReport(Record):
    """One attempt: an entry of the document why/1.

    Args:
        attempt: its number; 0 for a run that ended before its first attempt.
        started: when, ISO 8601; None where no supervisor said so.
        ended: when; None where no supervisor said so.
        exit: the exit code.
        failure_class: what kind of end it was.
        hosts: those on which ranks were started.
        root_cause: None where it ended well, was stopped, or its supervisor was lost.
    """

    attempt: int
    started: str | None = None
    ended: str | None = None
    exit: int | None = None
    failure_class: FailureClass | None = field(default=None, metadata={"key": "class"})
    hosts: list[str] = field(default_factory=list)
    root_cause: RootCause | None = None


@dataclass(frozen=True)
class RankFailure:
    """A rank that failed by itself after another one had."""

    rank: int
    host: str | None
    code: int
    time: str


def report_attempt(attempt: AttemptFolder) -> AttemptReport:
    """Read one attempt's events."""
    events = read_events(attempt)
    started = first_event(events, AttemptStarted)
    ended = last_event(events, AttemptEnded)
    report = AttemptReport(
        attempt.number,
        started=started.time if started else None,
        hosts=list(dict.fromkeys(event.host for event in events_of(events, RankStarted))),
    )
    if ended is None:
        return report
    cause = None if ended.failure_class == "success" else ended.root_cause or None
    return replace(
        report,
        ended=ended.time,
        exit=ended.exit,
        failure_class=ended.failure_class,
        root_cause=cause,
    )


def report_attempts(run: RunFolder, record: RunRecord) -> list[AttemptReport]:
    """All attempts of a run, oldest first. If the supervisor of the last one was lost, the record
    says how it ended. One that another attempt followed was lost in any case."""
    reports = [report_attempt(attempt) for attempt in run.attempts()]
    for index, report in enumerate(reports[:-1]):
        if report.failure_class is None:
            reports[index] = _without_supervisor(report)
    lost = bool(reports) and reports[-1].failure_class is None
    if lost and record.state in ("failed", "unknown"):
        reports[-1] = _as_recorded(reports[-1], record)
    return reports


def _without_supervisor(report: AttemptReport) -> AttemptReport:
    return replace(
        report,
        exit=int(Exit.RANK_INFRA),
        failure_class="infra",
        root_cause={"message": "its supervisor is gone and did not say how it ended"},
    )


def _as_recorded(report: AttemptReport, record: RunRecord) -> AttemptReport:
    return replace(
        report,
        exit=record.exit,
        failure_class=record.failure_class,
        root_cause=record.root_cause,
    )


def find_failed_attempt(
    record: RunRecord, reports: Sequence[AttemptReport], number: int
) -> AttemptReport | None:
    """The attempt that is asked about; None if none failed.

    Args:
        record: the run.
        reports: all its attempts.
        number: of an attempt; 0: the newest that failed.

    Raises:
        ConfigError: there is no attempt of that number.
    """
    if number and number not in {report.attempt for report in reports}:
        raise ConfigError(
            f"run {record.run.id} has no attempt {number}",
            hint=f"attempts: {', '.join(str(report.attempt) for report in reports) or 'none'}",
        )
    cause = record.root_cause
    if cause and not reports:
        return _as_recorded(AttemptReport(0), record)
    # what the scheduler says came after the last attempt's end
    if cause and ("slurm_job" in cause or "jobset" in cause) and number in (0, reports[-1].attempt):
        return _as_recorded(reports[-1], record)
    asked = [report for report in reports if number in (0, report.attempt)]
    return next((report for report in reversed(asked) if report.root_cause), None)


def later_failures(attempt: AttemptFolder, cause: RootCause) -> list[RankFailure]:
    """Other ranks that failed by themselves. As a rule they failed because the first one did.

    Args:
        attempt: the attempt.
        cause: why it failed; its rank is left out.
    """
    events = read_events(attempt)
    hosts = {event.rank: event.host for event in events_of(events, RankStarted)}
    return [
        RankFailure(end.rank, hosts.get(end.rank), end.code, end.time)
        for end in events_of(events, RankEnded)
        if not end.stopped
        and not end.done
        and end.code not in (0, int(Exit.PREEMPTED))
        and end.rank != cause.get("rank")
    ]
