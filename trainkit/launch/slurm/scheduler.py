"""Slurm as a scheduler: a run is a batch job, its supervisor runs in it, and stages are arrays.
Its jobs are ended here, and shown before they are submitted."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from trainkit.base.errors import Exit, TrainkitError
from trainkit.engines.contract import engine_lines
from trainkit.engines.registry import ENGINES
from trainkit.jobs.schema import Cluster, Job
from trainkit.launch.hosts.hostfile import Host
from trainkit.launch.hosts.selection import HostList
from trainkit.launch.launchers.slurm import (
    Slurm as SrunLauncher,
    mount_check_argv,
    pyxis_container,
    srun_argv,
)
from trainkit.launch.preparation import Notice, Preparation, UnitRunner, direct_units
from trainkit.launch.scheduler_contract import (
    CancelledJob,
    ClusterNode,
    DryRun,
    HostsToAsk,
    JobAccount,
    QueueReport,
    Scheduler,
    Start,
    Submission,
)
from trainkit.launch.session_preview import script_lines
from trainkit.launch.slurm.allocation import (
    allocation_hosts,
    available_nodes,
    current_allocation,
    immediate_options,
    slurm_output,
)
from trainkit.launch.slurm.array_states import jobs_are_over
from trainkit.launch.slurm.arrays import ArrayRunner, array_place
from trainkit.launch.slurm.batch_job import supervise_batch
from trainkit.launch.slurm.batch_script import all_options, allocation_variables, batch_script
from trainkit.launch.slurm.job_graph import finish_job_name, read_stage_jobs, stages_pending
from trainkit.launch.slurm.reconcile import (
    SlurmQueueFollower,
    newest_job_output,
    newest_job_status,
    newest_slurm_job,
    reconciled,
    reconciled_all,
)
from trainkit.launch.slurm.run_array import settle_arrays, submit_array
from trainkit.launch.slurm.sbatch import dependency_options, note_end, run_sbatch_argv
from trainkit.launch.slurm.shared_arrays import SharedArrayStatus
from trainkit.launch.slurm.squeue import RUNNING, WAITING, job_accounts, job_statuses
from trainkit.launch.slurm.stage_graph import hold_stage_graph, show_stage_graph
from trainkit.launch.slurm.submit_run import submit_run, submit_with_stages
from trainkit.launch.slurm.withdraw import withdraw_stage_jobs
from trainkit.launch.supervise.attempt_context import new_session
from trainkit.launch.supervise.outcome import Outcome
from trainkit.runs.folder import RunFolder
from trainkit.runs.record import RunRecord
from trainkit.runs.slurm import SlurmJob, drop_slurm_job, read_slurm_jobs
from trainkit.stages.contract import Need
from trainkit.stages.in_flight import StillRunning

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
    stages = end_stages(run, deadline)
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
    and wait for their end: their numbers; none where its stages are made.

    Raises TrainkitError (exit 13) where they are not over by `deadline` (of time.monotonic();
    two minutes from now by default).
    """
    if not stages_pending(run):
        return []
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


def preview_batch_job(start: Start, after: str = "") -> DryRun:
    """The batch script, the line that submits it and the line of srun in it. Nothing is written.

    Args:
        start: of a run on a cluster of Slurm's.
        after: the job that completes its stages; "" where they are made.
    """
    job = start.job
    run = RunFolder(start.root.absolute() / "runs" / job.name / "RUN")
    text = batch_script(job, run)
    submit_line = run_sbatch_argv(
        run, dependency_options(after, job.sbatch_options) if after else []
    )
    slots = tuple(range(job.ranks_per_node))
    hosts = [Host(f"NODE{node}", slots=slots) for node in range(job.nodes)]
    session = new_session(run, 1, job, hosts)
    variables = {
        "SLURM_JOB_CPUS_PER_NODE": "CPUS_OF_A_NODE",
        **allocation_variables(all_options(job, run)),
    }
    launcher = [
        *([mount_check_argv(session, hosts, variables)] if pyxis_container(session) else []),
        srun_argv(session, hosts, variables),
    ]
    command = ENGINES[job.engine].command(job, run, 1)
    lines = [
        f"would submit: {shlex.join(submit_line)}",
        *(f"  {line}" for line in text.rstrip("\n").split("\n")),
        *(f"would run in it: {shlex.join(argv)}" for argv in launcher),
        *script_lines(session),
        f"would start on each of {job.nodes} nodes: {job.ranks_per_node} ranks, each"
        f" {shlex.join(command.argv)}",
        *engine_lines(command),
    ]
    values: dict[str, object] = {
        "command": command.to_json(),
        "files": dict(command.files),
        "sbatch": submit_line,
        "script": text,
        "launcher": [list(argv) for argv in launcher],
    }
    return DryRun(lines, values)


