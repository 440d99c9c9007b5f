"""A run leaves the jobs that make its stages: they are taken out of Slurm, but for arrays that
other runs wait for as well."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from trainkit.base.errors import Exit, TrainkitError
from trainkit.base.locks import LockBusy, locked
from trainkit.launch.slurm.allocation import slurm_output
from trainkit.launch.slurm.array_states import element_states
from trainkit.launch.slurm.job_graph import read_graph, read_stage_jobs
from trainkit.launch.slurm.reconcile import reconciled
from trainkit.launch.slurm.squeue import RUNNING, WAITING
from trainkit.runs.folder import RunFolder
from trainkit.runs.record import read_run_record
from trainkit.stages.execute import stamps_folder
from trainkit.stages.in_flight import read_in_flight, write_in_flight

LOCK_SECONDS = 60.0  # for whoever just joins the arrays
POLL_SECONDS = 0.2


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
        stamps = stamps_folder(run.root, need["stage"])
        # nobody joins between reading and writing
        with (
            contextlib.nullcontext()
            if held
            else _soon_locked(stamps / f"{need['lock']}.lock", need)
        ):
            arrays = read_in_flight(stamps, need["name"])
            if arrays is None or arrays.levels != tuple(need["levels"]):  # over, or others' since
                continue
            others = tuple(
                each for each in arrays.runs if each != str(run.path) and _waits(Path(each))
            )
            write_in_flight(stamps, replace(arrays, runs=others))
        if others:
            kept |= set(arrays.jobs)
        else:
            ids += arrays.jobs
    ids = [id for id in dict.fromkeys(ids) if id not in kept]
    if ids:
        left = {id for id, state in element_states(ids) if state in WAITING | RUNNING}
    else:
        left = set()
    if ids := [id for id in ids if id in left]:  # Slurm may have forgotten the others
        slurm_output(["scancel", "--quiet", *ids])
    return ids


def _waits(path: Path) -> bool:
    """Whether a run still waits for its stages; one of which Slurm cannot be asked does."""
    return (path / "job.json").is_file() and reconciled(read_run_record(RunFolder(path))).state in (
        "starting",
        "queued",
    )


@contextlib.contextmanager
def _soon_locked(path: Path, need: dict[str, object]) -> Iterator[None]:
    """Hold a stage's lock. Raises TrainkitError (exit 17) where another process does not let go
    of it."""
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(
                    locked(path, {"stage": need["stage"], "name": need["name"]}, wait=False)
                )
            except LockBusy as busy:
                if time.monotonic() > deadline:
                    message = (
                        f"pid {busy.holder.get('pid', '?')} is at work on {need['stage']}"
                        f" {need['name']}, which this run's jobs make"
                    )
                    raise TrainkitError(
                        message, exit=Exit.HOSTS_BUSY, hint="try again when it is done, or end it"
                    ) from None
            else:
                yield
                return
        time.sleep(POLL_SECONDS)
