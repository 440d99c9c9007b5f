"""The state of a run now, from its newest attempt's events, its supervisor's status and its jobs
of a scheduler; and who runs it: its supervisor's sign of life (launch/supervisor.json, schema
supervisor/1), and until that is there, the process that started it (launch/maker.json, schema
maker/1)."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from trainkit.base.documents import document, read_document, utc_text
from trainkit.base.errors import Exit
from trainkit.base.files import write_json
from trainkit.base.lazy_dataclasses import dataclass, replace
from trainkit.base.process import ProcessIdentity, identity, is_alive
from trainkit.base.records import Record
from trainkit.runs.events import (
    RESERVE_BYTES,
    AttemptEnded,
    AttemptStarted,
    FailureClass,
    RootCause,
    SurvivingProcess,
    first_event,
    last_event,
    read_events,
)
from trainkit.runs.folder import RunFolder
from trainkit.runs.kubernetes import newest_jobset
from trainkit.runs.slurm import read_slurm_jobs

# a supervisor writes its sign of life every 5 s; one that was silent for longer may be alive or not
SILENCE_SECONDS = 60.0


@dataclass(frozen=True)
class SupervisorStatus(Record):
    """launch/supervisor.json.

    Args:
        identity: which process it is.
        host: where it runs.
        time: when it last wrote this, seconds since 1970.
        attempt: the newest attempt it began.
        address: where it listens.
        port: where it listens; 0 where it listens nowhere.
        ended: it has finished its work.
    """

    SCHEMA = "supervisor/1"
    identity: ProcessIdentity
    host: str
    time: float
    attempt: int
    address: str
    port: int
    ended: bool

    @classmethod
    def from_json(cls, value: Mapping[str, Any], name: str = "") -> SupervisorStatus:
        """Read what `to_json` wrote, or an older version, whose port may be null. Raises
        FieldError."""
        return super().from_json({**value, "port": value.get("port") or 0}, name)

    def alive(self, now: float) -> bool | None:
        """Whether it lives. None: it has been silent for too long, so that it hangs, or the file
        system does; or, on another host, is gone. A sign of the future says no more: the clocks
        of two hosts differ."""
        if self.ended or is_alive(self.identity) is False:
            return False
        if abs(now - self.time) <= SILENCE_SECONDS:
            return True
        return None


def read_supervisor_status(run: RunFolder) -> SupervisorStatus | None:
    """The supervisor's sign of life; None where there is none (yet). Raises ConfigError for a
    file of another form."""
    if not run.supervisor.is_file():
        return None
    return SupervisorStatus.from_file(run.supervisor)


def write_supervisor_status(run: RunFolder, status: SupervisorStatus) -> None:
    """Write launch/supervisor.json, whole or not at all. Raises OSError as the disk does."""
    write_json(run.supervisor, status.to_json())


@dataclass(frozen=True)
class RunStarter(Record):
    """launch/maker.json: the process that started the run, or started it again, last.

    Args:
        identity: which process it is.
        time: when, seconds since 1970 by its own clock.
        former: the supervisor's status that it found there, as `_signature` has it. While that is
            the newest, no supervisor has signed since.
    """

    SCHEMA = "maker/1"
    identity: ProcessIdentity
    time: float
    former: list[Any] | None


def write_starter(run: RunFolder) -> None:
    """Write launch/maker.json: this process is about to supervise the run, or to have it
    supervised."""
    starter = RunStarter(identity(), time.time(), _signature(read_supervisor_status(run)))
    write_json(run.maker, starter.to_json())


def read_starter(run: RunFolder) -> RunStarter | None:
    """Who started the run last; None where no process has said so. Raises ConfigError for a file
    of another schema."""
    return RunStarter.from_file(run.maker) if run.maker.is_file() else None


def _signature(status: SupervisorStatus | None) -> list[Any] | None:
    """Tells one sign of life from another without comparing clocks, which are those of two
    hosts."""
    return [status.identity.to_json(), status.time] if status is not None else None


def is_starting(run: RunFolder, status: SupervisorStatus | None) -> bool:
    """Whether a process is just starting the run, or starting it again, and no supervisor has
    signed since.

    Args:
        run: the run.
        status: its supervisor's newest sign of life.
    """
    starter = read_starter(run)
    if starter is None or _signature(status) != starter.former:
        return False
    alive = is_alive(starter.identity)
    if alive is not None:
        return alive
    return time.time() - starter.time <= SILENCE_SECONDS


RunState = Literal[
    "queued", "starting", "running", "succeeded", "failed", "cancelled", "preempted", "unknown"
]
# what slurm.json and kubernetes.json tell of a job that ended before there were ranks
CAUSE = ("message", "unit", "host", "log", "advice")
_STATE_OF_CLASS: dict[str, RunState] = {
    "success": "succeeded",
    "cancelled": "cancelled",
    "preempted": "preempted",
}


@dataclass(frozen=True)
class RunRecord:
    """A run as its folder tells it. `lost`: its supervisor did not say how it ended, or has long
    been silent; who else may know how it ended can be asked."""

    run: RunFolder
    state: RunState
    step: int
    attempt: int
    exit: int | None = None
    failure_class: FailureClass | None = None
    root_cause: RootCause | None = None
    survivors: Sequence[SurvivingProcess] = ()
    lost: bool = False

    def row(self) -> dict[str, object]:
        """The keys of one entry of `runs --json`."""
        return {
            "run": self.run.id,
            "job": self.run.job_name,
            "state": self.state,
            "step": self.step,
            "attempt": self.attempt,
            "folder": str(self.run.path),
        }

    def next_tasks(self) -> list[str]:
        """Tasks worth trying now, likeliest first."""
        run = self.run.id
        if self.state == "succeeded":
            return [*_uses_of_weights(self.run), f"invoke report {run}", "invoke tensorboard"]
        if self.state in ("failed", "cancelled") and not self.run.inputs.is_file():
            # it ended before its stages were made: there is nothing to resume
            return [f"invoke why {run}", f"invoke train {self.run.job_name}"]
        if self.state == "failed":
            return [f"invoke why {run}", f"invoke resume {run}", f"invoke logs {run}"]
        if self.state in ("cancelled", "preempted"):
            return [f"invoke resume {run}", f"invoke logs {run}"]
        if self.state == "unknown":
            return [f"invoke cancel {run}", "invoke nodes"]
        if self.state == "queued":
            return [f"invoke attach {run}", f"invoke cancel {run}"]
        return [f"invoke attach {run}", f"invoke logs {run} --follow"]

    def to_json(self) -> dict[str, object]:
        """The form run/1."""
        return document(
            "run/1",
            **self.row(),
            exit=self.exit,
            root_cause=self.root_cause,
            survivors=list(self.survivors),
            next=self.next_tasks(),
            **{"class": self.failure_class},
        )


def _uses_of_weights(run: RunFolder) -> list[str]:
    """What its weights may be tried with: text, where its tokens stand for text (those of mock data
    do not); those of another engine are converted first, where they can be."""
    from trainkit.jobs.job_tables import CONVERTED  # no supervisor asks: not at its start

    job = read_document(run.job, "job/1")["job"]
    if job.get("engine", "native") != "native":
        readable = job["engine"] in CONVERTED
        return [f"invoke convert {run.id} --to hf --out FOLDER"] if readable else []
    if job.get("dataset", {}).get("tokenizer") is not None:
        return [f'invoke generate {run.id} --prompt "..."']
    return []


def last_step(run: RunFolder) -> int:
    """The newest step in metrics.jsonl, read from the file's end; 0 where nothing was logged."""
    try:
        with open(run.metrics, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 65536))
            lines = file.read().split(b"\n")[:-1]
    except FileNotFoundError:
        return 0
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError):
            continue
    return 0


