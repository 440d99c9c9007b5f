"""The tasks that run: train, resume."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from trainkit.base.errors import ConfigError, Exit, TrainkitError
from trainkit.base.forms import document
from trainkit.base.process import allow_open_files
from trainkit.cli.ending import print_ending
from trainkit.cli.jobs import load_jobs
from trainkit.cli.plan import plan_of
from trainkit.cli.prepare import STAGES, bring_up_to_date
from trainkit.cli.progress import TrainingView
from trainkit.cli.wrapper import Answer, Talk
from trainkit.data.mixture import open_mixture
from trainkit.engines import ENGINES, refuse_unlaunchable
from trainkit.engines.rules import RULES
from trainkit.jobs.change import changed_job
from trainkit.jobs.schema import Job
from trainkit.launch.outcome import Outcome
from trainkit.launch.start import Watch, refuse_other_inputs, resume_run, start_run
from trainkit.launch.world import secret_values
from trainkit.plan.make import Plan, make_plan
from trainkit.runs.folder import RunFolder
from trainkit.runs.record import find_run, read_record
from trainkit.stages.index import Index
from trainkit.stages.run import needs_in_turn, needs_of, refuse_stale, stamps_folder


def _refuse_infeasible(plan: Plan) -> Plan:
    """The plan itself. Raises TrainkitError (exit 4) with every objection."""
    if not plan.feasible:
        raise TrainkitError("; ".join(f"{o.key}: {o.message}" for o in plan.objections), exit=Exit.PLAN, hint=f"invoke plan {plan.job}")
    return plan


def _refuse_without_samples(job: Job) -> None:
    """Open what every rank will read, before any of them starts. Raises ConfigError as `open_mixture`."""
    allow_open_files()
    evaluated = {"valid": job.dataset, **job.validation} if job.training.eval_iters else {}
    open_mixture(job, job.dataset, "train", vocab=job.model.vocab_size or 1)
    for dataset in evaluated.values():
        open_mixture(job, dataset, "valid", vocab=job.model.vocab_size or 1)


def _refuse_without_wandb(job: Job) -> None:
    """Raise ConfigError where the job asks for Weights & Biases and its ranks could not have it; before there is a run."""
    if job.wandb is None:
        return
    from trainkit.train.wandb_log import wandb_problems

    if problems := wandb_problems(job, {**job.cluster.env, **job.env, **secret_values(job.cluster.secrets, os.environ)}):
        raise ConfigError(problems)


def _print_plan(talk: Talk, plan: Plan, job: Job) -> None:
    size = f"{plan.parameters / 1e6:,.2f} million parameters" if plan.parameters else "parameters known when the tokenizer is"
    batch = f"{plan.global_batch_size} x {job.model.seq_length} tokens ({plan.gradient_accumulation_steps} micro-batches of {job.training.micro_batch_size})"
    ranks = f"{plan.world_size} rank{'s' if plan.world_size > 1 else ''} on {job.cluster.device.name}"
    talk.console.print(f"[bold]{job.name}[/]: {size}, {ranks}, {job.training.train_iters} steps of {batch} = {plan.tokens / 1e6:,.2f} million tokens")


def _dry_run(talk: Talk, job: Job, plan: Plan) -> Answer:
    run = RunFolder(Path(job.cluster.root or ".") / "runs" / job.name / "RUN")
    command = ENGINES[job.engine].command(job, run, 1)
    for rank in range(job.world_size):
        talk.say(f"would start rank {rank}: {shlex.join(command.argv)}")
    for name, value in command.env.items():
        talk.say(f"  with {name}={value}")
    for name in command.secret_names:
        talk.say(f"  with {name} from the environment")
    return Answer(document("dry-run/1", plan=plan.to_json(), command=command.to_json()))


def train(talk: Talk, name: str, sets: Sequence[str], *, stages: bool, share: bool) -> Answer:
    """The task `train`."""
    jobs = load_jobs(talk)
    resolved = jobs.resolve(name, sets)
    job = resolved.job
    refuse_unlaunchable(job)
    plan = _refuse_infeasible(make_plan(job, rules=RULES[job.engine]))
    secret_values(job.cluster.secrets, os.environ)
    _refuse_without_wandb(job)
    _print_plan(talk, plan, job)
    root = Path(job.cluster.root or ".")
    needs = needs_of(job, STAGES)  # of all, before the first begins: what is hopeless is said at once
    if stages:
        bring_up_to_date(talk, needs if talk.dry_run else needs_in_turn(job, STAGES), root)
    else:
        refuse_stale(needs, root)
    plan = _refuse_infeasible(plan_of(job))
    if talk.dry_run:
        return _dry_run(talk, job, plan)
    _refuse_without_samples(job)
    needs = needs_of(job, STAGES)  # as they are now that they are done
    view = TrainingView(talk.console, job.training.train_iters)
    try:
        run, outcome = start_run(resolved, plan, needs, jobs.root, Watch(view.begin, view.tick, view.notice), share=share)
    finally:
        view.end()
    return _finish(talk, run, job, outcome)


def _say_lasting_longer(talk: Talk, job: Job) -> None:
    """The end of the decay does not move with train_iters: steps after it may do little, with min_lr = 0 nothing."""
    t = job.training
    if t.train_iters > t.decay_iters and t.lr_decay_style != "constant":
        way = f"--set training.lr_decay_iters={t.train_iters} would make the decay longer"
        talk.say(f"after step {t.decay_iters} the learning rate is min_lr = {t.min_lr:g}; {way}")


def resume(talk: Talk, words: str, sets: Sequence[str], *, share: bool) -> Answer:
    """The task `resume`."""
    run = find_run(load_jobs(talk).roots(), words)
    record = read_record(run)
    changed, job = changed_job(run.job, sets)
    if record.state == "running":
        raise TrainkitError(
            f"run {run.id} is still running (attempt {record.attempt}, step {record.step})", exit=Exit.HOSTS_BUSY, hint=f"invoke status {run.id}"
        )
    if record.state == "unknown":
        hint = "ask there; if that host is gone for good, delete the attempt's events.jsonl"
        raise TrainkitError(f"run {run.id} was started on another host, which cannot be asked from here", exit=Exit.CONTACT_LOST, hint=hint)
    refuse_other_inputs(run)
    root = Path(job.cluster.root or ".")
    _refuse_infeasible(plan_of(job))
    if record.state == "succeeded" and record.step >= job.training.train_iters:
        talk.say(f"run {run.id} has finished: step {record.step} of {job.training.train_iters}; there is nothing to resume")
        return Answer(record.to_json())
    _refuse_without_wandb(job)
    _say_lasting_longer(talk, job)
    if talk.dry_run:
        talk.say(f"would go on with run {run.id} in {run.path}, attempt {record.attempt + 1}, from its newest valid checkpoint")
        return Answer(record.to_json())
    bring_up_to_date(talk, Index().needs(job, stamps_folder(root, Index.name)), root)
    _refuse_without_samples(job)
    talk.say(f"run {run.id} ({record.state}) is at step {record.step}; going on as attempt {record.attempt + 1}")
    view = TrainingView(talk.console, job.training.train_iters)
    try:
        outcome = resume_run(run, job, changed, Watch(view.begin, view.tick, view.notice), share=share)
    finally:
        view.end()
    return _finish(talk, run, job, outcome)


def _finish(talk: Talk, run: RunFolder, job: Job, outcome: Outcome) -> Answer:
    record = read_record(run)
    with contextlib.suppress(OSError, SystemExit):  # a terminal that is gone does not change how the run ended
        print_ending(talk, run, job, record)
    return Answer(record.to_json(), outcome.exit)
