"""Charts as SVG that needs no script: lines stretch with the page, texts keep their size.

A plot's own coordinates are whole numbers from 0 to 10,000, in an inner <svg> that is stretched to
the width there is; ticks and labels lie around it in percent (SVG 2, preserveAspectRatio="none" and
vector-effect).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from statistics import median

from trainkit.base.lazy_dataclasses import dataclass
from trainkit.base.printable import printable
from trainkit.reports.words import short

SIZE = 10_000
TICKS = 6  # at most, along x
COLOURS = 5  # then the same again, in dashes
MOST_POINTS = 6000  # of one line
MANY = 1000  # points, from which on their medians are drawn over them
MIDDLES = 200
Points = Sequence[tuple[float, float | None]]
FARTHEST = 1e100  # from 0 that is drawn: what is farther lies at the edge
NEAREST = 1e-12  # parts of a value: what differs less is the same


def text(value: object) -> str:
    """Anything as text of a page: nothing in it is markup, and no control character is left."""
    return escape(printable(str(value)).replace("\n", " "), quote=True)


@dataclass(frozen=True)
class Series:
    """One line.

    Args:
        name: in words.
        points: (x, y), by x; a y of None is a gap.
        colour: its number; from COLOURS on they come again, in dashes.
        lost: it was taken back: dashed.
        dots: points without a line.
    """

    name: str
    points: Points
    colour: int = 0
    lost: bool = False
    dots: bool = False

    @property
    def kind(self) -> str:
        """Its classes in the style sheet."""
        again = " again" if self.colour >= COLOURS else ""
        return f"s{self.colour % COLOURS}{again}{' lost' if self.lost else ''}"


@dataclass(frozen=True)
class Chart:
    """A chart over one x axis.

    Args:
        title: in words.
        x_name: what x counts.
        series: the lines.
        marks: (x, words) of moments to be marked.
    """

    title: str
    x_name: str
    series: Sequence[Series]
    marks: Sequence[tuple[float, str]] = ()

    def to_html(self) -> str:
        """A figure; one that says so where there is nothing to draw."""
        points = [p for each in self.series for p in each.points if p[1] is not None]
        if not points:
            return (
                f'<figure class="empty"><h3>{text(self.title)}</h3>'
                '<p class="soft">nothing was logged</p></figure>'
            )
        frame = _Frame.around(points, room=all(each.dots for each in self.series))
        return "".join(
            (
                f'<figure data-x="{frame.left!r} {frame.right!r}"'
                f' data-y="{frame.bottom!r} {frame.top!r}" data-xname="{text(self.x_name)}">',
                f"<h3>{text(self.title)}</h3>",
                self._legend(),
                '<svg class="chart" width="100%" height="220" role="img"'
                f' aria-label="{text(self.title)}">',
                *frame.axes(self.x_name),
                f'<svg class="lines" viewBox="0 0 {SIZE} {SIZE}" preserveAspectRatio="none"'
                ' width="100%" height="100%">',
                *self._marks(frame),
                *(_line(each, frame) for each in self.series),
                '</svg></svg><p class="readout"></p></figure>',
            )
        )

    def _legend(self) -> str:
        names = {each.name: each for each in self.series if each.points}
        marks = [_key("mark", "resumed")] if self.marks else []
        keys = [_key(each.kind, name, dots=each.dots) for name, each in names.items()]
        return f'<p class="legend">{"".join([*keys, *marks])}</p>'

    def _marks(self, frame: _Frame) -> Iterator[str]:
        for at, words in self.marks:
            x = frame.x(at)
            yield (
                f'<line class="mark" x1="{x}" x2="{x}" y1="0" y2="{SIZE}">'
                f"<title>{text(words)}</title></line>"
            )


def _key(kind: str, name: str, *, dots: bool = False) -> str:
    drawn = f'<line class="{kind}" x1="0" x2="22" y1="4" y2="4"/>'
    if dots:
        drawn = f'<line class="{kind} dot" x1="11" x2="11.1" y1="4" y2="4"/>'
    return f'<span><svg width="22" height="8">{drawn}</svg>{text(name)}</span>'


def _step(width: float) -> float:
    """The least 1, 2 or 5 times a power of ten that is no less than a quarter of a width."""
    least = width / 4
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * size for size in (1, 2, 5, 10) if power * size >= least * (1 - 1e-9))


def _drawn(value: float) -> float:
    return min(max(value, -FARTHEST), FARTHEST)


@dataclass(frozen=True)
class _Frame:
    left: float
    right: float
    bottom: float
    top: float
    step: float  # from line to line

    @staticmethod
    def around(points: Iterable[tuple[float, float | None]], *, room: bool) -> _Frame:
        """From one round number to another around all points. `room`: beside them too."""
        xs, ys = [], []
        for x, y in points:
            xs.append(_drawn(x))
            if y is not None:
                ys.append(_drawn(y))
        high = max(ys, default=0.0)
        low = min(ys, default=0.0)
        size = max(abs(high), abs(low))
        if high - low <= max(size * NEAREST, 1 / FARTHEST):
            high += size * 0.1 or 1.0
        step = _step(high - low)
        left = min(xs)
        right = max(xs)
        if right - left <= max(abs(right) * NEAREST, 1 / FARTHEST):
            right += max(1.0, abs(right) * 0.1)
        if 0 <= left <= 0.05 * right:
            left = 0.0
        elif room:
            left, right = left - 0.06 * (right - left), right + 0.06 * (right - left)
        bottom = math.floor(low / step + 1e-5) * step  # a hair beyond is not seen
        return _Frame(left, right, bottom, math.ceil(high / step - 1e-5) * step, step)

    def x(self, value: float) -> int:
        value = min(max(value, self.left), self.right)
        return round(SIZE * (value - self.left) / (self.right - self.left))

    def y(self, value: float) -> int:
        value = min(max(value, self.bottom), self.top)
        return round(SIZE * (self.top - value) / (self.top - self.bottom))

    def axes(self, x_name: str) -> Iterator[str]:
        for value in _ticks(self.bottom, self.top, self.step):
            y = f"{self.y(value) * 100 / SIZE:.4g}%"
            yield f'<line class="grid-line" x1="0" x2="100%" y1="{y}" y2="{y}"/>'
            yield f'<text class="end" x="-6" y="{y}" dy="4">{text(short(value))}</text>'
        ticks = _ticks(self.left, self.right, _step(self.right - self.left))
        for value in ticks:
            part = self.x(value) / SIZE
            place = "begin" if part < 0.05 else "end" if part > 0.93 else "mid"
            yield (
                f'<text class="tick-x {place}" x="{100 * part:.4g}%" y="100%" dy="16">'
                f"{text(short(value))}</text>"
            )
        # the script needs others when it zooms
        yield '<text class="tick-x mid" y="100%" dy="16"></text>' * (TICKS - len(ticks))
        yield f'<text class="mid" x="50%" y="100%" dy="31">{text(x_name)}</text>'


def _ticks(low: float, high: float, step: float) -> list[float]:
    """Round numbers from one to the other."""
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def _line(series: Series, frame: _Frame) -> str:
    kind = f"{series.kind}{' dot' if series.dots else ''}"
    name = f' data-name="{text(series.name)}"'
    if series.dots:
        places = [place for part in _places(series.points, frame) for place in part]
        dots = "".join(
            f'<path class="{kind}" d="M{place}h1"><title>{text(series.name)}</title></path>'
            for place in places
        )
        return dots + _polylines(name, series.points, frame)
    if len(series.points) <= MANY:
        return _polylines(f'{name} class="{kind}"', series.points, frame)
    # the noise of so many steps hides where they go
    return _polylines(f'{name} class="{kind} noise"', series.points, frame) + _polylines(
        f' class="{kind}"', middles(series.points), frame
    )


def _polylines(attributes: str, points: Points, frame: _Frame) -> str:
    return "".join(
        # a point alone is a line without length
        f'<polyline{attributes} points="{" ".join(part if len(part) > 1 else part * 2)}"/>'
        for part in _places(points, frame)
    )


def _places(points: Points, frame: _Frame) -> Iterator[list[str]]:
    """Where points are drawn, each place once in a row, from gap to gap."""
    for whole, group in itertools.groupby(thinned(points), key=lambda point: point[1] is not None):
        if whole:
            places = (f"{frame.x(x)},{frame.y(y or 0.0)}" for x, y in group)
            yield [place for place, _ in itertools.groupby(places)]


def middles(points: Points) -> list[tuple[float, float | None]]:
    """The median of each of MIDDLES stretches, in its middle."""
    found = []
    for number in range(MIDDLES):
        part = points[number * len(points) // MIDDLES : (number + 1) * len(points) // MIDDLES]
        numbers = [y for _, y in part if y is not None]
        found.append((part[len(part) // 2][0], median(numbers) if numbers else None))
    return found


def thinned(points: Points) -> list[tuple[float, float | None]]:
    """At most MOST_POINTS points: of each stretch the first, the least, the most and a gap."""
    stretch = math.ceil(len(points) / (MOST_POINTS // 4))
    if stretch <= 4:
        return list(points)
    kept = []
    for begin in range(0, len(points), stretch):
        some = range(begin, min(begin + stretch, len(points)))
        numbers = [index for index in some if points[index][1] is not None]
        chosen = {begin}
        if numbers:
            chosen.add(min(numbers, key=lambda index: points[index][1] or 0.0))
            chosen.add(max(numbers, key=lambda index: points[index][1] or 0.0))
        if len(numbers) < len(some):
            chosen.add(next(index for index in some if points[index][1] is None))
        kept += [points[index] for index in sorted(chosen)]
    return kept
