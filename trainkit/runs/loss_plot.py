"""The loss curve of a run as a picture, by matplotlib (the extra `report`)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

from trainkit.base.errors import ConfigError
from trainkit.base.extras import MissingExtra
from trainkit.base.files import atomic_open
from trainkit.runs.folder import RunFolder
from trainkit.runs.metrics import MetricsRow
from trainkit.runs.summary import summarize_run

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
