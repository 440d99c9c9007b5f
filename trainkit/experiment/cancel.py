"""Ends a run, and asks every node what is left of it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence

from trainkit.base.errors import Exit, TrainkitError
from trainkit.base.lazy_dataclasses import dataclass, replace
from trainkit.base.process import is_alive
from trainkit.base.process_marks import MarkedProcess, send_signal
from trainkit.jobs.resolved import read_job
from trainkit.jobs.schema import Job
from trainkit.launch.hosts.hostfile import Host
from trainkit.launch.hosts.selection import HostList, local_hosts
from trainkit.launch.protocol.client import ask_supervisor
from trainkit.launch.protocol.frames import CancelRun
from trainkit.launch.scheduler_registry import current, scheduler_of
from trainkit.launch.start import SPAWN_SECONDS
from trainkit.launch.supervise.orphan_sweep import sweep_orphans
from trainkit.runs.events import (
    AgentJoined,
    AttemptEnded,
    EventLog,
    events_of,
    newest_end,
    read_events,
)
from trainkit.runs.folder import AttemptFolder, RunFolder
from trainkit.runs.record import (
    RunRecord,
    read_run_record,
    read_starter,
    read_supervisor_status,
    write_supervisor_status,
)

POLL_SECONDS = 0.3
BEGIN_SECONDS = 300.0  # for a run to be handed over: an sbatch for each of its arrays
ROOM_SECONDS = 60.0  # beyond lease and grace, for a supervisor that was asked to stop at once
SAY_SECONDS = 15.0
Say = Callable[[str], None]


@dataclass(frozen=True)
class HostLeftovers:
    """What is left of a run on one host.

    Args:
        host: its name.
        answered: whether it could be asked.
        error: why not.
        left: processes that are still there.
        killed: how many were ended just now; None where its agent said this at the run's end.
        proof: by what it is proved that these are all; None: nothing proves it, "": not asked.
    """

    host: str
    answered: bool
    error: str | None
    left: Sequence[Mapping[str, object]]
    killed: int | None = None
    proof: str | None = ""

    def to_json(self) -> dict[str, object]:
        """One entry of the document cancel/1."""
        row = {
            "host": self.host,
            "answered": self.answered,
            "error": self.error,
            "left": self.left,
        }
        if self.killed is not None:
            row["killed"] = self.killed
        if self.proof != "":
            row["proof"] = self.proof
        return row


@dataclass(frozen=True)
class Cancellation:
    """How the attempt to end a run went.

    Args:
        record: the run afterwards.
        exit: what `cancel` ends with.
        hosts: what is left on each; None where no host had to be asked.
    """

    record: RunRecord
    exit: Exit
    hosts: list[HostLeftovers] | None = None


def cancel_run(run: RunFolder, *, save: bool, force: bool, say: Say) -> Cancellation:
    """End a run, and see what is left of it.

    Args:
        run: the run.
        save: first save at the end of the step; it can go on from there.
        force: hosts that do not answer count as gone; a supervisor of this host that does not is
            killed.
        say: prints one line.

    Raises TrainkitError (exit 13) where the run does not end, or cannot be reached.
    """
    record = _begun(run, say)
    scheduler = scheduler_of(run)
    if not run.job.is_file():
        say(f"run {run.id} was given up by the process that began it")
        return Cancellation(record, Exit.DONE)
    job = read_job(run.job)
    if record.state == "queued":
        ended_job = scheduler.cancel(run, queued=True)
        with_stages = ""
        if ended_job.stage_jobs:
            jobs = ", ".join(ended_job.stage_jobs)
            with_stages = f", with jobs {jobs} that were to make its stages"
        say(f"job {ended_job.id} is out of the queue ({ended_job.state}){with_stages}")
        return Cancellation(read_run_record(run), Exit.CANCELLED)
    if not scheduler.queues and _made_just_now(run):
        record = read_run_record(run)
    if record.state in ("running", "unknown") and _ask_supervisor(
        record, say, save=save, force=force
    ):
        say(f"run {run.id}: its supervisor was asked to {'save and stop' if save else 'stop'}")
        record = _wait(run, job, say, save=save)
        ended = newest_end(run)
        if record.state == "succeeded":
            say(f"run {run.id} finished before that")
        scheduler.end_job(run)
        hosts = _hosts_at_end(run, job, ended) if ended else _sweep(run, job)
        return Cancellation(record, _exit_of(record, hosts), hosts)
    if not scheduler.queues:
        _end_hung_supervisor(run, record, say, force=force)
    ended = newest_end(run)
    record = current(read_run_record(run))  # it may have ended while it was asked
    if record.state not in ("running", "unknown") and not _may_have_left(run, ended):
        if left := scheduler.end_stages(run):
            say(f"what was to make its stages is out of the queue (jobs {', '.join(left)})")
        say(f"run {run.id} has ended already: {record.state}, exit {record.exit}")
        return Cancellation(record, Exit.DONE)
    say(f"run {run.id} has no supervisor that could be asked; asking its nodes what is left")
    hosts = _sweep(run, job)
    # the scheduler's TERM lets a supervisor that could not be reached write its last event
    nothing_left = not any(host.left for host in hosts)
    if newest_end(run) is None and nothing_left and (force or all(host.answered for host in hosts)):
        _close(run, record)
    record = read_run_record(run)
    return Cancellation(record, _exit_of(record, hosts, force=force), hosts)


def _exit_of(record: RunRecord, hosts: Sequence[HostLeftovers], *, force: bool = False) -> Exit:
    if not force and not all(host.answered for host in hosts):
        return Exit.CONTACT_LOST
    if any(host.left for host in hosts):
        return Exit.RANK_INFRA
    if record.state == "succeeded":
        return Exit.DONE
    if record.state == "preempted" and (record.root_cause or {}).get("saved"):
        return Exit.PREEMPTED
    return Exit.CANCELLED


def _begun(run: RunFolder, say: Say) -> RunRecord:
    """The record once the run is no longer starting: before, it is not known what would have to
    be stopped. Raises TrainkitError (exit 13) where that lasts."""
    deadline = time.monotonic() + BEGIN_SECONDS
    said = False
    while (record := current(read_run_record(run))).state == "starting":
        starter = read_starter(run)
        if starter:
            who = f"pid {starter.identity.pid} on {starter.identity.host}"
        else:
            who = "an unknown process"
        if time.monotonic() > deadline:
            hint = "is it stopped, or does its file system hang? end it, then cancel again"
            raise TrainkitError(
                f"run {run.id} is still being begun by {who}", exit=Exit.CONTACT_LOST, hint=hint
            )
        if not said:
            say(f"run {run.id} is being begun by {who}; waiting for that")
        said = True
        time.sleep(POLL_SECONDS)
    return record


def _ask_supervisor(record: RunRecord, say: Say, *, save: bool, force: bool) -> bool:
    """Ask the supervisor to end the run; whether there was one. Raises TrainkitError (exit 13)
    where it lives and cannot be reached, and neither force nor a scheduler could end the run."""
    scheduler = scheduler_of(record.run)
    if scheduler.ask(record.run, save=save):
        return True
    try:
        return ask_supervisor(record.run, CancelRun(save))
    except TrainkitError as error:
        if force or record.state == "unknown":  # long silent, and not to be reached either
            say(error.message)
            return False
        if not scheduler.queues:
            raise
        say(
            f"{error.message}; {scheduler.title} can end its job: ranks save, as far as there is"
            " time"
        )
        return False


def _end_hung_supervisor(run: RunFolder, record: RunRecord, say: Say, *, force: bool) -> None:
    """End a supervisor of this host that lives and does not answer, so that it cannot go on beside
    another. Raises TrainkitError (exit 13) without force, or where it is not ours to end."""
    status = read_supervisor_status(run)
    if status is None or status.ended or not is_alive(status.identity):
        return
    who = status.identity
    if not force:
        raise TrainkitError(
            f"run {run.id}: {(record.root_cause or {}).get('message')}",
            exit=Exit.CONTACT_LOST,
            hint=f"invoke cancel {run.id} --force ends that process too",
        )
    # the folder's word alone does not point a signal at a process of somebody else's
    if os.stat(f"/proc/{who.pid}").st_uid == run.supervisor.stat().st_uid:
        send_signal(MarkedProcess(who.pid, who.start_time, "", ""), signal.SIGKILL)
    deadline = time.monotonic() + ROOM_SECONDS
    while is_alive(who):
        if time.monotonic() > deadline:
            raise TrainkitError(
                f"run {run.id}: its supervisor (pid {who.pid}) does not end",
                exit=Exit.CONTACT_LOST,
                hint=f"whose is it, and what does it wait for? ps -o user,stat,wchan {who.pid}",
            )
        time.sleep(POLL_SECONDS)
    say(f"run {run.id}: its supervisor (pid {who.pid}), which did not answer, is ended")


def _made_just_now(run: RunFolder) -> bool:
    """A run that was made this minute may have a supervisor that has not signed yet: only then
    can it be asked to stop. Waits for that; returns whether it signed."""
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
    """Write the last event that a dead supervisor could not, so that the run can be resumed:
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


