"""What happened to a run: events are appended by the supervisor, the state is read from them and
from the supervisor's sign of life."""

from __future__ import annotations

import datetime
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from trainkit.base.documents import document, read_document
from trainkit.base.errors import ConfigError, Exit
from trainkit.base.files import read_json, write_json
from trainkit.base.process import ProcessIdentity, identity, is_alive
from trainkit.runs.events import (
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
from trainkit.runs.slurm import read_slurm_jobs

RunState = Literal[
    "queued", "starting", "running", "succeeded", "failed", "cancelled", "preempted", "unknown"
]
# what slurm.json tells of a job that ended before there were ranks
CAUSE = ("message", "unit", "host", "log", "advice")
# of another host's supervisor, which writes its sign of life every 5 s; longer and nobody knows
SILENCE_SECONDS = 60.0
_STATE_OF_CLASS: dict[str, RunState] = {
    "success": "succeeded",
    "cancelled": "cancelled",
    "preempted": "preempted",
}


@dataclass(frozen=True)
class SupervisorStatus:
    """launch/supervisor.json, the form supervisor/1.

    Args:
        identity: which process it is.
        host: where it runs.
        time: when it last wrote this, seconds since 1970.
        attempt: the newest attempt it began.
        address: where it listens.
        port: where it listens.
        ended: it has finished its work.
    """

    identity: ProcessIdentity
    host: str
    time: float
    attempt: int
    address: str
    port: int
    ended: bool

    def alive(self, now: float) -> bool | None:
        """Whether it lives; None: it is another host's, and has been silent."""
        if self.ended:
            return False
        here = is_alive(self.identity)
        if here is not None:
            return here
        if now - self.time <= SILENCE_SECONDS:
            return True
        return None


def read_supervisor_status(run: RunFolder) -> SupervisorStatus | None:
    """The supervisor's sign of life; None where there is none (yet). Raises ConfigError for a
    file of another form."""
    if not run.supervisor.is_file():
        return None
    value = read_document(run.supervisor, "supervisor/1")
    try:
        who = ProcessIdentity(**value["identity"])
        at = float(value["time"])
        attempt = int(value["attempt"])
        port = int(value["port"] or 0)
        return SupervisorStatus(
            who, str(value["host"]), at, attempt, str(value["address"]), port, bool(value["ended"])
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{run.supervisor} is not as a supervisor writes it: {error}") from None


def write_maker(run: RunFolder) -> None:
    """Write launch/maker.json, the form maker/1: this process is about to supervise the run, or
    to have it supervised."""
    write_json(
        run.maker,
        document(
            "maker/1",
            identity=identity().as_dict(),
            time=time.time(),
            former=_signature(read_supervisor_status(run)),
        ),
    )


def read_maker(run: RunFolder) -> ProcessIdentity | None:
    """The process that began the run, or began it again, last; None where none has said so."""
    if run.maker.is_file():
        return ProcessIdentity(**read_document(run.maker, "maker/1")["identity"])
    return None


def _signature(sign: SupervisorStatus | None) -> list[Any] | None:
    """Tells one sign of life from another without comparing clocks, which are those of two
    hosts."""
    if sign is not None:
        return [sign.identity.as_dict(), sign.time]
    return None


def _starting(run: RunFolder, sign: SupervisorStatus | None) -> bool:
    """Whether somebody is just beginning, or beginning again, and no supervisor has said so yet."""
    if not run.maker.is_file():
        return False
    value = read_document(run.maker, "maker/1")
    if _signature(sign) != value["former"]:  # a supervisor has signed since
        return False
    alive = is_alive(ProcessIdentity(**value["identity"]))
    if alive is not None:
        return alive
    return time.time() - float(value["time"]) <= SILENCE_SECONDS


@dataclass(frozen=True)
class RunRecord:
    """A run as its folder tells it. `lost`: its supervisor left no word, or has long been
    silent; who else may know how it ended can be asked."""

    run: RunFolder
    state: RunState
    step: int
    attempt: int
    exit: int | None
    failure_class: FailureClass | None
    root_cause: RootCause | None
    survivors: list[SurvivingProcess]
    lost: bool = False

    def row(self) -> dict[str, Any]:
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
            if _has_tokenizer(self.run):
                writes = [f'invoke generate {run} --prompt "..."']
            else:
                writes = []
            return [*writes, f"invoke report {run}", "invoke tensorboard"]
        if self.state in ("failed", "cancelled") and _was_not_prepared(self.run):
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

    def to_json(self) -> dict[str, Any]:
        """The form run/1."""
        return document(
            "run/1",
            **self.row(),
            exit=self.exit,
            root_cause=self.root_cause,
            survivors=self.survivors,
            next=self.next_tasks(),
            **{"class": self.failure_class},
        )


def _was_not_prepared(run: RunFolder) -> bool:
    """Whether a run of Slurm's ended before its stages were made: there is nothing to resume."""
    return (run.path / "launch" / "stages").is_dir() and not (
        run.path / "launch" / "inputs.json"
    ).is_file()


def _has_tokenizer(run: RunFolder) -> bool:
    """Whether the run's tokens stand for text; those of mock data do not."""
    job = read_json(run.job).get("job", {})
    return job.get("dataset", {}).get("tokenizer") is not None


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
    """The state of a run now. Until its supervisor has said that it is there it is starting,
    between two attempts it is running. A run whose supervisor is gone without a word is failed,
    class infra; one whose supervisor is on another host and silent is unknown (exit 13)."""
    attempts = run.attempts()
    if attempts:
        number = attempts[-1].number
    else:
        number = 0
    if attempts:
        events = read_events(attempts[-1])
    else:
        events = []
    step = last_step(run)
    started = first_event(events, AttemptStarted)
    ended = last_event(events, AttemptEnded)
    sign = read_supervisor_status(run)
    if sign is not None:
        alive = sign.alive(time.time())
    else:
        alive = None
    if (queued := _queued(run, step, number)) is not None and not alive:
        return queued
    if not alive and _starting(run, sign):
        return RunRecord(run, "starting", step, number, None, None, None, [])
    if ended is not None and not alive:
        state = _STATE_OF_CLASS.get(ended.failure_class, "failed")
        return RunRecord(
            run,
            state,
            step,
            number,
            ended.exit,
            ended.failure_class,
            ended.root_cause,
            list(ended.survivors),
        )
    if sign is None and started is not None:
        alive = is_alive(ProcessIdentity(**started.supervisor))
    if alive:
        return RunRecord(run, "running", step, number, None, None, None, [])
    if alive is None and (sign is not None or started is not None):
        if sign:
            host = sign.host
            since = sign.time
        else:
            host = started.supervisor["host"] if started else "?"
            since = attempts[-1].events.stat().st_mtime
        message = (
            f"the supervisor on {host} has given no sign of life since {_iso(since)}, and that host"
            " cannot be asked from here"
        )
        return RunRecord(
            run,
            "unknown",
            step,
            number,
            int(Exit.CONTACT_LOST),
            None,
            {"message": message, "host": host, "since": _iso(since)},
            [],
            True,
        )
    if sign is not None:
        message = (
            f"the supervisor (pid {sign.identity.pid} on {sign.host}) is gone and left no word"
        )
    elif started is not None:
        message = (
            f"the supervisor (pid {started.supervisor['pid']} on"
            f" {started.supervisor['host']}) is gone and left no word"
        )
    else:
        message = "it never started: whoever made it is gone"
    return RunRecord(
        run,
        "failed",
        step,
        number,
        int(Exit.RANK_INFRA),
        "infra",
        {"message": message},
        [],
        sign is not None or started is not None,
    )


def _queued(run: RunFolder, step: int, number: int) -> RunRecord | None:
    """The record of a run whose newest Slurm job waits, or was over before a supervisor began;
    None for any other."""
    newest = next(reversed(read_slurm_jobs(run)), None)
    if newest is None or (newest.began is not None and newest.ended is None):
        return None
    waiting = RunRecord(run, "queued", step, number, None, None, None, [])
    if newest.ended is None:
        return waiting
    return record_of_end(waiting, newest.id, newest.ended)


def record_of_end(record: RunRecord, job: str, ended: Mapping[str, Any]) -> RunRecord:
    """The record of a run whose Slurm job ended without a supervisor's word.

    Args:
        record: what is known besides.
        job: Slurm's number of it.
        ended: {"state": Slurm's word, "message", "exit", ...}, as SlurmJob.ended.
    """
    code = int(ended.get("exit", Exit.START))
    cause: Any = {  # a RootCause; a job's end may hold any of CAUSE
        **(record.root_cause or {}),
        **{key: ended[key] for key in CAUSE if ended.get(key)},
        "slurm_job": job,
        "slurm_state": ended["state"],
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


def _iso(seconds: float) -> str:
    return (
        datetime.datetime.fromtimestamp(seconds, datetime.UTC)
        .isoformat(timespec="seconds")
        .replace("+00:00", "Z")
    )


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)


def all_runs(roots: Iterable[Path], warn: Callable[[str], None] = _warn) -> list[RunFolder]:
    """Every run below ROOT/runs of any root, oldest first. `warn` is told of what cannot be
    read."""
    found = [run for root in roots for run in _runs_below(root, warn)]
    return sorted(found, key=lambda run: run.id)


def _runs_below(root: Path, warn: Callable[[str], None]) -> list[RunFolder]:
    """Runs of one root; those that can be seen where parts of it are not to be read from here
    (another cluster's root, a dead mount)."""
    found = []
    for job in _folders(root / "runs", warn):
        for run in _folders(job, warn):
            try:
                found += [RunFolder(run)] if (run / "job.json").is_file() else []
            except OSError as error:
                warn(f"{run} cannot be read ({error.strerror}): that run is not seen")
    return found


def _folders(path: Path, warn: Callable[[str], None]) -> list[Path]:
    try:
        return [entry for entry in path.iterdir() if entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        warn(f"{path} cannot be read ({error.strerror}): runs there are not seen")
        return []


def find_run(roots: Sequence[Path], words: str) -> RunFolder:
    """The run `words` means: an id, a unique prefix of one, a job's name (its newest run),
    Slurm's number of its job, or "last".

    Raises ConfigError (exit 3) where there is none or more than one.
    """
    runs = all_runs(roots)
    if not runs:
        raise ConfigError(
            f"there are no runs in {' or '.join(str(root / 'runs') for root in roots)}",
            hint="start one: invoke train JOB",
        )
    if words == "last":
        return runs[-1]
    matches = (
        [run for run in runs if run.id == words]
        or [run for run in runs if run.job_name == words][-1:]
        or [
            run
            for run in runs
            if words.isdigit() and any(job.id == words for job in read_slurm_jobs(run))
        ][-1:]
        or [run for run in runs if run.id.startswith(words)]
    )
    if len(matches) > 1:
        raise ConfigError(
            f"{words!r} is the beginning of {len(matches)} runs:"
            f" {', '.join(run.id for run in matches[:8])}"
        )
    if not matches:
        raise ConfigError(
            f"no run and no job with runs is called {words!r}",
            hint="invoke runs lists them; `last` is the newest",
        )
    return matches[0]
