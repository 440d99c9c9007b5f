"""Ranks over time as a map of colours: who is slower than the others."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

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
    ratios = _ratios(times, ranks)
    yield "<h2>Ranks</h2>"
    yield (
        '<p class="soft">Forward and backward of each rank beside the median of its step: dark is'
        f" {LEAST:g} of it or less, bright {MOST:g} times or more. Ranks of a tensor-parallel"
        " group wait for each other within these.</p>"
    )
    yield from _picture(times, ratios, ranks)
    yield from _stragglers(ratios)


def _ratios(times: Sequence[RankTimes], ranks: int) -> NDArray[np.float64]:
    """A row a line, a column a rank: its time over the median of the line; 1 where there is
    none."""
    found = np.ones((len(times), ranks))
    for number, each in enumerate(times):
        row = np.array(each.compute_ms)
        finite = np.isfinite(row)
        middle = float(np.median(row[finite])) if finite.any() else 0.0
        if middle > 0:
            found[number, : len(row)] = np.where(finite, row, middle) / middle
    return found


def _stretches(count: int, most: int) -> list[range]:
    size = max(1, math.ceil(count / most))
    return [range(begin, min(begin + size, count)) for begin in range(0, count, size)]


def _colour(ratio: float) -> int:
    part = (ratio - LEAST) / (MOST - LEAST)
    return min(COLOURS - 1, max(0, int(part * COLOURS)))


def _picture(times: Sequence[RankTimes], ratios: NDArray[np.float64], ranks: int) -> Iterator[str]:
    """Each cell is the slowest of what it stands for: a straggler does not vanish."""
    columns = _stretches(len(times), COLUMNS)
    rows = _stretches(ranks, ROWS)
    paths: list[list[str]] = [[] for _ in range(COLOURS)]
    for x, column in enumerate(columns):
        for y, row in enumerate(rows):
            most = ratios[column.start : column.stop, row.start : row.stop].max()
            paths[_colour(float(most))].append(f"M{x} {y}h1v1h-1z")
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


def _stragglers(ratios: NDArray[np.float64]) -> Iterator[str]:
    """The slowest ranks, over the whole run."""
    means = ratios.mean(axis=0)
    slowest = np.argsort(-means, kind="stable")[:STRAGGLERS]
    words = ", ".join(f"rank {rank} ({means[rank]:.2f})" for rank in slowest)
    yield f"<p>Slowest over all, times the median: {text(words)}</p>"
