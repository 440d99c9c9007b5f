"""The page of a sweep: its table, the losses of all its runs, and what each key does to them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from trainkit.reports.chart import Chart, Series, text
from trainkit.reports.curves import points_of
from trainkit.reports.documents import as_number
from trainkit.reports.page import page, table
from trainkit.reports.sweep import KEYS, MemberResult, SweepResults
from trainkit.reports.words import short
from trainkit.runs.metrics import MetricsRow

LOSS = "Training loss (nats per token)"
MOST_CURVES = 40  # in one chart; of more runs those with the lowest losses


def headings(results: SweepResults) -> list[str]:
    """The columns of `member_row`."""
    return ["", *(key.rpartition(".")[2] for key in results.keys), "run", "state", "step", *WORDS]


WORDS = ("training loss", "validation loss", "tokens/s")


def member_row(results: SweepResults, member: MemberResult) -> list[str]:
    """A member in the table; "-" where nothing was logged."""
    return [
        str(member.number),
        *(str(member.values.get(key, "-")) for key in results.keys),
        member.run or "-",
        member.state,
        str(member.step),
        _number(member.training_loss, ".4f"),
        _number(member.validation_loss, ".4f"),
        _number(member.tokens_per_second, ",.0f"),
    ]


def _number(value: float | None, form: str) -> str:
    if value is None:
        return "-"
    return format(value, form)


def sweep_page(results: SweepResults, rows: Mapping[int, Sequence[MetricsRow]]) -> str:
    """The page.

    Args:
        results: of all members.
        rows: of the metrics of each member that has some, by its number.
    """
    return page(f"Sweep of {results.job}", _sections(results, rows))


def _sections(results: SweepResults, rows: Mapping[int, Sequence[MetricsRow]]) -> Iterator[str]:
    yield f"<h1>Sweep of {text(results.job)}</h1>"
    states = [member.state for member in results.members]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    yield f'<p class="soft">sweep {text(results.id)} · {len(states)} runs: {text(counts)}</p>'
    names = headings(results)
    cells = [member_row(results, member) for member in results.members]
    yield table(names, cells, len(results.keys) + 3)
    if len(results.points()) < len(results.members):
        yield from _points(results)
    yield '<h2>Losses</h2><p class="soft hint">Drag to zoom, double-click for all.</p>'
    yield '<div class="grid">'
    yield _curves(results, rows).to_html()
    yield from (chart.to_html() for chart in _by_key(results))
    yield "</div>"
    ended = [member for member in results.members if member.why]
    if ended:
        yield "<h2>Why runs ended</h2>"
        yield table(("", "run", "why"), [(m.number, m.run, m.why) for m in ended])


def _points(results: SweepResults) -> Iterator[str]:
    """Means over seeds."""
    keys = [key for key in results.keys if any(key in p.values for p in results.points())]
    lines = []
    for point in results.points():
        cells = [str(point.values.get(key, "-")) for key in keys]
        for key in KEYS:
            mean = short(point.mean[key])
            spread = point.deviation[key]
            cells.append(mean if spread is None else f"{mean} ± {short(spread)}")
        lines.append([*cells, len(point.members)])
    yield "<h2>Over seeds</h2>"
    yield table([*(key.rpartition(".")[2] for key in keys), *WORDS, "seeds"], lines, len(keys))


def _curves(results: SweepResults, rows: Mapping[int, Sequence[MetricsRow]]) -> Chart:
    def loss(member: MemberResult) -> float:
        return float("inf") if member.training_loss is None else member.training_loss

    shown = sorted((m for m in results.members if m.number in rows), key=loss)[:MOST_CURVES]
    series = []
    for colour, member in enumerate(sorted(shown, key=lambda member: member.number)):
        training = [row for row in rows[member.number] if "eval" not in row]
        points = points_of(training, "lm_loss", lambda row: float(row["consumed_samples"]))
        words = " ".join(
            f"{key.rpartition('.')[2]}={member.values.get(key)}" for key in results.keys
        )
        series.append(Series(f"{member.number}: {words}", points, colour))
    return Chart(LOSS, "samples", series)


def _by_key(results: SweepResults) -> Iterator[Chart]:
    """The last losses over each key that has numbers."""
    for key in results.keys:
        points: dict[str, list[tuple[float, float | None]]] = {"training": [], "validation": []}
        for member in results.members:
            x = as_number(member.values.get(key))
            if x is None or member.state != "succeeded":
                continue
            points["training"].append((x, member.training_loss))
            points["validation"].append((x, member.validation_loss))
        series = [
            Series(name, sorted(found, key=lambda point: point[0]), colour, dots=True)
            for colour, (name, found) in enumerate(points.items())
            if any(y is not None for _, y in found)
        ]
        if series:
            yield Chart(f"Last loss over {key}", key, series)
