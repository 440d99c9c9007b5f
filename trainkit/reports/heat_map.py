"""Maps of colours of whatever has rows and columns of numbers; and those of ranks and of
experts: which starve and which are overfull, in words too.

Shapes: L layers with experts, E experts, N lines of expert-loads.jsonl.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from trainkit.base.lazy_dataclasses import dataclass
from trainkit.reports.chart import text
from trainkit.runs.expert_loads import (
    NAMED,
    OVERFULL,
    ExpertLoads,
    dead_in_words,
    dropped_in_words,
    loads_now,
    thinned,
)
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


def expert_maps(lines: Sequence[ExpertLoads]) -> Iterator[str]:
    """The section of a page; nothing for a model without experts."""
    now = loads_now(lines)
    if now is None:
        return
    ratios_LE = now.over_mean()
    yield "<h2>Experts</h2>"
    yield (
        '<p class="soft">Rows of tokens of each expert beside the mean of its layer: dark is none,'
        f" bright {OVERFULL:g} times or more.</p>"
    )
    layers = now.layers
    names = f"layer {layers[0]}", f"layer {layers[-1]}"
    yield from _map(f"Loads of the last {now.steps} steps, by layer", names, ratios_LE)
    worst = int(ratios_LE.max(1).argmax())
    over_time = thinned(lines)
    steps = f"step {over_time[0].step}", f"step {over_time[-1].step}"
    of_layer_NE = np.stack([each.over_mean()[worst] for each in over_time])
    yield from _map(f"Loads of layer {layers[worst]}, over steps", steps, of_layer_NE)
    yield from _sentences(now)


def _map(title: str, columns: tuple[str, str], values: Values) -> Iterator[str]:
    names = "expert 0", f"{values.shape[1] - 1}"
    yield from HeatMap(title, names, columns, (0.0, OVERFULL), _extreme).to_html(values)


def _extreme(ratios: Values) -> float:
    """The one furthest from 1, by how many times: an expert without rows does not vanish."""
    least = float(ratios.min())
    most = float(ratios.max())
    return least if least * most < 1 else most


def _sentences(now: ExpertLoads) -> Iterator[str]:
    overfull = [
        f"layer {layer} expert {expert} ({load:.2f})"
        for layer, expert, load in now.overfull()[:NAMED]
    ]
    if words := dead_in_words(now):
        yield f"<p>{text(words)}</p>"
    else:
        yield f"<p>Every expert had rows in the last {now.steps} steps.</p>"
    if words := dropped_in_words(now):
        yield f"<p>{text(words)}</p>"
    if overfull:
        yield f"<p>Fullest experts, times the mean: {text(', '.join(overfull))}</p>"
