"""A run's report as one picture, by matplotlib (the extra `report`)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from trainkit.base.errors import ConfigError
from trainkit.base.extras import MissingExtra
from trainkit.base.files import atomic_open
from trainkit.base.printable import printable
from trainkit.reports.chart import Chart, Series, thinned
from trainkit.reports.curves import charts_of
from trainkit.reports.ledger import WORDS, Bin, Ledger
from trainkit.reports.read import RunReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")  # Okabe and Ito, 2008
BIN_COLOURS: dict[Bin, str] = {  # as page.css
    "queue": "#999999",
    "start": "#e69f00",
    "compile": "#f0e442",
    "training": "#0072b2",
    "data": "#56b4e9",
    "checkpoint": "#009e73",
    "evaluation": "#cc79a7",
    "lost": "#d55e00",
    "idle": "#d4d4d4",
}


def draw_report(report: RunReport, path: Path) -> None:
    """Draw the curves and the ledger into a .png file.

    Raises ConfigError (exit 3) for another ending, and without matplotlib.
    """
    if path.suffix != ".png":
        raise ConfigError(f"{path} does not end in .png", hint="--html and --picture draw others")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtra("drawing needs matplotlib, which is not installed", "report") from None
    charts = [chart for chart in charts_of(report) if any(each.points for each in chart.series)]
    figure = Figure(figsize=(12, 2 + 3 * math.ceil(len(charts) / 2)), layout="constrained", dpi=110)
    title = printable(f"{report.run.job_name}, run {report.run.id}: {report.record.state}")
    figure.suptitle(title, parse_math=False)
    rows = math.ceil(len(charts) / 2)
    grid = figure.add_gridspec(rows + 1, 2, height_ratios=[0.6, *[2.0] * rows])
    _draw_ledger(figure.add_subplot(grid[0, :]), report.ledger)
    for number, chart in enumerate(charts):
        _draw_chart(figure.add_subplot(grid[1 + number // 2, number % 2]), chart)
    with atomic_open(path) as file:
        figure.savefig(file, format="png")


def _draw_ledger(axes: Axes, ledger: Ledger) -> None:
    left = 0.0
    for bin, colour in BIN_COLOURS.items():
        seconds = ledger.seconds[bin]
        if seconds:
            part = 100 * seconds / ledger.wall_seconds
            axes.barh(0, seconds, left=left, color=colour, label=f"{WORDS[bin]} {part:.1f} %")
            left += seconds
    axes.set(yticks=[], xlabel="seconds from submission to end")
    if left:
        axes.legend(frameon=False, ncols=5, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1))


def _numbers(values: Iterable[float | None]) -> list[float]:
    return [math.nan if value is None else value for value in values]


def _style(series: Series) -> str:
    if series.dots:
        return "none"
    if series.lost:
        return "--"
    return "-"


def _draw_chart(axes: Axes, chart: Chart) -> None:
    for series in chart.series:
        points = thinned(series.points)
        if points:
            axes.plot(
                [x for x, _ in points],
                _numbers(y for _, y in points),
                color=COLOURS[series.colour % len(COLOURS)],
                linestyle=_style(series),
                marker="o" if series.dots else None,
                linewidth=1.1,
                label=printable(series.name),
            )
    for at, _ in chart.marks:
        axes.axvline(at, color="#b04a00", linestyle=":", linewidth=1)
    axes.set(xlabel=chart.x_name, title=chart.title)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        legend = axes.legend(frameon=False, fontsize=8)
        for words in legend.get_texts():
            words.set_parse_math(False)
