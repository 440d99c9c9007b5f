"""From a start to a submitted run."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace

from trainkit.base.errors import TrainkitError
from trainkit.launch.preparation import Notice
from trainkit.launch.scheduler_contract import Start, Submission
from trainkit.launch.slurm.batch_script import script_path, seconds_before_limit
from trainkit.launch.slurm.job_graph import StageGraph, submit_graph
from trainkit.launch.slurm.sbatch import forget_secrets, submit, write_script
from trainkit.launch.slurm.stage_graph import ArrayFollower
from trainkit.launch.slurm.withdraw import withdraw_stage_jobs
from trainkit.launch.start import fill_run
from trainkit.launch.supervise.rank_environment import secrets_of
from trainkit.launch.supervise.run_lock import locked_run
from trainkit.runs.folder import RunFolder, new_run_folder


def submit_run(start: Start) -> Submission:
    """Make a run, its code and everything, or renew one that has ended, and submit it.

    Raises TrainkitError: 8 if sbatch refuses it, 3 if a secret is missing, 17 where the run is not
    over; then nothing is left behind of a new one.
    """
    if start.run is None:
        with _new_run(start) as run:
            return submission(run, submit(run, first_attempt=1))
    run = start.run
    with locked_run(run):  # until it is in the queue: nobody else puts it there
        fill(run, start)
        newest = max((attempt.number for attempt in run.attempts()), default=0)
        try:
            return submission(run, submit(run, first_attempt=newest + 1))
        except BaseException:
            forget_secrets(run)
            raise


def submit_with_stages(start: Start, graph: StageGraph, notice: Notice) -> Submission:
    """As `submit_run`, for a new run whose stages are still to be made, by Slurm too. The plan is
    what is known by now.

    The caller holds the locks of the graph's stages. Raises TrainkitError as `submit_run`; then
    nothing is left in the queue either.
    """
    with _new_run(start) as run:
        try:
            id, followed = submit_graph(run, start.job, graph, notice)
        except BaseException:
            with contextlib.suppress(TrainkitError):
                withdraw_stage_jobs(run, held=True)
            raise
        return replace(submission(run, id), stages=ArrayFollower(run, followed))


@contextlib.contextmanager
def _new_run(start: Start) -> Iterator[RunFolder]:
    """The folder of a new run, filled: submit it in the block. Its lock is free there, for its job
    may begin at once. Where the block raises, the folder is removed."""
    run = new_run_folder(start.root.absolute(), start.job.name)
    try:
        with locked_run(run):
            fill(run, start)
        yield run
    except BaseException:
        shutil.rmtree(run.path, ignore_errors=True)
        raise


def submission(run: RunFolder, id: str) -> Submission:
    """A run as job `id`."""
    return Submission(run, id, f"job {id} of Slurm; its script: {script_path(run)}")


def fill(run: RunFolder, start: Start) -> None:
    """Write all of a run's folder that a start says, but which job of Slurm's it is. The caller
    holds the run's lock."""
    secrets = secrets_of(start.job, os.environ)
    fill_run(run, start, secrets)
    write_script(run, start.job, secrets, seconds=seconds_before_limit(run, start.job))
