"""All runs of a sweep in one picture of parallel coordinates: an axis for each key, the last one
the loss. As SVG in one file, and within the page of a sweep."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence

from pydantic import JsonValue

from trainkit.base.lazy_dataclasses import dataclass
from trainkit.reports.chart import text
from trainkit.reports.documents import as_number
from trainkit.reports.sweep import MemberResult, SweepResults, loss_key, shared_keys
from trainkit.reports.words import short

GAP = 170  # between axes
HEIGHT = 260
MARGIN = 70
MANY = 6  # values; an axis of more shows its ends and its middle
LOG = 8  # times the lowest value, from which on an axis is logarithmic
# from the lowest loss to the highest; Okabe and Ito's blue and vermillion
COLOURS = ((0, 114, 178), (153, 153, 153), (213, 94, 0))
STYLE = """
.parallel { background: #fafafa; } .parallel text { font: 12px system-ui, sans-serif;
  fill: #1d1d1f; text-anchor: middle; } .parallel .tick { text-anchor: start; fill: #555; }
.parallel .axis { stroke: #777; } .parallel .run { fill: none; stroke-width: 2.2; }
.parallel .stopped { opacity: .3; } .parallel .failed { stroke: #777; stroke-dasharray: 4 4; }
@media (prefers-color-scheme: dark) { .parallel { background: #16181c; }
  .parallel text { fill: #e8e8ea; } .parallel .tick { fill: #aaa; } }
"""


@dataclass(frozen=True)
class Axis:
    """One axis: where a value lies on it.

    Args:
        name: in words.
        ticks: (words, part of the height from below).
        places: of the values that runs have there, by their JSON.
    """

    name: str
    ticks: Sequence[tuple[str, float]]
    places: Mapping[str, float]


def axis_of(name: str, values: Sequence[JsonValue]) -> Axis:
    """The axis of these values: of numbers, logarithmic where they span a factor of LOG; of
    anything else, one place a value."""
    numbers = {json.dumps(value): as_number(value) for value in values}
    known = [number for number in numbers.values() if number is not None]
    if len(known) < len(numbers):
        last = max(1, len(numbers) - 1)
        places = {key: number / last for number, key in enumerate(numbers)}
        return Axis(name, [(key.strip('"'), place) for key, place in places.items()], places)
    log = min(known) > 0 and max(known) >= LOG * min(known)
    low, high = _scaled(min(known), log), _scaled(max(known), log)
    places = {
        key: (_scaled(number, log) - low) / (high - low) if high > low else 0.5
        for key, number in numbers.items()
        if number is not None
    }
    if len(numbers) <= MANY:
        shown = [(number, places[key]) for key, number in numbers.items() if number is not None]
    else:
        middle = (low + high) / 2
        shown = [(min(known), 0), (math.exp(middle) if log else middle, 0.5), (max(known), 1)]
    return Axis(name, [(f"{value:.6g}", place) for value, place in shown], places)


def _scaled(value: float, log: bool) -> float:
    return math.log(value) if log else value


def parallel_svg(results: SweepResults) -> str:
    """The picture; runs that a rung stopped are faint, those that failed are dashed and end above.

    A loss that is not known yet leaves a run out.
    """
    key = loss_key(results)
    losses = {m.number: loss for m in results.members if (loss := getattr(m, key)) is not None}
    shown = [m for m in results.members if m.number in losses or m.own_fault]
    keys = shared_keys(results)
    axes = [axis_of(name, [m.values.get(name) for m in results.members]) for name in keys]
    axes.append(axis_of(key.replace("_", " "), list(losses.values()) or [0.0]))
    width = 2 * MARGIN + GAP * (len(axes) - 1)
    height = HEIGHT + 2 * MARGIN
    title = f"sweep of {results.job}: {len(shown)} runs"
    return "".join(
        (
            f'<svg class="parallel" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width}'
            f' {height}" width="{width}" height="{height}" role="img"'
            f' aria-label="{text(title)}"><style>{STYLE}</style>',
            # the best lies over the others
            *(
                _line(member, keys, axes, losses.get(member.number))
                for member in sorted(shown, key=lambda m: -losses.get(m.number, math.inf))
            ),
            *(piece for at, axis in enumerate(axes) for piece in _drawn(axis, at)),
            "</svg>\n",
        )
    )


def _x(at: int) -> int:
    return MARGIN + GAP * at


def _y(place: float) -> float:
    return round(MARGIN + HEIGHT * (1 - place), 1)


def _line(
    member: MemberResult, keys: Sequence[str], axes: Sequence[Axis], loss: float | None
) -> str:
    places = [
        axis.places[json.dumps(member.values.get(key))]
        for key, axis in zip(keys, axes, strict=False)
    ]
    failed = loss is None or member.own_fault
    end = 1.08 if failed else axes[-1].places[json.dumps(loss)]
    points = " ".join(f"{_x(at)},{_y(place)}" for at, place in enumerate([*places, end]))
    kind = "failed" if failed else member.state
    values = " ".join(f"{key.rpartition('.')[2]}={member.values.get(key)}" for key in keys)
    words = f"{member.number}: {values}: {member.state}, step {member.step}, loss {short(loss)}"
    colour = "" if failed else f' stroke="{_colour(end)}"'
    return (
        f'<polyline class="run {kind}"{colour} points="{points}">'
        f"<title>{text(words)}</title></polyline>"
    )


def _colour(part: float) -> str:
    first = min(int(part * 2), 1)
    pairs = zip(COLOURS[first], COLOURS[first + 1], strict=True)
    mixed = (round(one + (other - one) * (part * 2 - first)) for one, other in pairs)
    return f"rgb({','.join(map(str, mixed))})"


def _drawn(axis: Axis, at: int) -> Iterator[str]:
    x = _x(at)
    yield f'<line class="axis" x1="{x}" x2="{x}" y1="{_y(0)}" y2="{_y(1)}"/>'
    yield f'<text x="{x}" y="{MARGIN - 30}">{text(axis.name)}</text>'
    for words, place in axis.ticks:
        yield f'<text class="tick" x="{x + 6}" y="{_y(place) + 4}">{text(words)}</text>'
