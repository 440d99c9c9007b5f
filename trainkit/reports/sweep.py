"""What the runs of a sweep have come to, and which values are the best."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from trainkit.base.errors import ConfigError
from trainkit.jobs.sweeps import SEED, Point
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
        why: the cause of an end that is no success.
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
        return [key for key in found if len({_text(m.values.get(key)) for m in self.members}) > 1]

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


def _text(value: object) -> str:
    return json.dumps(value)
