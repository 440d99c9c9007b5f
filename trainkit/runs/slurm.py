"""launch/slurm.json: the Slurm jobs of a run, oldest first. A run has more than one where a
successor or `resume` goes on with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainkit.base.documents import document, read_document, utc_now
from trainkit.base.files import write_json
from trainkit.base.lazy_dataclasses import asdict, dataclass, replace
from trainkit.runs.folder import RunFolder

FORM = "slurm/1"


@dataclass(frozen=True)
class SlurmJob:
    """One submission.

    Args:
        id: Slurm's number of the job.
        submitted: when, ISO 8601.
        first_attempt: the first attempt that came from a person's word (`train`, `resume`); budgets
            of retries count from there.
        began: the newest attempt that its supervisor began; None while the job waits in the queue,
            again too.
        ended: how it ended where no supervisor could tell: {"state", "message"}, and where it was
            for its stages {"exit", "class", "unit", "host", ...}.
        follows: the job whose successor this is (resume = "chain").
    """

    id: str
    submitted: str
    first_attempt: int
    began: int | None = None
    ended: dict[str, Any] | None = None
    follows: str | None = None

    @property
    def waiting(self) -> bool:
        """Whether the queue is where it is, as far as the run folder can tell."""
        return self.began is None and self.ended is None


def read_slurm_jobs(run: RunFolder) -> list[SlurmJob]:
    """All submissions of a run; none where it is not one of Slurm's. Raises ConfigError for a
    file of another form."""
    if not run.slurm.is_file():
        return []
    return [SlurmJob(**job) for job in read_document(run.slurm, FORM)["jobs"]]


def write_slurm_jobs(run: RunFolder, jobs: Sequence[SlurmJob]) -> None:
    """Write launch/slurm.json, whole or not at all."""
    write_json(run.slurm, document(FORM, jobs=[asdict(job) for job in jobs]))


def add_slurm_job(
    run: RunFolder, id: str, *, first_attempt: int, follows: str | None = None
) -> None:
    """Note a submission."""
    write_slurm_jobs(
        run, [*read_slurm_jobs(run), SlurmJob(id, utc_now(), first_attempt, follows=follows)]
    )


def change_slurm_job(run: RunFolder, id: str, **changed: Any) -> None:
    """Change what is noted about a submission."""
    write_slurm_jobs(
        run, [replace(job, **changed) if job.id == id else job for job in read_slurm_jobs(run)]
    )


def drop_slurm_job(run: RunFolder, id: str) -> None:
    """Forget a successor that will not be needed."""
    write_slurm_jobs(run, [job for job in read_slurm_jobs(run) if job.id != id])
