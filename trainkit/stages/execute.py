"""Bringing stages up to date: judge, lock, run the units that are missing, stamp."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from trainkit.base.errors import Exit, TrainkitError
from trainkit.base.files import TEMPORARY, remove_leftovers
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.base.locks import LockBusy, locked
from trainkit.jobs.schema import Job
from trainkit.stages.contract import Need, Stage, Unit
from trainkit.stages.in_flight import (
    ArraysInFlight,
    StillRunning,
    refuse_in_flight,
    still_in_flight,
)
from trainkit.stages.stamps import (
    Freshness,
    check_freshness,
    file_identities,
    read_stamp,
    stamp_path,
    unit_folder,
    unit_is_fresh,
    unit_stamp_path,
    write_stamp,
    write_times,
    write_unfinished,
)

# between two questions whether Slurm's jobs of another run are done: ever more rarely
WAIT_SECONDS = 1.0
LONGEST_WAIT = 30.0
GROWTH = 1.4


class StageReporter(Protocol):
    """Who tells the person what happens."""

    def verdict(self, verdict: Freshness) -> None:
        """A stage was judged."""

    def waiting(self, need: Need, holder: str) -> None:
        """Another process holds the stage's lock."""

    def started(self, need: Need, units: Sequence[Unit]) -> None:
        """These units are about to run."""

    def counted(self, unit: Unit, counts: Mapping[str, int]) -> None:
        """A unit has written so many "tokens" of so many "text_bytes" by now."""

    def progress(self, unit: Unit, fraction: float) -> None:
        """A unit has done so much of its work."""

    def finished(self, need: Need) -> None:
        """All units of the stage have succeeded, or it was given up."""


@dataclass(frozen=True)
class StageWork:
    """Units of a stage that are to run now.

    Args:
        need: whose units they are.
        units: those that are missing, in an order that respects `after`.
        stamps: the folder of the stage's stamps.
        reporter: is called as they progress.
        workers: units that compute at once; None: one a core of this machine, and
            clusters.X.stages.STAGE.tasks_per_node on another host.
    """

    need: Need
    units: Sequence[Unit]
    stamps: Path
    reporter: StageReporter
    workers: int | None = None


# Runs units in the order their `after` asks for and stamps each that succeeds; raises TrainkitError
# on the first failure.
Executor = Callable[[StageWork], None]


def stamps_folder(root: Path, stage: str) -> Path:
    """<root>/stamps/<stage>."""
    return root / "stamps" / stage


def needs_of(job: Job, stages: Sequence[Stage]) -> list[Need]:
    """What `job` needs, in order."""
    root = job.cluster.root_folder
    return [need for stage in stages for need in stage.needs(job, stamps_folder(root, stage.name))]


def needs_in_turn(job: Job, stages: Sequence[Stage]) -> Iterator[Need]:
    """As `needs_of`, each stage asked when those before it are done: what it needs may depend on
    their outputs."""
    root = job.cluster.root_folder
    for stage in stages:
        yield from stage.needs(job, stamps_folder(root, stage.name))


def missing_units(need: Need, stamps: Path, *, force: bool) -> list[Unit]:
    """Units to run: stale ones, and those that come after one that is run. Of a stage that goes
    by evidence all: they see for themselves what is there."""
    missing: dict[str, Unit] = {}
    for unit in need.units:
        if (
            force
            or need.evidence
            or any(name in missing for name in unit.after)
            or not unit_is_fresh(need, unit, stamps)
        ):
            missing[unit.name] = unit
    return list(missing.values())


def update_stage(
    need: Need,
    root: Path,
    execute: Executor,
    reporter: StageReporter,
    *,
    force: bool = False,
    going: StillRunning = refuse_in_flight,
    workers: int | None = None,
) -> Freshness:
    """Bring one stage up to date and return what was found before. Two callers at once: the
    second waits and finds it fresh.

    `going`: asked whether Slurm's jobs of a run are still making it; while they are, this waits.
    `workers`: see `StageWork`.
    """
    stamps = stamps_folder(root, need.stage)
    inputs = file_identities(need.inputs)
    verdict = check_freshness(need, stamps, force=force)
    if verdict.fresh and not any(
        folder.is_dir() for folder in {path.parent for path in need.scratch}
    ):
        reporter.verdict(verdict)
        with contextlib.suppress(LockBusy), stage_lock(need, stamps, wait=False):
            remove_leftovers(stamp_path(stamps, need))
            write_times(need, stamps, inputs)
        return verdict
    said = False
    while True:
        with stage_lock(need, stamps, reporter):
            making = still_in_flight(stamps, need.lock, going)
            if making is None:
                verdict = check_freshness(need, stamps, force=force)
                reporter.verdict(verdict)
                if verdict.fresh:
                    remove_leftovers(stamp_path(stamps, need))
                    delete_scratch(need)  # its maker was killed before that
                else:
                    units, inputs = begin_need(need, stamps, verdict, force=force)
                    _run(execute, StageWork(need, units, stamps, reporter, workers), verdict)
                    complete_need(need, stamps, inputs)
                return verdict
        if not said:
            reporter.waiting(need, making.words())
        said = True
        wait_for_arrays(
            making, going
        )  # without the lock: those jobs need it to say that they are done


