"""The task `why`: which rank failed first, where, how, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

from rich.markup import escape
from rich.text import Text

from trainkit.base.documents import document
from trainkit.base.errors import TrainkitError
from trainkit.cli.config.jobs import load_jobs
from trainkit.cli.run.summary import last_lines, next_page
from trainkit.cli.tables import Listing, Page
from trainkit.cli.wrapper import TaskContext, TaskResult
from trainkit.launch.scheduler_contract import JobAccount
from trainkit.launch.scheduler_registry import current, scheduler_of
from trainkit.runs.attempt_report import (
    AttemptReport,
    RankFailure,
    find_failed_attempt,
    later_failures,
    report_attempts,
)
from trainkit.runs.events import RootCause
from trainkit.runs.find import find_run
from trainkit.runs.folder import RunFolder
from trainkit.runs.record import RunRecord, read_run_record

MAX_LINES = 30  # of a failed rank's log
MAX_LATER = 12  # later failures of other ranks that are shown
MAX_CELL = 100  # characters of a cause in the table of attempts
DETAILS = {"time": "at {}", "step": "in step {}", "log": "log: {}", "advice": "advice: {}"}


@dataclass(frozen=True)
class Failure:
    """Why a run failed.

    Args:
        report: the attempt that is explained; None if none failed.
        cause: its root cause, with the last lines of the rank's log; empty without one.
        later: other ranks that failed after it.
    """

    report: AttemptReport | None
    cause: RootCause
    later: list[RankFailure]


def why(task: TaskContext, run_name: str, attempt: int) -> TaskResult:
    """The task `why`. The exit code is 0: the question was answered.

    Args:
        task: how it was called.
        run_name: which run.
        attempt: which attempt; 0: the newest that failed.

    Raises:
        ConfigError: there is no such run or attempt.
    """
    run = find_run(load_jobs(task).roots(), run_name)
    record = current(read_run_record(run))
    reports = report_attempts(run, record)
    failure = _failure(run, find_failed_attempt(record, reports, attempt))
    scheduler = scheduler_of(run)
    try:
        kept = scheduler.accounts(run)
    except TrainkitError as error:
        task.say(error.message)
        kept = None
    failed = failure.report is not None and bool(failure.cause.get("message"))
    page: list[Page] = []
    if failure.report is not None and failed:
        page.append(_failure_page(record, failure.report, failure, reports))
    else:
        words = f"[bold]{run.id}[/] ({run.job_name}) is {record.state}: nothing has failed"
        page.append([Text.from_markup(words)])
    if kept:
        page.append([f"what {scheduler.title} kept of it:", _accounts_table(kept)])
    if failed:
        page.append(next_page(task, record, without="why"))
    return TaskResult(
        document(
            "why/1",
            run=run.id,
            job=run.job_name,
            state=record.state,
            exit=record.exit,
            attempt=failure.report.attempt if failure.report else None,
            root_cause=failure.cause if failed else None,
            others=[asdict(each) for each in failure.later],
            attempts=[report.to_json() for report in reports],
            slurm=None if kept is None else [asdict(each) for each in kept],
            next=[command for command in record.next_tasks() if " why " not in command],
            **{"class": record.failure_class},
        ),
        page=chain.from_iterable(page),
    )


def _failure(run: RunFolder, report: AttemptReport | None) -> Failure:
    cause: RootCause = {}
    if report is not None and report.root_cause is not None:
        cause = report.root_cause.copy()
    if "last" not in cause:
        cause["last"] = last_lines(Path(cause["log"]), MAX_LINES) if cause.get("log") else []
    later: list[RankFailure] = []
    if report is not None and report.attempt:
        later = later_failures(run.attempt(report.attempt), cause)
    return Failure(report, cause, later)


def _accounts_table(rows: list[JobAccount]) -> Listing:
    return Listing(
        "job",
        "state",
        "exit code",
        "submitted",
        "began",
        "ended",
        "nodes",
        drop=("nodes", "submitted", "began"),
        rows=(
            map(escape, (row.id, row.state, row.code, row.submit, row.start, row.end, row.nodes))
            for row in rows
        ),
    )


def _describe(cause: RootCause) -> str:
    """A signal, an exception or an exit code, in few words."""
    if cause.get("signal"):
        return f"ended by {cause['signal']}"
    if cause.get("type"):
        return f"{cause['type']}: {cause.get('message')}"
    return str(cause.get("message"))


def _failure_page(
    record: RunRecord,
    report: AttemptReport,
    failure: Failure,
    reports: Sequence[AttemptReport],
) -> Page:
    run = record.run
    cause = failure.cause
    where = str(cause.get("host", "the run"))
    if "rank" in cause:
        where = f"rank {cause['rank']} on {cause.get('host', '?')}"
    yield Text.from_markup(
        f"[bold]{run.id}[/] ({run.job_name}) is {record.state}; attempt {report.attempt} of"
        f" {len(reports)}: exit {report.exit}, class [bold]{report.failure_class or 'unknown'}[/]"
    )
    yield Text.from_markup(f"[red]{escape(where)}: {escape(_describe(cause))}[/]")
    for key, text in DETAILS.items():
        value = cause.get(key)
        if value not in (None, ""):
            yield "  " + text.format(value)
    if cause["last"]:
        yield "its last lines:"
        yield from (f"  {line}" for line in cause["last"][-MAX_LINES:])
    for later in failure.later[:MAX_LATER]:
        yield f"later: rank {later.rank} on {later.host} ended with {later.code}"
    if len(failure.later) > MAX_LATER:
        yield f"later: {len(failure.later) - MAX_LATER} more ranks"
    if len(reports) > 1:
        yield _attempts_table(reports, record.state)


def _attempts_table(reports: Sequence[AttemptReport], state: str) -> Listing:
    """A row per attempt.

    Args:
        reports: all attempts.
        state: that of the run, for an attempt without an end.
    """
    table = Listing("attempt", "exit", "class", "rank", "host", "step", "what")
    for report in reports:
        cause: RootCause = report.root_cause or {}
        what = ""
        if cause.get("message"):
            what = (_describe(cause).splitlines() or [""])[0]
        elif not report.failure_class:
            what = state
        cells = [
            report.attempt,
            report.exit,
            report.failure_class,
            cause.get("rank"),
            cause.get("host"),
            cause.get("step"),
            what[:MAX_CELL],
        ]
        table.add_row(*("" if cell is None else escape(str(cell)) for cell in cells))
    return table
