"""The tasks that run: train, resume; and precompile, with what its stage made in numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

from rich.markup import escape

from trainkit.base.documents import document, read_document
from trainkit.base.errors import Exit, TrainkitError
from trainkit.cli.config.jobs import load_jobs
from trainkit.cli.config.render_plan import read_lines
from trainkit.cli.host_options import say_hosts
from trainkit.cli.run.progress import TrainingView
from trainkit.cli.run.stages import bring_up_to_date, say_unused_stages, stage_ui
from trainkit.cli.wrapper import TaskContext, TaskResult
from trainkit.engines.registry import ENGINES, refuse_unlaunchable
from trainkit.experiment.follow import wait_until_started
from trainkit.experiment.options import (
    LaunchOptions,
    RehearseOptions,
    ResumeOptions,
    TrainOptions,
)
from trainkit.experiment.start import (
    has_finished,
    plan_new_run,
    plan_resumed_run,
    prepare,
    prepare_and_submit,
    show_new_run,
    submit,
)
from trainkit.jobs.resolved import read_job
from trainkit.jobs.schema import Job
from trainkit.launch.scheduler_contract import StageFollower, Start, Submission
from trainkit.launch.scheduler_registry import preparation_for
from trainkit.launch.session_preview import preview_start
from trainkit.launch.supervise.observer import RunObserver
from trainkit.plan.planner import Plan
from trainkit.runs.checkpoints import newest_valid, open_checkpoint
from trainkit.runs.events import EventTail
from trainkit.runs.folder import RunFolder
from trainkit.runs.record import RunRecord, read_run_record
from trainkit.runs.retention import ListedCheckpoint
from trainkit.stages.execute import needs_in_turn
from trainkit.stages.precompile import PrecompileStage, prune as prune_graphs
from trainkit.stages.registry import STAGES
from trainkit.train.compiled_graphs import SCHEMA, GraphFiles

BEFORE = ("build", "build-container", "prep-data")  # stages that say what is compiled


def compile_graphs(task: TaskContext, job: Job, *, force: bool, prune: bool) -> TaskResult:
    """Make the graphs of a job, and say what that took.

    Args:
        task: how the task speaks.
        job: the job.
        force: also where they are fresh.
        prune: delete the oldest graphs of other jobs.
    """
    refuse_unlaunchable(job)
    root = job.cluster.root_folder
    before = [stage for stage in STAGES if stage.name in BEFORE]
    own = (PrecompileStage(),)
    preparation = preparation_for(job, root, stage_ui(task), force=force)
    if task.dry_run:
        bring_up_to_date(task, needs_in_turn(job, before), root)
        verdicts = preparation.show(needs_in_turn(job, own))
    else:
        preparation_for(job, root, stage_ui(task)).make(needs_in_turn(job, before))
        verdicts = preparation.make(needs_in_turn(job, own))
    values: dict[str, object] = {"job": job.name, "fresh": verdicts[0].fresh}
    if not task.dry_run:
        values |= _numbers(task, GraphFiles.of(job), fresh=verdicts[0].fresh)
    if prune and not task.dry_run:
        for folder, size in prune_graphs(root, [job.name]):
            task.say(f"deleted {folder} ({size / 1e6:,.1f} MB)")
    return TaskResult(document("precompile/1", because=verdicts[0].because, **values))


def _numbers(task: TaskContext, files: GraphFiles, *, fresh: bool) -> dict[str, object]:
    """What is in the record of the graphs, said and returned."""
    record = read_document(files.record, SCHEMA)
    ranks = record["ranks"]
    total = sum(each["hits"] + each["misses"] for each in ranks)
    made = sum(each["misses"] for each in ranks)
    compiled = 0 if fresh else made
    seconds = record["seconds"]
    each_seconds = seconds / max(1, made)
    saved = seconds if fresh else 0.0
    task.say(
        f"total graphs {total}, compiled {compiled}, from cache {total - compiled}, failed 0;"
        f" {each_seconds:.1f} s each, {saved:.1f} s saved; {files.archive}"
    )
    return {
        "graphs": total,
        "compiled": compiled,
        "from_cache": total - compiled,
        "failed": 0,
        "seconds": seconds,
        "seconds_each": round(each_seconds, 3),
        "seconds_saved": saved,
        "archive": str(files.archive),
    }


def train(task: TaskContext, name: str, options: TrainOptions) -> TaskResult:
    """The task `train`.

    Args:
        task: how the task speaks.
        name: of the job.
        options: how the run is started.
    """
    jobs = load_jobs(task)
    resolved = jobs.resolve(name, options.overrides())
    if options.rehearse or resolved.job.rehearse:
        from trainkit.cli.run.rehearse import refuse_failed, run_rehearsal

        refuse_failed(task, run_rehearsal(task, jobs, name, RehearseOptions.of(options)))
    start = plan_new_run(jobs, resolved, options)
    job = start.job
    _print_plan(task, start.plan, job)
    _say_missing_graphs(task, job)
    say_hosts(task, job, start.hosts)
    say_unused_stages(task, job)
    if task.dry_run:
        return _show(task, start, options)
    with _watched(task, start) as watched:
        submission = prepare_and_submit(watched, stage_ui(task), no_stages=options.no_stages)
    return _finish(task, job, submission, EventTail(submission.run), options)


def precompile(
    task: TaskContext, name: str, options: TrainOptions, *, force: bool, prune: bool
) -> TaskResult:
    """The task `precompile`.

    Args:
        task: how the task speaks.
        name: of the job.
        options: how its run is started.
        force: also where all graphs are compiled.
        prune: native: delete old graphs of other jobs.
    """
    compiling = TrainOptions(**{**vars(options), "set": (*options.set, "precompile=true")})
    jobs = load_jobs(task)
    resolved = jobs.resolve(name, compiling.overrides())
    if resolved.job.is_native:
        return compile_graphs(task, resolved.job, force=force, prune=prune)
    job = plan_new_run(jobs, resolved, compiling).job
    if not force and ENGINES[job.engine].compiled_nodes(job) == job.nodes:
        task.say(f"the graphs of {name} are compiled on all {job.nodes} nodes")
        return TaskResult(document("precompile/1", job=name, nodes=job.nodes, fresh=True))
    return train(task, name, compiling)


@contextlib.contextmanager
def _watched(task: TaskContext, start: Start) -> Iterator[Start]:
    """The start with a view of its progress, which stands on the terminal in the block."""
    view = TrainingView(task.console, start.job.training.train_iters)
    try:
        yield replace(start, watch=RunObserver(view.begin, view.tick, view.notice))
    finally:
        view.end()


def _show(task: TaskContext, start: Start, options: TrainOptions) -> TaskResult:
    """Say what would be started where."""
    plan, dry_run = show_new_run(start, stage_ui(task), no_stages=options.no_stages)
    for line in dry_run.lines:
        task.say(line)
    if dry_run.error is not None:
        raise dry_run.error
    if dry_run.not_seen:
        task.say(f"not looked at: {dry_run.not_seen}")
    seen = {"not_looked_at": dry_run.not_seen or None}
    return TaskResult(document("dry-run/1", plan=plan.to_json(), **seen, **dry_run.values))


def _say_missing_graphs(task: TaskContext, job: Job) -> None:
    """A training whose graphs are not there compiles them while its nodes wait for each other."""
    there = None if job.precompile else ENGINES[job.engine].compiled_nodes(job)
    if there is not None and there < job.nodes:
        task.say(
            f"note: graphs of {job.name} are compiled on {there} of {job.nodes} nodes; the others"
            f" compile while all wait: {task.command} precompile {job.name} first"
        )


def _print_plan(task: TaskContext, plan: Plan, job: Job) -> None:
    if job.precompile and not job.is_native:
        task.console.print(
            f"[bold]{job.name}[/]: compiles the graphs of a few steps on {job.nodes} nodes; nothing"
            " is trained"
        )
        return
    if plan.parameters:
        size = f"{plan.parameters / 1e6:,.2f} million parameters"
    else:
        size = "parameters known when the tokenizer is"
    batch = (
        f"{plan.global_batch_size} x {job.model.seq_length} tokens"
        f" ({plan.gradient_accumulation_steps} micro-batches of {job.training.micro_batch_size})"
    )
    ranks = (
        f"{plan.world_size} rank{'s' if plan.world_size > 1 else ''} on {job.cluster.device.name}"
    )
    task.console.print(
        f"[bold]{job.name}[/]: {size}, {ranks}, {job.training.train_iters} steps of {batch} ="
        f" {plan.tokens / 1e6:,.2f} million tokens"
    )
    for line in read_lines(plan):
        task.say(f"  {line}")


def _beginning(task: TaskContext, run: RunFolder) -> str:
    """What a resumed run would begin with, by manifests and sizes. Raises TrainkitError (exit
    16) where there are checkpoints and none is right."""
    job = read_job(run.job)
    if not job.is_native:
        return _engines_beginning(task, ENGINES[job.engine].checkpoints(run, hashes=False))
    newest = newest_valid(
        run.checkpoints, lambda words: task.say(f"would be passed over: {words}"), open_checkpoint
    )
    if newest:
        return f"the checkpoint of step {newest.manifest.step}"
    return "step 0: it has no checkpoint"


def _engines_beginning(task: TaskContext, found: Sequence[ListedCheckpoint]) -> str:
    """The same of another engine, by its own rules."""
    newest = None
    for checkpoint in found:
        if checkpoint.problems:
            problems = "; ".join(checkpoint.problems)
            task.say(f"would be passed over: {checkpoint.folder}: {problems}")
        else:
            newest = checkpoint
    if newest is None:
        return "step 0: it has no whole checkpoint"
    return f"the checkpoint of step {newest.step}"


def _say_lasting_longer(task: TaskContext, job: Job) -> None:
    """The end of the decay does not move with train_iters: steps after it may do little, with
    min_lr = 0 nothing."""
    t = job.training
    if t.train_iters > t.decay_iters and t.lr_decay_style != "constant":
        way = f"--set training.lr_decay_iters={t.train_iters} would make the decay longer"
        task.say(f"after step {t.decay_iters} the learning rate is min_lr = {t.min_lr:g}; {way}")


def resume(task: TaskContext, text: str, options: ResumeOptions) -> TaskResult:
    """The task `resume`.

    Args:
        task: how the task speaks.
        text: which run.
        options: how it goes on.
    """
    record, start = plan_resumed_run(load_jobs(task), text, options)
    run = record.run
    job = start.job
    if has_finished(record, job):
        task.say(
            f"run {run.id} has finished: step {record.step} of {job.training.train_iters}; there is"
            " nothing to resume"
        )
        return TaskResult(record.to_json())
    _say_lasting_longer(task, job)
    say_hosts(task, job, start.hosts)
    if task.dry_run:
        return _show_resumed(task, record, start)
    start = prepare(start, stage_ui(task))
    task.say(
        f"run {run.id} ({record.state}) is at step {record.step}; going on as attempt"
        f" {record.attempt + 1}"
    )
    events = EventTail(run, skip_existing=True)
    with _watched(task, start) as watched:
        submission = submit(watched)
    return _finish(task, job, submission, events, options)


def _show_resumed(task: TaskContext, record: RunRecord, start: Start) -> TaskResult:
    run = record.run
    attempt = record.attempt + 1
    task.say(
        f"would go on with run {run.id} in {run.path}, attempt {attempt}, from"
        f" {_beginning(task, run)}"
    )
    preview = preview_start(run, start.job, attempt, start.hosts, background=start.background)
    for line in preview.lines:
        task.say(line)
    return TaskResult(record.to_json())


def _finish(
    task: TaskContext,
    job: Job,
    submission: Submission,
    events: EventTail,
    options: LaunchOptions,
) -> TaskResult:
    """How it ended. Without an outcome a supervisor of its own goes on with the run, now or when
    its turn comes: follow it, unless nobody wants to."""
    # while the supervisor begins, not before it
    from trainkit.cli.run.attach import follow_run
    from trainkit.cli.run.summary import print_ending

    run = submission.run
    if submission.job:
        _say_submitted(task, submission, detach=options.detach)
        if options.detach:
            return TaskResult(read_run_record(run).to_json())
        if submission.stages is not None and not _follow_stages(task, run, submission.stages):
            return TaskResult(read_run_record(run).to_json(), Exit.INTERRUPTED)
        return follow_run(task, run, events)
    if submission.outcome is None:
        if not (options.detach and wait_until_started(run, events)):
            return follow_run(task, run, events)
        task.say(f"run {run.id} goes on by itself in {run.path}")
        task.say(
            f"  {task.command} attach {run.id} follows it, {task.command} cancel {run.id} stops it"
        )
        return TaskResult(read_run_record(run).to_json())
    record = read_run_record(run)
    # a terminal that is gone does not change how the run ended
    with contextlib.suppress(OSError, SystemExit):
        print_ending(task, run, job, record)
    return TaskResult(record.to_json(), submission.outcome.exit)


def _say_submitted(task: TaskContext, submission: Submission, *, detach: bool) -> None:
    """What has been done, and how to go on from here."""
    run = submission.run
    id = submission.job
    task.say(f"run {run.id} is {submission.description}")
    if detach:
        task.say(f"  {task.command} attach {id} follows it, {task.command} cancel {id} stops it")


def _follow_stages(task: TaskContext, run: RunFolder, stages: StageFollower) -> bool:
    """Show how the stages of a run that was just submitted are made; Ctrl-C only ends the
    following: False then."""

    def say(line: str) -> None:
        task.console.print(f"[yellow]{escape(line)}[/]")

    try:
        stages.follow(stage_ui(task), say)
    except KeyboardInterrupt:
        task.say(
            f"run {run.id} goes on; {task.command} attach {run.id} follows it again, {task.command}"
            f" cancel {run.id} stops it"
        )
        return False
    except TrainkitError as error:  # the scheduler could not be asked just now
        task.say(str(error))
    return True
