"""From a job to a running run, and from a run that ended to one that goes on. What is wrong is
raised before anything is made."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from trainkit.base.errors import ConfigError, Exit, TrainkitError
from trainkit.base.extras import MissingExtra
from trainkit.data.fetch.retry import Unreachable
from trainkit.engines.registry import ENGINES, refuse_unlaunchable
from trainkit.experiment.hosts import hosts_of_job, rank_override, resolve_on_hosts
from trainkit.experiment.options import LaunchOptions, ResumeOptions, TrainOptions
from trainkit.jobs.load import Jobs
from trainkit.jobs.resolved import ResolvedJob
from trainkit.jobs.resume_changes import changed_job
from trainkit.jobs.schema import Job
from trainkit.launch.containers import check_container
from trainkit.launch.direct import DIRECT
from trainkit.launch.hosts.selection import HostList, hosts_path, read_hosts
from trainkit.launch.job_plan import plan_of
from trainkit.launch.preparation import StageUi
from trainkit.launch.readiness import (
    refuse_infeasible,
    refuse_without_samples,
    refuse_without_wandb,
)
from trainkit.launch.run_inputs import refuse_other_inputs
from trainkit.launch.scheduler_contract import (
    DryRun,
    ResumeRequest,
    RunRequest,
    Scheduler,
    Submission,
)
from trainkit.launch.scheduler_registry import current, preparation_for, scheduler_for, scheduler_of
from trainkit.launch.session_preview import StartPreview, preview_start
from trainkit.launch.supervise.observer import RunObserver
from trainkit.launch.supervise.rank_environment import secrets_of
from trainkit.plan.planner import Plan, make_plan
from trainkit.runs.find import find_run
from trainkit.runs.folder import RunFolder
from trainkit.runs.record import RunRecord, read_run_record
from trainkit.stages.execute import needs_in_turn, needs_of, refuse_stale, stamps_folder
from trainkit.stages.index import IndexStage
from trainkit.stages.registry import STAGES, stages_asked_once


def in_background(job: Job, options: LaunchOptions) -> bool:
    """Whether the supervisor is a process of its own, which no terminal ends. Raises ConfigError
    where both is asked for."""
    if options.detach and options.foreground:
        raise ConfigError("--detach and --foreground contradict each other")
    if options.detach:
        return True
    return job.cluster.launcher_traits.hostfile and not options.foreground


def _scheduler(job: Job, options: LaunchOptions) -> Scheduler:
    """Who starts the ranks: inside an allocation that is there already, this machine."""
    if options.existing:
        return DIRECT
    return scheduler_for(job.cluster)


@dataclass(frozen=True)
class NewRun:
    """A run that could be started: its job is checked, its hosts are chosen.

    Args:
        resolved: the job.
        hosts: where it runs, and spares.
        plan: its plan, as far as it is known before its data are prepared.
        project: the folder of jobs.toml.
        options: how it is to be started.
        background: its supervisor is a process of its own.
    """

    resolved: ResolvedJob
    hosts: HostList
    plan: Plan
    project: Path
    options: TrainOptions
    background: bool

    @property
    def job(self) -> Job:
        return self.resolved.job

    @property
    def root(self) -> Path:
        """The folder that holds data, stamps and runs."""
        return Path(self.job.cluster.root or ".")

    @property
    def scheduler(self) -> Scheduler:
        return _scheduler(self.job, self.options)

    @cached_property
    def _request(self) -> RunRequest:
        return RunRequest(
            self.resolved,
            self.plan,
            None,
            self.project,
            self.hosts,
            share=self.options.share,
            background=self.background,
        )

    def start(self, ui: StageUi, watch: RunObserver) -> Submission:
        """Prepare what is stale, then start the run, or put it into its scheduler's queue.

        Args:
            ui: how a person follows the stages.
            watch: how a person follows a supervisor of this process.

        Raises TrainkitError: 5 where a stage is stale and shall not be made, 4 where the plan
        objects, and what a stage or the scheduler raises.
        """
        job = self.job
        preparation = preparation_for(job, self.root, ui)
        # of all, before the first begins: what is hopeless is said at once
        needs = needs_of(job, STAGES)
        if self.options.no_stages:
            refuse_stale(needs, self.root)
        else:
            submission = self.scheduler.prepare(self._request, preparation)
            if submission is not None:
                return submission
        return self.scheduler.submit(replace(self._ready(), watch=watch))

    def prepared(self, ui: StageUi) -> RunRequest:
        """Make what is stale, wherever its units run, and wait for it: what `submit_array` takes.
        Raises TrainkitError as `start`."""
        preparation_for(self.job, self.root, ui).make(needs_in_turn(self.job, STAGES))
        return self._ready()

    def _ready(self) -> RunRequest:
        """The request now that its stages are made."""
        plan = refuse_infeasible(plan_of(self.job))
        refuse_without_samples(self.job)
        return replace(self._request, plan=plan, needs=needs_of(self.job, STAGES))

    def show(self, ui: StageUi) -> tuple[Plan, DryRun]:
        """What `start` would do. Nothing is written. Where the stages cannot be told, because a
        file is missing, the dry run's `error` says so; where no server answers, or what asks it is
        not installed here, its `not_seen`."""
        try:
            return self._show(ui)
        except TrainkitError as error:
            try:
                shown = self.scheduler.dry_run(self._request)
            except TrainkitError:
                raise error from None
            if isinstance(error, Unreachable | MissingExtra):
                return self.plan, replace(shown, not_seen=str(error))
            return self.plan, replace(shown, error=error)

    def _show(self, ui: StageUi) -> tuple[Plan, DryRun]:
        job = self.job
        preparation = preparation_for(job, self.root, ui)
        needs = needs_of(job, stages_asked_once())
        if self.options.no_stages:
            refuse_stale(needs, self.root)
        elif after := self.scheduler.show_stages(job, needs, preparation):
            return self.plan, self.scheduler.dry_run(self._request, after)
        plan = refuse_infeasible(plan_of(job))
        return plan, self.scheduler.dry_run(replace(self._request, plan=plan))


def plan_new_run(jobs: Jobs, name: str, options: TrainOptions) -> NewRun:
    """Check a job and choose its hosts. Nothing is written.

    Args:
        jobs: those of a jobs.toml.
        name: which of them.
        options: how it is to be started.

    Raises TrainkitError: 3 for what is wrong with the job, its hosts, secrets or reports, 4 where
    the plan objects.
    """
    # before its hosts are looked for
    refuse_unlaunchable(jobs.resolve(name, [*options.overrides(), *options.set]).job)
    resolved, hosts = resolve_on_hosts(jobs, name, options.set, options)
    job = resolved.job
    check_container(job)
    background = in_background(job, options)
    plan = refuse_infeasible(make_plan(job, rules=ENGINES[job.engine].rules))
    secrets_of(job, os.environ)
    refuse_without_wandb(job)
    return NewRun(resolved, hosts, plan, jobs.root, options, background)


@dataclass(frozen=True)
class ResumedRun:
    """A run that could go on: what is changed of its job is checked, its hosts are chosen.

    Args:
        run: the run.
        record: how it ended.
        job: its job as it goes on.
        document: the job.json of that.
        hosts: where it runs, and spares.
        project: the folder of jobs.toml.
        options: how it is to be started.
        background: its supervisor is a process of its own.
    """

    run: RunFolder
    record: RunRecord
    job: Job
    document: dict[str, object]
    hosts: HostList
    project: Path
    options: ResumeOptions
    background: bool

    @property
    def finished(self) -> bool:
        """Whether it has made all its steps: there is nothing to go on with."""
        return (
            self.record.state == "succeeded" and self.record.step >= self.job.training.train_iters
        )

    def preview(self) -> StartPreview:
        """What would be started where. Nothing is written."""
        return preview_start(
            self.run, self.job, self.record.attempt + 1, self.hosts, background=self.background
        )

    def prepare(self, ui: StageUi) -> None:
        """Make the index that its order of samples needs. Raises TrainkitError as a stage does,
        3 where a rank could not read its samples."""
        root = Path(self.job.cluster.root or ".")
        needs = IndexStage().needs(self.job, stamps_folder(root, IndexStage.name))
        preparation_for(self.job, root, ui).make(needs)
        refuse_without_samples(self.job)

    def start(self, watch: RunObserver) -> Submission:
        """Start the run again, or put it into its scheduler's queue."""
        return _scheduler(self.job, self.options).requeue(replace(self.request, watch=watch))

    @property
    def request(self) -> ResumeRequest:
        """What its scheduler takes."""
        return ResumeRequest(
            self.run,
            self.job,
            self.document,
            self.project,
            self.hosts,
            new_code=self.options.code == "current",
            share=self.options.share,
            background=self.background,
        )


