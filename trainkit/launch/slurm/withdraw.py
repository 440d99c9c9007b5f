"""A run leaves the jobs that make its stages: they are taken out of Slurm, but for arrays that
other runs wait for as well."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainkit.base.errors import Exit, TrainkitError
from trainkit.launch.slurm.allocation import slurm_output
from trainkit.launch.slurm.job_graph import read_graph, read_stage_jobs
from trainkit.launch.slurm.reconcile import reconciled
from trainkit.launch.slurm.squeue import element_statuses
from trainkit.launch.supervise.run_lock import locked_in_time
from trainkit.runs.folder import RunFolder
from trainkit.runs.record import read_run_record
from trainkit.stages.execute import stamps_folder
from trainkit.stages.in_flight import ArraysInFlight, read_in_flight, write_in_flight

LOCK_SECONDS = 60.0  # for a run that just joins the arrays


def withdraw_stage_jobs(run: RunFolder, *, held: bool = False) -> list[str]:
    """scancel what is left of a run's graph: the jobs concerned. The record of its arrays stays
    until Slurm says that they are over: they may still write.

    Args:
        run: a run with a graph.
        held: the caller holds the stages' locks.

    Raises TrainkitError: 8 where Slurm cannot be asked, 17 where another process keeps a stage's
    lock; then nothing has changed for that stage.
    """
    graph = read_graph(run)
    kept = set[str]()
    ids = [job.id for job in read_stage_jobs(run) if job.own]
    for need in graph["needs"] if graph else ():
        arrays = _leave_arrays(run, need, held=held)
        if arrays is not None and arrays.runs:
            kept |= set(arrays.jobs)
        elif arrays is not None:
            ids += arrays.jobs
    return _cancel([id for id in dict.fromkeys(ids) if id not in kept])


def _leave_arrays(run: RunFolder, need: Mapping[str, Any], *, held: bool) -> ArraysInFlight | None:
    """Take a run off the list of those that wait for the arrays of a need: the record as it is
    then. None where the arrays are over, or others' since."""
    stamps = stamps_folder(run.root, need["stage"])
    lock = stamps / f"{need['lock']}.lock"
    # nobody joins between reading and writing
    with contextlib.nullcontext() if held else _soon_locked(lock, need):
        arrays = read_in_flight(stamps, need["name"])
        if arrays is None or arrays.levels != tuple(need["levels"]):
            return None
        others = tuple(each for each in arrays.runs if each != str(run.path) and _waits(Path(each)))
        left = replace(arrays, runs=others)
        write_in_flight(stamps, left)
        return left


def _cancel(ids: Sequence[str]) -> list[str]:
    """scancel those of the jobs that wait or run: Slurm may have forgotten the others."""
    if not ids:
        return []
    left = {each.array for each in element_statuses(ids) if not each.over}
    going = [id for id in ids if id in left]
    if going:
        slurm_output(["scancel", "--quiet", *going])
    return going


def _waits(path: Path) -> bool:
    """Whether a run still waits for its stages; one of which Slurm cannot be asked does."""
    return (path / "job.json").is_file() and reconciled(read_run_record(RunFolder(path))).state in (
        "starting",
        "queued",
    )


@contextlib.contextmanager
def _soon_locked(path: Path, need: Mapping[str, Any]) -> Iterator[None]:
    """Hold a stage's lock. Raises TrainkitError (exit 17) where another process does not let go
    of it."""
    deadline = time.monotonic() + LOCK_SECONDS
    with locked_in_time(
        path,
        {"stage": need["stage"], "name": need["name"]},
        lambda: time.monotonic() <= deadline,
        lambda pid: TrainkitError(
            f"pid {pid} is at work on {need['stage']} {need['name']}, which this run's jobs make",
            exit=Exit.HOSTS_BUSY,
            hint="try again when it is done, or end it",
        ),
    ):
        yield
