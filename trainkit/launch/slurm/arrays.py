"""The units of a stage as Slurm arrays: one array a level of what waits for what, each after the
one before it has gone well, all submitted at once.

Units that wait for the network are done on this machine first: it has the way out, which compute
nodes often have not. `prep-data` waits here for its arrays; `train` puts those of all its stages
and the run into one graph (job_graph.py).
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from trainkit.base.documents import document
from trainkit.base.errors import Exit, TrainkitError
from trainkit.base.files import write_json, write_text
from trainkit.jobs.clusters import StagePlace
from trainkit.jobs.schema import Job
from trainkit.launch.containers.stages import stage_box
from trainkit.launch.remote_units import ALWAYS_LOCAL, remote_argv
from trainkit.launch.slurm.allocation import slurm_output
from trainkit.launch.slurm.array_scripts import (
    ArrayLevel,
    ArrayPlace,
    array_script,
    container_scripts,
    level_container,
    level_file,
)
from trainkit.launch.slurm.array_states import describe_failure, element_ends, jobs_are_over
from trainkit.launch.slurm.sbatch import sbatch
from trainkit.launch.slurm.squeue import PollBackoff, element_statuses
from trainkit.launch.supervise.code_snapshot import take_snapshot
from trainkit.launch.supervise.orphan_sweep import PACKAGE
from trainkit.stages.array_task import FORM
from trainkit.stages.contract import Need, Unit
from trainkit.stages.execute import StageReporter, StageWork
from trainkit.stages.in_flight import ArraysInFlight, clear_in_flight, write_in_flight
from trainkit.stages.stamps import spec_digest, unit_folder, unit_is_fresh, unit_stamp_path
from trainkit.stages.unit_process import COUNTS, UnitProcess, execute_locally

POLL_SECONDS = 0.5  # between two looks at what units have written
END_SECONDS = 120.0  # for Slurm to end arrays: KillWait, and epilogs
SLURMS = re.compile(r"(srun|slurmstepd|slurmd)\b")  # its own words in the output of a job
VISIBLE_SECONDS = 30.0  # for a shared file system to show here what a job wrote before its end


def array_place(job: Job, stage: str, notice: Callable[[str], None]) -> ArrayPlace | None:
    """Where Slurm runs the units of a stage of `job`; None: this machine does."""
    cluster = job.cluster
    asked = cluster.stages.get(stage)
    if asked is None or stage in ALWAYS_LOCAL:
        return None
    root = cluster.root_folder.absolute()
    return ArrayPlace(cluster, asked, root, notice, stage_box(job, stage))


def split_units(place: ArrayPlace, units: Sequence[Unit]) -> tuple[list[Unit], list[Unit]]:
    """(units for this machine, units for Slurm): here what waits for the network, and what an
    image could not do, as far as it waits for nothing that Slurm does."""
    here: dict[str, Unit] = {}
    names = {unit.name for unit in units}
    for unit in units:
        stays = unit.network or (unit.here and place.box is not None)
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


def array_argv(path: Path, after: str | None) -> list[str]:
    """The line of sbatch. `after`: jobs, with colons between them, that must have gone well;
    without it the array waits for nothing."""
    dependency = [f"--dependency=afterok:{after}", "--kill-on-invalid-dep=yes"] if after else []
    return ["sbatch", "--parsable", *dependency, str(path)]


def describe_level(level: ArrayLevel, after: str | None = None) -> str:
    """One line of the graph, for people."""
    count = sum(map(len, level.shares))
    shown = (
        f"{count} unit{'s' if count > 1 else ''} in {level.elements} x {level.tasks}"
        f" task{'s' if level.tasks > 1 else ''}"
    )
    return f"{level.name}: {shown}" + (f", after {after} has gone well" if after else "")


def describe_arrays(
    place: ArrayPlace, need: Need, units: Sequence[Unit], folder: Path, before: str | None = None
) -> tuple[list[str], str | None]:
    """(what would be submitted, name of the last array). `folder`: of the scripts; `before`:
    what the first array waits for."""
    here, there = split_units(place, units)
    found = [
        f"would run here, {'for the network' if unit.network else 'with this Python'}: {unit.name}"
        for unit in here
    ]
    code = place.root / "code" / "SHA256"
    for level in array_levels(need, there, place.asked):
        found.append("would submit " + describe_level(level, before))
        container = level_container(place, need, level, folder)
        texts = {"": array_script(place, level, folder, code, container)}
        if container is not None:
            texts |= container_scripts(place, container, level, folder, code)
        for name, text in texts.items():
            found += [f"  {name}:"] if name else []
            found += [f"  {line}" for line in text.splitlines()]
        before = level.name
    return found, before


def run_arrays(place: ArrayPlace, work: StageWork) -> None:
    """Run units: those for the network here, then the others as arrays. Ctrl-C takes them out
    of Slurm.

    A unit that fails does not stop the others of its level; what comes after is not begun.
    Finished ones are stamped: the next call does the rest.

    Raises TrainkitError: a unit's own, naming it; 8 if sbatch refuses.
    """
    need = work.need
    stamps = work.stamps
    here, there = split_units(place, work.units)
    if here:
        execute_locally(replace(work, units=here))
    if not there:
        return
    code = take_snapshot(PACKAGE, place.root / "code").folder
    graph = array_levels(need, there, place.asked)
    folder = unit_folder(stamps, need.name)
    batches = write_levels(place, need, graph, stamps, code, folder)
    ids: list[str] = []
    files = tuple(str(level_file(folder, level)) for level in graph)
    owner = f"pid {os.getpid()} on {os.uname().nodename}"
    try:
        for level in graph:
            ids.append(submit_level(level, folder, ids[-1:]))
            write_in_flight(
                stamps, ArraysInFlight(need.lock, need.name, "", tuple(ids), files, (), owner)
            )
            before = f"job {ids[-2]}" if len(ids) > 1 else None
            place.notice(f"job {ids[-1]}: {describe_level(level, before)}")
        follow_arrays(ids, batches, work.reporter, place.notice)
    except BaseException:
        if ids:
            _end_arrays(place, ids, stamps, need)
        raise
    clear_in_flight(stamps, need.name)
    _judge(dict(zip(ids, map(Path, files), strict=True)), need, batches, stamps)


class ArrayRunner:
    """Runs the units of a stage as arrays."""

    on_this_machine = False

    def __init__(self, place: ArrayPlace) -> None:
        self.place = place
        self.run = functools.partial(run_arrays, place)

    def describe(self, need: Need, units: Sequence[Unit], folder: Path) -> list[str]:
        return describe_arrays(self.place, need, units, folder)[0]


def _end_arrays(place: ArrayPlace, ids: Sequence[str], stamps: Path, need: Need) -> None:
    """scancel, and wait for the end: tasks write until then. Where that is not to be had, the
    record stays, and the next to come waits."""
    with contextlib.suppress(TrainkitError):
        slurm_output(["scancel", "--quiet", *ids])
        place.notice(f"jobs {', '.join(ids)} are taken out of Slurm; waiting for their end")
        deadline = time.monotonic() + END_SECONDS
        while not jobs_are_over(ids):
            if time.monotonic() > deadline:
                return
            time.sleep(POLL_SECONDS)
        clear_in_flight(stamps, need.name)


def submit_level(level: ArrayLevel, folder: Path, after: Sequence[str]) -> str:
    """sbatch of an array whose script lies in `folder`, after jobs that must go well: Slurm's
    number. Raises TrainkitError (exit 8)."""
    path = folder / f"{level.name}.sh"
    return sbatch(array_argv(path, ":".join(after) or None), folder, hint=f"its script: {path}")


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
            # Slurm has put its task back, and it began again
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


def write_levels(
    place: ArrayPlace,
    need: Need,
    graph: Sequence[ArrayLevel],
    stamps: Path,
    code: Path,
    scripts: Path,
) -> list[ArrayUnit]:
    """Write specs, and into the folder `scripts` the scripts and what their tasks read."""
    folder = unit_folder(stamps, need.name)
    box = place.box
    python = box.python if box else place.cluster.python or sys.executable
    env = box.env if box else place.cluster.env
    batches: list[ArrayUnit] = []
    for level in graph:
        shares: list[list[dict[str, object]]] = []
        for units in level.shares:
            shares.append([])
            for unit in units:
                batches.append(batch := ArrayUnit(unit, folder))
                argv = [*remote_argv(unit.argv, python, code), *map(str, batch.specs)]
                files = {
                    "out": str(batch.out),
                    "log": str(batch.log(unit)),
                    "stamp": str(unit_stamp_path(stamps, need.name, unit.name)),
                }
                rest = {
                    "digest": spec_digest(need, unit),
                    "outputs": [str(path) for path in unit.outputs],
                    "env": dict(env),
                }
                shares[-1].append({"name": unit.name, "argv": argv, **files, **rest})
        write_json(level_file(scripts, level), document(FORM, tasks=level.tasks, shares=shares))
        container = level_container(place, need, level, scripts)
        text = array_script(place, level, scripts, code, container)
        write_text(scripts / f"{level.name}.sh", text, 0o755)
        if container is not None:
            container.folder.mkdir(exist_ok=True)
            for name, text in container_scripts(place, container, level, scripts, code).items():
                write_text(container.folder / name, text, 0o755)
    return batches


def follow_arrays(
    ids: Sequence[str],
    batches: Sequence[ArrayUnit],
    reporter: StageReporter,
    say: Callable[[str], None],
    asked: Callable[[], None] = lambda: None,
) -> None:
    """Until all units are done or Slurm says that the jobs are over. `asked` is called as often
    as Slurm is: ever more rarely while nothing changes.

    That Slurm cannot be asked, or holds an element, is said once, and waited out: the jobs go on
    without it.
    """
    backoff = PollBackoff()
    over = False
    said = False
    held: set[str] = set()
    while not over and any(batch.waiting for batch in batches):
        if backoff.due():
            try:
                elements = element_statuses(ids)
                over = all(each.over for each in elements)
                said = False
                now_held = {each.id: each for each in elements if each.held}
                for id in now_held.keys() - held:
                    say(now_held[id].words())
                held = set(now_held)
                asked()
            except TrainkitError as error:
                if not said:
                    say(
                        f"Slurm cannot be asked about jobs {', '.join(ids)} ({error.message});"
                        " asking again"
                    )
                said = True
        for batch in batches:
            if batch.waiting:
                batch.look()
                unit = batch.units[0]
                result = batch.results[0][1] if batch.results else batch.counts
                if counts := {name: result[name] for name in COUNTS if name in result}:
                    reporter.counted(unit, counts)
                reporter.progress(unit, batch.fraction if batch.waiting else 1.0)
                if not batch.waiting:
                    backoff.changed()
        if not over:
            time.sleep(POLL_SECONDS)


def _judge(
    levels: Mapping[str, Path], need: Need, batches: Sequence[ArrayUnit], stamps: Path
) -> None:
    """Raise for the first unit that failed or never ended; the file system may be late to show
    an end. `levels`: what the tasks of each array read, by its job."""
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
    if left:
        ids = list(levels)
        names, said = describe_failure(
            levels, element_ends(ids), [batch.units[0].name for batch in left]
        )
        raise TrainkitError(
            f"{names} did not end: {said}{job_words(left[0].folder, ids)}",
            exit=Exit.STAGE_FAILED,
            hint=f"{left[0].folder}: *.log of units, *_*.out of jobs",
        )


def job_words(folder: Path, ids: Sequence[str]) -> str:
    """What the newest of some jobs said last that said anything, as the end of a sentence: why
    its tasks did not come to their units. What Slurm says of it is shown already."""
    for id in reversed(ids):
        for path in sorted(folder.glob(f"*-{id}_*.out")):
            with contextlib.suppress(OSError):
                lines = path.read_text(errors="replace").splitlines()
                words = [each for each in lines if each.strip() and not SLURMS.match(each)]
                if words:
                    return f"; {path.name} ends with: {words[-1].strip()}"
    return ""