def plan_resumed_run(jobs: Jobs, text: str, options: ResumeOptions) -> ResumedRun:
    """Find a run, check what is changed of its job and choose its hosts. Nothing is written.

    Args:
        jobs: those of a jobs.toml.
        text: which run: an id or the beginning of one, a job's name, or "last".
        options: how it is to be started.

    Raises TrainkitError: 3 for what is wrong with the job, its hosts or reports, 4 where the plan
    objects, 5 where its samples have changed, 17 or 13 where it has not ended.
    """
    if options.code not in ("run", "current"):
        raise ConfigError(
            f"--code {options.code!r} is neither run (the code that the run began with) nor"
            " current (that of this checkout)"
        )
    run = find_run(jobs.roots(), text)
    record = current(read_run_record(run))
    document, job, hosts = _changed(jobs, run, options)
    background = in_background(job, options)
    _refuse_running(record)
    refuse_other_inputs(run)
    refuse_infeasible(plan_of(job))
    found = ResumedRun(run, record, job, document, hosts, jobs.root, options, background)
    if not found.finished:
        refuse_without_wandb(job)
    return found


def _changed(
    jobs: Jobs, run: RunFolder, options: ResumeOptions
) -> tuple[dict[str, object], Job, HostList]:
    """(document, job, hosts) that a run goes on with: where no others are asked for, those it
    had."""
    moved = None
    if options.cluster:
        moved = jobs.resolve(run.job_name, [f"cluster={json.dumps(options.cluster)}"])
    given = [*replace(options, cluster="").overrides(), *options.set]
    _, job = changed_job(run.job, given, moved)
    refuse_unlaunchable(job)
    check_container(job)
    former = None
    if hosts_path(run).is_file() and moved is None:
        former = read_hosts(run)
    hosts = hosts_of_job(job, options, former)
    document, job = changed_job(run.job, [*given, *rank_override(job, hosts, options.set)], moved)
    return document, job, hosts


def _refuse_running(record: RunRecord) -> None:
    run = record.run
    if record.state in ("starting", "running"):
        message = f"run {run.id} is still running (attempt {record.attempt}, step {record.step})"
        raise TrainkitError(
            message,
            exit=Exit.HOSTS_BUSY,
            hint=f"invoke status {run.id}; invoke attach {run.id} follows it",
        )
    if record.state == "queued":
        hint = (
            f"invoke attach {run.id} follows it, invoke cancel {run.id} takes it out of the queue"
        )
        title = scheduler_of(run).title
        raise TrainkitError(
            f"run {run.id} waits in {title}'s queue", exit=Exit.HOSTS_BUSY, hint=hint
        )
    if record.state == "unknown":
        hint = (
            f"ask there, or end what may be left of it: invoke cancel {run.id} (--force where a"
            " host is gone for good)"
        )
        raise TrainkitError(
            f"run {run.id}: {(record.root_cause or {}).get('message')}",
            exit=Exit.CONTACT_LOST,
            hint=hint,
        )
