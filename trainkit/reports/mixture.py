"""What a run read in which steps, and how its loss went there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from trainkit.base.lazy_dataclasses import dataclass
from trainkit.reports.documents import Table, as_number, as_table
from trainkit.runs.metrics import MetricsRow

HEADINGS = ("phase", "reads", "steps", "first loss", "last loss")


@dataclass(frozen=True)
class TrainedPhase:
    """One phase of a run's data.

    Args:
        phase: 0 of the job's own dataset, else which of `jobs.X.phases`.
        reads: datasets with their shares, in words.
        first_step: the first of its steps, as planned.
        last_step: the last.
        first_loss: training loss of its first row of metrics; None: there is none yet.
        last_loss: of its newest.
    """

    phase: int
    reads: str
    first_step: int
    last_step: int
    first_loss: float | None
    last_loss: float | None

    def cells(self) -> tuple[str, ...]:
        """By HEADINGS."""
        losses = [f"{x:.4f}" if x is not None else "" for x in (self.first_loss, self.last_loss)]
        return str(self.phase), self.reads, f"{self.first_step} to {self.last_step}", *losses


def trained_phases(plan: Table, rows: Iterable[MetricsRow]) -> Sequence[TrainedPhase]:
    """The phases of a run; none where its plan says of none.

    Args:
        plan: plan/1 of the run.
        rows: of its metrics.
    """
    found = plan.get("reads")
    reads = [as_table(read) for read in found] if isinstance(found, list) else []
    training = [row for row in rows if "eval" not in row]
    return list(_phases(reads, training))


def _phases(reads: Sequence[Table], training: Sequence[MetricsRow]) -> Iterator[TrainedPhase]:
    for phase in sorted({int(as_number(read.get("phase")) or 0) for read in reads}):
        own = [read for read in reads if read.get("phase") == phase]
        losses = [row["lm_loss"] for row in training if row.get("phase", 0) == phase]
        yield TrainedPhase(
            phase,
            ", ".join(map(_words, own)),
            int(as_number(own[0].get("first_step")) or 0),
            int(as_number(own[0].get("last_step")) or 0),
            losses[0] if losses else None,
            losses[-1] if losses else None,
        )


def _words(read: Table) -> str:
    share = as_number(read.get("share"))
    return f"{read.get('dataset')}" + ("" if share is None else f" {share:.1%}")


def phase_begins(rows: Iterable[MetricsRow]) -> Iterator[MetricsRow]:
    """The first row of each phase after the first."""
    before = 0
    for row in rows:
        if (phase := row.get("phase", before)) > before and "eval" not in row:
            before = phase
            yield row
