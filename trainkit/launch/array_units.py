"""Units as arrays: how a scheduler's tasks share out the units of a stage, and what is known of
them from the files that they write. A task is of stages/array_task.py."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from trainkit.base.documents import document
from trainkit.base.files import write_json
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.jobs.clusters import StagePlace
from trainkit.stages.array_task import FORM
from trainkit.stages.contract import Need, Unit
from trainkit.stages.execute import StageReporter
from trainkit.stages.stamps import spec_digest, unit_folder, unit_is_fresh, unit_stamp_path
from trainkit.stages.unit_process import COUNTS, UnitProcess

POLL_SECONDS = 0.5  # between two looks at what units have written
VISIBLE_SECONDS = 30.0  # for a shared file system to show here what a job wrote before its end
MOST_NAMED = 3  # units, and elements, that a message names


@dataclass(frozen=True)
class ArrayLevel:
    """Units that may run at the same time, in shares of one task each.

    Args:
        name: of the array's job.
        shares: for each task its units.
        tasks: of one element of the array, which is one node.
    """

    name: str
    shares: tuple[tuple[Unit, ...], ...]
    tasks: int

    @property
    def elements(self) -> int:
        return -(-len(self.shares) // self.tasks)


def split_units(units: Sequence[Unit], *, in_image: bool) -> tuple[list[Unit], list[Unit]]:
    """(units for this machine, units for the scheduler): here what waits for the network, and what
    an image could not do, as far as it waits for nothing that the others do."""
    here: dict[str, Unit] = {}
    names = {unit.name for unit in units}
    for unit in units:
        stays = unit.network or (unit.here and in_image)
        if stays and all(name in here for name in unit.after if name in names):
            here[unit.name] = unit
    return list(here.values()), [unit for unit in units if unit.name not in here]


def array_levels(need: Need, units: Sequence[Unit], asked: StagePlace) -> list[ArrayLevel]:
    """The graph: each unit one level behind the last that it waits for; the largest units shared
    out first, to the share that has least."""
    depth: dict[str, int] = {}
    for unit in units:  # in an order that respects `after`
        depth[unit.name] = 1 + max(
            (depth[name] for name in unit.after if name in depth), default=-1
        )
    found = []
    for number in range(max(depth.values(), default=-1) + 1):
        of_level = [unit for unit in units if depth[unit.name] == number]
        shares: list[list[Unit]] = [
            [] for _ in range(min(len(of_level), asked.nodes * asked.tasks_per_node))
        ]
        for unit in sorted(of_level, key=lambda unit: -unit.size):
            min(shares, key=lambda each: sum(u.size for u in each) + len(each)).append(unit)
        tasks = min(asked.tasks_per_node, len(shares))
        found.append(
            ArrayLevel(f"{need.stage}-{need.name}-{number}", tuple(map(tuple, shares)), tasks)
        )
    return found


def level_file(folder: Path, level: ArrayLevel) -> Path:
    """What the tasks of an array read."""
    return folder / f"{level.name}.json"


def local_lines(here: Sequence[Unit]) -> list[str]:
    """What a dry run says of units that stay on this machine."""
    return [
        f"would run here, {'for the network' if unit.network else 'with this Python'}: {unit.name}"
        for unit in here
    ]


class ArrayUnit(UnitProcess):
    """A unit that a task does; what it says is in a file."""

    def __init__(self, unit: Unit, folder: Path) -> None:
        super().__init__([unit], folder)
        self.out = folder / f"{unit.name}.out"
        self.out.unlink(missing_ok=True)
        self.log(unit).unlink(missing_ok=True)
        self.code: int | None = None
        self._read = 0

    def look(self) -> None:
        """Take in what is new."""
        with contextlib.suppress(FileNotFoundError), open(self.out, "rb") as file:
            # its task was put back, and began again
            if os.fstat(file.fileno()).st_size < self._read:
                self._read = 0
                self._rest = b""
            file.seek(self._read)
            data = file.read()
            self._read += len(data)
            self.feed(data)

    def _feed_line(self, said: dict[str, object]) -> None:
        if isinstance(said.get("ended"), int):
            self.code = int(str(said["ended"]))
            self.host = str(said.get("host"))
        super()._feed_line(said)


def write_level(
    need: Need,
    level: ArrayLevel,
    stamps: Path,
    path: Path,
    argv_of: Callable[[Unit], Sequence[str]],
    env: Mapping[str, str],
) -> list[ArrayUnit]:
    """Write the specs of an array's units, and to `path` what its tasks read.

    Args:
        need: whose units they are.
        level: the units.
        stamps: the folder of the stage's stamps.
        path: of the file.
        argv_of: a unit's program on a node; the spec is appended.
        env: variables of every unit.
    """
    folder = unit_folder(stamps, need.name)
    batches: list[ArrayUnit] = []
    shares: list[list[dict[str, object]]] = []
    for units in level.shares:
        shares.append([])
        for unit in units:
            batches.append(batch := ArrayUnit(unit, folder))
            shares[-1].append(
                {
                    "name": unit.name,
                    "argv": [*argv_of(unit), *map(str, batch.specs)],
                    "out": str(batch.out),
                    "log": str(batch.log(unit)),
                    "stamp": str(unit_stamp_path(stamps, need.name, unit.name)),
                    "digest": spec_digest(need, unit),
                    "outputs": [str(each) for each in unit.outputs],
                    "env": dict(env),
                }
            )
    write_json(path, document(FORM, tasks=level.tasks, shares=shares))
    return batches


def take_progress(batches: Sequence[ArrayUnit], reporter: StageReporter) -> bool:
    """Take in and report what units have written; whether one has ended."""
    ended = False
    for batch in batches:
        if batch.waiting:
            batch.look()
            unit = batch.units[0]
            result = batch.results[0][1] if batch.results else batch.counts
            if counts := {name: result[name] for name in COUNTS if name in result}:
                reporter.counted(unit, counts)
            reporter.progress(unit, batch.fraction if batch.waiting else 1.0)
            ended = ended or not batch.waiting
    return ended


def judge_units(need: Need, batches: Sequence[ArrayUnit], stamps: Path) -> list[ArrayUnit]:
    """Units that never ended, of arrays that are over. Raises for the first that failed; the file
    system may be late to show an end."""
    deadline = time.monotonic() + VISIBLE_SECONDS
    while True:
        failed = [batch for batch in batches if batch.code]
        left = [batch for batch in batches if not unit_is_fresh(need, batch.units[0], stamps)]
        if failed or not left or time.monotonic() > deadline:
            break
        time.sleep(POLL_SECONDS)
        for batch in left:
            batch.look()
    for batch in batches:
        if batch.code == 0:
            batch.forget_log(batch.units[0])
            batch.out.unlink(missing_ok=True)
    if failed:
        failed[0].host = f"{failed[0].host}" + (
            f" (and {len(failed) - 1} more units failed)" if len(failed) > 1 else ""
        )
        failed[0].end(failed[0].code or 1)
    return left


def name_some(names: Sequence[str]) -> str:
    """The first of some names, and how many more there are."""
    shown = ", ".join(names[:MOST_NAMED])
    if len(names) > MOST_NAMED:
        shown += f" and {len(names) - MOST_NAMED} more"
    return shown
