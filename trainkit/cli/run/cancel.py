"""The task `cancel`: ends a run, and asks every node what is left of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.markup import escape

from trainkit.base.documents import document
from trainkit.base.errors import Exit, TrainkitError
from trainkit.cli.config.jobs import load_jobs
from trainkit.cli.run import slurm
from trainkit.cli.tables import Listing
from trainkit.cli.wrapper import TaskContext, TaskResult
from trainkit.jobs.resolved import read_job
from trainkit.jobs.schema import Job
from trainkit.launch.hosts.hostfile import Host
from trainkit.launch.hosts.selection import hosts_path, local_hosts, read_hosts
from trainkit.launch.protocol.client import ask_supervisor
from trainkit.launch.protocol.frames import CancelRun
from trainkit.launch.slurm.job_graph import still_to_be_made
from trainkit.launch.slurm.reconcile import newest_job, settled
from trainkit.launch.start import SPAWN_SECONDS
from trainkit.launch.supervise.orphan_sweep import sweep_orphans
from trainkit.runs.events import (
    AgentJoined,
    AttemptEnded,
    EventLog,
    events_of,
    last_event,
    read_events,
)
from trainkit.runs.find import find_run
from trainkit.runs.folder import AttemptFolder, RunFolder
from trainkit.runs.record import RunRecord, read_run_record
from trainkit.runs.supervisor_status import (
    read_starter,
    read_supervisor_status,
    write_supervisor_status,
)

POLL_SECONDS = 0.3
BEGIN_SECONDS = 300.0  # for a run to be handed over: an sbatch for each of its arrays
ROOM_SECONDS = 60.0  # beyond lease and grace, for a supervisor that was told to stop at once
SAY_SECONDS = 15.0
NodeRow = dict[str, Any]


def cancel(task: TaskContext, words: str, *, save: bool, force: bool = False) -> TaskResult:
    """The task `cancel`. With `force`, hosts that do not answer count as gone."""
    run = find_run(load_jobs(task).roots(), words)
    job = read_job(run.job)
    record = _begun(task, run)
    if not run.job.is_file():
        task.say(f"run {run.id} was given up by whoever began it")
        return TaskResult(document("cancel/1", **_head(record), hosts=[]))
    if record.state == "queued":
        slurm.cancel_queued(task, run)
        return TaskResult(
            document("cancel/1", **_head(read_run_record(run)), hosts=[]), Exit.CANCELLED
        )
    if newest_job(run) is None and _made_just_now(run):
        record = read_run_record(run)
    ended = _last_end(run)
    if record.state in ("running", "unknown") and _told(task, record, save=save):
        task.say(f"run {run.id}: its supervisor was told to {'save and stop' if save else 'stop'}")
        record = _wait(task, run, job, save=save)
        ended = _last_end(run)
        if record.state == "succeeded":
            task.say(f"run {run.id} finished before that")
        slurm.make_sure(run)
        if ended:
            rows = _rows_of_end(run, job, ended)
        else:
            rows = _sweep(run, job)
        return _answer(task, record, rows)
    record = settled(read_run_record(run))  # it may have ended while it was asked
    if record.state not in ("running", "unknown") and not _may_have_left(run, ended):
        if left := (
            slurm.end_stages(run, time.monotonic() + slurm.CANCEL_SECONDS)
            if still_to_be_made(run)
            else []
        ):
            task.say(f"what was to make its stages is out of the queue (jobs {', '.join(left)})")
        task.say(f"run {run.id} has ended already: {record.state}, exit {record.exit}")
        return TaskResult(document("cancel/1", **_head(record), hosts=[]))
    task.say(f"run {run.id} has no supervisor that could be asked; asking its nodes what is left")
    rows = _sweep(run, job)
    # Slurm's TERM lets a supervisor that could not be reached have its last word
    ended = _last_end(run)
    if (
        ended is None
        and not any(row["left"] for row in rows)
        and (force or all(row["answered"] for row in rows))
    ):
        _close(run, record)
    return _answer(task, read_run_record(run), rows, force=force)


def _begun(task: TaskContext, run: RunFolder) -> RunRecord:
    """The record once the run is no longer starting: before, nobody knows what would have to be
    stopped. Raises TrainkitError (exit 13) where that lasts."""
    deadline = time.monotonic() + BEGIN_SECONDS
    said = False
    while (record := settled(read_run_record(run))).state == "starting":
        starter = read_starter(run)
        if starter:
            who = f"pid {starter.identity.pid} on {starter.identity.host}"
        else:
            who = "somebody"
        if time.monotonic() > deadline:
            hint = "is it stopped, or does its file system hang? end it, then cancel again"
            raise TrainkitError(
                f"run {run.id} is still being begun by {who}", exit=Exit.CONTACT_LOST, hint=hint
            )
        if not said:
            task.say(f"run {run.id} is being begun by {who}; waiting for that")
        said = True
        time.sleep(POLL_SECONDS)
    return record


def _told(task: TaskContext, record: RunRecord, *, save: bool) -> bool:
    """Tell the supervisor; whether there was one. Raises TrainkitError (exit 13) where it lives
    and cannot be reached, and nobody else could end the run."""
    try:
        return ask_supervisor(record.run, CancelRun(save))
    except TrainkitError as error:
        if record.state == "unknown":  # long silent, and not to be reached either
            task.say(error.message)
            return False
        if newest_job(record.run) is None:
            raise
        task.say(f"{error.message}; Slurm can end its job: ranks save, as far as KillWait allows")
        return False


def _made_just_now(run: RunFolder) -> bool:
    """A run that was made this minute may have a supervisor that has not said so yet: only with
    its word can it be told to stop. Waits for that; returns whether it came."""
    waited = False
    while (
        (sign := read_supervisor_status(run)) is None
        and not run.attempts()
        and time.time() - run.job.stat().st_mtime < SPAWN_SECONDS
    ):
        waited = True
        time.sleep(POLL_SECONDS)
    return waited and sign is not None


def _close(run: RunFolder, record: RunRecord) -> None:
    """Write the last word that a dead supervisor could not, so that the run can be resumed:
    nothing of it is left."""
    why = (record.root_cause or {}).get("message") or "its supervisor is gone"
    for attempt in run.attempts()[-1:]:
        events = EventLog(attempt)
        events.write(
            AttemptEnded(
                int(Exit.CANCELLED),
                {"message": f"stopped by invoke cancel; {why}"},
                failure_class="cancelled",
            )
        )
        events.close()
    status = read_supervisor_status(run)
    if status is not None:
        write_supervisor_status(run, replace(status, ended=True))


def _last_end(run: RunFolder) -> AttemptEnded | None:
    """The newest attempt's last word."""
    attempts = run.attempts()
    if attempts:
        return last_event(read_events(attempts[-1]), AttemptEnded)
    return None


