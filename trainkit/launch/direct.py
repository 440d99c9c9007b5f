"""The scheduler of launchers local, ssh and pdsh: a supervisor on this machine starts the ranks
at once, on hosts that the caller chose, and nothing has a queue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

from trainkit.base.errors import ConfigError
from trainkit.jobs.resolved import read_job
from trainkit.jobs.schema import Cluster, Job
from trainkit.launch.hosts.hostfile import find_hostfile
from trainkit.launch.hosts.selection import HostList, load_hosts, this_host
from trainkit.launch.protocol.client import supervisor_answers
from trainkit.launch.scheduler_contract import (
    ArrayRequest,
    CancelledJob,
    DryRun,
    HostsToAsk,
    Scheduler,
    Start,
    Submission,
)
from trainkit.launch.supervise.observer import silent_observer
from trainkit.launch.supervise.outcome import Outcome
from trainkit.launch.supervise.rank_environment import secrets_of
from trainkit.runs.folder import RunFolder
from trainkit.runs.record import RunRecord
from trainkit.stages.in_flight import StillRunning, refuse_in_flight

if TYPE_CHECKING:
    from trainkit.launch.preparation import Notice, UnitRunner

ASKED_AT_ONCE = 16  # supervisors that are silent: each may take seconds not to answer


class Direct(Scheduler):
    """Runs that a supervisor of this machine starts at once."""

    title = "this machine"
    queues = False

    def allocated_hosts(self, job: Job) -> HostList:
        raise ConfigError(
            f"cluster '{job.cluster.name}' (launcher = '{job.cluster.launcher}') has no allocations"
        )

    def hosts_to_ask(self, cluster: Cluster, hostfile: str, *, devices: bool) -> HostsToAsk:
        if cluster.launcher_traits.hostfile:
            return HostsToAsk(list(load_hosts(find_hostfile(cluster, hostfile))))
        return HostsToAsk([this_host()])

    # what starts a run and makes its stages is imported where that is done: its supervisor, which
    # ranks wait for, does not
    def unit_runner(self, job: Job, stage: str, notice: Notice) -> UnitRunner:
        from trainkit.launch.preparation import direct_units

        return direct_units(job, stage, notice)

    def in_flight(self, notice: Notice) -> StillRunning:
        return refuse_in_flight

    def dry_run(self, start: Start, after: str = "") -> DryRun:
        from trainkit.launch.session_preview import preview_start

        job = start.job
        hosts = start.hosts
        run = RunFolder(start.root / "runs" / job.name / "RUN")
        preview = preview_start(run, job, 1, hosts, background=start.background)
        ranks = job.ranks_per_node
        listed = [
            {
                "host": host.name,
                "ranks": list(range(node * ranks, (node + 1) * ranks)),
                "slots": list(host.slots),
            }
            for node, host in enumerate(hosts.running)
        ]
        values: dict[str, object] = {
            "command": preview.command.to_json(),
            "files": dict(preview.command.files),
            "hosts": listed,
            "spares": [host.name for host in hosts.spares],
            "launcher": preview.launcher_lines,
        }
        return DryRun(preview.lines, values)

    def submit(self, start: Start) -> Submission:
        from trainkit.launch.start import start_run

        run, outcome = start_run(start)
        return Submission(run, outcome=outcome)

    def submit_array(self, asked: ArrayRequest) -> list[Submission]:
        raise ConfigError(f"{self.title} has no queue that {asked.name} could wait in")

    def supervise(
        self, run: RunFolder, environment: Mapping[str, str], *, share: bool, prolog_failed: int
    ) -> Outcome:
        from trainkit.launch.supervise.supervisor import supervise

        secrets = secrets_of(read_job(run.job), environment)
        return supervise(run, secrets, silent_observer(), share=share)

    def owns(self, run: RunFolder) -> bool:
        return True

    def state(self, record: RunRecord) -> RunRecord:
        if record.state == "unknown" and supervisor_answers(record.run):
            return replace(record, state="running", exit=None, root_cause=None, lost=False)
        return record

    def states(self, records: Sequence[RunRecord]) -> list[RunRecord]:
        with ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
            return list(pool.map(self.state, records))

    def cancel(self, run: RunFolder, *, queued: bool) -> CancelledJob:
        raise NotImplementedError(
            "a run that waits for nothing is cancelled through its supervisor"
        )

    def end_job(self, run: RunFolder) -> None:
        """There is no job beside the supervisor."""


DIRECT = Direct()
