"""Finished runs as points of a scaling law: N, D, FLOPs, loss; and what cannot be one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from trainkit.base.documents import read_document
from trainkit.base.errors import ConfigError, Problem, raise_problems
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.base.records import Record
from trainkit.jobs.resolved import read_job
from trainkit.jobs.schema import Job
from trainkit.launch.scheduler_registry import current_all
from trainkit.plan.arithmetic import active_parameters_of
from trainkit.runs.folder import RunFolder
from trainkit.runs.record import RunRecord, read_run_record
from trainkit.runs.summary import RunSummary, summarize_run

RISE = 1.1  # an end so many times above the least validation loss has diverged


@dataclass(frozen=True)
class ScalingPoint(Record):
    """One run.

    Args:
        run: its id.
        parameters: N: those that a token is multiplied with: of experts the chosen ones, and the
            head, but no embedding of the input besides it.
        tokens: D: consumed.
        flops: of the model's products, as the plan counts them; about 6 N D.
        loss: at the end, nats per token.
    """

    run: str
    parameters: int
    tokens: int
    flops: float
    loss: float


def counted_parameters(job: Job, vocab_size: int) -> int:
    """N of a job: see ScalingPoint."""
    return active_parameters_of(job.model, vocab_size, embedding=False)


def setting_of(job: Job) -> dict[str, str]:
    """What runs must share for their losses to be compared."""
    dataset = job.dataset
    return {
        "dataset": dataset.name,
        "split": dataset.split,
        "tokenizer": dataset.tokenizer.name if dataset.tokenizer else "none",
        "vocab_size": str(job.model.vocab_size or (dataset.tokenizer or job.model).vocab_size),
        "seq_length": str(job.model.seq_length),
        # of the learning rate's decay: one that a sweep has stopped early has not done it
        "trained_part": f"{job.training.train_iters / job.training.decay_iters:.1f}",
    }


@dataclass(frozen=True)
class MeasuredRuns:
    """Runs that can be compared.

    Args:
        points: one a run.
        loss: which loss they have: validation_loss, or training_loss where a run has no other.
        setting: what they share.
    """

    points: Sequence[ScalingPoint]
    loss: str
    setting: Mapping[str, str]


def read_points(runs: Sequence[RunFolder]) -> MeasuredRuns:
    """Read runs.

    Raises ConfigError (exit 3), naming each run: that has not succeeded, has diverged, or is of
    other data, tokens or length than the first.
    """
    records = current_all([read_run_record(run) for run in runs])
    summaries = [summarize_run(run) for run in runs]
    jobs = [read_job(run.job) for run in runs]
    raise_problems(
        problem
        for record, summary in zip(records, summaries, strict=True)
        for problem in _unfit(record, summary)
    )
    settings = [setting_of(job) for job in jobs]
    raise_problems(
        Problem(
            f"run {run.id} has {key} {setting[key]}, run {runs[0].id} {value}: their losses cannot"
            " be compared"
        )
        for run, setting in zip(runs, settings, strict=True)
        for key, value in settings[0].items()
        if setting[key] != value
    )
    validated = all(summary.validation_loss() for summary in summaries)
    points = [
        _point(job, summary, validated=validated)
        for job, summary in zip(jobs, summaries, strict=True)
    ]
    return MeasuredRuns(points, "validation_loss" if validated else "training_loss", settings[0])


def _unfit(record: RunRecord, summary: RunSummary) -> Iterator[Problem]:
    """Why a run cannot be a point."""
    run = record.run.id
    if record.state != "succeeded":
        yield Problem(f"run {run} has not ended well: {record.state} at step {record.step}")
        return
    evaluated = [row["lm_loss"] for row in summary.evaluations()]
    known = [loss for loss in evaluated if loss is not None]
    training = summary.training_loss()
    if training is None or (evaluated and evaluated[-1] is None):
        yield Problem(f"run {run} has no loss at its end")
    elif known and known[-1] > RISE * min(known):
        yield Problem(f"run {run} has diverged: loss {known[-1]:.4g} after {min(known):.4g}")
    elif not training[1] < training[0] or not math.isfinite(training[1]):
        yield Problem(f"run {run} has diverged: loss {training[1]:.4g} after {training[0]:.4g}")


def _point(job: Job, summary: RunSummary, *, validated: bool) -> ScalingPoint:
    plan = read_document(summary.run.plan, "plan/1")
    found = summary.validation_loss() if validated else summary.training_loss()
    vocab = plan["vocab_size"]
    if found is None or vocab is None:
        raise ConfigError(f"run {summary.run.id}: its plan does not know its size")
    tokens = int(summary.training[-1]["consumed_samples"]) * job.model.seq_length
    parameters = counted_parameters(job, vocab)
    return ScalingPoint(
        summary.run.id, parameters, tokens, float(plan["model_flops_per_token"]) * tokens, found[1]
    )
