"""[jobs.X.sweep]: a job with other values, again and again; which of its runs stop early."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Literal

from pydantic import Field, JsonValue, model_validator

from trainkit.jobs.table import Table, needs, wrong

MOST_MEMBERS = 1000  # Slurm's arrays have at most 1,001 elements by default (MaxArraySize)
SEED = "training.seed"
DIGITS = 4  # of a number that is drawn
DRAWS = ("uniform", "log", "integer", "choice")
Point = dict[str, JsonValue]  # values of a job by their dotted keys


class Halving(Table):
    """Successive halving (Jamieson and Talwalkar, 2016): all runs train to a rung, the better part
    of them goes on to the next."""

    first_rung: int = Field(
        ge=1,
        description="steps after which runs are compared first; then after factor times as many",
    )
    factor: int = Field(3, ge=2, description="of so many settings one goes on")

    def rungs(self, last: int) -> Sequence[int]:
        """Steps at which runs stop: all rungs before the last step, and that."""
        steps = (self.first_rung * self.factor**number for number in itertools.count())
        return [*itertools.takewhile(lambda step: step < last, steps), last]


class Sweep(Table):
    """Which values the runs of a sweep have. Keys are those of the job, as elsewhere in its table:
    grid.training.lr = [1e-3, 3e-4]."""

    grid: dict[str, JsonValue] = Field(
        default_factory=dict,
        description="keys of the job with arrays of values: each value of one with each of others",
    )
    list: tuple[dict[str, JsonValue], ...] = Field(
        (), strict=False, description="tables of keys of the job: a run with the values of each"
    )
    random: dict[str, JsonValue] = Field(
        default_factory=dict,
        description=(
            "keys of the job, each with one of { uniform = [LOW, HIGH] }, { log = [LOW, HIGH] },"
            " { integer = [LOW, HIGH] }, { choice = [...] }; needs samples"
        ),
    )
    samples: int | None = Field(
        None, ge=1, le=MOST_MEMBERS, description="how often the keys of random are drawn"
    )
    draw_seed: int = Field(0, ge=0, description="seed of these draws")
    sampler: Literal["random", "tpe"] = Field(
        "random",
        description=(
            "how the keys of random are drawn: each draw alone, or by what the runs before have"
            " come to (tree-structured Parzen estimators; needs the extra `sweep`)"
        ),
    )
    seeds: Annotated[tuple[Annotated[int, Field(ge=0, lt=2**63)], ...], Field(strict=False)] = (
        Field((), description="training.seed: all of the above once with each of these")
    )
    at_once: int | None = Field(
        None,
        ge=1,
        description=(
            "so many runs at the same time; by default as many as there is room, with sampler ="
            " 'tpe' one setting after the other"
        ),
    )
    halving: Halving | None = Field(
        None, description="stop runs early that are worse than others after as many steps"
    )

    @model_validator(mode="after")
    def _has_points(self) -> Sweep:
        if not (self.grid or self.list or self.random or self.seeds):
            raise needs("grid", "a sweep needs grid, list, random or seeds")
        if bool(self.random) != (self.samples is not None):
            raise wrong("samples", "random says what is drawn, samples how often: give both")
        if self.sampler == "tpe":
            self._check_proposals()
        for key, values in flat(self.grid):
            if not isinstance(values, Sequence) or isinstance(values, str) or not values:
                raise wrong(f"grid.{key}", f"grid.{key}: expected an array of values")
        for key, draw in draws(self.random):
            if said := _objection(draw):
                raise wrong(f"random.{key}", f"random.{key}: {said}")
        if self.seeds and any(SEED in point for point in self._drawn()):
            raise wrong("seeds", f"seeds are values of {SEED}, which the sweep gives already")
        count = len(self.points())
        if count > MOST_MEMBERS:
            raise wrong("grid", f"{count:,} runs; a sweep has at most {MOST_MEMBERS:,}")
        return self

    def _check_proposals(self) -> None:
        if self.grid or self.list or not self.random:
            raise wrong("sampler", "sampler = 'tpe' proposes values of random, and of nothing else")
        if self.halving is not None:
            words = "sampler = 'tpe' learns from whole runs, halving stops them: give one of both"
            raise wrong("halving", words)
        if any(key == SEED for key, _ in draws(self.random)):
            raise wrong("sampler", f"{SEED} is noise, nothing to search: seeds gives replicas")

    def points(self) -> Sequence[Point]:
        """The values of each run, in order; the same values twice are one run. With sampler =
        'tpe' the runs have others, of the same ranges."""
        seeded = [each for point in self._drawn() for each in self.seeded(point)]
        return [*{json.dumps(point, sort_keys=True): point for point in seeded}.values()]

    def seeded(self, point: Point) -> Sequence[Point]:
        """The point with each of the seeds."""
        return [{**point, SEED: seed} for seed in self.seeds] or [point]

    def _drawn(self) -> Iterator[Point]:
        """Without seeds."""
        if not (self.grid or self.list or self.random):
            yield {}
        axes = dict(flat(self.grid))
        if axes:
            columns = [values for values in axes.values() if isinstance(values, Sequence)]
            for chosen in itertools.islice(itertools.product(*columns), MOST_MEMBERS + 1):
                yield dict(zip(axes, chosen, strict=True))
        yield from (dict(flat(table)) for table in self.list)
        source = random.Random(self.draw_seed)
        for _ in range(self.samples or 0):
            yield {key: _drawn_value(draw, source) for key, draw in draws(self.random)}


def overrides_of(point: Point) -> list[str]:
    """A run's values as --set has them."""
    return [f"{key}={json.dumps(value)}" for key, value in point.items()]


