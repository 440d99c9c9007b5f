"""From a job to a running run, and from a run that ended to one that goes on. What is wrong is
raised before anything is made."""

from __future__ import annotations

import json
import os
from dataclasses import replace

from trainkit.base.errors import ConfigError, Exit, TrainkitError
from trainkit.base.extras import MissingExtra
from trainkit.data.fetch.retry import Unreachable
from trainkit.engines.registry import ENGINES, refuse_unlaunchable
from trainkit.experiment.hosts import hosts_of_job, job_on_hosts, rank_override
from trainkit.experiment.options import LaunchOptions, ResumeOptions, TrainOptions
from trainkit.jobs.load import Jobs
from trainkit.jobs.resolved import ResolvedJob
from trainkit.jobs.resume_changes import changed_job
from trainkit.jobs.schema import Job
from trainkit.launch.containers import check_container
from trainkit.launch.direct import DIRECT
from trainkit.launch.hosts.selection import HostList
from trainkit.launch.job_plan import plan_of
from trainkit.launch.preparation import StageUi
from trainkit.launch.run_inputs import refuse_other_inputs
from trainkit.launch.scheduler_contract import DryRun, Scheduler, Start, Submission
from trainkit.launch.scheduler_registry import current, preparation_for, scheduler_for, scheduler_of
from trainkit.launch.supervise.rank_environment import refuse_without_wandb, secrets_of
from trainkit.plan.planner import Plan, make_plan, refuse_infeasible
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


def plan_new_run(jobs: Jobs, resolved: ResolvedJob, options: TrainOptions) -> Start:
    """Check a job and choose its hosts. Nothing is written.

    Args:
        jobs: those of a jobs.toml.
        resolved: one of them, with what the options change of it.
        options: how it is to be started.

    Raises TrainkitError: 3 for what is wrong with the job, its hosts, secrets or reports, 4 where
    the plan objects.
    """
    refuse_unlaunchable(resolved.job)  # before its hosts are looked for
    placed, hosts = job_on_hosts(jobs, resolved, options)
    job = placed.job
    check_container(job)
    background = in_background(job, options)
    plan = refuse_infeasible(make_plan(job, rules=ENGINES[job.engine].rules))
    if not job.cluster.launcher_traits.pods:
        secrets_of(job, os.environ)
    refuse_without_wandb(job)
    return Start(
        job,
        placed.to_json(),
        plan,
        hosts,
        jobs.root,
        existing=options.existing,
        share=options.share,
        background=background,
    )


def plan_resumed_run(jobs: Jobs, text: str, options: ResumeOptions) -> tuple[RunRecord, Start]:
    """Find a run, check what is changed of its job and choose its hosts: (how it ended, how it
    would go on). Nothing is written.

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
    plan = refuse_infeasible(plan_of(job))
    if not has_finished(record, job):
        refuse_without_wandb(job)
    return record, Start(
        job,
        document,
        plan,
        hosts,
        jobs.root,
        run,
        new_code=options.code == "current",
        existing=options.existing,
        share=options.share,
        background=background,
    )


def has_finished(record: RunRecord, job: Job) -> bool:
    """Whether a run has made all steps that `job` has: there is nothing to go on with."""
    return record.state == "succeeded" and record.step >= job.training.train_iters


def _changed(
    jobs: Jobs, run: RunFolder, options: ResumeOptions
) -> tuple[dict[str, object], Job, HostList]:
    """(document, job, hosts) that a run goes on with: where no others are asked for, those it
    had."""
    moved = None
    if options.cluster:
        moved = jobs.resolve(run.job_name, [f"cluster={json.dumps(options.cluster)}"])
    given = replace(options, cluster="").overrides()
    document, job = changed_job(run.job, given, moved)
    refuse_unlaunchable(job)
    check_container(job)
    former = None
    if run.hosts.is_file() and moved is None:
        former = HostList.from_file(run.hosts)
    hosts = hosts_of_job(job, options, former)
    if ranks := rank_override(job, hosts, options.set):
        document, job = changed_job(run.job, [*given, *ranks], moved)
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


def _scheduler(start: Start) -> Scheduler:
    """Who starts the ranks: inside an allocation that is there already, this machine."""
    return DIRECT if start.existing else scheduler_for(start.job.cluster)


def prepare(start: Start, ui: StageUi) -> Start:
    """Make what is stale, wherever its units run, and wait for it: the start that can be submitted
    then, also in an array. A run that goes on has its data, but may lack the index of its order of
    samples.

    Raises TrainkitError as a stage does, 4 where the plan objects, 3 where a rank could not read
    its samples.
    """
    preparation = preparation_for(start.job, start.root, ui)
    if start.run is None:
        preparation.make(needs_in_turn(start.job, STAGES))
        return _ready(start)
    preparation.make(IndexStage().needs(start.job, stamps_folder(start.root, IndexStage.name)))
    _refuse_without_samples(start.job)
    return start


def _ready(start: Start) -> Start:
    """The start of a new run now that its stages are made."""
    plan = refuse_infeasible(plan_of(start.job))
    _refuse_without_samples(start.job)
    return replace(start, plan=plan, needs=needs_of(start.job, STAGES))


def _refuse_without_samples(job: Job) -> None:
    """Refuse what no rank could read, where the job reads files at all: opening them needs numpy,
    whose import would be a tenth of a start."""
    if any(dataset.source != "mock" for dataset in job.datasets):
        from trainkit.data.order.open import refuse_without_samples

        refuse_without_samples(job)


def submit(start: Start) -> Submission:
    """Start a run that is prepared, or put it into its scheduler's queue. Raises TrainkitError as
    the scheduler."""
    return _scheduler(start).submit(start)


def prepare_and_submit(start: Start, ui: StageUi, *, no_stages: bool = False) -> Submission:
    """Prepare what is stale, then start the run, or put it into its scheduler's queue, where the
    stages of a new run may be made too.

    Args:
        start: of a new run, or of one that goes on.
        ui: how a person follows the stages.
        no_stages: what is stale of a new run shall not be made.

    Raises TrainkitError: 5 where a stage is stale and shall not be made, 4 where the plan
    objects, and what a stage or the scheduler raises.
    """
    if start.run is not None:
        return submit(prepare(start, ui))
    preparation = preparation_for(start.job, start.root, ui)
    # of all, before the first begins: what is hopeless is said at once
    needs = needs_of(start.job, STAGES)
    if no_stages:
        refuse_stale(needs, start.root)
    elif (submission := _scheduler(start).prepare(start, preparation)) is not None:
        return submission
    return submit(_ready(start))


def show_new_run(start: Start, ui: StageUi, *, no_stages: bool = False) -> tuple[Plan, DryRun]:
    """What `prepare_and_submit` would do with a new run. Nothing is written.

    Where the stages cannot be known, because a file is missing, the dry run's `error` says so;
    where no server answers, or what asks it is not installed here, its `not_seen`.
    """
    scheduler = _scheduler(start)
    try:
        needs = needs_of(start.job, stages_asked_once())
        if no_stages:
            refuse_stale(needs, start.root)
        elif after := scheduler.show_stages(
            start.job, needs, preparation_for(start.job, start.root, ui)
        ):
            return start.plan, scheduler.dry_run(start, after)
        plan = refuse_infeasible(plan_of(start.job))
        return plan, scheduler.dry_run(replace(start, plan=plan))
    except TrainkitError as error:
        try:
            shown = scheduler.dry_run(start)
        except TrainkitError:
            raise error from None
        if isinstance(error, Unreachable | MissingExtra):
            return start.plan, replace(shown, not_seen=str(error))
        return start.plan, replace(shown, error=error)
