"""How the speed of a job grows with its nodes: a table and a picture.

The columns are those that Lambda's gpt-neox-training prints (nodes, batch, samples/s, TFLOPs):
docs/published-lambda-neox.md. Efficiency is samples a second of each device over those of the
fastest run on the fewest devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainkit.base.errors import ConfigError
from trainkit.base.extras import MissingExtra
from trainkit.base.files import atomic_open
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.runs.summary import FORMATS, RunResult


@dataclass(frozen=True)
class ScalingRow:
    """One run beside the smallest of its job.

    Args:
        run: its id.
        job: its job's name.
        nodes: nodes.
        ranks: devices.
        global_batch_size: samples of a step; None where its plan does not say.
        samples_per_second: of all devices.
        tflops: of each device, by trainkit's count or a convention; None where unknown.
        speedup: over the smallest run.
        efficiency: that over the number of times it has the smallest run's devices.
    """

    run: str
    job: str
    nodes: int
    ranks: int
    global_batch_size: int | None
    samples_per_second: float
    tflops: float | None
    speedup: float
    efficiency: float


def scaling_of(results: Sequence[RunResult], convention: str = "") -> list[ScalingRow]:
    """The runs that have a speed, job by job, fewest devices first.

    Args:
        results: any runs.
        convention: by which TFLOP/s are counted; "": trainkit's own.
    """
    jobs: dict[str, list[tuple[float, RunResult]]] = {}
    for result in results:
        if result.samples_per_second:
            jobs.setdefault(result.job, []).append((result.samples_per_second, result))
    rows = []
    for runs in jobs.values():
        runs.sort(key=lambda pair: (pair[1].ranks, -pair[0]))
        speed, smallest = runs[0]
        for samples, result in runs:
            speedup = samples / speed
            rows.append(
                ScalingRow(
                    result.run,
                    result.job,
                    result.nodes,
                    result.ranks,
                    result.global_batch_size,
                    samples,
                    result.convention_tflops if convention else result.model_tflops,
                    speedup,
                    speedup * smallest.ranks / result.ranks,
                )
            )
    return rows


def draw_scaling(rows: Sequence[ScalingRow], path: Path) -> None:
    """Draw samples a second over nodes, with what a perfect job would have, into `path`: of runs
    of one job on as many devices the fastest.

    Raises ConfigError (exit 3) for an ending other than .svg, .png or .pdf, without matplotlib,
    and without any run that has a speed.
    """
    if path.suffix not in FORMATS:
        raise ConfigError(f"{path} does not end in {', '.join(FORMATS)}")
    if not rows:
        raise ConfigError("no run has logged a speed yet", hint="train a job on 1, 2, 4 nodes")
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtra("drawing needs matplotlib, which is not installed", "report") from None
    with rc_context({"svg.hashsalt": "scaling", "svg.fonttype": "none", "font.size": 10}):
        figure = Figure(figsize=(6, 4), layout="constrained")
        axes = figure.subplots()
        shown = _fastest(rows)
        # nodes say it all unless a job has used more or fewer devices of as many
        by_nodes = len({(row.job, row.nodes) for row in shown}) == len(shown)
        for job in dict.fromkeys(row.job for row in shown):
            of_job = [row for row in shown if row.job == job]
            nodes = [row.nodes if by_nodes else row.ranks for row in of_job]
            drawn = axes.plot(nodes, [row.samples_per_second for row in of_job], "o-", label=job)
            first = of_job[0]
            ideal = [first.samples_per_second * row.ranks / first.ranks for row in of_job]
            axes.plot(nodes, ideal, "--", linewidth=1, color=drawn[0].get_color(), alpha=0.6)
            for at, row in list(zip(nodes, of_job, strict=True))[1:]:
                axes.annotate(
                    f"{row.efficiency:.0%}",
                    (at, row.samples_per_second),
                    textcoords="offset points",
                    xytext=(5, -12),
                )
        axes.set(
            xlabel="nodes" if by_nodes else "devices", ylabel="samples/s (dashed: a perfect job)"
        )
        axes.margins(x=0.1)
        axes.set_ylim(bottom=0)
        axes.set_xticks(sorted({row.nodes if by_nodes else row.ranks for row in shown}))
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        metadata = {"Date": None} if path.suffix == ".svg" else None
        with atomic_open(path) as file:
            figure.savefig(file, format=path.suffix[1:], metadata=metadata)


def _fastest(rows: Sequence[ScalingRow]) -> list[ScalingRow]:
    """Of runs of one job on as many devices the fastest, which comes first."""
    found: dict[tuple[str, int], ScalingRow] = {}
    for row in rows:
        found.setdefault((row.job, row.ranks), row)
    return list(found.values())
