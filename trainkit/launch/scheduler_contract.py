"""What a scheduler is: it decides when and where the ranks of a run start, and it knows what
became of runs that were handed over to it.

A launcher (launch/launchers) starts agents on hosts that are known; a scheduler comes before it.
launch/scheduler_registry.py has the table of all, docs/adding.md says how another one is added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from trainkit.base.errors import TrainkitError
from trainkit.base.lazy_dataclasses import dataclass, field
from trainkit.jobs.schema import Cluster, Job
from trainkit.launch.hosts.hostfile import Host
from trainkit.launch.hosts.selection import HostList
from trainkit.launch.launchers.contract import Launcher
from trainkit.launch.supervise.host_consistency import Finding
from trainkit.launch.supervise.observer import RunObserver, silent_observer
from trainkit.launch.supervise.outcome import Outcome
from trainkit.runs.folder import RunFolder
from trainkit.runs.record import RunRecord
from trainkit.stages.contract import Need
from trainkit.stages.in_flight import StillRunning

if TYPE_CHECKING:  # what makes stages and plans: no supervisor does
    from trainkit.launch.preparation import Notice, Preparation, StageUi, UnitRunner
    from trainkit.plan.planner import Plan


@dataclass(frozen=True)
class Start:
    """A run that is to be made and started, or one that has ended and is to go on. Its job is
    checked, its hosts are chosen.

    Args:
        job: the job as it will run.
        document: job.json of it.
        plan: its plan, as far as it is known before its data are prepared.
        hosts: where it runs, and spares; a scheduler with a queue finds others.
        project: the folder of jobs.toml.
        run: the run that goes on; None: a new one.
        needs: what a new run reads, up to date; None while its stages are still to be made.
        new_code: a run that goes on takes a new snapshot of `project`, instead of the code it has.
        existing: in the allocation that this process is in, which `hosts` are of.
        share: run beside other runs on the same slots.
        background: return as soon as a supervisor that outlives this process has taken over.
        watch: how a person follows a supervisor of this process.
    """

    job: Job
    document: Mapping[str, object]
    plan: Plan
    hosts: HostList
    project: Path
    run: RunFolder | None = None
    needs: Sequence[Need] | None = None
    new_code: bool = False
    existing: bool = False
    share: bool = False
    background: bool = False
    watch: RunObserver = field(default_factory=silent_observer)

    @property
    def root(self) -> Path:
        """The folder that holds data, stamps and runs."""
        return self.job.cluster.root_folder


@dataclass(frozen=True)
class ArrayRequest:
    """Several runs that are to be handed over at once.

    Args:
        name: of them all.
        folder: of what is written about them all.
        starts: a run each, new or to go on.
        at_once: so many at the same time; None: as many as there is room.
    """

    name: str
    folder: Path
    starts: Sequence[Start]
    at_once: int | None = None


class StageFollower(Protocol):
    """Follows the jobs that make a run's stages."""

    def follow(self, ui: StageUi, on_waiting: Notice) -> None:
        """Return when they are over; `on_waiting` is called with the one at work, as it changes.
        Raises TrainkitError (exit 8) where the scheduler cannot be asked."""


@dataclass(frozen=True)
class Submission:
    """A run that was handed over.

    Args:
        run: the run.
        job: the scheduler's own name of what was submitted; "" where it has no queue.
        description: what the run is to the scheduler, for people: "job 7 of ..., its script: ...".
        outcome: how it ended, where this process has supervised it to its end.
        stages: the jobs that make its stages before it starts; None where none do.
    """

    run: RunFolder
    job: str = ""
    description: str = ""
    outcome: Outcome | None = None
    stages: StageFollower | None = None


@dataclass(frozen=True)
class DryRun:
    """What would be done.

    Args:
        lines: for people.
        values: for the document dry-run/1, besides plan.
        error: why the stages before it cannot be known, or are stale and shall not be made; what
            would start after them is known all the same.
        not_seen: why a stage could not be looked at from here, which is no error; "": all were.
    """

    lines: list[str]
    values: dict[str, object]
    error: TrainkitError | None = None
    not_seen: str = ""


