"""Ranks over time as a map of colours: who is slower than the others."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence

from trainkit.reports.chart import text
from trainkit.runs.rank_times import RankTimes

COLUMNS = 120
ROWS = 128
COLOURS = 8
LEAST, MOST = 0.9, 1.5  # times the median of the step: the two ends of the colours
STRAGGLERS = 8


def heat_map(times: Sequence[RankTimes]) -> Iterator[str]:
    """The section of a page; nothing for a run that has not noted its ranks' times."""
    sizes = [len(each.compute_ms) for each in times]
    if not sizes or max(sizes) < 2:
        return
    ranks = max(sizes)
    ratios = [_ratios(each) for each in times]
    yield "<h2>Ranks</h2>"
    yield (
        '<p class="soft">Forward and backward of each rank beside the median of its step: dark is'
        f" {LEAST:g} of it or less, bright {MOST:g} times or more. Ranks of a tensor-parallel"
        " group wait for each other within these.</p>"
    )
    yield from _picture(times, ratios, ranks)
    yield from _stragglers(ratios, ranks)


def _ratios(times: RankTimes) -> list[float]:
    finite = [ms for ms in times.compute_ms if math.isfinite(ms)]
    middle = statistics.median(finite) if finite else 0.0
    return [ms / middle if middle > 0 and math.isfinite(ms) else 1.0 for ms in times.compute_ms]


def _stretches(count: int, most: int) -> list[range]:
    size = max(1, math.ceil(count / most))
    return [range(begin, min(begin + size, count)) for begin in range(0, count, size)]


def _colour(ratio: float) -> int:
    part = (ratio - LEAST) / (MOST - LEAST)
    return min(COLOURS - 1, max(0, int(part * COLOURS)))


def _picture(
    times: Sequence[RankTimes], ratios: Sequence[Sequence[float]], ranks: int
) -> Iterator[str]:
    """Each cell is the slowest of what it stands for: a straggler does not vanish."""
    columns = _stretches(len(times), COLUMNS)
    rows = _stretches(ranks, ROWS)
    paths: list[list[str]] = [[] for _ in range(COLOURS)]
    for x, column in enumerate(columns):
        for y, row in enumerate(rows):
            cells = [ratios[c][r] for c in column for r in row if r < len(ratios[c])]
            paths[_colour(max(cells, default=1.0))].append(f"M{x} {y}h1v1h-1z")
    height = min(320, max(60, 14 * len(rows)))
    yield "<figure><h3>Step time by rank</h3>"
    yield f'<svg width="100%" height="{height}" role="img" aria-label="step time by rank">'
    yield '<text class="end" x="-6" y="12">rank 0</text>'
    yield f'<text class="end" x="-6" y="100%">{ranks - 1}</text>'
    yield f'<text x="0" y="100%" dy="16">step {times[0].step}</text>'
    yield f'<text class="end" x="100%" y="100%" dy="16">step {times[-1].step}</text>'
    yield (
        f'<svg class="heat" viewBox="0 0 {len(columns)} {len(rows)}" preserveAspectRatio="none"'
        ' width="100%" height="100%" shape-rendering="crispEdges">'
    )
    for number, cells_of in enumerate(paths):
        if cells_of:
            yield f'<path class="h{number}" d="{"".join(cells_of)}"/>'
    yield "</svg></svg></figure>"


def _stragglers(ratios: Sequence[Sequence[float]], ranks: int) -> Iterator[str]:
    """The slowest ranks, over the whole run."""
    means = []
    for rank in range(ranks):
        seen = [row[rank] for row in ratios if rank < len(row)]
        means.append((statistics.fmean(seen) if seen else 1.0, rank))
    slowest = sorted(means, key=lambda pair: (-pair[0], pair[1]))[:STRAGGLERS]
    words = ", ".join(f"rank {rank} ({mean:.2f})" for mean, rank in slowest)
    yield f"<p>Slowest over all, times the median: {text(words)}</p>"
