"""Slurm as a scheduler: a run is a batch job, its supervisor runs in it, and stages are arrays."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from trainkit.jobs.schema import Cluster, Job
from trainkit.launch.hosts.selection import HostList
from trainkit.launch.launchers.slurm import Slurm as SrunLauncher
from trainkit.launch.preparation import Notice, Preparation, UnitRunner, direct_units
from trainkit.launch.scheduler_contract import (
    ArrayRequest,
    CancelledJob,
    ClusterNode,
    DryRun,
    HostsToAsk,
    JobAccount,
    QueueFollower,
    QueueReport,
    ResumeRequest,
    RunRequest,
    Submission,
)
from trainkit.launch.slurm.allocation import allocation_hosts, current_allocation, slurm_output
from trainkit.launch.slurm.arrays import ArrayRunner, array_place
from trainkit.launch.slurm.batch_job import supervise_batch
from trainkit.launch.slurm.dry_run import preview_batch_job
from trainkit.launch.slurm.end_jobs import cancel_newest_job, end_after_supervisor, end_stages
from trainkit.launch.slurm.job_graph import finish_job_name, read_stage_jobs, stages_pending
from trainkit.launch.slurm.node_access import available_nodes, immediate_options
from trainkit.launch.slurm.reconcile import (
    SlurmQueueFollower,
    newest_job_output,
    newest_job_status,
    reconciled,
    reconciled_all,
)
from trainkit.launch.slurm.run_array import settle_arrays, submit_array
from trainkit.launch.slurm.shared_arrays import SharedArrayStatus
from trainkit.launch.slurm.squeue import RUNNING, WAITING, job_accounts
from trainkit.launch.slurm.stage_graph import hold_stage_graph, show_stage_graph
from trainkit.launch.slurm.submit_run import submit_again, submit_new, submit_with_stages
from trainkit.launch.supervise.outcome import Outcome
from trainkit.runs.folder import RunFolder
from trainkit.runs.record import RunRecord
from trainkit.runs.slurm import read_slurm_jobs
from trainkit.stages.contract import Need
from trainkit.stages.in_flight import StillRunning

# of a step of a job: it says nothing about why a run ended; srun's are cancelled with their job
UNREMARKABLE = WAITING | RUNNING | {"COMPLETED", "CANCELLED"}

RESUME_ADVICE = (
    "`scontrol show node HOST` says since when; `scontrol update nodename=HOST state=resume`"
    " lets it in again"
)


class SlurmScheduler:
    """Runs that are batch jobs of Slurm's. launch/slurm.json in the run folder names the jobs."""

    title = "Slurm"
    queues = True

    def allocated_hosts(self, job: Job) -> HostList:
        return allocation_hosts(job, current_allocation(os.environ))

    def hosts_to_ask(self, cluster: Cluster, hostfile: str, *, devices: bool) -> HostsToAsk:
        hosts, others = available_nodes(cluster, os.environ)
        launcher = SrunLauncher(immediate_options(cluster, os.environ, devices=devices))
        busy = frozenset(name for name, why in others.items() if "allocated" in why)
        return HostsToAsk(hosts, others, busy, RESUME_ADVICE, launcher)

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

    def in_flight(self, notice: Notice) -> StillRunning:
        return SharedArrayStatus(notice)

    def prepare(self, request: RunRequest, preparation: Preparation) -> Submission | None:
        with hold_stage_graph(request.job, preparation) as graph:
            if graph.parts:
                return submit_with_stages(request, graph, preparation.ui.say)
        return None

    def show_stages(self, job: Job, needs: Sequence[Need], preparation: Preparation) -> str:
        if show_stage_graph(job, preparation).parts:
            return finish_job_name(job)
        return ""

    def dry_run(self, request: RunRequest, after: str = "") -> DryRun:
        return preview_batch_job(request.job, after)

    def submit(self, request: RunRequest) -> Submission:
        return submit_new(request)

    def requeue(self, request: ResumeRequest) -> Submission:
        return submit_again(request)

    def submit_array(self, asked: ArrayRequest) -> list[Submission]:
        return submit_array(asked)

    def settle_arrays(self, folder: Path) -> list[str]:
        return settle_arrays(folder)

    def supervise(
        self, run: RunFolder, environment: Mapping[str, str], *, share: bool, prolog_failed: int
    ) -> Outcome:
        return supervise_batch(run, environment, prolog=prolog_failed)

    def owns(self, run: RunFolder) -> bool:
        return bool(read_slurm_jobs(run))

    def state(self, record: RunRecord) -> RunRecord:
        return reconciled(record)

    def states(self, records: Sequence[RunRecord]) -> list[RunRecord]:
        return reconciled_all(list(records))

    def report(self, record: RunRecord) -> QueueReport | None:
        seen = newest_job_status(record)
        if seen is None:
            return None
        return QueueReport(seen.words(), {"slurm": asdict(seen)})

    def follower(self, run: RunFolder) -> QueueFollower | None:
        return SlurmQueueFollower(run)

    def log(self, run: RunFolder) -> Path | None:
        return newest_job_output(run)

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

    def cancel(self, run: RunFolder, *, queued: bool) -> CancelledJob:
        return cancel_newest_job(run, queued=queued)

    def end_job(self, run: RunFolder) -> None:
        end_after_supervisor(run)

    def end_stages(self, run: RunFolder) -> list[str]:
        if stages_pending(run):
            return end_stages(run)
        return []
