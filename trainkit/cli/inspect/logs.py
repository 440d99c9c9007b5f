"""The tasks `logs`: what ranks of one attempt printed, and what is added while they run; and `why`:
which rank failed first, where, how, and what to do about it."""

from __future__ import annotations

import collections
import contextlib
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path

from rich.markup import escape

from trainkit.base.documents import document
from trainkit.base.errors import ConfigError, Exit, TrainkitError
from trainkit.base.files import rotated_log
from trainkit.base.lazy_dataclasses import asdict, dataclass
from trainkit.base.printable import printable
from trainkit.cli.config.jobs import load_jobs
from trainkit.cli.options import LogOptions
from trainkit.cli.run.summary import faults_table, last_lines, next_page
from trainkit.cli.tables import Listing, Page, marked
from trainkit.cli.wrapper import TaskContext, TaskResult
from trainkit.launch.scheduler_contract import JobAccount
from trainkit.launch.scheduler_registry import current, scheduler_of
from trainkit.reports.faults import build_faults, faults_in_words
from trainkit.reports.read import read_run_times
from trainkit.runs.attempt_report import (
    AttemptReport,
    RankFailure,
    find_failed_attempt,
    later_failures,
    report_attempts,
)
from trainkit.runs.events import RankEnded, RankStarted, RootCause, events_of, read_events
from trainkit.runs.find import find_run
from trainkit.runs.folder import AttemptFolder, RunFolder
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
    faults = build_faults(read_run_times(record))
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
        words = f"[bold]{run.id}[/] ({run.job_name}), {record.state}: nothing has failed"
        page.append([marked(words)])
    if faults:
        page.append([faults_table(faults), *faults_in_words(faults)])
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
            faults=[fault.to_json() for fault in faults],
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
    yield marked(
        f"[bold]{run.id}[/] ({run.job_name}) is {record.state}; attempt {report.attempt} of"
        f" {len(reports)}: exit {report.exit}, class [bold]{report.failure_class or 'unknown'}[/]"
    )
    yield marked(f"[red]{escape(where)}: {escape(_describe(cause))}[/]")
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