def _may_have_left(run: RunFolder, ended: AttemptEnded | None) -> bool:
    """Whether processes may be left of a run whose supervisor is gone: it left no last word, or
    one that says so."""
    sign = read_supervisor_status(run)
    if ended is None:
        return bool(run.attempts()) or sign is not None
    return bool(ended.survivors or ended.unanswered) or (sign is not None and not sign.ended)


def _wait(task: TaskContext, run: RunFolder, job: Job, *, save: bool) -> RunRecord:
    """Wait for the end. Saving takes as long as a step and a checkpoint take; stopping is
    bounded. Raises TrainkitError (exit 13) beyond that."""
    watch = job.cluster.watch
    began = time.monotonic()
    limit = watch.lease + watch.grace + ROOM_SECONDS
    said = seen = began
    while (record := read_run_record(run)).state in ("running", "unknown"):
        now = time.monotonic()
        if record.state == "running":
            seen = now
        if (not save and now - began > limit) or now - seen > limit:
            raise TrainkitError(
                f"run {run.id} was told to stop {limit:.0f} s ago and still runs",
                exit=Exit.CONTACT_LOST,
                hint=f"invoke logs {run.id}",
            )
        if now - said > SAY_SECONDS:
            said = now
            task.say(f"  waiting, {now - began:.0f} s so far; the run is at step {record.step}")
        time.sleep(POLL_SECONDS)
    return record


