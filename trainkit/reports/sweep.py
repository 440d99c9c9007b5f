"""What the runs of a sweep have come to, and which values are the best; and its page: a table, the
losses of all runs, and what each key does to them."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from trainkit.base.errors import ConfigError
from trainkit.jobs.sweeps import SEED, Point
from trainkit.reports.chart import Chart, Series, text
from trainkit.reports.curves import points_of
from trainkit.reports.documents import as_number
from trainkit.reports.page import page, table
from trainkit.reports.words import short
from trainkit.runs.metrics import MetricsRow
from trainkit.runs.record import RunState

MemberState = RunState | Literal["waiting", "diverged"]
Key = Literal["training_loss", "validation_loss", "tokens_per_second"]
KEYS: tuple[Key, ...] = ("training_loss", "validation_loss", "tokens_per_second")
HIGHEST: tuple[Key, ...] = ("tokens_per_second",)  # the highest is the best; else the lowest


@dataclass(frozen=True)
class MemberResult:
    """One run of a sweep; None where nothing was logged.

    Args:
        number: the member's.
        values: the member's.
        run: the run's id; "": it has none yet.
        state: the run's; waiting: it has none yet; diverged: its loss ended it.
        step: the newest that was logged.
        training_loss: the mean of the last tenth of the rows.
        validation_loss: the last.
        tokens_per_second: the median.
        why: the cause of an end that is not a success.
        own_fault: it ended by what it is, not by what befell it: it would end so again.
    """

    number: int
    values: Point
    run: str
    state: MemberState
    step: int = 0
    training_loss: float | None = None
    validation_loss: float | None = None
    tokens_per_second: float | None = None
    why: str = ""
    own_fault: bool = False


@dataclass(frozen=True)
class PointResult:
    """Members that differ in nothing but their seed.

    Args:
        values: those that they share.
        members: their numbers.
        mean: by key, where all of them have succeeded; None: they have not.
        deviation: from it (the sample's); None for a single one.
    """

    values: Point
    members: Sequence[int]
    mean: Mapping[Key, float | None]
    deviation: Mapping[Key, float | None]


@dataclass(frozen=True)
class SweepResults:
    """What a sweep has come to by now.

    Args:
        id: the sweep's.
        job: whose values it changes.
        folder: the sweep's own.
        members: its runs, in order.
    """

    id: str
    job: str
    folder: Path
    members: Sequence[MemberResult]

    @property
    def keys(self) -> list[str]:
        """The keys whose values differ, in order."""
        found = list(dict.fromkeys(key for each in self.members for key in each.values))
        return [
            key for key in found if len({json.dumps(m.values.get(key)) for m in self.members}) > 1
        ]

    def points(self) -> list[PointResult]:
        """The members without their seeds, in order."""
        groups: dict[str, list[MemberResult]] = {}
        for each in self.members:
            values = {key: value for key, value in each.values.items() if key != SEED}
            groups.setdefault(json.dumps(values), []).append(each)
        return [_point(json.loads(values), group) for values, group in groups.items()]

    def best(self, key: str) -> PointResult:
        """The point with the best mean. Raises ConfigError for an unknown key, and where no
        point has all its members succeeded with a value there."""
        known = next((each for each in KEYS if each == key), None)
        if known is None:
            raise ConfigError(f"--best {key}: expected one of {', '.join(KEYS)}")
        found = [(value, point) for point in self.points() if (value := point.mean[known])]
        if not found:
            raise ConfigError(
                f"no member of sweep {self.id} has succeeded with a {key.replace('_', ' ')}",
                hint=f"keys: {', '.join(KEYS)}; a point counts once all its seeds are done",
            )
        if known in HIGHEST:
            return max(found, key=lambda pair: pair[0])[1]
        return min(found, key=lambda pair: pair[0])[1]

    def to_json(self) -> dict[str, object]:
        """Keys of sweep/1."""
        return {
            "sweep": self.id,
            "job": self.job,
            "folder": str(self.folder),
            "members": [asdict(each) for each in self.members],
            "points": [asdict(each) for each in self.points()],
        }


def _point(values: Point, members: Sequence[MemberResult]) -> PointResult:
    done = all(each.state == "succeeded" for each in members)
    mean: dict[Key, float | None] = {}
    deviation: dict[Key, float | None] = {}
    for key in KEYS:
        numbers = [float(value) for each in members if (value := getattr(each, key)) is not None]
        whole = done and len(numbers) == len(members)
        mean[key] = statistics.fmean(numbers) if whole else None
        deviation[key] = None
        if whole and len(numbers) > 1:
            deviation[key] = statistics.stdev(numbers)
    return PointResult(values, [each.number for each in members], mean, deviation)


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
    return "-" if value is None else format(value, form)


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
    """The last losses over each key that has numbers: a line for each choice of the other keys,
    means over seeds; dots where no two points share one. Over log2 of what spans a factor of 8."""
    kind: Key = "training_loss"
    if any(point.mean["validation_loss"] is not None for point in results.points()):
        kind = "validation_loss"
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
