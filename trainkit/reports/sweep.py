"""What the runs of a sweep have come to, which values are the best, and both as tables."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from trainkit.base.errors import ConfigError
from trainkit.base.lazy_dataclasses import asdict, dataclass
from trainkit.jobs.sweeps import SEED, Point
from trainkit.reports.words import short
from trainkit.runs.record import RunState

MemberState = RunState | Literal["waiting", "diverged", "paused", "promoted", "stopped"]
Key = Literal["training_loss", "validation_loss", "tokens_per_second"]
KEYS: tuple[Key, ...] = ("training_loss", "validation_loss", "tokens_per_second")
# of Student's t: 0.975 quantile by degrees of freedom from 1; beyond, that of 30, which is wider
T_975 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
HIGHEST: tuple[Key, ...] = ("tokens_per_second",)  # the highest is the best; else the lowest


def known_key(text: str) -> Key:
    """What --best names. Raises ConfigError where runs are not compared by that."""
    found = next((each for each in KEYS if each == text), None)
    if found is None:
        raise ConfigError(f"--best {text}: expected one of {', '.join(KEYS)}")
    return found


@dataclass(frozen=True)
class MemberResult:
    """One run of a sweep; None where nothing was logged.

    Args:
        number: the member's.
        values: the member's.
        run: the run's id; "": it has none yet.
        state: the run's; waiting: it has none yet; diverged: its loss ended it; paused: it waits
            at a rung until the others are there; promoted: it is to go on from one; stopped: others
            were better there.
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
        interval: half the width of the mean's 95 % interval, by Student's t; as `deviation`.
    """

    values: Point
    members: Sequence[int]
    mean: Mapping[Key, float | None]
    deviation: Mapping[Key, float | None]
    interval: Mapping[Key, float | None]

    def cells(self) -> list[str]:
        """Its means in the table over seeds: columns of WORDS, and how many there are."""
        found = []
        for key in KEYS:
            half = self.interval[key]
            words = short(self.mean[key])
            found.append(words if half is None else f"{words} ± {short(half)}")
        return [*found, str(len(self.members))]


@dataclass(frozen=True)
class Rung:
    """Where runs were stopped and compared.

    Args:
        step: after which.
        kept: numbers of the members that went on; None: that is not decided, or it is the end.
    """

    step: int
    kept: Sequence[int] | None = None


@dataclass(frozen=True)
class SweepResults:
    """What a sweep has come to by now.

    Args:
        id: the sweep's.
        job: whose values it changes.
        folder: the sweep's own.
        members: its runs, in order.
        rungs: where they stop; none: only at their end.
    """

    id: str
    job: str
    folder: Path
    members: Sequence[MemberResult]
    rungs: Sequence[Rung] = ()

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

    def best(self, key: Key) -> PointResult:
        """The point with the best mean. Raises ConfigError where no point has all its members
        succeeded with a value there."""
        found = [(value, point) for point in self.points() if (value := point.mean[key])]
        if not found:
            raise ConfigError(
                f"no member of sweep {self.id} has succeeded with a {key.replace('_', ' ')}",
                hint=f"keys: {', '.join(KEYS)}; a point counts once all its seeds are done",
            )
        if key in HIGHEST:
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
            "rungs": [asdict(each) for each in self.rungs],
        }


def _point(values: Point, members: Sequence[MemberResult]) -> PointResult:
    done = all(each.state == "succeeded" for each in members)
    mean: dict[Key, float | None] = {}
    deviation: dict[Key, float | None] = {}
    interval: dict[Key, float | None] = {}
    for key in KEYS:
        numbers = [float(value) for each in members if (value := getattr(each, key)) is not None]
        whole = done and len(numbers) == len(members)
        mean[key] = statistics.fmean(numbers) if whole else None
        deviation[key] = interval[key] = None
        if whole and len(numbers) > 1:
            spread = statistics.stdev(numbers)
            quantile = T_975[min(len(numbers) - 1, len(T_975)) - 1]
            deviation[key] = spread
            interval[key] = quantile * spread / math.sqrt(len(numbers))
    return PointResult(values, [each.number for each in members], mean, deviation, interval)


def headings(results: SweepResults) -> list[str]:
    """The columns of `member_row`."""
    return ["", *(key.rpartition(".")[2] for key in results.keys), "run", "state", "step", *WORDS]


OVER_SEEDS = "Mean ± half of its 95 % interval (Student's t), of settings whose seeds are all done."
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


def point_headings(results: SweepResults) -> list[str]:
    """The columns of the table over seeds."""
    return [*(key.rpartition(".")[2] for key in shared_keys(results)), *WORDS, "seeds"]


def point_rows(results: SweepResults) -> list[list[str]]:
    """The table over seeds: a mean and its interval for each setting."""
    keys = shared_keys(results)
    return [
        [*(str(point.values.get(key, "-")) for key in keys), *point.cells()]
        for point in results.points()
    ]


def shared_keys(results: SweepResults) -> list[str]:
    """Keys that differ between settings, not only between their seeds."""
    return [key for key in results.keys if key != SEED]


def loss_key(results: SweepResults) -> Key:
    """The loss that pictures show: on the validation set, where one was computed."""
    known = any(each.validation_loss is not None for each in results.members)
    return "validation_loss" if known else "training_loss"
