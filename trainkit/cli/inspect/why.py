"""The task `why`: which rank failed first, where, how, and what to do about it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.markup import escape

from trainkit.base.documents import document
from trainkit.base.errors import ConfigError, Exit, TrainkitError
from trainkit.cli.config.jobs import load_jobs
from trainkit.cli.run.summary import last_lines, print_next
from trainkit.cli.tables import Listing
from trainkit.cli.wrapper import TaskContext, TaskResult
from trainkit.launch.slurm.job_graph import read_stage_jobs
from trainkit.launch.slurm.reconcile import settled
from trainkit.launch.slurm.squeue import BEFORE, RUNNING, Account, accounts
from trainkit.runs.events import (
    AttemptEnded,
    AttemptStarted,
    RankEnded,
    RankStarted,
    events_of,
    first_event,
    last_event,
    read_events,
)
from trainkit.runs.find import find_run
from trainkit.runs.folder import AttemptFolder, RunFolder
from trainkit.runs.record import RunRecord, read_run_record
from trainkit.runs.slurm import read_slurm_jobs

LINES = 30
SHOWN = 12  # later failures of other ranks
# a step of Slurm's that says nothing: srun's are cancelled with their job
WELL = BEFORE | RUNNING | {"COMPLETED", "CANCELLED"}


def why(task: TaskContext, words: str, attempt: int) -> TaskResult:
    """The task `why`. The exit code is 0: the question was answered."""
    run = find_run(load_jobs(task).roots(), words)
    record = settled(read_run_record(run))
    told = [_attempt(each) for each in run.attempts()]
    chosen = _chosen(run, record, told, attempt)
    if chosen:
        cause = dict(chosen["root_cause"] or {})
    else:
        cause = {}
    cause.setdefault("last", _last(cause))
    if chosen and chosen["attempt"]:
        others = _later_failures(run.attempt(chosen["attempt"]), cause)
    else:
        others = []
    kept = _kept_by_slurm(task, run)
    if not task.json:
        _print(task, run, record, chosen, cause, others, told)
        if kept:
            task.say("what Slurm kept of it:")
            task.console.print(_slurm_table(kept))
        if chosen is not None and cause.get("message"):
            print_next(task, record, without="why")
    answer = {
        "run": run.id,
        "job": run.job_name,
        "state": record.state,
        "exit": record.exit,
        "class": record.failure_class,
    }
    failure = {
        "attempt": chosen["attempt"] if chosen else None,
        "root_cause": cause if cause.get("message") else None,
        "others": others,
    }
    if kept is None:
        slurm = None
    else:
        slurm = [asdict(each) for each in kept]
    return TaskResult(
        document(
            "why/1",
            **answer,
            **failure,
            attempts=told,
            slurm=slurm,
            next=[task for task in record.next_tasks() if " why " not in task],
        )
    )


def _attempt(attempt: AttemptFolder) -> dict[str, Any]:
    """One attempt: how it ended, and why. `root_cause` is None where it ended well, was told to
    end, or left no word."""
    events = read_events(attempt)
    started = first_event(events, AttemptStarted)
    ended = last_event(events, AttemptEnded)
    failed = ended is not None and ended.failure_class != "success"
    return {
        "attempt": attempt.number,
        "started": started and started.time,
        "ended": ended and ended.time,
        "exit": ended and ended.exit,
        "class": ended and ended.failure_class,
        "hosts": list(dict.fromkeys(event.host for event in events_of(events, RankStarted))),
        "root_cause": (ended.root_cause or None) if ended and failed else None,
    }


def _chosen(
    run: RunFolder, record: RunRecord, told: list[dict[str, Any]], number: int
) -> dict[str, Any] | None:
    """The attempt that is asked about: that of the number, else the newest one that went wrong;
    None where none did. Raises ConfigError."""
    if number and not any(each["attempt"] == number for each in told):
        raise ConfigError(
            f"run {run.id} has no attempt {number}",
            hint=f"attempts: {', '.join(str(each['attempt']) for each in told) or 'none'}",
        )
    # its supervisor left no word: the record says what is known
    if record.state in ("failed", "unknown") and told and told[-1]["class"] is None:
        told[-1] |= {
            "root_cause": record.root_cause,
            "exit": record.exit,
            "class": record.failure_class,
        }
    # Slurm's word, after the last attempt's
    if record.root_cause and (
        not told or ("slurm_job" in record.root_cause and number in (0, told[-1]["attempt"]))
    ):
        return {
            "attempt": told[-1]["attempt"] if told else 0,
            "root_cause": record.root_cause,
            "exit": record.exit,
            "class": record.failure_class,
        }
    return next(
        (each for each in reversed(told) if each["root_cause"] and number in (0, each["attempt"])),
        None,
    )


def _last(cause: dict[str, Any]) -> list[str]:
    if cause.get("log"):
        return last_lines(Path(cause["log"]), LINES)
    return []


def _kept_by_slurm(task: TaskContext, run: RunFolder) -> list[Account] | None:
    """Every start of the run's Slurm jobs, and what ended badly of their steps and of the jobs
    that made its stages, as slurmdbd keeps them; None where there is no accounting, or no job."""
    ids = [job.id for job in read_slurm_jobs(run)]
    stages = [job.id for job in read_stage_jobs(run)]
    try:
        if ids or stages:
            rows = accounts([*stages, *ids])
        else:
            rows = None
    except TrainkitError as error:
        task.say(error.message)
        return None
    if rows is None:
        return None
    return [row for row in rows if row.id in ids or row.word not in WELL]


def _slurm_table(rows: list[Account]) -> Listing:
    table = Listing(
        "job",
        "state",
        "exit code",
        "submitted",
        "began",
        "ended",
        "nodes",
        drop=("nodes", "submitted", "began"),
    )
    for row in rows:
        table.add_row(
            *(
                escape(cell)
                for cell in (row.id, row.state, row.code, row.submit, row.start, row.end, row.nodes)
            )
        )
    return table


def _later_failures(attempt: AttemptFolder, cause: dict[str, Any]) -> list[dict[str, Any]]:
    """Other ranks that ended badly by themselves: as a rule echoes of the first."""
    events = read_events(attempt)
    hosts = {event.rank: event.host for event in events_of(events, RankStarted)}
    return [
        {"rank": end.rank, "host": hosts.get(end.rank), "code": end.code, "time": end.time}
        for end in events_of(events, RankEnded)
        if not end.stopped
        and not end.done
        and end.code not in (0, int(Exit.PREEMPTED))
        and end.rank != cause.get("rank")
    ]


def _how(cause: dict[str, Any]) -> str:
    """A signal, an exception or an exit code, in few words."""
    if cause.get("signal"):
        return f"ended by {cause['signal']}"
    if cause.get("type"):
        return f"{cause['type']}: {cause.get('message')}"
    return str(cause.get("message"))


def _print(
    task: TaskContext,
    run: RunFolder,
    record: RunRecord,
    chosen: dict[str, Any] | None,
    cause: dict[str, Any],
    others: list[dict[str, Any]],
    told: list[dict[str, Any]],
) -> None:
    console = task.console
    if chosen is None or not cause.get("message"):
        console.print(f"[bold]{run.id}[/] ({run.job_name}) is {record.state}: nothing has failed")
        return
    if "rank" in cause:
        where = f"rank {cause['rank']} on {cause.get('host', '?')}"
    else:
        where = str(cause.get("host", "the run"))
    what = (
        f"attempt {chosen['attempt']} of {len(told)}: exit {chosen['exit']}, class"
        f" [bold]{chosen['class'] or 'unknown'}[/]"
    )
    console.print(f"[bold]{run.id}[/] ({run.job_name}) is {record.state}; {what}")
    console.print(f"[red]{escape(where)}: {escape(_how(cause))}[/]")
    for key, text in (
        ("time", "at {}"),
        ("step", "in step {}"),
        ("log", "log: {}"),
        ("advice", "advice: {}"),
    ):
        if cause.get(key) not in (None, ""):
            task.say("  " + text.format(cause[key]))
    if cause.get("last"):
        task.say("its last lines:")
        for line in cause["last"][-LINES:]:
            task.say(f"  {line}")
    for other in others[:SHOWN]:
        task.say(f"later: rank {other['rank']} on {other['host']} ended with {other['code']}")
    if len(others) > SHOWN:
        task.say(f"later: {len(others) - SHOWN} more ranks")
    if len(told) > 1:
        console.print(
            _attempts_table(told, "running" if record.state == "running" else "no last word")
        )


def _attempts_table(told: list[dict[str, Any]], wordless: str) -> Listing:
    table = Listing("attempt", "exit", "class", "rank", "host", "step", "what")
    for each in told:
        cause = each["root_cause"] or {}
        cells = [cause.get("rank", ""), cause.get("host", ""), cause.get("step", "")]
        if cause.get("message"):
            first = (_how(cause).splitlines() or [""])[0]
        elif each["class"]:
            first = ""
        else:
            first = wordless
        table.add_row(
            str(each["attempt"]),
            *("" if each[key] is None else str(each[key]) for key in ("exit", "class")),
            *map(_cell, cells),
            escape(first[:100]),
        )
    return table


def _cell(value: object) -> str:
    if value is None:
        return ""
    return escape(str(value))
