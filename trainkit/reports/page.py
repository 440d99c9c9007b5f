"""A run's report as one HTML file: no request to anywhere, nothing of the run executes in it.

Styles and script are part of the file, and the page's own policy (Content-Security-Policy, CSP3)
allows these two by their hashes and nothing else: no request, no frame, no form, no inline handler.

And as one picture, by matplotlib (the extra `report`).
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from trainkit.base.errors import ConfigError
from trainkit.base.extras import MissingExtra
from trainkit.base.files import atomic_open
from trainkit.base.printable import printable
from trainkit.reports.chart import Chart, Series, text, thinned
from trainkit.reports.curves import charts_of
from trainkit.reports.faults import HEADINGS, faults_in_words
from trainkit.reports.heat_map import expert_maps, rank_map
from trainkit.reports.ledger import WORDS, Bin, Ledger, ledger_section
from trainkit.reports.mixture import HEADINGS as PHASE_HEADINGS
from trainkit.reports.read import RunReport
from trainkit.reports.words import duration, moment, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes


SERIES_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")  # Okabe and Ito, 2008
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
                [math.nan if y is None else y for _, y in points],
                color=SERIES_COLOURS[series.colour % len(SERIES_COLOURS)],
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


FOLDER = Path(__file__).parent
MOST_CHARACTERS = 400  # of a value in a table
LONGEST_WORD = 20  # characters that stand on one line however narrow the page is


def page(title: str, body: Iterable[str], *, again: int = 0) -> str:
    """A whole page.

    Args:
        title: in words; any text.
        body: markup.
        again: seconds after which a browser asks for it again; 0: never.
    """
    style = (FOLDER / "page.css").read_text()
    code = (FOLDER / "page.js").read_text()
    refresh = f'<meta http-equiv="refresh" content="{again}">' if again else ""
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(code)}; base-uri 'none';"
        " form-action 'none'"
    )
    return "".join(
        (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="referrer" content="no-referrer">',
            refresh,
            f"<title>{text(title)}</title><style>{style}</style></head><body>",
            *body,
            f"<script>{code}</script></body></html>\n",
        )
    )


def _hash(content: str) -> str:
    digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def report_page(report: RunReport) -> str:
    """The page of one run."""
    run = report.run
    return page(f"{run.job_name}, run {run.id}", _sections(report))


def _sections(report: RunReport) -> Iterator[str]:
    run = report.run
    record = report.record
    yield f"<h1>{text(run.job_name)}</h1>"
    yield (
        f'<p class="soft">run {text(run.id)} · {text(record.state)} · step {record.step} ·'
        f" attempt {record.attempt}</p>"
    )
    if record.root_cause and record.root_cause.get("message"):
        yield f"<p>{text(record.root_cause['message'])}</p>"
    yield _cards(report)
    yield from ledger_section(report.ledger)
    yield from _faults(report)
    yield '<h2>Training</h2><p class="soft hint">Drag to zoom, double-click for all.</p>'
    yield '<div class="grid">'
    yield from (chart.to_html() for chart in charts_of(report))
    yield "</div>"
    yield from rank_map(report.rank_times)
    yield from expert_maps(report.expert_loads)
    yield from _phases(report)
    yield from _plan(report)
    yield from _attempts(report)
    yield from _checkpoints(report)
    yield from _evaluations(report)
    yield from _samples(report)
    yield from _lists(report)
    if report.notes:
        yield "<h2>Notes</h2>"
        yield from (f"<p>{text(note)}</p>" for note in report.notes)


def _cards(report: RunReport) -> str:
    summary = report.summary
    training = summary.training_loss()
    validation = summary.validation_loss()
    mfu = summary.median("mfu")
    goodput = report.ledger.goodput
    rows = report.rows.rows
    validation_rows = [row for row in rows if row.get("eval") == "valid"]
    if validation is None and validation_rows:
        losses = [row["lm_loss"] for row in validation_rows if row["lm_loss"] is not None]
        validation = (losses[0], losses[-1]) if losses else None
    cards = {
        "training loss": training and f"{training[1]:.4f}",
        "validation loss": validation and f"{validation[1]:.4f}",
        "tokens per second": short(summary.tokens_per_second),
        "MFU": f"{100 * mfu:.1f} %" if mfu is not None else "n/a",
        "goodput": f"{100 * goodput:.1f} %" if goodput is not None else "n/a",
        "wall clock": duration(report.ledger.wall_seconds),
    }
    note = f"of {summary.peak}" if summary.peak else "no peak is known"
    return '<div class="cards">{}</div>'.format(
        "".join(
            f'<div class="card"><span class="soft">{text(name)}</span><b>{text(value or "n/a")}</b>'
            + (f'<span class="soft">{text(note)}</span>' if name == "MFU" else "")
            + "</div>"
            for name, value in cards.items()
        )
    )


def table(headings: Sequence[str], rows: Iterable[Sequence[object]], right: int = 99) -> str:
    """A table.

    Args:
        headings: of its columns.
        rows: their cells; any text.
        right: columns from this one on hold numbers.
    """
    kinds = [' class="n"' if index >= right else "" for index in range(len(headings))]
    head = "".join(f"<th{k}>{text(h)}</th>" for k, h in zip(kinds, headings, strict=True))
    body = "".join(
        "<tr>"
        + "".join(f"<td{k}>{_cell(c)}</td>" for k, c in zip(kinds, row, strict=True))
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
        "</div>"
    )


def _cell(value: object) -> str:
    """A value as text of a cell: words stay whole where there is room, long ones may be broken."""
    words = re.findall(rf"\S{{1,{LONGEST_WORD}}}|\s+", clip(value))
    parts = [text(word) for word in words[:1]]
    for before, word in itertools.pairwise(words):
        parts.append(text(word) if before.isspace() or word.isspace() else f"<wbr>{text(word)}")
    return "".join(parts)


def clip(value: object) -> str:
    """A value as text that is not endless."""
    words = str(value)
    if len(words) > MOST_CHARACTERS:
        return f"{words[:MOST_CHARACTERS]}… ({len(words)} characters)"
    return words


def _faults(report: RunReport) -> Iterator[str]:
    if not report.faults:
        return
    yield "<h2>What faults cost</h2>"
    yield from (f"<p>{text(line)}</p>" for line in faults_in_words(report.faults))
    yield table(HEADINGS, (fault.cells for fault in report.faults), 2)


def _phases(report: RunReport) -> Iterator[str]:
    if report.phases:
        yield "<h2>What was read when</h2>"
        yield table(PHASE_HEADINGS, (phase.cells() for phase in report.phases), 3)


def _plan(report: RunReport) -> Iterator[str]:
    rows = []
    for each in report.planned_and_measured():
        error = f"{100 * each.error:+.1f} %" if each.error is not None else "n/a"
        rows.append(
            (each.what, short(each.planned, each.unit), short(each.measured, each.unit), error)
        )
    yield "<h2>Plan beside measured</h2>"
    yield table(("", "planned", "measured", "planned over measured"), rows, 1)


def _attempts(report: RunReport) -> Iterator[str]:
    if not report.attempts:
        yield "<h2>Attempts</h2><p>It never began.</p>"
        return
    steps = dict(report.resumed_at)
    rows = [
        (
            each.attempt,
            steps.get(each.attempt, 0),
            moment(each.started or "?"),
            moment(each.ended or "not said"),
            each.failure_class or report.record.state,
            (each.root_cause or {}).get("message", ""),
        )
        for each in report.attempts
    ]
    yield "<h2>Attempts</h2>"
    yield table(("attempt", "from step", "began (UTC)", "ended (UTC)", "how", "why"), rows)


def _checkpoints(report: RunReport) -> Iterator[str]:
    yield "<h2>Checkpoints</h2>"
    if not report.checkpoints:
        yield "<p>None.</p>"
        return
    yield table(("step", "size"), [(c.step, short(c.bytes, "B")) for c in report.checkpoints], 1)


def _evaluations(report: RunReport) -> Iterator[str]:
    if not report.evaluations:
        return
    yield "<h2>Evaluations</h2>"
    rows = [
        (record.step, record.name, score.set, score.metric, score.in_words())
        for record in report.evaluations
        for score in record.scores
    ]
    yield table(("step", "evaluation", "of", "by", "score"), rows, 4)
    for each in report.evaluations:
        if each.error:
            yield f"<p>{text(f'{each.name} of step {each.step} failed: {clip(each.error)}')}</p>"


def _samples(report: RunReport) -> Iterator[str]:
    """Text as it is written, line by line; nothing where nobody asked for any."""
    if not report.samples:
        return
    yield "<h2>Text at checkpoints</h2>"
    for sample in report.samples:
        words = escape(printable(sample.text[: 10 * MOST_CHARACTERS]), quote=True)
        prompt = text(clip(sample.prompt) or "the beginning of a document")
        yield f'<p class="soft">step {sample.step}, after: {prompt}</p><pre>{words}</pre>'


def _lists(report: RunReport) -> Iterator[str]:
    events = [(moment(line.time), line.attempt, line.words) for line in report.events]
    yield f"<details><summary>Events ({len(events)})</summary>"
    yield table(("time (UTC)", "attempt", "what"), events) + "</details>"
    settings = [(each.key, each.value, each.place) for each in report.settings]
    yield f"<details><summary>Configuration ({len(settings)} values)</summary>"
    yield table(("key", "value", "written at"), settings) + "</details>"
    versions = [("commit", report.origin.get("git_commit") or "none")]
    for key in ("host", "platform", "python", "code_sha256"):
        versions.append((key, report.origin.get(key, "?")))
    packages = report.origin.get("packages")
    if isinstance(packages, dict):
        versions += packages.items()
    yield "<details><summary>Software</summary>"
    yield table(("what", "version"), versions) + "</details>"