def _may_have_left(run: RunFolder, ended: AttemptEnded | None) -> bool:
    """Whether processes may be left of a run whose supervisor is gone: it wrote no last event, or
    one that says so."""
    sign = read_supervisor_status(run)
    if ended is None:
        return bool(run.attempts()) or sign is not None
    return bool(ended.survivors or ended.unanswered) or (sign is not None and not sign.ended)


def _wait(run: RunFolder, job: Job, say: Say, *, save: bool) -> RunRecord:
    """Wait for the end. Saving takes as long as a step and a checkpoint take; stopping is
    bounded. Raises TrainkitError (exit 13) beyond that."""
    watch = job.cluster.watch
    began = time.monotonic()
    limit = watch.lease + watch.grace + ROOM_SECONDS
    said = began
    seen = began
    while (record := read_run_record(run)).state in ("running", "unknown"):
        now = time.monotonic()
        if record.state == "running":
            seen = now
        if (not save and now - began > limit) or now - seen > limit:
            raise TrainkitError(
                f"run {run.id} was asked to stop {limit:.0f} s ago and still runs",
                exit=Exit.CONTACT_LOST,
                hint=f"invoke logs {run.id}",
            )
        if now - said > SAY_SECONDS:
            said = now
            say(f"  waiting, {now - began:.0f} s so far; the run is at step {record.step}")
        time.sleep(POLL_SECONDS)
    return record


