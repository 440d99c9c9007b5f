"""The batch script of a run: a person can read it, and submit it by hand."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from trainkit.base.errors import ConfigError
from trainkit.jobs import sbatch
from trainkit.jobs.clusters import SlurmOptions
from trainkit.jobs.schema import Job
from trainkit.launch.session import SAFE_PATH
from trainkit.runs.folder import RunFolder
from trainkit.runs.summary import summarize

SIGNAL_SECONDS = 300  # before the time limit, where no save of the run was seen yet
PRECISION_SECONDS = 60  # Slurm looks at time limits once in that time
# What a job gets of its submitter's environment; the rest is what a login on the node gives, and the prolog. slurm.export says otherwise.
EXPORTED = ("HOME", "USER", "LOGNAME", "SHELL", "PATH", "LANG", "LC_ALL", "TZ")


def batch_script(job: Job, run: RunFolder, *, seconds: int = SIGNAL_SECONDS) -> str:
    """The text of the script.

    Args:
        job: the job; its cluster is Slurm's.
        run: its folder, below a root that the nodes share.
        seconds: before the time limit, when the supervisor is told to save.

    Raises ConfigError for a root whose path does not fit into such a script.
    """
    if not SAFE_PATH.fullmatch(str(run.path)):
        hint = "letters, digits and _ . / + = : @ , - only: Slurm replaces others in names of files"
        raise ConfigError(f"clusters.{job.cluster.name}.root: {run.path} does not fit into a batch script", hint=hint)
    python = job.cluster.python or sys.executable
    last = [python, "-I", str(run.code / "trainkit" / "launch" / "supervisor.py"), str(run.path)]
    lines = [
        "#!/bin/bash -l",
        *option_lines(all_options(job, run, seconds=seconds)),
        "",
        f"# Run {run.id} of job {job.name}. By hand: sbatch {script_path(run)}",
        "# The supervisor takes Slurm's signals; until it listens they must not end this shell.",
        "trap '' USR1 TERM",
        "set -e",
        *job.cluster.prolog,
        f"exec {shlex.join(last)}",
    ]
    return "\n".join(lines) + "\n"


def all_options(job: Job, run: RunFolder, *, seconds: int = SIGNAL_SECONDS) -> SlurmOptions:
    """sbatch's options in the order they are written: the job's own over the cluster's over what trainkit needs."""
    given = job.sbatch_options
    own: SlurmOptions = {"job-name": job.name, "nodes": job.nodes}
    if "ntasks" not in given:
        own["ntasks-per-node"] = 1  # one agent; it starts the ranks
    ends: SlurmOptions = {"output": f"{run.path}/launch/slurm-%j.out", "open-mode": "append", "export": ",".join(EXPORTED)}
    if job.resume == "requeue" and "no-requeue" not in given:
        ends["requeue"] = True
    elif "requeue" not in given:
        ends["no-requeue"] = True
    if "dependency" in given:
        ends["kill-on-invalid-dep"] = "yes"  # else a job whose dependency has failed waits for ever
    ends["signal"] = f"B:USR1@{seconds}"
    return {**own, **given, **{name: value for name, value in ends.items() if name not in given}}


def script_path(run: RunFolder) -> Path:
    return run.path / "launch" / "slurm.sh"


def option_lines(options: SlurmOptions) -> list[str]:
    """sbatch's options as the lines of a script that it reads."""
    return [f"#SBATCH {_quoted(word)}" for word in sbatch.words(options)]


def _quoted(word: str) -> str:
    """A word as sbatch reads #SBATCH lines: quotes as in a shell, and a # begins a comment."""
    name, equals, value = word.partition("=")
    return f"{name}{equals}{shlex.quote(value)}" if equals else word


def allocation_variables(options: Mapping[str, str | int | bool]) -> dict[str, str]:
    """What sbatch will put into the job's environment of these options, as far as the line of srun depends on it (sbatch(1), output environment variables)."""
    names = {"cpus-per-task": "SLURM_CPUS_PER_TASK", "ntasks-per-node": "SLURM_NTASKS_PER_NODE", "hint": "SLURM_HINT", "export": "SLURM_EXPORT_ENV"}
    return {variable: str(options[name]) for name, variable in names.items() if name in options}


def seconds_before_limit(run: RunFolder, job: Job) -> int:
    """How long before its time limit a run must be told to save: twice the last step and save, and Slurm's own precision."""
    speed = summarize(run).tokens_per_second
    saved = sorted(run.checkpoints.glob("step-*/manifest.json")) if run.checkpoints.is_dir() else []
    if not saved or not speed:
        return SIGNAL_SECONDS
    step = job.global_batch_size * job.model.seq_length / speed
    folder = saved[-1].parent
    times = [file.stat().st_mtime for file in folder.rglob("*") if file.is_file()]
    return math.ceil(2 * (max(times) - min(times) + step)) + PRECISION_SECONDS