def each_value_once(points: Sequence[Point]) -> list[Point]:
    """As few of the points as hold every value that a key has in any of them, about."""
    seen: set[tuple[str, str]] = set()
    chosen = []
    for point in points:
        values = {(key, json.dumps(value, sort_keys=True)) for key, value in point.items()}
        if not values <= seen:
            seen |= values
            chosen.append(point)
    return chosen


def flat(table: Mapping[str, JsonValue], above: str = "") -> Iterator[tuple[str, JsonValue]]:
    """(dotted key, value) of all that a table holds, in order."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def draws(
    table: Mapping[str, JsonValue], above: str = ""
) -> Iterator[tuple[str, Mapping[str, JsonValue]]]:
    """(dotted key, how it is drawn)."""
    for key, value in table.items():
        if isinstance(value, dict) and not set(DRAWS) & set(value):
            yield from draws(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value if isinstance(value, dict) else {}


def _objection(draw: Mapping[str, JsonValue]) -> str:
    """What is wrong with a draw; "" for nothing."""
    if len(draw) != 1:
        return f"expected one of {', '.join(DRAWS)}, such as {{ log = [1e-4, 1e-2] }}"
    ((kind, values),) = draw.items()
    if kind not in DRAWS:
        return f"'{kind}' is none of {', '.join(DRAWS)}"
    if not isinstance(values, Sequence) or isinstance(values, str) or not values:
        return f"{kind} takes an array"
    if kind == "choice":
        return ""
    numbers = [value for value in values if type(value) in (int, float)]
    if len(numbers) != 2 or len(values) != 2:
        return f"{kind} takes [LOW, HIGH]"
    low, high = bounds(values)
    if not low < high:
        return f"{kind} = [{low:g}, {high:g}]: the lower number first"
    if kind == "log" and low <= 0:
        return f"log = [{low:g}, {high:g}]: both above 0"
    if kind == "integer" and any(type(value) is not int for value in values):
        return "integer takes two whole numbers"
    return ""


def bounds(values: Sequence[JsonValue]) -> tuple[float, float]:
    """The lowest and the highest of a draw that is no choice."""
    low, high = (float(str(value)) for value in values)
    return low, high


def _drawn_value(draw: Mapping[str, JsonValue], source: random.Random) -> JsonValue:
    ((kind, values),) = draw.items()
    assert isinstance(values, Sequence), "see _objection"
    if kind == "choice":
        return source.choice(values)
    low, high = bounds(values)
    if kind == "integer":
        return source.randint(int(low), int(high))
    if kind == "log":
        return rounded(math.exp(source.uniform(math.log(low), math.log(high))))
    return rounded(source.uniform(low, high))


def rounded(value: float) -> float:
    """As few digits as a person writes: what is drawn is a job's value, and stands in its name."""
    return float(f"{value:.{DIGITS}g}")