def read_run_record(run: RunFolder) -> RunRecord:
    """The state of a run now. Until its supervisor has written its status it is starting, between
    two attempts it is running. A run whose supervisor is gone without a word is failed, class
    infra; one whose supervisor is silent, and is on another host or hangs, is unknown (exit 13)."""
    attempts = run.attempts()
    if attempts:
        number = attempts[-1].number
        events = read_events(attempts[-1])
    else:
        number = 0
        events = []
    running = RunRecord(run, "running", last_step(run), number)
    started = first_event(events, AttemptStarted)
    ended = last_event(events, AttemptEnded)
    status = read_supervisor_status(run)
    alive = status.alive(time.time()) if status is not None else None
    queued = _queued(running)
    if queued is not None and not alive:
        return queued
    if not alive and is_starting(run, status):
        return replace(running, state="starting")
    if ended is not None and not alive:
        return replace(
            running,
            state=_STATE_OF_CLASS.get(ended.failure_class, "failed"),
            exit=ended.exit,
            failure_class=ended.failure_class,
            root_cause=ended.root_cause,
            survivors=ended.survivors,
        )
    if status is None and started is not None:
        alive = is_alive(ProcessIdentity(**started.supervisor))
    if alive:
        return running
    if alive is None and status is not None:
        return _unknown(running, status.identity, status.time)
    if alive is None and started is not None:
        since = attempts[-1].events.stat().st_mtime
        return _unknown(running, ProcessIdentity(**started.supervisor), since)
    return _lost(running, status, started)