def _rows_of_end(run: RunFolder, job: Job, ended: AttemptEnded) -> list[NodeRow]:
    """What the agents of the newest attempt told the supervisor about their hosts when it ended."""
    silent = ended.unanswered
    names = [host.name for host in _hosts(run, job, run.attempts()[-1:])]
    rows = dict.fromkeys([*names, *silent, *(each["host"] for each in ended.survivors)])
    left = {name: [each for each in ended.survivors if each["host"] == name] for name in rows}
    return [
        {"host": name, "answered": name not in silent, "error": None, "left": left[name]}
        for name in rows
    ]


def _hosts(run: RunFolder, job: Job, attempts: Sequence[AttemptFolder]) -> list[Host]:
    """The hosts on which some attempts had an agent; where none is known, all that the run may
    have used."""
    listed = (read_hosts(run) if hosts_path(run).is_file() else local_hosts(job)).hosts
    used = {
        event.host for attempt in attempts for event in events_of(read_events(attempt), AgentJoined)
    }
    return [host for host in listed if host.name in used] or list(listed)


def _sweep(run: RunFolder, job: Job) -> list[NodeRow]:
    """Ask every host that the run ever used by itself, and end what is left there. Nodes of
    Slurm's are not asked: it ends all that a job left."""
    hosts = _hosts(run, job, run.attempts())
    if (newest := newest_job(run)) is not None:
        slurm.end_job(run, newest)
        return [{"host": host.name, "answered": True, "error": None, "left": []} for host in hosts]
    try:
        reports = sweep_orphans(run, job, hosts, kill=True)
    except TrainkitError as error:  # no way leads to any of them
        return [
            {"host": host.name, "answered": False, "error": error.message, "left": [], "killed": 0}
            for host in hosts
        ]
    return [
        {
            "host": each.host,
            "answered": each.error is None,
            "error": each.error,
            "left": [vars(process) for process in each.left],
            "killed": len(each.killed),
            "proof": each.proof,
        }
        for each in reports
    ]


def _head(record: RunRecord) -> dict[str, Any]:
    return {
        "run": record.run.id,
        "job": record.run.job_name,
        "state": record.state,
        "exit": record.exit,
        "class": record.failure_class,
    }


def _answer(
    task: TaskContext, record: RunRecord, rows: list[NodeRow], *, force: bool = False
) -> TaskResult:
    table = Listing("host", "left")
    for row in rows:
        table.add_row(escape(row["host"]), escape(_left(row)))
    if not task.json:
        task.console.print(table)
    if not force and not all(row["answered"] for row in rows):
        code = Exit.CONTACT_LOST
    elif any(row["left"] for row in rows):
        code = Exit.RANK_INFRA
    elif record.state == "succeeded":
        code = Exit.DONE
    else:
        if record.state == "preempted" and (record.root_cause or {}).get("saved"):
            code = Exit.PREEMPTED
        else:
            code = Exit.CANCELLED
    if code == Exit.PREEMPTED:
        task.say(f"saved at step {record.step}; {task.command} resume {record.run.id} goes on")
    elif record.state == "preempted":
        task.say("stopped before it had saved: it would go on from an older checkpoint")
    return TaskResult(document("cancel/1", **_head(record), hosts=rows), code)


def _left(row: NodeRow) -> str:
    if not row["answered"]:
        return "did not answer" + (
            f": {row['error']}" if row["error"] else "; what is left there is not known"
        )
    if row.get("proof", "") is None:
        unproved = " that can be seen (no cgroup there: see `doctor`)"
    else:
        unproved = ""
    if row.get("killed"):
        killed = f" ({row['killed']} ended just now)"
    else:
        killed = ""
    return (
        ", ".join(f"pid {each['pid']} {each.get('argv0', '')}".rstrip() for each in row["left"])
        or f"nothing{unproved}{killed}"
    )
