"""A run in numbers, from its metrics; what it achieved, with the layout that it was achieved with;
and its loss curve as a picture, by matplotlib (the extra `report`)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from trainkit.base.documents import document, read_document
from trainkit.base.errors import ConfigError, TrainkitError
from trainkit.base.extras import MissingExtra
from trainkit.base.files import atomic_open
from trainkit.base.lazy_dataclasses import asdict, dataclass
from trainkit.jobs.resolved import read_job
from trainkit.plan.flop_conventions import CONVENTIONS, tflops_per_device
from trainkit.runs.folder import RunFolder
from trainkit.runs.metrics import MetricsRow, read_rows
from trainkit.runs.record import RunRecord, read_run_record


@dataclass(frozen=True)
class RunSummary:
    """Losses before and after, speed, and what lies where. None where nothing was logged yet.

    Args:
        run: the run.
        rows: of its metrics, all or those that were kept when they were thinned.
        training: of them, rows of training steps at even distances: medians are of these.
    """

    run: RunFolder
    rows: Sequence[MetricsRow]
    training: Sequence[MetricsRow]

    def evaluations(self, split: str = "valid") -> list[MetricsRow]:
        """Rows of evaluations on one split."""
        return [r for r in self.rows if r.get("eval") == split]

    @property
    def tokens_per_second(self) -> float | None:
        """Median over logged steps, all ranks together."""
        return self.median("tokens_per_second")

    def median(self, key: str) -> float | None:
        """Median over the logged steps that have a number there."""
        found = [r.get(key) for r in self.training]
        values = [float(value) for value in found if isinstance(value, int | float)]
        return statistics.median(values) if values else None

    @property
    def training_seconds(self) -> float:
        """Time of all steps up to the last row: each row has the mean of the steps since the row
        before."""
        before = [0, *(r["step"] for r in self.training)]
        milliseconds: float = sum(
            r["elapsed_ms"] * (r["step"] - last)
            for r, last in zip(self.training, before, strict=False)
        )
        return milliseconds / 1000

    @property
    def peak_bytes(self) -> int | None:
        """The most memory that rank 0 has held: what CUDA's allocator reserved, on the CPU the
        process; None where no row says it. Of thinned rows, the most of those that were kept."""
        kinds = [row.get("memory_bytes") or {} for row in self.rows]
        peaks = [kind.get("max_reserved", kind.get("max_resident")) for kind in kinds]
        return max((int(peak) for peak in peaks if peak is not None), default=None)

    @property
    def peak(self) -> str | None:
        """What MFU was measured against last."""
        return next((r["peak"] for r in reversed(self.training) if r.get("peak")), None)

    def training_loss(self) -> tuple[float, float] | None:
        """(first, last): the first logged step's, and the mean of the last tenth of them: single
        batches are noisy. Losses that are not finite (null in the metrics) do not count."""
        losses = [r["lm_loss"] for r in self.training if r["lm_loss"] is not None]
        if losses:
            return (losses[0], statistics.fmean(losses[-max(1, len(losses) // 10) :]))
        return None

    def validation_loss(self, name: str = "valid") -> tuple[float, float] | None:
        """(first, last) evaluation on a validation set, by default the valid split of the job's
        own dataset."""
        losses = [r["lm_loss"] for r in self.evaluations(name) if r["lm_loss"] is not None]
        return (losses[0], losses[-1]) if losses else None

    def further_validation_losses(self) -> dict[str, tuple[float, float]]:
        """(first, last) evaluation on every set that the job names in `validation`."""
        names = dict.fromkeys(r["eval"] for r in self.rows if r.get("eval", "valid") != "valid")
        return {name: losses for name in names if (losses := self.validation_loss(name))}

    @property
    def skipped_iterations(self) -> int:
        """Steps that left the weights as they were; rows that a rollback took back are not among
        them."""
        return sum(r.get("skipped_iterations", 0) for r in self.training)

    @property
    def nan_iterations(self) -> int:
        """Of the skipped ones, those with a loss or gradient norm that is not finite."""
        return sum(r.get("nan_iterations", 0) for r in self.training)

    def to_json(self) -> dict[str, object]:
        """The form report/1."""
        first_and_last = ("first", "last")
        training = self.training_loss()
        validation = self.validation_loss()
        return document(
            "report/1",
            **read_run_record(self.run).row(),
            training_loss=training and dict(zip(first_and_last, training, strict=True)),
            validation_loss=validation and dict(zip(first_and_last, validation, strict=True)),
            further_validation_losses={
                name: dict(zip(first_and_last, losses, strict=True))
                for name, losses in self.further_validation_losses().items()
            },
            tokens_per_second=self.tokens_per_second,
            model_tflops=self.median("model_tflops"),
            mfu=self.median("mfu"),
            hfu=self.median("hfu"),
            peak=self.peak,
            skipped_iterations=self.skipped_iterations,
            nan_iterations=self.nan_iterations,
            consumed_samples=self.training[-1]["consumed_samples"] if self.training else 0,
            seconds=self.training_seconds,
        )


def summarize_run(run: RunFolder) -> RunSummary:
    """Read a run's metrics."""
    rows = read_rows(run.metrics)
    return RunSummary(run, rows, [row for row in rows if "eval" not in row])


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
        data=job.data_parallel_size,
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


FORMATS = (".svg", ".png", ".pdf")


def _losses(rows: Iterable[MetricsRow]) -> list[float]:
    """A loss that is not finite is a gap."""
    return [math.nan if row["lm_loss"] is None else row["lm_loss"] for row in rows]


def draw_losses(run: RunFolder, path: Path) -> None:
    """Draw training and validation loss over consumed samples into `path` (.svg, .png or .pdf).

    Raises ConfigError (exit 3) for another ending, without matplotlib, and for a run that has
    logged nothing.
    """
    if path.suffix not in FORMATS:
        raise ConfigError(f"{path} does not end in {', '.join(FORMATS)}")
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtra("drawing needs matplotlib, which is not installed", "report") from None
    summary = summarize_run(run)
    if not summary.training:
        raise ConfigError(f"run {run.id} has logged no step yet")
    with rc_context({"svg.hashsalt": run.id, "svg.fonttype": "none", "font.size": 10}):
        figure = Figure(figsize=(7, 3.6), layout="constrained")
        axes = figure.subplots()
        axes.plot(
            [r["step"] for r in summary.training],
            _losses(summary.training),
            linewidth=1.2,
            label="training",
        )
        evaluations = summary.evaluations()
        if evaluations:
            axes.plot(
                [r["step"] for r in evaluations],
                _losses(evaluations),
                "o",
                label="validation",
            )
        axes.set(
            xlabel="step", ylabel="loss (nats per token)", title=f"{run.job_name}, run {run.id}"
        )
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        with atomic_open(path) as file:
            figure.savefig(
                file,
                format=path.suffix[1:],
                metadata={"Date": None} if path.suffix == ".svg" else None,
            )
