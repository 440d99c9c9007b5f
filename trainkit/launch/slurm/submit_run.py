"""From a request to a submitted run; and from a run that ended to one that is submitted again."""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import replace
from pathlib import Path

from trainkit.base.errors import TrainkitError
from trainkit.launch.preparation import Notice
from trainkit.launch.scheduler_contract import ResumeRequest, RunRequest, Submission
from trainkit.launch.slurm.batch_script import script_path, seconds_before_limit
from trainkit.launch.slurm.job_graph import StageGraph, submit_graph
from trainkit.launch.slurm.sbatch import forget_secrets, submit, write_script
from trainkit.launch.slurm.stage_graph import ArrayFollower
from trainkit.launch.slurm.withdraw import withdraw_stage_jobs
from trainkit.launch.start import fill_run, renew_run
from trainkit.launch.supervise.rank_environment import secrets_of
from trainkit.launch.supervise.run_lock import locked_run
from trainkit.runs.folder import RunFolder, new_run_folder


def submit_new(request: RunRequest) -> Submission:
    """Make a run, its code and everything, and submit it.

    Raises TrainkitError: 8 if sbatch refuses it, 3 if a secret is missing; then nothing is left
    behind.
    """
    run = new_run_folder(_root(request), request.job.name)
    try:
        fill_new(run, request)
        return submission(run, submit(run, first_attempt=1))
    except BaseException:
        shutil.rmtree(run.path, ignore_errors=True)
        raise


def submit_with_stages(request: RunRequest, graph: StageGraph, notice: Notice) -> Submission:
    """As `submit_new`, for a run whose stages are still to be made, by Slurm too. The plan is
    what is known by now.

    The caller holds the locks of the graph's stages. Raises TrainkitError as `submit_new`; then
    nothing is left in the queue either.
    """
    run = new_run_folder(_root(request), request.job.name)
    try:
        fill_new(run, request)
        id, followed = submit_graph(run, request.job, graph, notice)
    except BaseException:
        with contextlib.suppress(TrainkitError):
            withdraw_stage_jobs(run, held=True)
        shutil.rmtree(run.path, ignore_errors=True)
        raise
    return replace(submission(run, id), stages=ArrayFollower(run, followed))


def submission(run: RunFolder, id: str) -> Submission:
    """A run as job `id`."""
    return Submission(run, id, f"job {id} of Slurm; its script: {script_path(run)}")


def _root(request: RunRequest) -> Path:
    return Path(request.job.cluster.root or ".").absolute()


def fill_new(run: RunFolder, request: RunRequest) -> None:
    """Write all of a new run's folder but which job of Slurm's it is."""
    secrets = secrets_of(request.job, os.environ)
    with locked_run(run):
        fill_run(run, request, secrets)
        write_script(run, request.job, secrets)


def submit_again(request: ResumeRequest) -> Submission:
    """Submit a run that has ended. Raises TrainkitError: 8 if sbatch refuses it."""
    run = request.run
    with locked_run(run):
        _renew(request)
        newest = max((attempt.number for attempt in run.attempts()), default=0)
        try:
            return submission(run, submit(run, first_attempt=newest + 1))
        except BaseException:
            forget_secrets(run)
            raise


def renew(request: ResumeRequest) -> None:
    """Write of a run that goes on all but which job of Slurm's it is. Raises TrainkitError (exit
    17) where it runs."""
    with locked_run(request.run):
        _renew(request)


def _renew(request: ResumeRequest) -> None:
    """The caller holds the run's lock."""
    run = request.run
    secrets = secrets_of(request.job, os.environ)
    renew_run(request)
    seconds = seconds_before_limit(run, request.job)
    write_script(run, request.job, secrets, seconds=seconds)
