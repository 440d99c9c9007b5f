"""The program of a batch job: what it is for is checked, the run is supervised, and what is needed
no more is removed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping, Sequence

from trainkit.base.errors import Exit, TrainkitError
from trainkit.base.files import write_json
from trainkit.jobs.resolved import read_job
from trainkit.jobs.schema import Job
from trainkit.launch.containers import node_container, reusable_since
from trainkit.launch.containers.pyxis import REMOVAL_MINUTES, removal_argv
from trainkit.launch.launchers.contract import Transports
from trainkit.launch.launchers.slurm import Slurm
from trainkit.launch.run_inputs import refuse_other_inputs
from trainkit.launch.session import Session
from trainkit.launch.slurm.allocation import (
    ANSWER_SECONDS,
    SlurmAllocation,
    allocation_hosts,
    current_allocation,
    slurm_output,
)
from trainkit.launch.slurm.batch_script import seconds_before_limit
from trainkit.launch.slurm.batch_supervisor import BatchStopRequests, BatchSupervisor
from trainkit.launch.slurm.job_graph import stages_folder, stages_pending
from trainkit.launch.slurm.sbatch import (
    forget_secrets,
    note_end,
    read_secrets,
    submit,
    write_script,
)
from trainkit.launch.supervise.observer import RunObserver
from trainkit.launch.supervise.outcome import Outcome
from trainkit.launch.supervise.queued_supervisor import ended_for_good
from trainkit.launch.supervise.rendezvous import StartError
from trainkit.runs.folder import RunFolder
from trainkit.runs.slurm import (
    SlurmJob,
    add_slurm_job,
    change_slurm_job,
    drop_slurm_job,
    read_slurm_jobs,
)


def supervise_batch(run: RunFolder, environment: Mapping[str, str], *, prolog: int = 0) -> Outcome:
    """Supervise a run in the batch job that the environment tells of. The caller holds the run's
    lock.

    Args:
        prolog: the exit code of the cluster's prolog in the batch script, where it failed. That is
            judged by what the nodes make of it: all are asked to run it. Where they do not (pyxis),
            the batch host alone is to blame.
    """
    stop_requests = BatchStopRequests()
    with stop_requests.handling_signals():
        where = current_allocation(environment)
        job = read_job(run.job)
        if stages_pending(run):
            message = (
                f"the stages of run {run.id} are not made: the jobs in {stages_folder(run)} come"
                " before this one"
            )
            raise TrainkitError(
                message,
                exit=Exit.STAGE_STALE,
                hint=f"invoke why {run.id}; invoke train {job.name} makes what is missing",
            )
        write_json(run.hosts, allocation_hosts(job, where).to_json())
        entry = _noted(run, where)
        if entry.follows and (ended := ended_for_good(run)) is not None:
            drop_slurm_job(run, entry.id)
            return ended
        _refuse_other_inputs(run, entry)
        observer = RunObserver(
            lambda run: print(f"run {run.id} on {', '.join(where.hosts)}", flush=True),
            lambda: None,
            lambda text: print(text, flush=True),
        )
        launcher = None
        if prolog:
            host = environment.get("SLURMD_NODENAME") or where.hosts[0]
            observer.on_notice(
                f"the prolog of clusters.{job.cluster.name} failed in the batch script on {host}"
                f" (exit code {prolog})"
            )
            if job.container is not None and job.container.runtime_traits.by_srun:
                launcher = FailedProlog(host, prolog)
        supervisor = BatchSupervisor(
            run, read_secrets(run), stop_requests, observer, where, launcher
        )
        supervisor.replay(entry.first_attempt)
        with _successor(run, supervisor, entry):
            supervisor.check_before_start()
            outcome = asyncio.run(supervisor.supervise())
        if not supervisor.continue_kind:
            _remove_containers(run, job, where)
        # Slurm should say so too, not FAILED; who cancels looks again
        if outcome.failure_class == "cancelled":
            with contextlib.suppress(TrainkitError):
                slurm_output(["scancel", where.job])
        return outcome


class FailedProlog(Slurm):
    """As Slurm, in a job whose prolog has failed in the batch script, and is run nowhere else.

    Args:
        host: the node that it failed on.
        code: its exit code.
    """

    def __init__(self, host: str, code: int) -> None:
        super().__init__()
        self.host = host
        self.code = code

    def start(self, session: Session, nodes: Sequence[int]) -> Transports:
        why = (
            f"the prolog of clusters.{session.cluster.name} failed in the batch script (exit code"
            f" {self.code})"
        )
        hint = f"what it said is in the job's output, slurm-JOB.out beside {session.folder}"
        raise StartError(
            Exit.START, "nothing was started", [(self.host, why)], hint=hint, suspects=[self.host]
        )


def _remove_containers(run: RunFolder, job: Job, where: SlurmAllocation) -> None:
    """A run that is over needs no more what its nodes have kept of pyxis. Where Slurm has taken
    the nodes already, that stays until a person removes it."""
    box = node_container(job, run.session(0), run.id, 0, reusable_since(run))
    if (
        box is not None
        and box.settings.runtime_traits.by_srun
        and (words := removal_argv(box, len(where.hosts)))
    ):
        with contextlib.suppress(TrainkitError):
            slurm_output(words, timeout=60.0 * REMOVAL_MINUTES + ANSWER_SECONDS)


def _refuse_other_inputs(run: RunFolder, entry: SlurmJob) -> None:
    """As `resume` does: between the person's word and now, or between two allocations, somebody
    may have made the data again."""
    try:
        refuse_other_inputs(run)
    except TrainkitError as error:
        note_end(
            run,
            entry.id,
            {
                "state": "REFUSED",
                "class": "user",
                "message": error.message,
                "advice": error.hint,
                "exit": int(error.exit),
            },
        )
        raise


def _noted(run: RunFolder, where: SlurmAllocation) -> SlurmJob:
    """This job's entry in launch/slurm.json."""
    if all(job.id != where.job for job in read_slurm_jobs(run)):  # submitted by hand
        add_slurm_job(
            run,
            where.job,
            first_attempt=max((attempt.number for attempt in run.attempts()), default=0) + 1,
        )
    change_slurm_job(run, where.job, ended=None)
    return next(job for job in read_slurm_jobs(run) if job.id == where.job)


@contextlib.contextmanager
def _successor(run: RunFolder, supervisor: BatchSupervisor, entry: SlurmJob) -> Iterator[None]:
    """With resume = "chain" a successor waits for our end, whatever that is; it is taken back
    where it will not be needed. So are secrets."""
    waiting = next((job.id for job in read_slurm_jobs(run) if job.follows == entry.id), None)
    if supervisor.job.resume == "chain" and waiting is None:
        write_script(run, supervisor.job, {}, seconds=seconds_before_limit(run, supervisor.job))
        waiting = submit(run, first_attempt=entry.first_attempt, follows=entry.id)
    try:
        yield
    finally:
        if not supervisor.continue_kind:
            forget_secrets(run)
            if waiting is not None:
                _take_back(run, waiting)


def _take_back(run: RunFolder, successor: str) -> None:
    """Take a successor out of the queue. It is forgotten only once it is out; one that stays
    finds that the run has ended, and ends."""
    try:
        slurm_output(["scancel", successor])
    except TrainkitError as error:
        print(
            f"job {successor}, which was to go on with the run, is still in the queue:"
            f" {error.message}; `scancel {successor}` takes it out",
            flush=True,
        )
    else:
        drop_slurm_job(run, successor)
