"""Runs beside each other: what differs in configuration, code and versions, and where their losses
part; and the page of it: curves over tokens and over time, and tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from trainkit.base.documents import document
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.reports.chart import Chart, Series, text
from trainkit.reports.curves import CURVES, points_of, tokens_of, x_name
from trainkit.reports.documents import as_table
from trainkit.reports.ledger import ledger_section
from trainkit.reports.page import page, table
from trainkit.reports.read import RunReport
from trainkit.reports.words import duration, short
from trainkit.runs.evaluations import newest_scores
from trainkit.runs.metrics import MetricsRow

ABSENT = "(absent)"
NOISE = 4.0  # times the spread of the first run's own steps
WINDOW = 20  # rows over which that spread is taken
FEWEST = 4  # rows before a spread means anything


@dataclass(frozen=True)
class Difference:
    """A value that is not the same in all runs, as text; ABSENT where a run has none."""

    key: str
    values: Sequence[str]


@dataclass(frozen=True)
class LossesPart:
    """How the losses of a run part from the first one's.

    Args:
        run: its id.
        common: logged steps that both have.
        bitwise: the first step whose losses are not equal in every bit; None where none is.
        beyond_noise: the first step from which the difference exceeds NOISE times the spread of
            the first run's losses from row to row; None where it never does, or is not known.
    """

    run: str
    common: int
    bitwise: int | None
    beyond_noise: int | None


@dataclass(frozen=True)
class Comparison:
    """Runs, the first of which the others are compared with."""

    reports: Sequence[RunReport]
    configuration: Sequence[Difference]
    software: Sequence[Difference]
    losses: Sequence[LossesPart]
    notes: Sequence[str]

    def to_json(self) -> dict[str, object]:
        """The form comparison/1."""
        return document(
            "comparison/1",
            runs=[report.record.row() for report in self.reports],
            configuration=[vars(each) for each in self.configuration],
            software=[vars(each) for each in self.software],
            losses=[vars(each) for each in self.losses],
            ledgers=[report.ledger.to_json() for report in self.reports],
            notes=list(self.notes),
        )


def compare_runs(reports: Sequence[RunReport]) -> Comparison:
    """Compare runs with the first of them.

    Args:
        reports: two or more.
    """
    settings = [{each.key: str(each.value) for each in report.settings} for report in reports]
    versions = [_software(report) for report in reports]
    configuration = _differences(settings)
    notes = []
    if any(each.key.endswith("vocab_size") or "tokenizer" in each.key for each in configuration):
        notes.append(
            "vocabularies or tokenizers differ: nats per token of these runs cannot be compared"
        )
    if any(report.rows.thinned for report in reports):
        notes.append(
            "of a run with many rows only a part is compared: a step where losses part may be"
            " later than the first"
        )
    for report in reports:
        notes += [f"run {report.run.id}: {note}" for note in report.ledger.notes]
    losses = [_losses_part(reports[0], other) for other in reports[1:]]
    return Comparison(reports, configuration, _differences(versions), losses, notes)


def _differences(tables: Sequence[Mapping[str, str]]) -> list[Difference]:
    keys = dict.fromkeys(key for table in tables for key in table)
    found = [Difference(key, [table.get(key, ABSENT) for table in tables]) for key in keys]
    return [each for each in found if len(set(each.values)) > 1]


def _software(report: RunReport) -> dict[str, str]:
    origin = report.origin
    keys = ("git_commit", "code_sha256", "python", "platform", "host")
    packages = as_table(origin.get("packages"))
    own = {key: str(origin[key]) for key in keys if key in origin}
    return {**own, **{name: str(version) for name, version in packages.items()}}


def _losses(rows: Sequence[MetricsRow]) -> dict[int, float | None]:
    return {row["step"]: row["lm_loss"] for row in rows if "eval" not in row}


def _losses_part(first: RunReport, other: RunReport) -> LossesPart:
    mine = _losses(first.rows.rows)
    theirs = _losses(other.rows.rows)
    common = sorted(mine.keys() & theirs.keys())
    bitwise = next((step for step in common if mine[step] != theirs[step]), None)
    return LossesPart(other.run.id, len(common), bitwise, _beyond_noise(common, mine, theirs))


def _beyond_noise(
    common: Sequence[int], mine: Mapping[int, float | None], theirs: Mapping[int, float | None]
) -> int | None:
    """The first step where the losses are further apart than steps of one run are."""
    changes: list[float] = []
    for before, step in pairwise(common):
        here = mine[step]
        there = theirs[step]
        last = mine[before]
        if here is None or there is None or last is None:
            if (here is None) != (there is None):
                return step
            continue
        changes.append(abs(here - last))
        recent = changes[-WINDOW:]
        if len(recent) >= FEWEST and abs(here - there) > NOISE * statistics.median(recent):
            return step
    return None


def numbers_of(reports: Sequence[RunReport]) -> Iterator[tuple[str, list[str]]]:
    """(what, a value a run) of what people compare first."""
    summaries = [report.summary for report in reports]
    trained = [summary.training_loss() for summary in summaries]
    validated = [summary.validation_loss() for summary in summaries]
    yield "state", [report.record.state for report in reports]
    yield "step", [str(report.record.step) for report in reports]
    yield "training loss", [f"{both[1]:.4f}" if both else "n/a" for both in trained]
    yield "validation loss", [f"{both[1]:.4f}" if both else "n/a" for both in validated]
    yield from _scores(reports)
    yield "tokens per second", [short(summary.tokens_per_second) for summary in summaries]
    yield "MFU", [short(summary.median("mfu")) for summary in summaries]
    yield "wall clock", [duration(report.ledger.wall_seconds) for report in reports]
    goodputs = [report.ledger.goodput for report in reports]
    yield "goodput", [f"{100 * part:.1f} %" if part is not None else "n/a" for part in goodputs]


def _scores(reports: Sequence[RunReport]) -> Iterator[tuple[str, list[str]]]:
    """The newest of every evaluation that a run has."""
    scores = [newest_scores(report.evaluations) for report in reports]
    for what in dict.fromkeys(name for each in scores for name in each):
        found = [each.get(what) for each in scores]
        yield what, [f"{one[1].in_words()} (step {one[0]})" if one else "n/a" for one in found]


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
    yield from _difference_table("Configuration", comparison.configuration, names)
    yield from _difference_table("Code and versions", comparison.software, names)
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


def _difference_table(
    title: str, found: Sequence[Difference], names: Sequence[str]
) -> Iterator[str]:
    yield f"<h2>{text(title)}</h2>"
    if not found:
        yield "<p>The same.</p>"
        return
    yield table(("", *names), [(each.key, *each.values) for each in found])
