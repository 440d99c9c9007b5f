"""Ends the jobs of a run, and makes sure that they are over."""

from __future__ import annotations

import time
from collections.abc import Sequence

from trainkit.base.errors import Exit, TrainkitError
from trainkit.launch.scheduler_contract import CancelledJob
from trainkit.launch.slurm.allocation import slurm_output
from trainkit.launch.slurm.array_states import jobs_are_over
from trainkit.launch.slurm.job_graph import stages_pending
from trainkit.launch.slurm.reconcile import newest_slurm_job
from trainkit.launch.slurm.sbatch import note_end
from trainkit.launch.slurm.squeue import job_statuses
from trainkit.launch.slurm.withdraw import withdraw_stage_jobs
from trainkit.runs.folder import RunFolder
from trainkit.runs.slurm import SlurmJob, drop_slurm_job, read_slurm_jobs

CANCEL_SECONDS = 120.0  # for Slurm to end a job: KillWait, and epilogs
POLL_SECONDS = 0.5


def end_job(run: RunFolder, job: SlurmJob) -> CancelledJob:
    """scancel the run's job, its successors and those that make its stages, and wait until Slurm
    says that all are over. Raises TrainkitError (exit 13), naming them, where they are not."""
    ids = [job.id, *(each.id for each in read_slurm_jobs(run) if each.follows == job.id)]
    refused = ""
    try:
        slurm_output(["scancel", *ids])
    except TrainkitError as error:  # as for a job that is over, by some versions
        refused = error.message
    deadline = time.monotonic() + CANCEL_SECONDS
    stages = end_stages(run, deadline) if stages_pending(run) else []
    while going := _still_going(ids, refused):
        if refused or time.monotonic() > deadline:
            if refused:
                done = f"could not be cancelled ({refused})"
            else:
                done = f"were cancelled {CANCEL_SECONDS:.0f} s ago"
            states = ", ".join(f"{id} {state}" for id, state in going.items())
            raise TrainkitError(
                f"jobs {done}, and Slurm still has them: {states}",
                exit=Exit.CONTACT_LOST,
                hint=f"scancel {' '.join(going)}",
            )
        time.sleep(POLL_SECONDS)
    for each in ids[1:]:
        drop_slurm_job(run, each)
    seen = job_statuses([job.id]).get(job.id)
    return CancelledJob(job.id, seen.state if seen else "gone", stages)


def _still_going(ids: Sequence[str], refused: str) -> dict[str, str]:
    """State of those of the jobs that are not over. Raises TrainkitError (exit 13), naming them
    all, where Slurm cannot be asked."""
    try:
        return {id: seen.state for id, seen in job_statuses(ids).items() if not seen.over}
    except TrainkitError as error:
        message = f"whether jobs {', '.join(ids)} are over is not known: {refused or error.message}"
        raise TrainkitError(
            message, exit=Exit.CONTACT_LOST, hint=f"scancel {' '.join(ids)}, once Slurm answers"
        ) from None


def end_stages(run: RunFolder, deadline: float | None = None) -> list[str]:
    """scancel the jobs that make a run's stages, but for those that another run waits for too,
    and wait for their end: their numbers.

    Raises TrainkitError (exit 13) where they are not over by `deadline` (of time.monotonic();
    two minutes from now by default).
    """
    if deadline is None:
        deadline = time.monotonic() + CANCEL_SECONDS
    ids = withdraw_stage_jobs(run)
    while ids and not jobs_are_over(ids):
        if time.monotonic() > deadline:
            raise TrainkitError(
                f"jobs {', '.join(ids)} were cancelled, and Slurm still runs them",
                exit=Exit.CONTACT_LOST,
                hint=f"squeue --jobs={','.join(ids)}",
            )
        time.sleep(POLL_SECONDS)
    return ids


def cancel_newest_job(run: RunFolder, *, queued: bool) -> CancelledJob:
    """End the run's newest job; `queued`: it had not begun, which is noted in the run folder."""
    job = newest_slurm_job(run)
    assert job is not None
    ended = end_job(run, job)
    if queued:
        note_end(
            run,
            job.id,
            {
                "state": "CANCELLED",
                "message": f"job {job.id} was taken out of the queue",
                "exit": int(Exit.CANCELLED),
            },
        )
    return ended


def end_after_supervisor(run: RunFolder) -> None:
    """After its supervisor has stopped a run: the job is to end too, with any successor. Raises
    TrainkitError (exit 13) where it does not."""
    jobs = read_slurm_jobs(run)
    if jobs:  # of a chain the one that the newest follows may still run
        end_job(run, next((job for job in jobs if job.id == jobs[-1].follows), jobs[-1]))
