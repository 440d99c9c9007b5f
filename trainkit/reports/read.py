"""A run folder, read once, as one record: what pages, comparisons and documents are made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainkit.base.errors import TrainkitError
from trainkit.base.printable import printable
from trainkit.reports.documents import Table, as_number, as_table, read_table
from trainkit.reports.ledger import Ledger, build_ledger
from trainkit.reports.rows import ThinnedRows, read_thinned
from trainkit.reports.times import read_run_times
from trainkit.reports.words import event_in_words
from trainkit.runs.attempt_report import AttemptReport, report_attempts
from trainkit.runs.checkpoints import published_folders, step_of
from trainkit.runs.events import read_events
from trainkit.runs.folder import RunFolder
from trainkit.runs.metrics import taken_back_path
from trainkit.runs.phases import read_phases
from trainkit.runs.rank_times import RankTimes, read_rank_times
from trainkit.runs.record import RunRecord, read_run_record
from trainkit.runs.samples import SampleText, read_samples
from trainkit.runs.summary import RunSummary

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
        attempts: how each ended.
        resumed_at: (attempt, step) from which each attempt went on.
        events: in words.
        settings: the job, value by value.
        origin: commit, versions, host: origin/1.
        plan: plan/1.
        checkpoints: those that are there.
        rank_times: of every rank, now and then.
        samples: what the models of checkpoints wrote.
        notes: what could not be read.
    """

    record: RunRecord
    rows: ThinnedRows
    taken_back: ThinnedRows
    ledger: Ledger
    attempts: Sequence[AttemptReport]
    resumed_at: Sequence[tuple[int, int]]
    events: Sequence[EventLine]
    settings: Sequence[Setting]
    origin: Table
    plan: Table
    checkpoints: Sequence[SavedCheckpoint]
    rank_times: Sequence[RankTimes]
    samples: Sequence[SampleText] = ()
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
            "attempts": [attempt.to_json() for attempt in self.attempts],
            "resumed_at": [{"attempt": attempt, "step": step} for attempt, step in self.resumed_at],
            "events": [vars(event) for event in self.events],
            "plan_and_measured": [
                {**vars(each), "error": each.error} for each in self.planned_and_measured()
            ],
            "checkpoints": [vars(checkpoint) for checkpoint in self.checkpoints],
            "samples": [vars(sample) for sample in self.samples],
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
        TrainkitError: its state cannot be told: files of another version.
        OSError: its metrics cannot be read.
    """
    record = record or read_run_record(run)
    ledger = build_ledger(read_run_times(record))
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
        _attempts(run, record, notes),
        list(_resumed_at(run)),
        _events(run, notes),
        list(_settings(run)),
        read_table(run.origin),
        read_table(run.plan),
        list(_checkpoints(run.checkpoints)),
        read_rank_times(run),
        read_samples(run),
        notes,
    )


def _attempts(run: RunFolder, record: RunRecord, notes: list[str]) -> Sequence[AttemptReport]:
    try:
        return report_attempts(run, record)
    except (TrainkitError, TypeError, AttributeError) as error:
        notes.append(f"the attempts cannot be told: {error}")
        return []


def _resumed_at(run: RunFolder) -> Iterator[tuple[int, int]]:
    for attempt in run.attempts():
        for change in read_phases(attempt):
            if change.phase in ("compile", "train"):
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
