"""A run folder, read once, as one record: what pages, comparisons and documents are made of; and
when the run did what, of which the ledger is made."""

from __future__ import annotations

import contextlib
import datetime
import json
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from trainkit.base.errors import TrainkitError
from trainkit.base.lazy_dataclasses import dataclass, field, replace
from trainkit.base.printable import printable
from trainkit.reports.documents import Table, as_number, as_table, read_table
from trainkit.reports.faults import FaultCost, build_faults
from trainkit.reports.ledger import STEPS, AttemptTimes, Fault, Ledger, RunTimes, build_ledger
from trainkit.reports.mixture import TrainedPhase, trained_phases
from trainkit.reports.words import event_in_words
from trainkit.runs.attempt_report import AttemptReport, report_attempts
from trainkit.runs.checkpoints import published_folders, step_of
from trainkit.runs.evaluations import EvaluationRecord, read_evaluations
from trainkit.runs.events import (
    AgentJoined,
    AllRanksStarted,
    AttemptEnded,
    AttemptStarted,
    ContactLost,
    Event,
    HangDetected,
    RankEnded,
    RankStarted,
    RetryPlanned,
    events_of,
    first_event,
    last_event,
    read_events,
)
from trainkit.runs.expert_loads import ExpertLoads, read_expert_loads
from trainkit.runs.folder import AttemptFolder, RunFolder
from trainkit.runs.kubernetes import read_jobsets
from trainkit.runs.metrics import ThinnedRows, read_thinned, taken_back_path
from trainkit.runs.phases import PhaseChange, RankTimes, read_phases, read_rank_times
from trainkit.runs.record import RunRecord, read_run_record
from trainkit.runs.samples import SampleText, read_samples
from trainkit.runs.slurm import read_slurm_jobs
from trainkit.runs.summary import RunSummary

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
        submitted = [job.submitted for job in read_slurm_jobs(run)]
        submitted += [each.submitted for each in read_jobsets(run)]
        queued = [seconds_of(time) for time in submitted]
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
    return None if match is None else seconds_of(f"{match[1]}T{match[2]}+00:00")


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
    beat = _last_beat(folder, offset)
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
        sign=beat,
        fault=None if ended is None and live else _fault(events, sign, beat),
        source=str(read_table(folder.path / "restored.json").get("source", "disk")),
    )


def _fault(events: Sequence[Event], sign: float, beat: tuple[float, int]) -> Fault | None:
    """What an attempt failed of; None where it succeeded, was stopped or has not ended.

    Args:
        events: its events.
        sign: when it was last heard of, where its supervisor did not say how it ended.
        beat: rank 0's last sign of life, which a hang begins with, and its step.
    """
    ended = last_event(events, AttemptEnded)
    if ended is None:
        return Fault("its supervisor is gone", "infra", sign, sign, beat[1])
    if ended.failure_class in ("success", "cancelled", "preempted"):
        return None
    cause = ended.root_cause or {}
    known = [
        seconds_of(each.time)
        for each in events
        if isinstance(each, ContactLost | HangDetected)
        or (isinstance(each, RankEnded) and not each.stopped and not each.done)
    ]
    end = seconds_of(ended.time) or sign
    at = min((each for each in known if each is not None), default=end)
    begin = seconds_of(cause.get("time"))
    if begin is None:
        begin = beat[0] if ended.failure_class == "hang" else at
    words = printable(str(cause.get("message", "")))
    return Fault(words, ended.failure_class, min(begin, at), at, ended.step or 0)


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
    return max([*signs, _last_beat(folder, offset)[0]])