# of a step of a job: it says nothing about why a run ended; srun's are cancelled with their job
UNREMARKABLE = WAITING | RUNNING | {"COMPLETED", "CANCELLED"}

RESUME_ADVICE = (
    "`scontrol show node HOST` says since when; `scontrol update nodename=HOST state=resume`"
    " lets it in again"
)


class SlurmScheduler(Scheduler):
    """Runs that are batch jobs of Slurm's. launch/slurm.json in the run folder names the jobs."""

    title = "Slurm"
    queues = True
    dry_run = staticmethod(preview_batch_job)
    submit = staticmethod(submit_run)
    submit_array = staticmethod(submit_array)
    settle_arrays = staticmethod(settle_arrays)
    state = staticmethod(reconciled)
    states = staticmethod(reconciled_all)
    follower = SlurmQueueFollower
    log = staticmethod(newest_job_output)
    cancel = staticmethod(cancel_newest_job)
    end_job = staticmethod(end_after_supervisor)
    end_stages = staticmethod(end_stages)

    def allocated_hosts(self, job: Job) -> HostList:
        return allocation_hosts(job, current_allocation(os.environ))

    def hosts_to_ask(self, cluster: Cluster, hostfile: str, *, devices: bool) -> HostsToAsk:
        hosts, others = available_nodes(cluster, os.environ)
        launcher = SrunLauncher(immediate_options(cluster, os.environ, devices=devices))
        busy = frozenset(name for name, why in others.items() if "allocated" in why)
        return HostsToAsk(hosts, others, busy, RESUME_ADVICE, launcher)

    def in_flight(self, notice: Notice) -> StillRunning:
        return SharedArrayStatus(notice)

    def nodes(self, cluster: Cluster) -> list[ClusterNode] | None:
        argv = ["sinfo", "--Node", "--noheader", "--format=%N|%T|%P|%c|%G|%E"]
        found = []
        for line in slurm_output(argv).splitlines():
            if line:
                host, state, partition, cpus, gres, reason = line.split("|")
                if reason == "none":
                    reason = ""
                found.append(ClusterNode(host, state, partition, cpus, gres, reason))
        return found

    def unit_runner(self, job: Job, stage: str, notice: Notice) -> UnitRunner:
        place = array_place(job, stage, notice)
        if place is None:
            return direct_units(job, stage, notice)
        return ArrayRunner(place)

    def prepare(self, start: Start, preparation: Preparation) -> Submission | None:
        with hold_stage_graph(start.job, preparation) as graph:
            if graph.parts:
                return submit_with_stages(start, graph, preparation.ui.say)
        return None

    def show_stages(self, job: Job, needs: Sequence[Need], preparation: Preparation) -> str:
        if show_stage_graph(job, preparation).parts:
            return finish_job_name(job)
        return ""

    def supervise(
        self, run: RunFolder, environment: Mapping[str, str], *, share: bool, prolog_failed: int
    ) -> Outcome:
        return supervise_batch(run, environment, prolog=prolog_failed)

    def owns(self, run: RunFolder) -> bool:
        return bool(read_slurm_jobs(run))

    def report(self, record: RunRecord) -> QueueReport | None:
        seen = newest_job_status(record)
        if seen is None:
            return None
        return QueueReport(seen.words(), {"slurm": asdict(seen)})

    def accounts(self, run: RunFolder) -> list[JobAccount] | None:
        """Every start of the run's jobs, and what ended badly of their steps and of the jobs that
        made its stages."""
        ids = [job.id for job in read_slurm_jobs(run)]
        stages = [job.id for job in read_stage_jobs(run)]
        if not ids and not stages:
            return None
        rows = job_accounts([*stages, *ids])
        if rows is None:
            return None
        return [row for row in rows if row.id in ids or row.state_word not in UNREMARKABLE]


SLURM = SlurmScheduler()