@dataclass(frozen=True)
class QueueReport:
    """What a scheduler says of a run's job now.

    Args:
        text: one line for people.
        values: for the document of `status`.
    """

    text: str
    values: Mapping[str, Any]


class QueueFollower(Protocol):
    """Asks about the job of one run again and again, more rarely while nothing changes."""

    def look(self, record: RunRecord) -> tuple[RunRecord, str]:
        """(the record as the scheduler sees the run, one line that is new; "" for none)."""


@dataclass(frozen=True)
class JobAccount:
    """What a scheduler's accounting keeps of one start of a job, or of a step of it. Times are
    its own; "Unknown" where there is none.

    Args:
        id: the scheduler's name of the job; with .batch, .extern or .0 behind it that of a step.
        state: how it is, or how it ended: COMPLETED, NODE_FAIL, TIMEOUT, OUT_OF_MEMORY,
            REQUEUED, "CANCELLED by 1000" (a user's number), ...
        code: exit code and signal, "1:0".
        submit: when it was put into the queue, again too.
        start: when it began.
        end: when it ended.
        limit: its time limit.
        nodes: its node list, "None assigned" where it had none.
    """

    id: str
    state: str
    code: str
    submit: str
    start: str
    end: str
    limit: str
    nodes: str

    @property
    def state_word(self) -> str:
        """The state without who brought it about."""
        return self.state.split()[0] if self.state else "UNKNOWN"


@dataclass(frozen=True)
class CancelledJob:
    """A job that was taken out of its queue.

    Args:
        id: the scheduler's name of it.
        state: its last state.
        stage_jobs: jobs of its stages that were taken out too.
    """

    id: str
    state: str
    stage_jobs: list[str]


@dataclass(frozen=True)
class ClusterNode:
    """A node as the scheduler knows it: one row of `nodes`."""

    host: str
    state: str
    partition: str
    cpus: str
    gres: str
    reason: str


@dataclass(frozen=True)
class HostsToAsk:
    """Hosts of a cluster that a small program may run on now.

    Args:
        hosts: those that can be asked.
        unavailable: why others cannot, by name.
        busy: those of the others that are only at work.
        advice: what to do about the rest of them.
        launcher: what gets there; None: the cluster's own launcher.
    """

    hosts: list[Host]
    unavailable: Mapping[str, str] = field(default_factory=dict)
    busy: frozenset[str] = frozenset()
    advice: str = ""
    launcher: Launcher | None = None


