"""Several runs as one Slurm array: each element is a run of its own, with its own folder, record
and batch script, which the array's script becomes.

An element is called ARRAY_INDEX in launch/slurm.json, as Slurm's own commands name it.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainkit.base.documents import canonical_json
from trainkit.base.errors import TrainkitError
from trainkit.base.files import write_text
from trainkit.jobs.clusters import SlurmOptions
from trainkit.jobs.resolved import read_job
from trainkit.launch.scheduler_contract import ArrayRequest, RunRequest, Submission
from trainkit.launch.slurm.allocation import slurm_output
from trainkit.launch.slurm.batch_script import (
    all_options,
    option_lines,
    script_path,
    seconds_before_limit,
)
from trainkit.launch.slurm.sbatch import forget_secrets, write_script
from trainkit.launch.slurm.sbatch import sbatch as run_sbatch
from trainkit.launch.slurm.submit_run import fill_new, renew
from trainkit.runs.folder import RunFolder, new_run_folder
from trainkit.runs.slurm import add_slurm_job, read_slurm_jobs, write_slurm_jobs

OWN = ("job-name", "output")  # options that differ from run to run


@dataclass(frozen=True)
class _Element:
    """A run that is to be an element.

    Args:
        run: its folder, complete.
        first_attempt: see SlurmJob.
        new: it was made just now.
    """

    run: RunFolder
    first_attempt: int
    new: bool


def submit_array(asked: ArrayRequest) -> list[Submission]:
    """Make the runs of a request, or renew them, and submit them: one array for all whose options
    of sbatch are the same. In the order of the request.

    Raises TrainkitError: 8 if sbatch refuses, 3 if a secret is missing; then nothing new is left
    behind, in the queue either.
    """
    elements: list[_Element] = []
    submitted: list[str] = []
    try:
        for request in asked.requests:
            if isinstance(request, RunRequest):
                root = Path(request.job.cluster.root or ".").absolute()
                elements.append(_Element(new_run_folder(root, request.job.name), 1, True))
                fill_new(elements[-1].run, request)
            else:
                newest = max((attempt.number for attempt in request.run.attempts()), default=0)
                elements.append(_Element(request.run, newest + 1, False))
                renew(request)
        ids: dict[RunFolder, str] = {}
        for group in _groups(elements):
            ids |= _submit(group, asked, submitted)
    except BaseException:
        _withdraw(elements, submitted)
        raise
    return [
        Submission(each.run, ids[each.run], f"element {ids[each.run]} of an array of Slurm's")
        for each in elements
    ]


def _groups(elements: Sequence[_Element]) -> list[list[_Element]]:
    """Elements by their options, which an array shares; each run's script says when it is told
    to save before its time limit, and the earliest of these holds for all."""
    found: dict[str, list[_Element]] = {}
    for each in elements:
        options = _shared_options(each.run)
        found.setdefault(canonical_json(options), []).append(each)
    return list(found.values())


def _shared_options(run: RunFolder, seconds: int | None = None) -> SlurmOptions:
    options = all_options(read_job(run.job), run, seconds=seconds)
    return {name: value for name, value in options.items() if name not in OWN}


def _submit(
    group: Sequence[_Element], asked: ArrayRequest, submitted: list[str]
) -> dict[RunFolder, str]:
    """Submit one array: the name of each run's element. It is held until every run's folder says
    which it is, for an element may begin at once.

    Args:
        group: its elements.
        asked: what is submitted.
        submitted: arrays so far; this one is added.
    """
    runs = [each.run for each in group]
    jobs = [read_job(run.job) for run in runs]
    seconds = max(seconds_before_limit(run, job) for run, job in zip(runs, jobs, strict=True))
    options = _shared_options(runs[0], seconds)
    number = len(list(asked.folder.glob("array-*.sh"))) + 1
    path = asked.folder / f"array-{number}.sh"
    write_text(path, array_script(asked, options, runs), 0o755)
    words = ["sbatch", "--parsable", "--hold", str(path)]
    array = run_sbatch(words, asked.folder, hint=f"its script: {path}")
    submitted.append(array)
    ids = {}
    for index, (each, job) in enumerate(zip(group, jobs, strict=True)):
        write_script(each.run, job, {}, seconds=seconds)  # secrets are there already
        ids[each.run] = f"{array}_{index}"
        add_slurm_job(each.run, ids[each.run], first_attempt=each.first_attempt)
    if "hold" not in options:
        slurm_output(["scontrol", "release", array])
    return ids


def array_script(asked: ArrayRequest, options: SlurmOptions, runs: Sequence[RunFolder]) -> str:
    """The batch script of an array: a person can read it.

    Args:
        asked: what is submitted.
        options: of sbatch.
        runs: its elements, in order.
    """
    throttle = f"%{asked.at_once}" if asked.at_once else ""
    shape: SlurmOptions = {
        "job-name": asked.name,
        "array": f"0-{len(runs) - 1}{throttle}",
        "output": f"{asked.folder}/array-%A_%a.out",
    }
    lines = [
        "#!/bin/bash",
        *option_lines({**shape, **options}),
        "",
        "# Each element is one run. To go on with those that ended: the task that wrote this.",
        "# The supervisor takes Slurm's signals; until it listens they must not end this shell.",
        "trap '' USR1 TERM",
        "runs=(",
        *(f"  {run.path}" for run in runs),  # paths that batch_script has let pass
        ")",
        'run="${runs[$SLURM_ARRAY_TASK_ID]}"',
        'output="$run/launch/slurm-${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID.out"',
        f'exec /bin/bash "$run/launch/{script_path(runs[0]).name}" >>"$output" 2>&1',
    ]
    return "\n".join(lines) + "\n"


def _withdraw(elements: Sequence[_Element], submitted: Sequence[str]) -> None:
    """Undo what was done: arrays out of the queue, new runs removed."""
    with contextlib.suppress(TrainkitError):
        if submitted:
            slurm_output(["scancel", *submitted])
    for each in elements:
        if each.new:
            shutil.rmtree(each.run.path, ignore_errors=True)
            continue
        kept = [job for job in read_slurm_jobs(each.run) if job.id.split("_")[0] not in submitted]
        if each.run.slurm.is_file():
            write_slurm_jobs(each.run, kept)
        forget_secrets(each.run)
