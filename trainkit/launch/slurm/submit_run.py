"""From a resolved job to a submitted run; and from a run that ended to one that is submitted
again."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trainkit.base.errors import TrainkitError
from trainkit.jobs.resolved import ResolvedJob
from trainkit.jobs.resume_changes import write_changed_job
from trainkit.jobs.schema import Job
from trainkit.launch.slurm.batch_script import seconds_before_limit
from trainkit.launch.slurm.job_graph import Followed, Graph, submit_graph
from trainkit.launch.slurm.sbatch import forget_secrets, submit, write_script
from trainkit.launch.slurm.withdraw import take_out
from trainkit.launch.start import PACKAGE, fill_run
from trainkit.launch.supervise.code_snapshot import link_code, take_snapshot
from trainkit.launch.supervise.rank_environment import secret_values
from trainkit.launch.supervise.supervisor import locked_run
from trainkit.plan.planner import Plan
from trainkit.runs.folder import RunFolder, new_run_folder
from trainkit.stages.contract import Need


def submit_new(
    resolved: ResolvedJob, plan: Plan, needs: Sequence[Need], project: Path
) -> tuple[RunFolder, str]:
    """Make a run, its code and everything, and submit it: (run, Slurm's number of the job).
    Arguments as of `start_run`.

    Raises TrainkitError: 8 if sbatch refuses it, 3 if a secret is missing; then nothing is left
    behind.
    """
    job = resolved.job
    secrets = secret_values(job.cluster.secrets, os.environ)
    run = new_run_folder(Path(job.cluster.root or ".").absolute(), job.name)
    try:
        with locked_run(run):
            fill_run(run, resolved, plan, needs, project, secrets)
            write_script(run, job, secrets)
        return run, submit(run, first_attempt=1)
    except BaseException:
        shutil.rmtree(run.path, ignore_errors=True)
        raise


def submit_with_stages(
    resolved: ResolvedJob, plan: Plan, graph: Graph, project: Path, notice: Callable[[str], None]
) -> tuple[RunFolder, str, list[Followed]]:
    """As `submit_new`, for a run whose stages are still to be made, by Slurm too: (run, its job,
    what can be followed). `plan` is what is known by now.

    The caller holds the locks of the graph's stages. Raises TrainkitError as `submit_new`; then
    nothing is left in the queue either.
    """
    job = resolved.job
    secrets = secret_values(job.cluster.secrets, os.environ)
    run = new_run_folder(Path(job.cluster.root or ".").absolute(), job.name)
    try:
        with locked_run(run):
            fill_run(run, resolved, plan, None, project, secrets)
            write_script(run, job, secrets)
        id, followed = submit_graph(run, job, graph, notice)
    except BaseException:
        with contextlib.suppress(TrainkitError):
            take_out(run, held=True)
        shutil.rmtree(run.path, ignore_errors=True)
        raise
    return run, id, followed


def submit_again(
    run: RunFolder, job: Job, document: dict[str, Any], *, code: bool, project: Path
) -> str:
    """Submit a run that has ended: Slurm's number of the job. Arguments as of `resume_run`."""
    secrets = secret_values(job.cluster.secrets, os.environ)
    with locked_run(run):
        if code:
            link_code(take_snapshot(PACKAGE, run.root / "code", project).folder, run.code)
        write_changed_job(run.job, document)
        write_script(run, job, secrets, seconds=seconds_before_limit(run, job))
        try:
            return submit(
                run,
                first_attempt=max((attempt.number for attempt in run.attempts()), default=0) + 1,
            )
        except BaseException:
            forget_secrets(run)
            raise
