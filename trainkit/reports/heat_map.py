"""Maps of colours of whatever has rows and columns of numbers; and the one of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainkit.reports.chart import text
from trainkit.runs.phases import RankTimes

COLUMNS = 120
ROWS = 128
COLOURS = 8
LEAST, MOST = 0.9, 1.5  # times the median of the step: the two ends of the colours
STRAGGLERS = 8
Values = NDArray[np.float64]


@dataclass(frozen=True)
class HeatMap:
    """What a map says.

    Args:
        title: above it, and for who cannot see it.
        rows: names of the first and the last.
        columns: names of the first and the last.
        ends: values of the darkest colour and of the brightest.
        cell: the one value, of several, that a cell shows.
    """

    title: str
    rows: tuple[str, str]
    columns: tuple[str, str]
    ends: tuple[float, float]
    cell: Callable[[Values], float]

    def to_html(self, values: Values) -> Iterator[str]:
        """The figure.

        Args:
            values: (columns, rows).
        """
        columns = _stretches(len(values), COLUMNS)
        rows = _stretches(values.shape[1], ROWS)
        paths: list[list[str]] = [[] for _ in range(COLOURS)]
        for x, column in enumerate(columns):
            for y, row in enumerate(rows):
                value = self.cell(values[column.start : column.stop, row.start : row.stop])
                paths[self._colour(float(value))].append(f"M{x} {y}h1v1h-1z")
        height = min(320, max(60, 14 * len(rows)))
        yield f"<figure><h3>{text(self.title)}</h3>"
        yield f'<svg width="100%" height="{height}" role="img" aria-label="{text(self.title)}">'
        yield f'<text class="end" x="-6" y="12">{self.rows[0]}</text>'
        yield f'<text class="end" x="-6" y="100%">{self.rows[1]}</text>'
        yield f'<text x="0" y="100%" dy="16">{self.columns[0]}</text>'
        yield f'<text class="end" x="100%" y="100%" dy="16">{self.columns[1]}</text>'
        yield (
            f'<svg class="heat" viewBox="0 0 {len(columns)} {len(rows)}"'
            ' preserveAspectRatio="none" width="100%" height="100%" shape-rendering="crispEdges">'
        )
        for number, cells_of in enumerate(paths):
            if cells_of:
                yield f'<path class="h{number}" d="{"".join(cells_of)}"/>'
        yield "</svg></svg></figure>"

    def _colour(self, value: float) -> int:
        least, most = self.ends
        part = (value - least) / (most - least)
        return min(COLOURS - 1, max(0, int(part * COLOURS)))


def _stretches(count: int, most: int) -> list[range]:
    size = max(1, math.ceil(count / most))
    return [range(begin, min(begin + size, count)) for begin in range(0, count, size)]


def rank_map(times: Sequence[RankTimes]) -> Iterator[str]:
    """The section of a page; nothing for a run that has not noted its ranks' times."""
    sizes = [len(each.compute_ms) for each in times]
    if not sizes or max(sizes) < 2:
        return
    ranks = max(sizes)
    ratios = _ratios(times, ranks)
    yield "<h2>Ranks</h2>"
    yield (
        '<p class="soft">Forward and backward of each rank beside the median of its step: dark is'
        f" {LEAST:g} of it or less, bright {MOST:g} times or more. Waiting for each other is not in"
        " them on CPUs.</p>"
    )
    steps = f"step {times[0].step}", f"step {times[-1].step}"
    names = "rank 0", f"{ranks - 1}"
    # each cell is the slowest of what it stands for: a straggler does not vanish
    drawn = HeatMap("Step time by rank", names, steps, (LEAST, MOST), np.max)
    yield from drawn.to_html(ratios)
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


def _stragglers(ratios: NDArray[np.float64]) -> Iterator[str]:
    """The slowest ranks, over the whole run."""
    means = ratios.mean(axis=0)
    slowest = np.argsort(-means, kind="stable")[:STRAGGLERS]
    words = ", ".join(f"rank {rank} ({means[rank]:.2f})" for rank in slowest)
    yield f"<p>Slowest over all, times the median: {text(words)}</p>"