@contextlib.contextmanager
def stage_lock(
    need: Need, stamps: Path, reporter: StageReporter | None = None, *, wait: bool = True
) -> Iterator[None]:
    """Hold the lock of a need's stage; `reporter` hears who has it meanwhile. Raises LockBusy
    where that is somebody, unless `wait`."""

    def waits(holder: dict[str, object]) -> None:
        if reporter is not None:
            reporter.waiting(need, f"pid {holder.get('pid', '?')}")

    path = stamps / f"{need.lock}.lock"
    with locked(path, {"stage": need.stage, "name": need.name}, wait=wait, on_wait=waits):
        yield


def wait_for_arrays(making: ArraysInFlight, going: StillRunning) -> None:
    """Until arrays are over; slurmctld serves the whole cluster, and they take hours."""
    gap = WAIT_SECONDS
    while True:
        time.sleep(gap)
        if not going(making):
            return
        gap = min(LONGEST_WAIT, gap * GROWTH)


def _run(execute: Executor, work: StageWork, verdict: Freshness) -> None:
    need = work.need
    work.reporter.started(need, work.units)
    try:
        execute(work)
    except TrainkitError as error:
        former = read_stamp(stamp_path(work.stamps, need)) or {}
        because = str(former.get("unfinished", verdict.because))
        with contextlib.suppress(OSError):  # a full disk, say: what failed counts more
            write_unfinished(need, work.stamps, because, failed=error.message)
        raise
    finally:
        work.reporter.finished(need)


def begin_need(
    need: Need, stamps: Path, verdict: Freshness, *, force: bool = False
) -> tuple[list[Unit], list[Any]]:
    """Get ready to make what is stale: (units to run, identities of the inputs as they are now).
    Nothing of it counts as fresh until `complete_need`.

    The caller holds the stage's lock.
    """
    if not need.units:
        message = (
            f"{need.stage} {need.name} was fresh a moment ago and is not any more: somebody made or"
            " deleted something meanwhile"
        )
        raise TrainkitError(message, exit=Exit.STAGE_FAILED, hint="run it again")
    former = read_stamp(stamp_path(stamps, need)) or {}
    # the first reason, however often it was interrupted
    write_unfinished(need, stamps, str(former.get("unfinished", verdict.because)))
    remove_leftovers(stamp_path(stamps, need))
    _remove_leftovers(path for unit in need.units for path in unit.outputs)
    inputs = file_identities(need.inputs)
    units = missing_units(need, stamps, force=force)
    folder = unit_folder(stamps, need.name)
    folder.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(
        folder / f"{unit.name}{ending}" for unit in need.units for ending in (".json", ".spec.json")
    )
    for unit in units:  # one that is cut short must not leave those after it looking fresh
        unit_stamp_path(stamps, need.name, unit.name).unlink(missing_ok=True)
    return units, inputs


def complete_need(need: Need, stamps: Path, inputs: list[Any]) -> None:
    """All units have succeeded: the stamp, for the inputs that `begin_need` saw."""
    write_stamp(need, stamps, inputs)
    delete_scratch(need)


def _remove_leftovers(paths: Iterable[Path]) -> None:
    """Delete what crashed writers of `paths` left beside them; each folder is read once, however
    many there are."""
    names: dict[Path, set[str]] = {}
    for path in paths:
        names.setdefault(path.parent, set()).add(path.name)
    for folder, known in names.items():
        if folder.is_dir():
            left = [entry.name for entry in os.scandir(folder) if TEMPORARY in entry.name]
            for name in known.intersection(text.partition(TEMPORARY)[0] for text in left):
                remove_leftovers(folder / name)


def delete_scratch(need: Need) -> None:
    """Delete what only the units needed."""
    for path in need.scratch:
        path.unlink(missing_ok=True)
    for folder in {path.parent for path in need.scratch}:
        if folder.is_dir() and not any(folder.iterdir()):
            shutil.rmtree(folder)


def refuse_stale(needs: Sequence[Need], root: Path) -> None:
    """`--no-stages`: raise (exit 5) naming every stage that is stale and why."""
    stale = [
        v
        for v in (check_freshness(need, stamps_folder(root, need.stage)) for need in needs)
        if not v.fresh
    ]
    if stale:
        raise TrainkitError(
            "; ".join(map(str, stale)),
            exit=Exit.STAGE_STALE,
            hint="run it without --no-stages, or `invoke prep-data` and `invoke build` first",
        )
