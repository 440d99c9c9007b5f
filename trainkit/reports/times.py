"""When a run did what, from its folder: what the ledger is made of."""

from __future__ import annotations

import contextlib
import datetime
import json
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

from trainkit.base.errors import TrainkitError
from trainkit.reports.documents import read_table
from trainkit.reports.ledger import AttemptTimes, RunTimes
from trainkit.runs.checkpoints import published_folders, step_of
from trainkit.runs.events import (
    AgentJoined,
    AllRanksStarted,
    AttemptEnded,
    AttemptStarted,
    Event,
    RankEnded,
    RankStarted,
    RetryPlanned,
    events_of,
    first_event,
    last_event,
    read_events,
)
from trainkit.runs.folder import AttemptFolder
from trainkit.runs.phases import PhaseChange, read_phases
from trainkit.runs.record import RunRecord
from trainkit.runs.slurm import read_slurm_jobs

ID_TIME = re.compile(r"(\d{8})-(\d{6})")
LIVE = ("queued", "starting", "running")


def seconds_of(text: object) -> float | None:
    """An ISO 8601 time in seconds since 1970; None for anything else."""
    try:
        return datetime.datetime.fromisoformat(str(text)).timestamp()
    except (ValueError, OverflowError):
        return None


def read_run_times(record: RunRecord) -> RunTimes:
    """The times of a run."""
    run = record.run
    folders = run.attempts()
    attempts = [
        times
        for folder in folders
        if (times := _attempt_times(folder, live=folder is folders[-1] and record.state in LIVE))
        is not None
    ]
    for index, following in enumerate(attempts[1:]):
        before = attempts[index]
        attempts[index] = replace(  # a copied log is younger than what is in it
            before,
            ranks_ended=min(before.ranks_ended, following.started),
            ended=min(before.ended, following.started),
        )
    try:
        queued = [seconds_of(job.submitted) for job in read_slurm_jobs(run)]
    except (TrainkitError, TypeError, KeyError):
        queued = []
    queued_at = sorted(at for at in queued if at is not None)
    begins = [*queued_at, *(each.started for each in attempts)]
    origin = seconds_of(read_table(run.origin).get("started"))
    if origin is None:
        origin = time_of_id(run.id)
    if origin is not None:
        begins.append(origin)
    if record.state in LIVE:
        end = time.time()
    else:
        end = max([*begins, *(each.ended for each in attempts)], default=0.0)
        if not attempts and queued_at and run.slurm.exists():  # it was over before it began
            end = max(end, run.slurm.stat().st_mtime)
    kept = None
    if record.state not in (*LIVE, "succeeded"):
        kept = max(map(step_of, published_folders(run.checkpoints)), default=0)
    return RunTimes(min(begins, default=end), end, attempts, queued_at, kept)


def time_of_id(run: str) -> float | None:
    """When a run was named, in seconds since 1970; None where its id is not of ours."""
    match = ID_TIME.match(run)
    if match is None:
        return None
    return seconds_of(f"{match[1]}T{match[2]}+00:00")


def _attempt_times(folder: AttemptFolder, *, live: bool) -> AttemptTimes | None:
    """One attempt's; None where not even its begin was written."""
    events = read_events(folder)
    started = first_event(events, AttemptStarted)
    begin = seconds_of(started.time) if started else None
    if begin is None:
        return None
    offset = _clock_offset(events)
    phases = [replace(each, time=each.time - offset) for each in read_phases(folder)]
    go = first_event(events, AllRanksStarted)
    ended = last_event(events, AttemptEnded)
    ranks_ended = _end_of_rank_0(events)
    sign = _last_sign(folder, [e for e in events if e is not ended], phases, offset)
    if ended is None and live:
        sign = time.time()
    finish = seconds_of(ended.time) if ended else None
    retry = last_event(events, RetryPlanned)
    return AttemptTimes(
        folder.number,
        begin,
        ranks_ended or sign,
        finish or sign,
        seconds_of(go.time) if go else None,
        phases,
        requeued=retry is not None and retry.by is not None,
    )


def _end_of_rank_0(events: Iterable[Event]) -> float | None:
    ends = [seconds_of(each.time) for each in events_of(events, RankEnded) if each.rank == 0]
    return next((at for at in reversed(ends) if at is not None), None)


def _clock_offset(events: Sequence[Event]) -> float:
    """Seconds that the clock of rank 0's host is ahead of the supervisor's."""
    host = next((each.host for each in events_of(events, RankStarted) if each.rank == 0), None)
    joined = (each for each in events_of(events, AgentJoined) if each.host == host)
    return next((float(each.clock_offset) for each in joined), 0.0)


def _last_sign(
    folder: AttemptFolder, events: Sequence[Event], phases: Sequence[PhaseChange], offset: float
) -> float:
    """When an attempt without an end was last heard of: its events, phases, heartbeat and log.

    Args:
        folder: the attempt.
        events: its events.
        phases: its phases, by the supervisor's clock.
        offset: by which the clock of rank 0's host is ahead.
    """
    signs = [seconds_of(event.time) or 0.0 for event in events[-1:]]
    signs += [change.time for change in phases[-1:]]
    with contextlib.suppress(OSError):
        signs.append(folder.log(0).stat().st_mtime - offset)
    try:
        beat = json.loads(folder.heartbeat(0).read_text())
        signs.append(float(beat["time"]) - offset)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return max(signs, default=0.0)
