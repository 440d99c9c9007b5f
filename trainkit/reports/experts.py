"""Which experts of a run starve and which are overfull: maps of their loads, and in words.

Shapes: L layers with experts, E experts, N lines of expert-loads.jsonl.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from trainkit.reports.chart import text
from trainkit.reports.heat_map import HeatMap, Values
from trainkit.runs.expert_loads import (
    NAMED,
    OVERFULL,
    ExpertLoads,
    dead_in_words,
    dropped_in_words,
    loads_now,
    thinned,
)


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
