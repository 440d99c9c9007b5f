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

from trainkit.base.errors import Exit, TrainkitError
from trainkit.base.files import write_text
from trainkit.jobs.schema import Job
from trainkit.launch.array_units import (
    POLL_SECONDS,
    ArrayLevel,
    ArrayUnit,
    array_levels,
    judge_units,
    level_file,
    local_lines,
    split_units,
    take_progress,
    write_level,
)
from trainkit.launch.containers.stages import stage_box
from trainkit.launch.remote_units import ALWAYS_LOCAL, remote_argv
from trainkit.launch.slurm.allocation import slurm_output
from trainkit.launch.slurm.array_scripts import (
    ArrayPlace,
    array_script,
    container_scripts,
    level_container,
)
from trainkit.launch.slurm.array_states import describe_failure, element_ends, jobs_are_over
from trainkit.launch.slurm.sbatch import sbatch
from trainkit.launch.slurm.squeue import PollBackoff, element_statuses
from trainkit.launch.supervise.code_snapshot import take_snapshot
from trainkit.launch.supervise.orphan_sweep import PACKAGE
from trainkit.stages.contract import Need, Unit
from trainkit.stages.execute import StageReporter, StageWork
from trainkit.stages.in_flight import ArraysInFlight, clear_in_flight, write_in_flight
from trainkit.stages.stamps import unit_folder
from trainkit.stages.unit_process import execute_locally

END_SECONDS = 120.0  # for Slurm to end arrays: KillWait, and epilogs
SLURMS = re.compile(r"(srun|slurmstepd|slurmd)\b")  # its own words in the output of a job


def array_place(job: Job, stage: str, notice: Callable[[str], None]) -> ArrayPlace | None:
    """Where Slurm runs the units of a stage of `job`; None: this machine does."""
    cluster = job.cluster
    asked = cluster.stages.get(stage)
    if asked is None or stage in ALWAYS_LOCAL:
        return None
    root = cluster.root_folder.absolute()
    return ArrayPlace(cluster, asked, root, notice, stage_box(job, stage))


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
    here, there = split_units(units, in_image=place.box is not None)
    found = local_lines(here)
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
    here, there = split_units(work.units, in_image=place.box is not None)
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


def write_levels(
    place: ArrayPlace,
    need: Need,
    graph: Sequence[ArrayLevel],
    stamps: Path,
    code: Path,
    scripts: Path,
) -> list[ArrayUnit]:
    """Write specs, and into the folder `scripts` the scripts and what their tasks read."""
    box = place.box
    python = box.python if box else place.cluster.python or sys.executable
    env = box.env if box else place.cluster.env
    batches: list[ArrayUnit] = []
    for level in graph:
        batches += write_level(
            need,
            level,
            stamps,
            level_file(scripts, level),
            lambda unit: remote_argv(unit.argv, python, code),
            env,
        )
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
        if take_progress(batches, reporter):
            backoff.changed()
        if not over:
            time.sleep(POLL_SECONDS)


def _judge(
    levels: Mapping[str, Path], need: Need, batches: Sequence[ArrayUnit], stamps: Path
) -> None:
    """Raise for the first unit that failed or never ended. `levels`: what the tasks of each array
    read, by its job."""
    left = judge_units(need, batches, stamps)
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