class Scheduler(Protocol):
    """One way in which runs get their hosts. Methods about runs are only called for runs that
    `owns` says are its own. Those with a body answer for a scheduler that has no queue, whose
    supervisor and run folder know all there is."""

    title: str  # its name for people
    queues: bool  # runs wait in its queue, and no process of ours has to live meanwhile

    # Before a run.

    def allocated_hosts(self, job: Job) -> HostList:
        """The hosts of the allocation that this process runs in (--existing). Raises ConfigError
        outside of one, or where it is too small."""

    def hosts_to_ask(self, cluster: Cluster, hostfile: str, *, devices: bool) -> HostsToAsk:
        """Hosts that `doctor` may run small programs on.

        Args:
            cluster: the cluster.
            hostfile: another hostfile than the cluster's; "" for that.
            devices: GPUs will be used, not only counted.
        """

    def nodes(self, cluster: Cluster) -> list[ClusterNode] | None:
        """What the scheduler knows of the cluster's nodes; None: ask each host itself."""
        return None

    def examine(self, job: Job) -> list[Finding]:
        """What is known of the cluster before anything of a job is made: what would keep it from
        running, and what is worth knowing. Hosts that can be asked tell the rest."""
        return []

    def unit_runner(self, job: Job, stage: str, notice: Notice) -> UnitRunner:
        """What runs the units of a stage of `job`: this machine, other hosts, or arrays."""

    def in_flight(self, notice: Notice) -> StillRunning:
        """Tells whether jobs that make a stage, submitted by any run, may still write."""

    # Starting a run.

    def prepare(self, start: Start, preparation: Preparation) -> Submission | None:
        """Make the stages of a new run now, then return None: the caller submits the run. Or submit
        the stages as jobs together with the run, which waits for them."""
        # no supervisor makes stages, and theirs is a quarter of its imports
        from trainkit.stages.execute import needs_in_turn
        from trainkit.stages.registry import STAGES

        preparation.make(needs_in_turn(start.job, STAGES))
        return None

    def show_stages(self, job: Job, needs: Sequence[Need], preparation: Preparation) -> str:
        """Say what `prepare` would do: the name of the job that the run would wait for, "" where
        it waits for none. Nothing is written.

        Args:
            job: the job.
            needs: what it needs, as far as that is known before anything is made.
            preparation: shows what this machine would do.
        """
        preparation.show(needs)
        return ""

    def dry_run(self, start: Start, after: str = "") -> DryRun:
        """What `submit` would do. `after`: see `show_stages`."""

    def submit(self, start: Start) -> Submission:
        """Make the run's folder, or renew that of one that goes on, and start it, or put it into
        the queue.

        Raises TrainkitError, and then leaves nothing of a new run behind: 17 if the slots are
        taken, or if the run is not over; 8 if the scheduler refuses, 3 if a secret is missing.
        """

    def submit_array(self, asked: ArrayRequest) -> list[Submission]:
        """Put several runs into the queue at once, each of which ends alone. Only asked of a
        scheduler that has a queue. Raises as `submit`; then none of them is left there."""

    def settle_arrays(self, folder: Path) -> list[str]:
        """Settle what processes have left in the queue that were killed in `submit_array`; what
        was done, in words. Raises TrainkitError (exit 8) where the scheduler cannot be asked.

        Args:
            folder: that of a request, or one above it.
        """
        return []

    def supervise(
        self, run: RunFolder, environment: Mapping[str, str], *, share: bool, prolog_failed: int
    ) -> Outcome:
        """Supervise a run to its end in this process, the program launch/main.py. The caller
        holds the run's lock.

        Args:
            run: the run.
            environment: of this process.
            share: run beside other runs on the same slots.
            prolog_failed: exit code of the cluster's prolog, where a batch script has run it.
        """

    # A run that was submitted.

    def owns(self, run: RunFolder) -> bool:
        """Whether the run was ever submitted to this scheduler; asked where the run's folder has
        launch/LAUNCHER.json, which `submit` writes."""

    def state(self, record: RunRecord) -> RunRecord:
        """The record in the light of one question to the scheduler, where one is needed; as it
        was where the scheduler cannot be asked."""

    def states(self, records: Sequence[RunRecord]) -> list[RunRecord]:
        """As `state`, with one question for all."""

    def report(self, record: RunRecord) -> QueueReport | None:
        """What the scheduler says of the job of a run that has not ended; None for nothing."""
        return None

    def follower(self, run: RunFolder) -> QueueFollower | None:
        """Follows the run through the queue; None where the run folder tells everything."""
        return None

    def log(self, run: RunFolder) -> Path | None:
        """What the run's job printed before there were ranks; None where there is no job."""
        return None

    def accounts(self, run: RunFolder) -> list[JobAccount] | None:
        """All that its accounting keeps of the run's jobs; None where there is none. Raises
        TrainkitError (exit 8) where that cannot be asked."""
        return None

    def ask(self, run: RunFolder, *, save: bool) -> bool:
        """Have the run's supervisor stop it, where its port is not for who types; whether it was
        asked. `save`: at the end of the step."""
        return False

    def cancel(self, run: RunFolder, *, queued: bool) -> CancelledJob:
        """End the run's job and wait until it is over; `queued`: it had not begun, which is noted
        in the run folder. Raises TrainkitError (exit 13) where it does not end."""

    def end_job(self, run: RunFolder) -> None:
        """After its supervisor has stopped a run: see that its job ends too, with any successor.
        Raises TrainkitError (exit 13) where it does not."""

    def end_stages(self, run: RunFolder) -> list[str]:
        """End jobs that were to make the stages of a run which has ended; their names. Raises
        TrainkitError (exit 13) where they go on."""
        return []