class LogTail:
    """The end of one log. The file may be replaced by a new one meanwhile (`rotated_log`).

    Args:
        path: the file.
        prefix: put before each line; then only whole lines are given, because the lines of other
            logs stand between them.
    """

    def __init__(self, path: Path, prefix: str = "") -> None:
        self.path = path
        self.prefix = prefix
        self.offset = 0
        self.inode = 0  # of the file that the offset belongs to

    def last(self, count: int, *, unfinished: bool) -> list[str]:
        """The last lines.

        Args:
            count: how many at most.
            unfinished: include a last line without a newline; else `new` gives it later.
        """
        lines: collections.deque[bytes] = collections.deque(maxlen=count)
        with contextlib.suppress(FileNotFoundError), open(rotated_log(self.path), "rb") as before:
            lines.extend(before)
        with open(self.path, "rb") as file:
            self.inode = os.fstat(file.fileno()).st_ino
            for line in file:
                if unfinished or line.endswith(b"\n"):
                    self.offset += len(line)
                    lines.append(line)
        return [printable(line.decode(errors="replace").rstrip("\n")) for line in lines]

    def new(self, *, unfinished: bool) -> str:
        """What was added since the last call.

        Args:
            unfinished: include a last line without a newline.
        """
        with open(self.path, "rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            rest = b""
            start = self.offset
            if inode != self.inode:  # a new file: what is left of the former comes first
                rest = self._rest_of_former()
                start = 0
            file.seek(start)
            data = rest + file.read()
        if self.prefix and not unfinished:
            data = data[: data.rfind(b"\n") + 1]
        if len(data) < len(rest):
            return ""  # the new file has no whole line yet
        self.inode = inode
        self.offset = start + len(data) - len(rest)
        text = printable(data.decode(errors="replace"))
        if self.prefix and text:
            return "".join(f"{self.prefix}{line}\n" for line in text.removesuffix("\n").split("\n"))
        return text

    def _rest_of_former(self) -> bytes:
        """What the former file has beyond what was given; nothing if it was replaced again."""
        with contextlib.suppress(FileNotFoundError), open(rotated_log(self.path), "rb") as before:
            if os.fstat(before.fileno()).st_ino == self.inode:
                before.seek(self.offset)
                return before.read()
        return b""


FAILED = "failed"
MAX_RANK = 10**6
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class RankLog:
    """The end of one log, as in the document logs/1. `rank` is None for the log of a host's
    connection."""

    rank: int | None
    host: str | None
    lines: list[str]


def logs(task: TaskContext, run_name: str, options: LogOptions) -> TaskResult:
    """The task `logs`. Raises ConfigError for an attempt, host or rank without a log."""
    if options.follow and task.json:
        raise ConfigError(
            "--follow and --json cannot be combined",
            hint="one document is printed at the end: leave out --follow",
        )
    asked = _parse_ranks(options.rank) if options.rank not in ("", FAILED) else None
    run = find_run(load_jobs(task).roots(), run_name)
    attempt = _attempt(run, options.attempt)
    hosts = {event.rank: event.host for event in events_of(read_events(attempt), RankStarted)}
    if options.node and options.node not in hosts.values():
        return _connection_log(run, attempt, sorted(set(hosts.values())), options)
    if options.rank == FAILED:
        asked = _failed_ranks(attempt)
        if not asked:
            none = f"no rank of attempt {attempt.number} of run {run.id} failed by itself"
            return _result(run, attempt, [], [none])
    if options.node:
        on_node = {rank for rank, host in hosts.items() if host == options.node}
        asked = on_node if asked is None else on_node & asked
    if asked is None:
        asked = {0}
    return _rank_logs(
        task, run, attempt, {rank: hosts.get(rank) for rank in sorted(asked)}, options
    )


def _result(
    run: RunFolder, attempt: AttemptFolder, found: Sequence[RankLog], page: Page
) -> TaskResult:
    rows = [asdict(each) for each in found]
    return TaskResult(document("logs/1", run=run.id, attempt=attempt.number, logs=rows), page=page)


def _rank_logs(
    task: TaskContext,
    run: RunFolder,
    attempt: AttemptFolder,
    ranks: Mapping[int, str | None],
    options: LogOptions,
) -> TaskResult:
    """Print the logs of these ranks, and follow them if that is asked for.

    Args:
        ranks: the host of each, where it is known.
    """
    _refuse_missing(run, attempt, ranks)
    prefix = "[{}] " if len(ranks) > 1 else ""
    tails = {rank: LogTail(attempt.log(rank), prefix.format(rank)) for rank in ranks}
    found = []
    page = []
    for rank, tail in tails.items():
        lines = tail.last(options.lines or sys.maxsize, unfinished=not options.follow)
        found.append(RankLog(rank, ranks[rank], lines))
        page += [f"{tail.prefix}{line}" for line in lines]
        if not lines and not options.follow:
            page.append(f"rank {rank} has printed nothing in attempt {attempt.number}")
    if options.follow:
        task.show(page)
        _follow(run, list(tails.values()))
        page = []
    return _result(run, attempt, found, page)


def _refuse_missing(run: RunFolder, attempt: AttemptFolder, ranks: Mapping[int, object]) -> None:
    missing = [rank for rank in ranks if not attempt.log(rank).is_file()]
    if missing:
        present = sorted(int(path.stem) for path in attempt.log(0).parent.glob("*.log"))
        raise ConfigError(
            f"run {run.id} has no log of rank {missing[0]}",
            hint=f"ranks with a log: {_spans(present) or 'none'}",
        )


def _connection_log(
    run: RunFolder, attempt: AttemptFolder, hosts: list[str], options: LogOptions
) -> TaskResult:
    """What ssh or pdsh said about a host on which no rank was started. Raises ConfigError for a
    host that the attempt did not have.

    Args:
        hosts: those on which ranks were started.
    """
    path = attempt.transports / f"{options.node.replace(os.sep, '_')}.log"
    if not path.is_file():
        known = sorted({*hosts, *(found.stem for found in attempt.transports.glob("*.log"))})
        raise ConfigError(
            f"attempt {attempt.number} of run {run.id} had no host '{options.node}'",
            hint=f"its hosts: {', '.join(known) or 'none'}",
        )
    lines = last_lines(path, options.lines or sys.maxsize)
    page = [f"no rank was started on {options.node}; its connection said:", *lines]
    return _result(run, attempt, [RankLog(None, options.node, lines)], page)


def _failed_ranks(attempt: AttemptFolder) -> set[int]:
    """Ranks that failed by themselves, and were not stopped because another failed."""
    return {
        end.rank
        for end in events_of(read_events(attempt), RankEnded)
        if not end.stopped and not end.done and end.code != 0
    }


def _parse_ranks(text: str) -> set[int]:
    """Ranks from "0,8-15". Ends the task for any other text."""
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,7})(?:-([0-9]{1,7}))?", part.strip())
        if match is None:
            raise _not_ranks(text)
        first = int(match.group(1))
        last = int(match.group(2) or match.group(1))
        if last < first or last >= MAX_RANK:
            raise _not_ranks(text)
        found |= set(range(first, last + 1))
    return found


def _not_ranks(text: str) -> TrainkitError:
    return TrainkitError(
        f"--rank takes ranks such as 3 or 0,8-15, or the word {FAILED}, not {text!r}",
        exit=Exit.USAGE,
    )


def _spans(ranks: list[int]) -> str:
    """0-3, 8."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def _attempt(run: RunFolder, number: int) -> AttemptFolder:
    """The attempt of this number, or the newest for 0. Raises ConfigError."""
    attempts = run.attempts()
    if number:
        chosen = [attempt for attempt in attempts if attempt.number == number]
    else:
        chosen = attempts[-1:]
    if chosen:
        return chosen[0]
    hint = f"attempts: {', '.join(str(attempt.number) for attempt in attempts) or 'none'}"
    output = scheduler_of(run).log(run)
    if output is not None and output.is_file():
        hint += f"; the output of its batch script is in {output}"
    raise ConfigError(f"run {run.id} has no attempt {number or ''}".rstrip(), hint=hint)


def _follow(run: RunFolder, tails: Sequence[LogTail]) -> None:
    """Print what is new until the run has ended."""
    while True:
        running = current(read_run_record(run)).state in ("starting", "running")
        texts = [text for tail in tails if (text := tail.new(unfinished=not running))]
        sys.stdout.write("".join(texts))
        sys.stdout.flush()
        if not texts and not running:
            return
        time.sleep(POLL_SECONDS)
