"""The tasks that run: train, resume."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainkit.base.documents import document
from trainkit.base.errors import ConfigError, Exit, TrainkitError
from trainkit.base.extras import MissingExtra
from trainkit.cli.config.jobs import load_jobs
from trainkit.cli.config.plan import plan_of
from trainkit.cli.host_options import (
    NO_HOST_OPTIONS,
    HostOptions,
    hosts_of_job,
    resolve_on_hosts,
    say_hosts,
    sets_of_hosts,
)
from trainkit.cli.run import slurm
from trainkit.cli.run.attach import follow_run, started
from trainkit.cli.run.dry_run import say_scripts, session_to_show
from trainkit.cli.run.preflight import refuse_infeasible, refuse_without_samples
from trainkit.cli.run.progress import TrainingView
from trainkit.cli.run.slurm_stages import dry_graph, follow_graph, graph_of
from trainkit.cli.run.stages import STAGES, bring_up_to_date, say_unused_places
from trainkit.cli.run.summary import print_ending
from trainkit.cli.wrapper import TaskContext, TaskResult
from trainkit.engines import ENGINES, refuse_unlaunchable
from trainkit.engines.contract import Command
from trainkit.engines.rules import RULES
from trainkit.jobs.load import Jobs
from trainkit.jobs.resume_changes import changed_job
from trainkit.jobs.schema import Job
from trainkit.launch.containers import check_mounts
from trainkit.launch.hosts.hostfile import OVER_SSH
from trainkit.launch.hosts.selection import HostList, hosts_path, read_hosts
from trainkit.launch.launchers import LAUNCHERS
from trainkit.launch.run_inputs import refuse_other_inputs
from trainkit.launch.slurm.job_graph import ready_name
from trainkit.launch.slurm.reconcile import settled
from trainkit.launch.slurm.submit_run import submit_again, submit_new, submit_with_stages
from trainkit.launch.start import RunObserver, resume_run, start_run
from trainkit.launch.supervise.outcome import Outcome
from trainkit.launch.supervise.rank_environment import secret_values
from trainkit.plan.planner import Plan, make_plan
from trainkit.runs.checkpoints import newest_valid, open_checkpoint
from trainkit.runs.event_tail import EventTail
from trainkit.runs.find import find_run
from trainkit.runs.folder import RunFolder
from trainkit.runs.record import RunRecord, read_run_record
from trainkit.stages.execute import needs_in_turn, needs_of, refuse_stale, stamps_folder
from trainkit.stages.index import IndexStage


def _refuse_without_wandb(job: Job) -> None:
    """Raise ConfigError where the job asks for Weights & Biases and its ranks could not have it;
    before there is a run."""
    if job.wandb is None:
        return
    from trainkit.train.metrics.wandb import wandb_problems

    problems = wandb_problems(
        job, {**job.environment, **secret_values(job.cluster.secrets, os.environ)}
    )
    # ./inv can mend that by itself
    if len(problems) == 1 and importlib.util.find_spec("wandb") is None:
        raise MissingExtra(problems[0].message, "wandb", otherwise="or leave out wandb")
    if problems:
        raise ConfigError(problems)


def _print_plan(task: TaskContext, plan: Plan, job: Job) -> None:
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


def _say_start(
    task: TaskContext, run: RunFolder, job: Job, attempt: int, hosts: HostList, *, background: bool
) -> tuple[Command, list[list[str]]]:
    """Say what an attempt would start where. Returns the ranks' command, and the launcher's
    command lines. Nothing is written."""
    command = ENGINES[job.engine].command(job, run, attempt)
    session = session_to_show(job, run, attempt, hosts.running)
    lines = [
        list(words) for words in LAUNCHERS[job.cluster.launcher].commands(session, hosts.running)
    ]
    if background:
        task.say("would start a supervisor in a session of its own, which outlives this terminal")
    for words in lines:
        task.say(f"would run: {shlex.join(words)}")
    say_scripts(task, session)
    ranks = job.ranks_per_node
    for node, host in enumerate(hosts.running):
        task.say(
            f"would start on {host.name}: {_span(node * ranks, ranks)}, each"
            f" {shlex.join(command.argv)}"
        )
    for name, value in command.env.items():
        task.say(f"  with {name}={value}")
    for name in command.secret_names:
        task.say(f"  with {name} from the environment")
    return command, lines


def _dry_run(
    task: TaskContext, job: Job, plan: Plan, hosts: HostList, *, background: bool
) -> TaskResult:
    """Say what would be started where."""
    run = RunFolder(Path(job.cluster.root or ".") / "runs" / job.name / "RUN")
    ranks = job.ranks_per_node
    command, lines = _say_start(task, run, job, 1, hosts, background=background)
    listed = [
        {
            "host": host.name,
            "ranks": list(range(node * ranks, (node + 1) * ranks)),
            "slots": list(host.slots),
        }
        for node, host in enumerate(hosts.running)
    ]
    told = {"hosts": listed, "spares": [host.name for host in hosts.spares], "launcher": lines}
    return TaskResult(document("dry-run/1", plan=plan.to_json(), command=command.to_json(), **told))


def _span(first: int, count: int) -> str:
    if count == 1:
        return f"rank {first}"
    return f"ranks {first} to {first + count - 1}"


@dataclass(frozen=True)
class Following:
    """--detach and --foreground: who keeps the run alive, and who follows it."""

    detach: bool = False
    foreground: bool = False

    def background(self, job: Job) -> bool:
        """Whether the supervisor is a process of its own, which no terminal ends. Raises
        ConfigError where both words are given."""
        if self.detach and self.foreground:
            raise ConfigError("--detach and --foreground contradict each other")
        return self.detach or (job.cluster.launcher in OVER_SSH and not self.foreground)


USUAL = Following()


def train(
    task: TaskContext,
    name: str,
    sets: Sequence[str],
    *,
    stages: bool,
    share: bool,
    words: HostOptions = NO_HOST_OPTIONS,
    following: Following = USUAL,
) -> TaskResult:
    """The task `train`."""
    jobs = load_jobs(task)
    # before its hosts are looked for
    refuse_unlaunchable(jobs.resolve(name, [*words.sets(), *sets]).job)
    resolved, hosts = resolve_on_hosts(jobs, name, sets, words)
    job = resolved.job
    check_mounts(job)
    background = following.background(job)
    plan = refuse_infeasible(make_plan(job, rules=RULES[job.engine]))
    secret_values(job.cluster.secrets, os.environ)
    _refuse_without_wandb(job)
    _print_plan(task, plan, job)
    say_hosts(task, job, hosts)
    say_unused_places(task, job)
    root = Path(job.cluster.root or ".")
    # of all, before the first begins: what is hopeless is said at once
    needs = needs_of(job, STAGES)
    on_slurm = job.cluster.launcher == "slurm" and not words.existing
    if not stages:
        refuse_stale(needs, root)
    elif on_slurm and task.dry_run:
        if (graph := dry_graph(task, job)).parts:
            return slurm.dry_run(task, job, plan, root, after=ready_name(job))
    elif on_slurm:
        with graph_of(task, job) as graph:
            if graph.parts:
                run, id, followed = submit_with_stages(resolved, plan, graph, jobs.root, task.say)
        if graph.parts:
            slurm.say_submitted(task, run, id, detach=following.detach)
            if following.detach:
                return TaskResult(read_run_record(run).to_json())
            return follow_graph(task, run, followed)
    else:
        bring_up_to_date(task, needs if task.dry_run else needs_in_turn(job, STAGES), root, job=job)
    plan = refuse_infeasible(plan_of(job))
    if task.dry_run:
        if on_slurm:
            return slurm.dry_run(task, job, plan, root)
        return _dry_run(task, job, plan, hosts, background=background)
    refuse_without_samples(job)
    needs = needs_of(job, STAGES)  # as they are now that they are done
    if on_slurm:
        run, id = submit_new(resolved, plan, needs, jobs.root)
        return _follow_submitted(task, run, id, EventTail(run), following)
    view = TrainingView(task.console, job.training.train_iters)
    try:
        watch = RunObserver(view.begin, view.tick, view.notice)
        run, outcome = start_run(
            resolved, plan, needs, jobs.root, watch, hosts=hosts, share=share, background=background
        )
    finally:
        view.end()
    return _finish(task, run, job, outcome, EventTail(run), following)


def _beginning(task: TaskContext, run: RunFolder) -> str:
    """What a resumed run would begin with, by manifests and sizes. Raises TrainkitError (exit
    16) where there are checkpoints and none is right."""
    newest = newest_valid(
        run.checkpoints, lambda words: task.say(f"would be passed over: {words}"), open_checkpoint
    )
    if newest:
        return f"the checkpoint of step {newest.manifest.step}"
    return "step 0: it has no checkpoint"


def _say_lasting_longer(task: TaskContext, job: Job) -> None:
    """The end of the decay does not move with train_iters: steps after it may do little, with
    min_lr = 0 nothing."""
    t = job.training
    if t.train_iters > t.decay_iters and t.lr_decay_style != "constant":
        way = f"--set training.lr_decay_iters={t.train_iters} would make the decay longer"
        task.say(f"after step {t.decay_iters} the learning rate is min_lr = {t.min_lr:g}; {way}")


def resume(
    task: TaskContext,
    text: str,
    sets: Sequence[str],
    *,
    share: bool,
    words: HostOptions = NO_HOST_OPTIONS,
    following: Following = USUAL,
    code: str = "run",
) -> TaskResult:
    """The task `resume`."""
    if code not in ("run", "current"):
        raise ConfigError(
            f"--code {code!r} is neither run (the code that the run began with) nor current (that"
            " of this checkout)"
        )
    jobs = load_jobs(task)
    run = find_run(jobs.roots(), text)
    record = settled(read_run_record(run))
    changed, job, hosts = _changed(jobs, run, sets, words)
    background = following.background(job)
    _refuse_running(record)
    refuse_other_inputs(run)
    root = Path(job.cluster.root or ".")
    refuse_infeasible(plan_of(job))
    if record.state == "succeeded" and record.step >= job.training.train_iters:
        task.say(
            f"run {run.id} has finished: step {record.step} of {job.training.train_iters}; there is"
            " nothing to resume"
        )
        return TaskResult(record.to_json())
    _refuse_without_wandb(job)
    _say_lasting_longer(task, job)
    say_hosts(task, job, hosts)
    if task.dry_run:
        task.say(
            f"would go on with run {run.id} in {run.path}, attempt {record.attempt + 1}, from"
            f" {_beginning(task, run)}"
        )
        _say_start(task, run, job, record.attempt + 1, hosts, background=background)
        return TaskResult(record.to_json())
    bring_up_to_date(
        task, IndexStage().needs(job, stamps_folder(root, IndexStage.name)), root, job=job
    )
    refuse_without_samples(job)
    task.say(
        f"run {run.id} ({record.state}) is at step {record.step}; going on as attempt"
        f" {record.attempt + 1}"
    )
    if job.cluster.launcher == "slurm" and not words.existing:
        events = EventTail(run, skip_existing=True)
        id = submit_again(run, job, changed, code=code == "current", project=jobs.root)
        return _follow_submitted(task, run, id, events, following)
    view = TrainingView(task.console, job.training.train_iters)
    events = EventTail(run, skip_existing=True)
    try:
        watch = RunObserver(view.begin, view.tick, view.notice)
        outcome = resume_run(
            run,
            job,
            changed,
            watch,
            hosts=hosts,
            share=share,
            background=background,
            code=code == "current",
            project=jobs.root,
        )
    finally:
        view.end()
    return _finish(task, run, job, outcome, events, following)


def _changed(
    jobs: Jobs, run: RunFolder, sets: Sequence[str], words: HostOptions
) -> tuple[dict[str, Any], Job, HostList]:
    """(document, job, hosts) that a run goes on with: where no others are asked for, those it
    had."""
    if words.cluster:
        moved = jobs.resolve(run.job_name, [f"cluster={json.dumps(words.cluster)}"])
    else:
        moved = None
    given = [*replace(words, cluster="").sets(), *sets]
    _, job = changed_job(run.job, given, moved)
    refuse_unlaunchable(job)
    check_mounts(job)
    if hosts_path(run).is_file() and moved is None:
        former = read_hosts(run)
    else:
        former = None
    hosts = hosts_of_job(job, words, former)
    changed, job = changed_job(run.job, [*given, *sets_of_hosts(job, hosts, sets)], moved)
    return changed, job, hosts


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
        raise TrainkitError(f"run {run.id} waits in Slurm's queue", exit=Exit.HOSTS_BUSY, hint=hint)
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


def _follow_submitted(
    task: TaskContext, run: RunFolder, id: str, events: EventTail, following: Following
) -> TaskResult:
    """Follow a run of Slurm's from the queue to its end, unless nobody wants to."""
    slurm.say_submitted(task, run, id, detach=following.detach)
    if following.detach:
        return TaskResult(read_run_record(run).to_json())
    return follow_run(task, run, events)


def _finish(
    task: TaskContext,
    run: RunFolder,
    job: Job,
    outcome: Outcome | None,
    events: EventTail,
    following: Following,
) -> TaskResult:
    """How it ended. Without an outcome a supervisor of its own goes on with the run: follow it,
    unless nobody wants to."""
    if outcome is None and following.detach and started(run, events):
        task.say(f"run {run.id} goes on by itself in {run.path}")
        task.say(
            f"  {task.command} attach {run.id} follows it, {task.command} cancel {run.id} stops it"
        )
        return TaskResult(read_run_record(run).to_json())
    if outcome is None:
        return follow_run(task, run, events)
    record = read_run_record(run)
    # a terminal that is gone does not change how the run ended
    with contextlib.suppress(OSError, SystemExit):
        print_ending(task, run, job, record)
    return TaskResult(record.to_json(), outcome.exit)
