"""What a run achieved, with the layout that it was achieved with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from trainkit.base.documents import read_document
from trainkit.base.errors import ConfigError, TrainkitError
from trainkit.jobs.resolved import read_job
from trainkit.plan.flop_conventions import CONVENTIONS, tflops_per_device
from trainkit.runs.folder import RunFolder
from trainkit.runs.record import RunRecord
from trainkit.runs.summary import RunSummary, summarize_run


@dataclass(frozen=True)
class RunResult:
    """One run: an entry of the document results/1. Medians over the logged steps; None where
    nothing was logged."""

    run: str
    job: str
    state: str
    nodes: int
    ranks: int
    device: str
    tensor: int
    pipeline: int
    data: int
    zero_stage: int
    micro_batch_size: int
    global_batch_size: int | None
    seconds_per_step: float | None
    tokens_per_second: float | None
    samples_per_second: float | None
    planned_tokens_per_second: float | None
    model_tflops: float | None
    mfu: float | None
    peak_bytes: int | None
    convention_tflops: float | None

    def to_json(self, convention: str) -> dict[str, object]:
        """The entry; TFLOP/s by convention only where one was asked for."""
        row = asdict(self)
        if not convention:
            del row["convention_tflops"]
        return row


def refuse_unknown_convention(convention: str) -> None:
    """Raise ConfigError for an unknown FLOPs convention; "" stands for none."""
    if convention and convention not in CONVENTIONS:
        raise ConfigError(
            f"there is no FLOPs convention '{convention}'", hint=f"one of {', '.join(CONVENTIONS)}"
        )


def convention_tflops(summary: RunSummary, convention: str) -> float | None:
    """TFLOP/s per device by a convention of others; None where the run has no speed yet, or ""
    was asked for."""
    if not convention:
        return None
    job = read_job(summary.run.job)
    vocab = read_document(summary.run.plan, "plan/1").get("padded_vocab_size")
    if summary.tokens_per_second is None or vocab is None:
        return None
    samples_per_second = summary.tokens_per_second / job.model.seq_length
    return tflops_per_device(convention, job.model, vocab, samples_per_second, job.world_size)


def planned_speed(run: RunFolder) -> float | None:
    """Tokens a second as the run's own plan had it; None where no speed was known, or the plan
    is of another version."""
    try:
        duration = read_document(run.plan, "plan/1").get("duration")
    except ConfigError:
        return None
    if duration is None:
        return None
    return float(duration["speed"]["tokens_per_second"])


def result_of_run(record: RunRecord, convention: str = "") -> RunResult:
    """One run's result.

    Args:
        record: the run.
        convention: how TFLOP/s are also counted; "" for not.

    Raises:
        TrainkitError: its files are of another version.
        OSError: they cannot be read.
    """
    run = record.run
    job = read_job(run.job)
    summary = summarize_run(run)
    milliseconds = summary.median("elapsed_ms")
    layout = job.parallelism
    speed = summary.tokens_per_second
    tensor = layout.tensor_model_parallel_size
    pipeline = layout.pipeline_model_parallel_size
    return RunResult(
        run=run.id,
        job=run.job_name,
        state=record.state,
        nodes=job.nodes,
        ranks=job.world_size,
        device=job.cluster.device.label or job.cluster.device.name,
        tensor=tensor,
        pipeline=pipeline,
        data=job.world_size // (tensor * pipeline),
        zero_stage=layout.zero_stage,
        micro_batch_size=job.training.micro_batch_size,
        global_batch_size=read_document(run.plan, "plan/1").get("global_batch_size"),
        seconds_per_step=None if milliseconds is None else milliseconds / 1000,
        tokens_per_second=speed,
        samples_per_second=None if speed is None else speed / job.model.seq_length,
        planned_tokens_per_second=planned_speed(run),
        model_tflops=summary.median("model_tflops"),
        mfu=summary.median("mfu"),
        peak_bytes=summary.peak_bytes,
        convention_tflops=convention_tflops(summary, convention),
    )


def results_of_runs(
    records: Sequence[RunRecord], convention: str, warn: Callable[[str], None]
) -> list[RunResult]:
    """Results of all runs that can be read.

    Args:
        records: the runs.
        convention: as for `result_of_run`.
        warn: called with a line about each run that cannot be read, such as one of another
            version.
    """
    results = []
    for record in records:
        try:
            results.append(result_of_run(record, convention))
        except (TrainkitError, OSError) as error:
            warn(f"run {record.run.id} is left out: {error}")
    return results
