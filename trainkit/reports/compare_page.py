"""The page of a comparison: curves over tokens and over time, and tables of what differs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trainkit.reports.chart import Chart, Series, text
from trainkit.reports.compare import Comparison, Difference, numbers_of
from trainkit.reports.curves import CURVES, points_of, tokens_of, x_name
from trainkit.reports.ledger_picture import ledger_section
from trainkit.reports.page import page, table
from trainkit.reports.read import RunReport

LOSS = ("Loss (nats per token)", (("lm_loss", "training", 1.0),))


def comparison_page(comparison: Comparison) -> str:
    """The page."""
    ids = " and ".join(report.run.id for report in comparison.reports)
    return page(f"Comparison of {ids}", _sections(comparison))


def names_of(comparison: Comparison) -> list[str]:
    """What each run is called: its id, and its job where they are several."""
    reports = comparison.reports
    if len({report.run.job_name for report in reports}) > 1:
        return [f"{report.run.job_name} {report.run.id}" for report in reports]
    return [report.run.id for report in reports]


def _sections(comparison: Comparison) -> Iterator[str]:
    names = names_of(comparison)
    yield "<h1>Comparison</h1>"
    yield f'<p class="soft">{text(", ".join(names))}</p>'
    yield from (f"<p><b>{text(note)}</b></p>" for note in comparison.notes)
    rows = [(what, *values) for what, values in numbers_of(comparison.reports)]
    yield table(("", *names), rows)
    yield "<h2>Where the losses part</h2>"
    parts = [
        (
            each.run,
            each.common,
            "never" if each.bitwise is None else each.bitwise,
            "never" if each.beyond_noise is None else each.beyond_noise,
        )
        for each in comparison.losses
    ]
    heads = (f"beside {names[0]}", "common steps", "not bit-equal from step", "beyond noise from")
    yield table(heads, parts)
    yield "<h2>Over tokens</h2>" + '<div class="grid">'
    yield from (chart.to_html() for chart in _over_tokens(comparison.reports, names))
    yield "</div><h2>Over time</h2>" + '<div class="grid">'
    yield _over_time(comparison.reports, names).to_html() + "</div>"
    yield from _differences("Configuration", comparison.configuration, names)
    yield from _differences("Code and versions", comparison.software, names)
    for report, name in zip(comparison.reports, names, strict=True):
        yield f"<h2>{text(name)}</h2>"
        yield from ledger_section(report.ledger)


def _over_tokens(reports: Sequence[RunReport], names: Sequence[str]) -> Iterator[Chart]:
    for title, keys in (LOSS, *CURVES):
        key, _, factor = keys[0]
        series = []
        for colour, (report, name) in enumerate(zip(reports, names, strict=True)):
            training = [row for row in report.rows.rows if "eval" not in row]
            series.append(Series(name, points_of(training, key, tokens_of(report), factor), colour))
        yield Chart(title, x_name(reports[0]), series)


def _over_time(reports: Sequence[RunReport], names: Sequence[str]) -> Chart:
    """Loss over seconds of training: steps alone, as their rows say."""
    series = []
    for colour, (report, name) in enumerate(zip(reports, names, strict=True)):
        points: list[tuple[float, float | None]] = []
        seconds = 0.0
        before = 0
        for row in report.rows.rows:
            if "eval" in row or "elapsed_ms" not in row:
                continue
            seconds += (row["elapsed_ms"] or 0.0) * max(0, row["step"] - before) / 1000
            before = row["step"]
            points.append((seconds, row["lm_loss"]))
        series.append(Series(name, points, colour))
    return Chart(LOSS[0], "seconds of steps", series)


def _differences(title: str, found: Sequence[Difference], names: Sequence[str]) -> Iterator[str]:
    yield f"<h2>{text(title)}</h2>"
    if not found:
        yield "<p>The same.</p>"
        return
    yield table(("", *names), [(each.key, *each.values) for each in found])
