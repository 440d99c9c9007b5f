"""The page of a sweep: tables, all runs in one picture, their losses, and what each key does to
them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from trainkit.jobs.sweeps import SEED
from trainkit.reports.chart import Chart, Series, text
from trainkit.reports.curves import points_of
from trainkit.reports.documents import as_number
from trainkit.reports.page import page, table
from trainkit.reports.parallel import parallel_svg
from trainkit.reports.sweep import (
    OVER_SEEDS,
    Key,
    MemberResult,
    SweepResults,
    headings,
    loss_key,
    member_row,
    point_headings,
    point_rows,
    shared_keys,
)
from trainkit.runs.metrics import MetricsRow

LOSS = "Training loss (nats per token)"
MOST_CURVES = 40  # in one chart; of more runs those with the lowest losses


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
        yield f'<h2>Over seeds</h2><p class="soft">{OVER_SEEDS}</p>'
        yield table(point_headings(results), point_rows(results), len(shared_keys(results)))
    yield '<h2>All runs</h2><p class="soft">Faint: stopped at a rung. Dashed: failed.</p>'
    yield f'<div class="scroll">{parallel_svg(results)}</div>'
    yield '<h2>Losses</h2><p class="soft hint">Drag to zoom, double-click for all.</p>'
    yield '<div class="grid">'
    yield _curves(results, rows).to_html()
    yield from (chart.to_html() for chart in _by_key(results))
    yield "</div>"
    ended = [member for member in results.members if member.why]
    if ended:
        yield "<h2>Why runs ended</h2>"
        yield table(("", "run", "why"), [(m.number, m.run, m.why) for m in ended])


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
    """The last losses over each key that has numbers: a line for each choice of the other keys,
    means over seeds; dots where no two points share one. Over log2 of what spans a factor of 8."""
    kind = loss_key(results)
    title = kind.replace("_", " ")
    for key in results.keys:
        lines = _lines(results, key, kind)
        points = [point for line in lines.values() for point in line]
        if all(y is None for _, y in points):
            continue
        xs = [x for x, _ in points]
        log2 = min(xs) > 0 and max(xs) >= 8 * min(xs)
        scattered = len(lines) == len(points) > 1
        if scattered:
            lines = {title: points}
        series = [
            Series(
                words or title,
                [(math.log2(x) if log2 else x, y) for x, y in sorted(line, key=lambda p: p[0])],
                colour,
                dots=scattered,
            )
            for colour, (words, line) in enumerate(lines.items())
        ]
        yield Chart(f"Last {title} over {key}", f"log2 of {key}" if log2 else key, series)


def _lines(
    results: SweepResults, key: str, kind: Key
) -> dict[str, list[tuple[float, float | None]]]:
    """(number of `key`, loss) of all points, by the words of their other keys."""
    others = [name for name in results.keys if name not in (key, SEED)]
    lines: dict[str, list[tuple[float, float | None]]] = {}
    for point in results.points():
        x = as_number(point.values.get(key))
        if x is not None:
            words = " ".join(f"{n.rpartition('.')[2]}={point.values.get(n)}" for n in others)
            lines.setdefault(words, []).append((x, point.mean[kind]))
    return lines
