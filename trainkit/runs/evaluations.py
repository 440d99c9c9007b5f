"""evaluations.jsonl: what the job's evaluations have found in checkpoints.

A line is one evaluation of one step, written whole when it has ended: {"step", "name", "scores":
[{"set", "metric", "value", "stderr"}], "seconds", "versions", "error", "time",
"checkpoint"}. Of two lines with
one step and name the later counts, so an evaluation may be made again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from trainkit.base.documents import utc_now
from trainkit.base.lazy_dataclasses import asdict, dataclass, field
from trainkit.base.records import FieldError, Record
from trainkit.jobs.resolved import read_job
from trainkit.jobs.schema import EvaluationSettings, Job
from trainkit.runs.checkpoints import published_folders, step_of
from trainkit.runs.folder import RunFolder
from trainkit.runs.manifest import seal_of


@dataclass(frozen=True)
class EvaluationScore:
    """One number: of a set, or a task, by a metric; `stderr` None where it is not known."""

    set: str
    metric: str
    value: float
    stderr: float | None = None

    def in_words(self) -> str:
        """The number and how sure it is."""
        return f"{self.value:.4f}" + ("" if self.stderr is None else f" ± {self.stderr:.4f}")


@dataclass(frozen=True)
class EvaluationRecord(Record):
    """One line.

    Args:
        step: of the checkpoint.
        name: the evaluation's.
        scores: none where it failed.
        seconds: that it took.
        versions: of what computed it.
        error: why it failed; "": it did not.
        time: when it ended, ISO 8601, UTC.
        checkpoint: the seal of its manifest; "": it failed, or was made by an older version.
    """

    step: int
    name: str
    scores: tuple[EvaluationScore, ...] = ()
    seconds: float = 0.0
    versions: Mapping[str, str] = field(default_factory=dict)
    error: str = ""
    time: str = field(default_factory=utc_now)
    checkpoint: str = ""


def evaluations_path(run: RunFolder) -> Path:
    """The file of a run."""
    return run.path / "evaluations.jsonl"


def evaluation_folder(run: RunFolder, step: int, name: str) -> Path:
    """Files of an evaluation while it is made; what it printed is in a log beside it."""
    return run.path / "evaluations" / f"step-{step:08d}-{name}"


def read_evaluations(run: RunFolder) -> list[EvaluationRecord]:
    """All whole lines by step, the last one of each step and name. A line that cannot be read is
    passed over: its evaluation will be made again."""
    try:
        lines = evaluations_path(run).read_bytes().split(b"\n")
    except OSError:
        return []
    found: dict[tuple[int, str], EvaluationRecord] = {}
    for line in lines:
        try:
            record = EvaluationRecord.from_json(json.loads(line))
        except (ValueError, FieldError):
            continue
        found[record.step, record.name] = record
    return sorted(found.values(), key=lambda record: record.step)


def add_evaluation(run: RunFolder, record: EvaluationRecord) -> None:
    """Append a line; first end one that a killed process has left torn."""
    path = evaluations_path(run)
    with open(path, "a+b") as file:
        torn = file.tell() and path.read_bytes()[-1:] != b"\n"
        line = json.dumps(asdict(record)).encode() + b"\n"
        file.write(b"\n" + line if torn else line)
        file.flush()
        os.fsync(file.fileno())  # its checkpoint may go now


def due_evaluations(
    run: RunFolder, job: Job
) -> Iterator[tuple[int, EvaluationSettings, EvaluationRecord | None]]:
    """(step, evaluation, what it has found so far) for all that is due of checkpoints that are
    there, the oldest first. What was found in an earlier checkpoint of the same step, before the
    run went back behind it, does not count."""
    if not job.evaluations:
        return
    known = {(record.step, record.name): record for record in read_evaluations(run)}
    for folder in published_folders(run.checkpoints):
        step = step_of(folder)
        for each in job.evaluations:
            if each.is_due(step, job.training.train_iters):
                record = known.get((step, each.name))
                if record and record.checkpoint and record.checkpoint != seal_of(folder):
                    record = None
                yield step, each, record


def unread_steps(run: RunFolder) -> set[int]:
    """Steps of checkpoints that an evaluation has still to read: they must stay. None of a folder
    that is no run's."""
    if not run.job.is_file():
        return set()
    job = read_job(run.job)
    return {step for step, _, record in due_evaluations(run, job) if record is None}


def newest_scores(records: Sequence[EvaluationRecord]) -> dict[str, tuple[int, EvaluationScore]]:
    """(step, score) of the newest checkpoint by what was measured: "arc_easy acc". One name for
    one number, whichever evaluation found it: so that runs can be compared."""
    return {
        f"{score.set} {score.metric}": (record.step, score)
        for record in records
        for score in record.scores
    }


def evaluations_in_words(run: RunFolder, job: Job) -> str:
    """How far they have come; "" where none is due."""
    due = list(due_evaluations(run, job))
    records = read_evaluations(run)
    failed = [f"{r.name} of step {r.step} failed: {r.error}" for r in records if r.error]
    waiting = [f"{each.name} of step {step}" for step, each, record in due if record is None]
    if not due and not records:
        return ""
    made = f"{len(records) - len(failed)} made"
    return "; ".join([made, *failed, *([f"to do: {', '.join(waiting)}"] if waiting else [])])