def _hosts_at_end(run: RunFolder, job: Job, ended: AttemptEnded) -> list[HostLeftovers]:
    """What the agents of the newest attempt reported about their hosts when it ended."""
    silent = ended.unanswered
    names = [host.name for host in _hosts(run, job, run.attempts()[-1:])]
    all_names = dict.fromkeys([*names, *silent, *(each["host"] for each in ended.survivors)])
    left = {name: [each for each in ended.survivors if each["host"] == name] for name in all_names}
    return [HostLeftovers(name, name not in silent, None, left[name]) for name in all_names]


def _hosts(run: RunFolder, job: Job, attempts: Sequence[AttemptFolder]) -> list[Host]:
    """The hosts on which some attempts had an agent; where none is known, all that the run may
    have used."""
    found = HostList.from_file(run.hosts) if run.hosts.is_file() else local_hosts(job)
    listed = found.hosts
    used = {
        event.host for attempt in attempts for event in events_of(read_events(attempt), AgentJoined)
    }
    return [host for host in listed if host.name in used] or list(listed)


def _sweep(run: RunFolder, job: Job) -> list[HostLeftovers]:
    """Ask every host that the run ever used by itself, and end what is left there. Nodes of a
    scheduler with a queue are not asked: it ends all that a job left."""
    hosts = _hosts(run, job, run.attempts())
    scheduler = scheduler_of(run)
    if scheduler.queues:
        scheduler.cancel(run, queued=False)
        return [HostLeftovers(host.name, True, None, []) for host in hosts]
    try:
        seconds = job.cluster.connect_seconds()
        reports = asyncio.run(sweep_orphans(run, job.cluster, hosts, seconds, forget=True))
    except TrainkitError as error:  # no way leads to any of them
        return [HostLeftovers(host.name, False, error.message, [], 0) for host in hosts]
    return [
        HostLeftovers(
            each.host,
            each.error is None,
            each.error,
            [vars(process) for process in each.left],
            len(each.killed),
            each.proof,
        )
        for each in reports
    ]
