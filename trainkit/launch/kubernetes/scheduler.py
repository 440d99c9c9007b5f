"""Kubernetes as a scheduler: a run is a JobSet, which Kueue or the cluster's own scheduler starts;
its supervisor lives in a pod."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from trainkit.base.errors import ConfigError, Exit, Problem, TrainkitError, raise_problems
from trainkit.base.files import write_text
from trainkit.engines.contract import engine_lines
from trainkit.engines.registry import ENGINES
from trainkit.jobs.schema import Cluster, Job
from trainkit.launch.hosts.selection import HostList
from trainkit.launch.kubernetes.cluster_checks import cluster_nodes, look_at_cluster
from trainkit.launch.kubernetes.kubectl import Kubectl
from trainkit.launch.kubernetes.manifest import jobset_manifest, jobset_name
from trainkit.launch.kubernetes.own_jobsets import OwnJobSets
from trainkit.launch.kubernetes.pod_supervisor import supervise_in_pod
from trainkit.launch.kubernetes.states import (
    JobSetFollower,
    reconciled,
    reconciled_all,
    report,
)
from trainkit.launch.kubernetes.units import PodUnitsInFlight, pod_units
from trainkit.launch.preparation import Notice
from trainkit.launch.protocol.pod_call import STOP, jobset_folder
from trainkit.launch.scheduler_contract import (
    ArrayRequest,
    CancelledJob,
    ClusterNode,
    DryRun,
    HostsToAsk,
    QueueFollower,
    Scheduler,
    Start,
    Submission,
)
from trainkit.launch.start import fill_run
from trainkit.launch.supervise.host_consistency import Finding
from trainkit.launch.supervise.outcome import Outcome
from trainkit.launch.supervise.run_lock import locked_run
from trainkit.runs.folder import RunFolder, new_run_folder
from trainkit.runs.kubernetes import change_jobset, newest_jobset, read_jobsets
from trainkit.runs.record import read_supervisor_status
from trainkit.stages.in_flight import StillRunning


class KubernetesScheduler(Scheduler):
    """Runs that are JobSets. launch/kubernetes.json in the run folder names them."""

    title = "Kubernetes"
    queues = True
    unit_runner = staticmethod(pod_units)
    state = staticmethod(reconciled)
    states = staticmethod(reconciled_all)
    report = staticmethod(report)

    def allocated_hosts(self, job: Job) -> HostList:
        raise ConfigError(
            f"cluster '{job.cluster.name}' (launcher = 'kubernetes') has no allocations to be in"
        )

    def hosts_to_ask(self, cluster: Cluster, hostfile: str, *, devices: bool) -> HostsToAsk:
        return HostsToAsk([])  # programs run in pods of jobs only

    def nodes(self, cluster: Cluster) -> list[ClusterNode] | None:
        return cluster_nodes(Kubectl.of(cluster))

    def examine(self, job: Job) -> list[Finding]:
        return look_at_cluster(Kubectl.of(job.cluster), job)

    def in_flight(self, notice: Notice) -> StillRunning:
        return PodUnitsInFlight(notice)

    def dry_run(self, start: Start, after: str = "") -> DryRun:
        job = start.job
        run = RunFolder(start.root.absolute() / "runs" / job.name / "RUN")
        manifest = jobset_manifest(job, run, jobset_name(job, run, 1))
        command = ENGINES[job.engine].command(job, run, 1)
        lines = [
            f"would create, as kubectl apply -f - could by hand, in {job.cluster.name}:",
            *json.dumps(manifest, indent=2).splitlines(),
            f"would start in each of {job.nodes} pods: {job.ranks_per_node} ranks, each"
            f" {' '.join(command.argv)}",
            *engine_lines(command),
        ]
        values: dict[str, object] = {
            "command": command.to_json(),
            "files": dict(command.files),
            "manifest": manifest,
        }
        return DryRun(lines, values)

    def submit(self, start: Start) -> Submission:
        wrong = [each for each in self.examine(start.job) if each.wrong]
        raise_problems([Problem(f"{e.host}: {e.message}", hint=e.advice) for e in wrong])
        run = start.run or new_run_folder(start.root.absolute(), start.job.name)
        try:
            with locked_run(run):  # until it is handed over: nobody else does that
                for former in read_jobsets(run):
                    OwnJobSets.of(run).remove(former, force=True)
                fill_run(run, start, {})  # secrets are Kubernetes'
                newest = max((attempt.number for attempt in run.attempts()), default=0)
                own = OwnJobSets(start.job, run, Kubectl.of(start.job.cluster))
                entry = own.submit(first_attempt=newest + 1)
        except BaseException:
            if start.run is None and not read_jobsets(run):
                shutil.rmtree(run.path, ignore_errors=True)
            raise
        where = f"JobSet {entry.name} of namespace {own.kubectl.namespace}"
        return Submission(run, entry.name, where)

    def submit_array(self, asked: ArrayRequest) -> list[Submission]:
        if asked.at_once is not None:
            raise ConfigError(
                f"{asked.name}: Kubernetes starts runs where there is room, not"
                f" {asked.at_once} at once",
                hint="leave --at-once out; a queue of Kueue's (kubernetes.queue) limits them",
            )
        done: list[Submission] = []
        try:
            for start in asked.starts:
                done.append(self.submit(start))
        except BaseException:
            for each in done:
                with contextlib.suppress(TrainkitError):
                    self.cancel(each.run, queued=True)
            raise
        return done

    def supervise(
        self, run: RunFolder, environment: Mapping[str, str], *, share: bool, prolog_failed: int
    ) -> Outcome:
        return supervise_in_pod(run, environment)

    def owns(self, run: RunFolder) -> bool:
        return bool(read_jobsets(run))

    def follower(self, run: RunFolder) -> QueueFollower | None:
        return JobSetFollower(run)

    def log(self, run: RunFolder) -> Path | None:
        entry = newest_jobset(run)
        return jobset_folder(run.path, entry.name) / "supervisor.log" if entry else None

    def ask(self, run: RunFolder, *, save: bool) -> bool:
        """By a file: pods have addresses of their own."""
        entry = newest_jobset(run)
        sign = read_supervisor_status(run)
        if entry is None or sign is None or not sign.alive(time.time()):
            return False
        write_text(jobset_folder(run.path, entry.name) / STOP, "save" if save else "")
        return True

    def cancel(self, run: RunFolder, *, queued: bool) -> CancelledJob:
        entry = newest_jobset(run)
        assert entry is not None
        own = OwnJobSets.of(run)
        for each in read_jobsets(run):
            own.cancel(each)
        if queued:
            message = f"JobSet {entry.name} was deleted before it had begun"
            ended = {"state": "CANCELLED", "message": message, "exit": int(Exit.CANCELLED)}
            change_jobset(run, entry.name, ended=ended)
        return CancelledJob(entry.name, "deleted", [])

    def end_job(self, run: RunFolder) -> None:
        own = OwnJobSets.of(run)
        for each in read_jobsets(run):
            own.remove(each)


KUBERNETES = KubernetesScheduler()
