"""Several runs as one Slurm array: each element is a run of its own, with its own folder, record
and batch script, which the array's script becomes.

An element is called ARRAY_INDEX in launch/slurm.json, as Slurm's own commands name it.

An array is submitted held, and its intent is on disk before that: array-N.held.json beside the
script, until it is released. Who comes after a process that was killed in between finds by it
what that process has left in the queue.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from trainkit.base.documents import canonical_json, document, read_document
from trainkit.base.errors import TrainkitError
from trainkit.base.files import write_json, write_text
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.jobs.clusters import SlurmOptions
from trainkit.jobs.resolved import read_job
from trainkit.launch.scheduler_contract import ArrayRequest, Submission
from trainkit.launch.slurm.allocation import slurm_output
from trainkit.launch.slurm.batch_script import (
    all_options,
    option_lines,
    script_path,
    seconds_before_limit,
)
from trainkit.launch.slurm.sbatch import forget_secrets, sbatch as run_sbatch, write_script
from trainkit.launch.slurm.submit_run import fill
from trainkit.launch.supervise.run_lock import locked_run
from trainkit.runs.folder import RunFolder, new_run_folder
from trainkit.runs.slurm import add_slurm_job, read_slurm_jobs, write_slurm_jobs

OWN = ("job-name", "output")  # options that differ from run to run
FORM = "held-array/1"
HELD = ".held.json"
# a sbatch whose caller was killed may still reach slurmctld: it tries for two minutes and a half
LATE_SECONDS = 600.0


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
        for start in asked.starts:
            run = start.run or new_run_folder(start.root.absolute(), start.job.name)
            newest = max((attempt.number for attempt in run.attempts()), default=0)
            elements.append(_Element(run, newest + 1, new=start.run is None))
            with locked_run(run):
                fill(run, start)
        ids: dict[RunFolder, str] = {}
        for group in _groups(elements):
            ids |= _submit(group, asked, submitted)
    except BaseException:
        _withdraw(elements, submitted)
        with contextlib.suppress(TrainkitError):  # a sbatch that could not tell its number
            settle_arrays(asked.folder)
        raise
    return [
        Submission(each.run, ids[each.run], f"element {ids[each.run]} of an array of Slurm's")
        for each in elements
    ]


def _groups(elements: Sequence[_Element]) -> list[list[_Element]]:
    """Elements by their options, which an array shares; each run's script says when it is asked
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
    name = f"{asked.name}-{number}"
    write_text(path, array_script(name, asked, options, runs), 0o755)
    intent = path.with_suffix(HELD)
    folders = [str(run.path) for run in runs]
    write_json(intent, document(FORM, name=name, runs=folders, stays="hold" in options))
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
    intent.unlink()
    return ids


def settle_arrays(folder: Path) -> list[str]:
    """Settle what processes have left that were killed between sbatch and the release of an array:
    one whose elements all stand in their runs' folders is released, any other is taken out of the
    queue. What was done, in words.

    Args:
        folder: a sweep's, or one that holds those of several.

    Raises TrainkitError (exit 8) where Slurm cannot be asked.
    """
    said = []
    for intent in sorted(folder.rglob(f"array-*{HELD}")):
        value = read_document(intent, FORM)
        words = ["squeue", "--me", "--noheader", "--array", f"--name={value['name']}"]
        lines = slurm_output([*words, "--format=%i|%r"]).splitlines()
        reasons = dict(line.split("|", 1) for line in lines if "|" in line)
        held = [id for id, why in reasons.items() if why.strip() == "JobHeldUser"]
        if not reasons and time.time() - intent.stat().st_mtime < LATE_SECONDS:
            continue  # it may still come
        array = held[0].partition("_")[0] if held else ""
        jobs = [read_slurm_jobs(RunFolder(Path(run))) for run in value["runs"]]
        noted = [each[-1].id if each else "" for each in jobs]
        if held and noted != [f"{array}_{index}" for index in range(len(noted))]:
            slurm_output(["scancel", "--quiet", array])
            said.append(f"job {array}, which a killed process has left held, is out of the queue")
        elif held and not value["stays"]:
            slurm_output(["scontrol", "release", array])
            said.append(f"job {array}, which a killed process has left held, is released")
        intent.unlink()
    return said


def array_script(
    name: str, asked: ArrayRequest, options: SlurmOptions, runs: Sequence[RunFolder]
) -> str:
    """The batch script of an array: a person can read it.

    Args:
        name: of the array, which no other has.
        asked: what is submitted.
        options: of sbatch.
        runs: its elements, in order.
    """
    throttle = f"%{asked.at_once}" if asked.at_once else ""
    shape: SlurmOptions = {
        "job-name": name,
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