def _unknown(record: RunRecord, who: ProcessIdentity, since: float) -> RunRecord:
    """The record of a run whose supervisor is silent."""
    moment = utc_text(since, "seconds")
    if is_alive(who):
        message = f"the supervisor (pid {who.pid} on {who.host}) hangs since {moment}"
    else:
        message = (
            f"the supervisor on {who.host} has given no sign of life since {moment}, and that host"
            " cannot be asked from here"
        )
    return replace(
        record,
        state="unknown",
        exit=int(Exit.CONTACT_LOST),
        root_cause={"message": message, "host": who.host, "since": moment},
        lost=True,
    )


def _lost(
    record: RunRecord, status: SupervisorStatus | None, started: AttemptStarted | None
) -> RunRecord:
    """The record of a run whose supervisor is gone and wrote no end."""
    if status is not None:
        pid = status.identity.pid
        message = (
            f"the supervisor (pid {pid} on {status.host}) is gone and did not say how it ended"
        )
    elif started is not None:
        pid = started.supervisor["pid"]
        host = started.supervisor["host"]
        message = f"the supervisor (pid {pid} on {host}) is gone and did not say how it ended"
    else:
        message = "it never started: the process that was to start it is gone"
    if _is_full(record.run.path):
        message += f"; the file system of {record.run.path} is full"
    return replace(
        record,
        state="failed",
        exit=int(Exit.RANK_INFRA),
        failure_class="infra",
        root_cause={"message": message},
        lost=status is not None or started is not None,
    )


def _is_full(folder: Path) -> bool:
    """Whether there is no room on its file system for what a supervisor writes."""
    status = os.statvfs(folder)
    no_files = status.f_files > 0 and status.f_favail == 0
    return no_files or status.f_bavail * status.f_frsize < RESERVE_BYTES


def _queued(running: RunRecord) -> RunRecord | None:
    """The record of a run whose newest job of a scheduler waits, or was over before a supervisor
    began; None for any other."""
    job = next(reversed(read_slurm_jobs(running.run)), None)
    jobset = newest_jobset(running.run)
    newest = job or jobset
    if newest is None or (newest.began is not None and newest.ended is None):
        return None
    waiting = replace(running, state="queued")
    if newest.ended is None:
        return waiting
    which = {"slurm_job": job.id} if job else {"jobset": jobset.name if jobset else ""}
    return record_of_end(waiting, which, newest.ended)


def record_of_end(record: RunRecord, job: Mapping[str, str], ended: Mapping[str, Any]) -> RunRecord:
    """The record of a run whose job of a scheduler ended without a supervisor's word.

    Args:
        record: what is known besides.
        job: {"slurm_job": Slurm's number of it} or {"jobset": its name}.
        ended: {"state": the scheduler's word, "message", "exit", ...}, as SlurmJob.ended.
    """
    code = int(ended.get("exit", Exit.START))
    cause: Any = {  # a RootCause; a job's end may hold any of CAUSE
        **(record.root_cause or {}),
        **{key: ended[key] for key in CAUSE if ended.get(key)},
        **job,
        "slurm_state" if "slurm_job" in job else "jobset_state": ended["state"],
    }
    if ended["state"].startswith("CANCELLED"):
        return replace(
            record,
            state="cancelled",
            exit=int(Exit.CANCELLED),
            failure_class="cancelled",
            root_cause=cause,
            lost=False,
        )
    kind: FailureClass = ended.get("class") or (
        "no-progress" if code == Exit.NO_PROGRESS else "infra"
    )
    return replace(
        record, state="failed", exit=code, failure_class=kind, root_cause=cause, lost=False
    )
