"""A run's state where its folder alone cannot tell it: Slurm says whether the job waits, runs or
is over."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from trainkit.base.errors import Exit, TrainkitError
from trainkit.launch.launchers.transports import last_line
from trainkit.launch.slurm.job_graph import describe_active_job, stage_failure
from trainkit.launch.slurm.sbatch import note_end
from trainkit.launch.slurm.squeue import (
    UNSURE,
    JobStatus,
    PollBackoff,
    element_statuses,
    job_statuses,
)
from trainkit.runs.folder import RunFolder
from trainkit.runs.record import RunRecord, read_run_record, record_of_end
from trainkit.runs.slurm import SlurmJob, read_slurm_jobs

ENDING_SECONDS = 60.0  # for Slurm to end a job whose supervisor has ended: KillWait, and epilogs


def newest_slurm_job(run: RunFolder) -> SlurmJob | None:
    """The Slurm job that has the run, or had it last; None where Slurm never did."""
    return next(reversed(read_slurm_jobs(run)), None)


def reconcile(record: RunRecord, seen: JobStatus | None) -> RunRecord:
    """The record as it is in the light of what Slurm says.

    Args:
        record: read from the folder.
        seen: the run's newest job; None: Slurm does not know it (any more).

    A job that was over before its supervisor began, or whose supervisor left no word, is noted
    in the run folder: Slurm forgets it after some minutes.
    """
    job = newest_slurm_job(record.run)
    if job is None:
        return record
    if (
        seen is not None
        and seen.waits
        and (record.state in ("unknown", "running") or _by_slurm(record))
    ):
        return replace(record, state="queued", exit=None, failure_class=None, root_cause=None)
    if (record.state == "queued" or record.lost) and (seen is None or seen.over):
        # read again: the supervisor may have begun, and ended, since the record was read
        return _over(read_run_record(record.run), job, seen)
    return record


def _by_slurm(record: RunRecord) -> bool:
    """Whether the run may have ended because Slurm took its nodes: then its job is in the queue
    again, or on its way there."""
    return record.failure_class in ("infra", "preempted") and record.state in (
        "failed",
        "preempted",
    )


def _over(record: RunRecord, job: SlurmJob, seen: JobStatus | None) -> RunRecord:
    """A record that was read after its job was over; with Slurm's word where the supervisor left
    none."""
    if record.state == "queued":
        end = _ended(record.run, job, seen)
    elif record.lost and (seen is not None or record.state == "unknown"):
        if record.state == "failed":
            message = (record.root_cause or {}).get("message")
        else:
            message = "the supervisor is gone without a word"
        if seen is None:
            said = "Slurm does not know the job any more"
        elif seen.state == UNSURE:
            said = seen.reason
        else:
            said = f"Slurm says {seen.ending()}"
        end = {
            "state": seen.state if seen else "UNKNOWN",
            "message": f"{message}; {said}",
            "exit": int(Exit.RANK_INFRA),
        }
    else:
        return record
    if seen.state != UNSURE if seen is not None else record.state == "queued":
        note_end(record.run, job.id, end)
        return read_run_record(record.run)
    return record_of_end(record, {"slurm_job": job.id}, end)


def _ended(run: RunFolder, job: SlurmJob, seen: JobStatus | None) -> dict[str, object]:
    if (failure := stage_failure(run)) is not None:
        return failure
    output = run.path / "launch" / f"slurm-{job.id}.out"
    if seen is None and not output.exists() and _goes_on_without(job.id):
        return {
            "state": "CANCELLED",
            "message": f"job {job.id} was taken out of the queue (scancel)",
            "exit": int(Exit.CANCELLED),
        }
    if seen is None:
        return {
            "state": "UNKNOWN",
            "message": f"Slurm does not know job {job.id} any more, and its supervisor never began",
            "exit": int(Exit.START),
        }
    said = last_line(output)
    words = f"; {output} ends with: {said}" if said else ""
    how = f"nobody can say how now ({seen.reason})" if seen.state == UNSURE else seen.ending()
    message = f"job {job.id} was over before its supervisor began: {how}{words}"
    return {"state": seen.state, "message": message, "exit": int(Exit.START)}


def _goes_on_without(id: str) -> bool:
    """Whether Slurm has other elements of an array whose element `id` it does not know: of one
    that is cancelled while it waits it keeps nothing."""
    array, of_array, _ = id.partition("_")
    with contextlib.suppress(TrainkitError):
        return bool(of_array and element_statuses([array]))
    return False


def newest_job_status(record: RunRecord) -> JobStatus | None:
    """What Slurm says of the job of a run that has not ended; None where it has, is none of
    Slurm's, or Slurm cannot be asked."""
    job = newest_slurm_job(record.run) if record.state in ("queued", "running") else None
    if job is not None:
        with contextlib.suppress(TrainkitError):
            return _with_stages(record.run, job_statuses([job.id]).get(job.id))
    return None


