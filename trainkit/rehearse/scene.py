"""What a rehearsal looks at: a job as `train` would start it, or a run as `resume` would."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path

from trainkit.base.errors import ConfigError, TrainkitError
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.engines.contract import Command
from trainkit.engines.registry import ENGINES
from trainkit.experiment.hosts import job_on_hosts
from trainkit.experiment.options import RehearseOptions, ResumeOptions
from trainkit.experiment.start import plan_resumed_run
from trainkit.jobs.load import Jobs
from trainkit.jobs.resolved import ResolvedJob
from trainkit.jobs.schema import Job
from trainkit.launch.hosts.selection import HostList
from trainkit.launch.job_plan import plan_of
from trainkit.plan.planner import Plan
from trainkit.runs.checkpoints import Checkpoint, newest_valid, open_checkpoint
from trainkit.runs.folder import RunFolder
from trainkit.stages.contract import Need
from trainkit.stages.execute import needs_of, stamps_folder
from trainkit.stages.registry import stages_asked_once
from trainkit.stages.stamps import Freshness, check_freshness


class NotLookedAt(Exception):
    """Raised by a check that cannot be made here; its text says why."""


@dataclass(frozen=True)
class RehearsalScene:
    """A job on its cluster. What several checks need is worked out once.

    Args:
        jobs: those of a jobs.toml.
        resolved: the job.
        options: how it would be started.
        run: the run that would go on; None: a new one.
    """

    jobs: Jobs
    resolved: ResolvedJob
    options: RehearseOptions
    run: RunFolder | None = None

    @property
    def job(self) -> Job:
        return self.resolved.job

    @property
    def root(self) -> Path:
        """The folder that holds data, stamps and runs."""
        return self.job.cluster.root_folder

    @cached_property
    def hosts(self) -> HostList:
        """Where it would run. Raises ConfigError as the hostfile's reader does."""
        resolved = self.resolved
        if self.run is not None:  # a run's job has its hosts' ranks already
            resolved = self.jobs.resolve(self.job.name, self.options.overrides())
        return job_on_hosts(self.jobs, resolved, self.options)[1]

    @cached_property
    def plan(self) -> Plan:
        return plan_of(self.job)

    @cached_property
    def command(self) -> Command:
        """What its ranks would run, of a run that is not there. Raises NotLookedAt where it cannot
        be made."""
        engine = ENGINES[self.job.engine]
        if engine.problems(self.job):
            raise NotLookedAt("the command cannot be made: see engine")
        run = RunFolder(self.root.absolute() / "runs" / self.job.name / "RUN")
        return engine.command(self.job, run, 1)

    @cached_property
    def newest_checkpoint(self) -> Checkpoint | None:
        """What a run would go on from; None for a new run, or one without any. Raises
        TrainkitError (exit 16) where none of several is right."""
        if self.run is None or not self.job.is_native:
            return None
        return newest_valid(self.run.checkpoints, lambda words: None, open_checkpoint)

    @cached_property
    def _needs(self) -> list[Need] | TrainkitError:
        try:
            return needs_of(self.job, stages_asked_once())
        except TrainkitError as error:  # a server that does not answer is asked once
            return error

    @property
    def needs(self) -> list[Need]:
        """What it needs of stages. Raises TrainkitError where that is hopeless."""
        if isinstance(self._needs, TrainkitError):
            raise self._needs
        return self._needs

    @cached_property
    def verdicts(self) -> list[Freshness]:
        """Of each of these, whether it is there."""
        return [check_freshness(need, stamps_folder(self.root, need.stage)) for need in self.needs]

    def require_stages(self) -> None:
        """Raise NotLookedAt where what a check reads is still to be made."""
        try:
            stale = [verdict for verdict in self.verdicts if not verdict.fresh]
        except TrainkitError:
            raise NotLookedAt("what the job reads cannot be made: see stages") from None
        stale = [each for each in stale if each.stage in ("prep-data", "index", "weights")]
        if stale:
            raise NotLookedAt(
                f"{stale[0].stage} {stale[0].name} is to be made first: invoke prep-data --job"
                f" {self.job.name}, then rehearse again"
            )

    def require_layout(self) -> None:
        """Raise NotLookedAt where native's ranks cannot share the work."""
        from trainkit.train.preflight import layout_problems

        for problem in layout_problems(self.job):
            raise NotLookedAt(f"the ranks cannot share the work: {problem.message}")


# It returns what held, and raises NotLookedAt where it cannot be made, TrainkitError or OSError
# where it failed.
Check = Callable[[RehearsalScene], str]


def scene_of(jobs: Jobs, name: str, options: RehearseOptions) -> RehearsalScene:
    """The scene of a job.

    Args:
        jobs: those of a jobs.toml.
        name: which of them.
        options: how it would be started.

    Raises ConfigError with everything that is wrong with the job's tables.
    """
    resolved = jobs.resolve(name, options.overrides())
    if not options.resume:
        return RehearsalScene(jobs, resolved, options)
    record, start = plan_resumed_run(jobs, options.resume, ResumeOptions(set=options.set))
    run = record.run
    if run.job_name != name:
        raise ConfigError(f"run {run.id} is of job {run.job_name}, not of {name}")
    return RehearsalScene(jobs, ResolvedJob(start.job, resolved.origins), options, run)
