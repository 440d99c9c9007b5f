"""The curves of a run over tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise

from trainkit.reports.chart import Chart, Series
from trainkit.reports.documents import as_number
from trainkit.reports.mixture import phase_begins
from trainkit.reports.read import RunReport
from trainkit.runs.metrics import MetricsRow

Points = list[tuple[float, float | None]]
X = Callable[[MetricsRow], float]
MOST_SETS = 4  # validation sets that have a colour


def points_of(rows: Iterable[MetricsRow], key: str, x: X, factor: float = 1.0) -> Points:
    """(x, y) of the rows that have the key; what is not finite is a gap.

    Args:
        rows: any.
        key: of the value.
        x: of a row.
        factor: by which the value is multiplied.
    """
    found: Points = []
    for row in rows:
        if key in row:
            value = as_number(row.get(key))
            found.append((x(row), None if value is None else value * factor))
    return [] if all(y is None for _, y in found) else found


def tokens_of(report: RunReport) -> X:
    """The x axis: tokens trained on by then."""
    length = report.tokens_per_sample
    return lambda row: float(row["consumed_samples"]) * length


def x_name(report: RunReport) -> str:
    """What `tokens_of` counts."""
    return "samples" if report.tokens_per_sample == 1 else "tokens"


def charts_of(report: RunReport) -> Iterator[Chart]:
    """Loss, gradient norm, learning rate, speed and utilization."""
    x = tokens_of(report)
    name = x_name(report)
    training = [row for row in report.rows.rows if "eval" not in row]
    marks = [
        (at, f"attempt {attempt} went on from step {step}")
        for attempt, step in report.resumed_at
        if (at := _tokens_at(report.rows.rows, step, x)) is not None
    ]
    reads = {phase.phase: phase.reads for phase in report.phases}
    marks += [
        (x(row), f"phase {row['phase']} began: {reads.get(row['phase'], '?')}")
        for row in phase_begins(training)
    ]
    yield Chart("Loss (nats per token)", name, list(_losses(report, training, x)), marks)
    for title, keys in CURVES:
        series = [
            Series(words, points_of(training, key, x, factor), colour)
            for colour, (key, words, factor) in enumerate(keys)
        ]
        yield Chart(title, name, series, marks)


CURVES = (
    ("Gradient norm", (("grad_norm", "gradient norm", 1.0),)),
    ("Learning rate", (("learning_rate", "learning rate", 1.0),)),
    ("Tokens per second", (("tokens_per_second", "tokens/s", 1.0),)),
    ("Utilization (% of the peak)", (("mfu", "MFU", 100.0), ("hfu", "HFU", 100.0))),
    ("Time of a step (ms)", (("elapsed_ms", "step", 1.0),)),
)


def _losses(report: RunReport, training: Sequence[MetricsRow], x: X) -> Iterator[Series]:
    yield Series("training", points_of(training, "lm_loss", x), 0)
    lost = [row for row in report.taken_back.rows if "eval" not in row]
    yield Series("lost with an attempt", _with_gaps(points_of(lost, "lm_loss", x)), 1, lost=True)
    names = dict.fromkeys(str(row["eval"]) for row in report.rows.rows if "eval" in row)
    for colour, name in enumerate(list(names)[:MOST_SETS], 2):
        rows = [row for row in report.rows.rows if row.get("eval") == name]
        words = "validation" if name == "valid" else f"validation on {name}"
        yield Series(words, points_of(rows, "lm_loss", x), colour, dots=True)


def _with_gaps(points: Points) -> Points:
    """Rows of several attempts, one after the other: a gap where x goes back."""
    found = points[:1]
    for one, other in pairwise(points):
        if other[0] <= one[0]:
            found.append((other[0], None))
        found.append(other)
    return found


def _tokens_at(rows: Iterable[MetricsRow], step: int, x: X) -> float | None:
    return next((x(row) for row in rows if row["step"] >= step), None)