def _last_beat(folder: AttemptFolder, offset: float) -> tuple[float, int]:
    """When rank 0 last said where it is, by the supervisor's clock, and how many steps it had made;
    zeros where it never did."""
    try:
        beat = json.loads(folder.heartbeat(0).read_text())
        return float(beat["time"]) - offset, int(beat["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0, 0


MOST_EVENTS = 500  # of a run of many ranks, those that say most


@dataclass(frozen=True)
class EventLine:
    """An event for people."""

    time: str
    attempt: int
    words: str


@dataclass(frozen=True)
class Setting:
    """A value of the job and where it was written."""

    key: str
    value: object
    place: str


@dataclass(frozen=True)
class SavedCheckpoint:
    """A published checkpoint: step, bytes of its files, seconds since 1970 when it was there."""

    step: int
    bytes: int
    time: float


@dataclass(frozen=True)
class PlannedAndMeasured:
    """A figure of the plan beside what the run measured; None where either is unknown."""

    what: str
    unit: str
    planned: float | None
    measured: float | None

    @property
    def error(self) -> float | None:
        """Planned over measured, less 1."""
        if not self.planned or not self.measured:
            return None
        return self.planned / self.measured - 1


@dataclass(frozen=True)
class RunReport:
    """Everything about one run that a person may ask.

    Args:
        record: its state.
        rows: of its metrics, thinned.
        taken_back: rows of steps that were lost and made again, thinned.
        ledger: where its time went.
        faults: what each of them cost.
        attempts: how each ended.
        resumed_at: (attempt, step) from which each attempt went on.
        events: in words.
        settings: the job, value by value.
        origin: commit, versions, host: origin/1.
        plan: plan/1.
        checkpoints: those that are there.
        rank_times: of every rank, now and then.
        expert_loads: of every expert, now and then.
        samples: what the models of checkpoints wrote.
        evaluations: what was measured of checkpoints beside training.
        notes: what could not be read.
    """

    record: RunRecord
    rows: ThinnedRows
    taken_back: ThinnedRows
    ledger: Ledger
    faults: Sequence[FaultCost]
    attempts: Sequence[AttemptReport]
    resumed_at: Sequence[tuple[int, int]]
    events: Sequence[EventLine]
    settings: Sequence[Setting]
    origin: Table
    plan: Table
    checkpoints: Sequence[SavedCheckpoint]
    rank_times: Sequence[RankTimes]
    expert_loads: Sequence[ExpertLoads]
    samples: Sequence[SampleText] = ()
    evaluations: Sequence[EvaluationRecord] = ()
    notes: list[str] = field(default_factory=list)

    @property
    def run(self) -> RunFolder:
        return self.record.run

    @property
    def summary(self) -> RunSummary:
        """Numbers over rows that were taken at even distances."""
        return RunSummary(self.run, self.rows.rows, self.rows.regular)

    @property
    def tokens_per_sample(self) -> int:
        """The job's sequence length; 1 where it is unknown: then axes count samples."""
        for setting in self.settings:
            if setting.key == "model.seq_length" and isinstance(setting.value, int):
                return max(1, setting.value)
        return 1

    @property
    def phases(self) -> Sequence[TrainedPhase]:
        """What it read in which steps."""
        return trained_phases(self.plan, self.rows.rows)

    def planned_and_measured(self) -> list[PlannedAndMeasured]:
        """Memory, speed and checkpoints: the plan beside the run."""
        memory = as_table(as_table(self.plan.get("memory")).get("fullest_rank"))
        speed = as_table(as_table(self.plan.get("duration")).get("speed"))
        newest = self.checkpoints[-1].bytes if self.checkpoints else None
        return [
            PlannedAndMeasured(
                "memory of the fullest rank",
                "B",
                as_number(memory.get("total_bytes")),
                self.summary.peak_bytes,
            ),
            PlannedAndMeasured(
                "speed",
                "tokens/s",
                as_number(speed.get("tokens_per_second")),
                self.summary.tokens_per_second,
            ),
            PlannedAndMeasured(
                "a checkpoint", "B", as_number(self.plan.get("checkpoint_bytes")), newest
            ),
        ]

    def to_json(self) -> dict[str, object]:
        """What report/1 says besides the summary's numbers."""
        return {
            "ledger": self.ledger.to_json(),
            "faults": [fault.to_json() for fault in self.faults],
            "attempts": [attempt.to_json() for attempt in self.attempts],
            "resumed_at": [{"attempt": attempt, "step": step} for attempt, step in self.resumed_at],
            "events": [vars(event) for event in self.events],
            "plan_and_measured": [
                {**vars(each), "error": each.error} for each in self.planned_and_measured()
            ],
            "checkpoints": [vars(checkpoint) for checkpoint in self.checkpoints],
            **({"phases": [vars(phase) for phase in self.phases]} if self.phases else {}),
            "samples": [vars(sample) for sample in self.samples],
            "evaluations": [each.to_json() for each in self.evaluations],
            "settings": [vars(setting) for setting in self.settings],
            "versions": dict(as_table(self.origin.get("packages"))),
            "git_commit": self.origin.get("git_commit"),
            "rows": {"total": self.rows.total, "damaged": self.rows.damaged},
            "notes": self.notes,
        }


def read_report(run: RunFolder, record: RunRecord | None = None) -> RunReport:
    """Read a run.

    Args:
        run: the run.
        record: its state, where somebody else was asked for it too.

    Raises:
        TrainkitError: its state cannot be read: files of another version.
        OSError: its metrics cannot be read.
    """
    record = record or read_run_record(run)
    times = read_run_times(record)
    ledger = build_ledger(times)
    rows = read_thinned(run.metrics)
    notes = list(ledger.notes)
    if rows.damaged:
        notes.append(f"{rows.damaged} damaged lines of {run.metrics.name} are left out")
    if rows.thinned:
        notes.append(
            f"{len(rows.rows):,} of {rows.total:,} rows are drawn: the least and the most of"
            f" each stretch are kept; medians are of {len(rows.regular):,} rows at even distances"
        )
    return RunReport(
        record,
        rows,
        read_thinned(taken_back_path(run.metrics)),
        ledger,
        build_faults(times),
        _attempts(run, record, notes),
        list(_resumed_at(run)),
        _events(run, notes),
        list(_settings(run)),
        read_table(run.origin),
        read_table(run.plan),
        list(_checkpoints(run.checkpoints)),
        read_rank_times(run),
        read_expert_loads(run),
        read_samples(run),
        read_evaluations(run),
        notes,
    )


def _attempts(run: RunFolder, record: RunRecord, notes: list[str]) -> Sequence[AttemptReport]:
    try:
        return report_attempts(run, record)
    except (TrainkitError, TypeError, AttributeError) as error:
        notes.append(f"the attempts cannot be read: {error}")
        return []


def _resumed_at(run: RunFolder) -> Iterator[tuple[int, int]]:
    for attempt in run.attempts():
        for change in read_phases(attempt):
            if change.phase in STEPS:
                if change.step:
                    yield attempt.number, change.step
                break


def _events(run: RunFolder, notes: list[str]) -> list[EventLine]:
    lines = []
    for attempt in run.attempts():
        for event in read_events(attempt):
            words = event_in_words(event)
            if words is not None:
                lines.append(EventLine(str(event.time), attempt.number, printable(words)))
    if len(lines) > MOST_EVENTS:
        few = [line for line in lines if "rank" not in line.words or "was ended" in line.words]
        notes.append(f"{len(lines)} events: ends of single ranks are left out")
        return few[:MOST_EVENTS]
    return lines


def _settings(run: RunFolder) -> Iterator[Setting]:
    origins = as_table(read_table(run.job).get("origins"))
    for key, origin in origins.items():
        table = as_table(origin)
        yield Setting(str(key), table.get("value"), str(table.get("place", "")))


def _checkpoints(folder: Path) -> Iterator[SavedCheckpoint]:
    for checkpoint in published_folders(folder):
        try:
            entries = [entry.stat() for entry in checkpoint.iterdir()]
        except OSError:
            continue
        size = sum(entry.st_size for entry in entries)
        newest = max((entry.st_mtime for entry in entries), default=0.0)
        yield SavedCheckpoint(step_of(checkpoint), size, newest)
