"""`runs --table`: what runs achieved, side by side, in the columns that published results have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.markup import escape

from trainkit.base.documents import read_document
from trainkit.base.errors import ConfigError, TrainkitError
from trainkit.cli.tables import Listing
from trainkit.jobs.resolved import read_job
from trainkit.plan.flop_conventions import CONVENTIONS, tflops_per_device
from trainkit.runs.record import RunRecord
from trainkit.runs.summary import RunSummary, summarize_run

GIB = 2**30


def refuse_unknown_convention(convention: str) -> None:
    """Raise ConfigError for a FLOPs convention that is not known; "" is none."""
    if convention and convention not in CONVENTIONS:
        raise ConfigError(
            f"there is no FLOPs convention '{convention}'", hint=f"one of {', '.join(CONVENTIONS)}"
        )


def by_convention(summary: RunSummary, convention: str) -> float | None:
    """TFLOP/s of each device as others count them; None where the run has no speed yet."""
    run = summary.run
    job = read_job(run.job)
    vocab = read_document(run.plan, "plan/1").get("padded_vocab_size")
    if summary.tokens_per_second is None or vocab is None:
        return None
    return tflops_per_device(
        convention,
        job.model,
        vocab,
        summary.tokens_per_second / job.model.seq_length,
        job.world_size,
    )


def result_row(record: RunRecord, convention: str) -> dict[str, Any]:
    """One run's results, and the layout that they were had with."""
    run = record.run
    job = read_job(run.job)
    summary = summarize_run(run)
    milliseconds = summary.median("elapsed_ms")
    layout = job.parallelism
    tensor = layout.tensor_model_parallel_size
    pipeline = layout.pipeline_model_parallel_size
    row = {
        "run": run.id,
        "job": run.job_name,
        "state": record.state,
        "nodes": job.nodes,
        "ranks": job.world_size,
        "device": job.cluster.device.label or job.cluster.device.name,
        "tensor": tensor,
        "pipeline": pipeline,
        "data": job.world_size // (tensor * pipeline),
        "zero_stage": layout.zero_stage,
        "micro_batch_size": job.training.micro_batch_size,
        "global_batch_size": read_document(run.plan, "plan/1").get("global_batch_size"),
        "seconds_per_step": None if milliseconds is None else milliseconds / 1000,
        "tokens_per_second": summary.tokens_per_second,
        "model_tflops": summary.median("model_tflops"),
        "mfu": summary.median("mfu"),
        "peak_bytes": summary.peak_bytes,
    }
    if convention:
        return {**row, "convention_tflops": by_convention(summary, convention)}
    return row


def result_rows(
    records: Sequence[RunRecord], convention: str, warn: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Results of all runs that can be read; `warn` is told of the others (older forms)."""
    rows = []
    for record in records:
        try:
            rows.append(result_row(record, convention))
        except (TrainkitError, OSError) as error:
            warn(f"run {record.run.id} is left out: {error}")
    return rows


def results_table(rows: Sequence[dict[str, Any]], convention: str) -> Listing:
    """Medians over the logged steps; "-" where nothing was logged."""
    if convention:
        further = [f"TFLOP/s ({convention})"]
    else:
        further = []
    names = (
        "run",
        "job",
        "nodes",
        "ranks",
        "TP x PP x DP",
        "micro",
        "global",
        "s/step",
        "tokens/s",
        "TFLOP/s a device",
        *further,
        "MFU",
        "memory a rank",
    )
    table = Listing(
        *names,
        right=names[2:],
        drop=(
            "micro",
            "global",
            "nodes",
            "TP x PP x DP",
            "memory a rank",
            "s/step",
            *further,
            "job",
            "MFU",
            "ranks",
        ),
    )
    for row in rows:
        cells = [
            str(row["nodes"]),
            str(row["ranks"]),
            f"{row['tensor']} x {row['pipeline']} x {row['data']}",
            str(row["micro_batch_size"]),
        ]
        cells += [
            _shown(row["global_batch_size"], ","),
            _shown(row["seconds_per_step"], ".3g"),
            _shown(row["tokens_per_second"], ",.0f"),
        ]
        cells += [
            _shown(row["model_tflops"], ".4g"),
            *([_shown(row["convention_tflops"], ".4g")] if convention else []),
        ]
        cells += [
            _shown(row["mfu"], ".1%"),
            "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / GIB:,.2f} GiB",
        ]
        table.add_row(escape(row["run"]), escape(row["job"]), *cells)
    return table


def _shown(value: float | None, form: str) -> str:
    if value is None:
        return "-"
    return format(value, form)