def _with_stages(run: RunFolder, seen: JobStatus | None) -> JobStatus | None:
    """The same; of a job that waits for its stages the reason says which of their jobs is at
    work."""
    if seen is None or seen.reason != "Dependency" or not (words := describe_active_job(run)):
        return seen
    # Slurm's guess does not know when they are made
    return replace(seen, reason=f"its stages are made first; {words}", start="N/A")


def reconciled(record: RunRecord) -> RunRecord:
    """The record after one question to Slurm, where one is needed; as it was where Slurm cannot
    be asked."""
    if record.state in ("queued", "unknown", "failed", "preempted"):
        job = newest_slurm_job(record.run)
    else:
        job = None
    if job is None:
        return record
    with contextlib.suppress(TrainkitError):
        return reconcile(record, job_statuses([job.id]).get(job.id))
    return record


def reconciled_all(records: Sequence[RunRecord]) -> list[RunRecord]:
    """As `reconciled`, with one question for all of them."""
    jobs = {
        record.run: job
        for record in records
        if record.state in ("queued", "unknown")
        and (job := newest_slurm_job(record.run))
        and job.ended is None
    }
    try:
        seen = job_statuses([job.id for job in jobs.values()])
    except TrainkitError:
        return list(records)
    return [
        reconcile(record, seen.get(jobs[record.run].id)) if record.run in jobs else record
        for record in records
    ]


class SlurmQueueFollower:
    """Follows a run's job through the queue: asks ever more rarely while nothing changes, and
    says what has changed."""

    def __init__(self, run: RunFolder) -> None:
        self.run = run
        self._backoff = PollBackoff()
        self._said = ""
        self._unheard = 0
        # by time.monotonic(): for how long an end of Slurm's making may still turn out to be none
        self._until = 0.0

    def look(self, record: RunRecord) -> tuple[RunRecord, str]:
        """(the record as settled, what a person who waits should know now; "" for nothing new)."""
        if _by_slurm(record) and not record.lost:
            return self._last_word(record)
        self._until = 0.0
        if record.state not in ("queued", "unknown") or not self._backoff.due():
            return replace(record, state="queued") if record.state == "unknown" else record, ""
        job = newest_slurm_job(self.run)
        assert job is not None
        try:
            seen = _with_stages(self.run, job_statuses([job.id]).get(job.id))
        except TrainkitError as error:
            return replace(record, state="queued"), self._new(
                f"cannot ask Slurm about job {job.id}: {error.message}"
            )
        # just submitted, or a slurmctld that has just begun
        if (
            (seen is None or seen.state == UNSURE)
            and self._unheard < 3
            and record.state == "queued"
        ):
            self._unheard += 1
            self._backoff.changed()
            return record, ""
        self._unheard = 0
        return reconcile(record, seen), self._new(seen.words()) if seen else ""

    def _last_word(self, record: RunRecord) -> tuple[RunRecord, str]:
        """An end that Slurm may have brought about counts when Slurm says that the job is over:
        it may have put it back, which the supervisor could not learn. A job that only ends
        slowly keeps nobody waiting."""
        job = newest_slurm_job(self.run)
        now = time.monotonic()
        self._until = self._until or now + ENDING_SECONDS
        if job is None or job.ended is not None or now > self._until:
            return record, ""
        if not self._backoff.due():
            return replace(record, state="running"), ""
        try:
            seen = job_statuses([job.id]).get(job.id)
        except TrainkitError:
            return record, ""
        if seen is None or seen.over:
            return record, ""
        if not seen.waits:
            return replace(record, state="running"), ""
        self._until = 0.0
        return reconcile(record, seen), self._new(f"Slurm has put job {job.id} back into the queue")

    def _new(self, words: str) -> str:
        if words == self._said:
            return ""
        self._said = words
        self._backoff.changed()
        return words


def newest_job_output(run: RunFolder) -> Path | None:
    """What the newest job's batch script and supervisor printed."""
    job = newest_slurm_job(run)
    return run.path / "launch" / f"slurm-{job.id}.out" if job else None
