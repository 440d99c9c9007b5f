"""The batch script of a run: a person can read it, and submit it by hand."""

from __future__ import annotations

import math
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from trainkit.base.errors import ConfigError
from trainkit.jobs import sbatch
from trainkit.jobs.clusters import SlurmOptions
from trainkit.jobs.schema import Job
from trainkit.launch.programs import program_path
from trainkit.launch.session import SAFE_PATH
from trainkit.runs.folder import RunFolder
from trainkit.runs.summary import summarize_run

SIGNAL_SECONDS = 300  # before the time limit, where no save of the run was seen yet
# of a short time limit, what is kept for saving at most while no save was seen; half of it where
# one was
LIMIT_SHARE = 4
GPU_OPTIONS = {"gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket", "tres-per-task"}
CPU_OPTIONS = {
    "cpus-per-task",
    "cpus-per-gpu",
    "mincpus",
    "ntasks",
    "ntasks-per-node",
    "cores-per-socket",
    "extra-node-info",
    "exclusive",
    "tres-per-task",
}
MEMORY_OPTIONS = {"mem", "mem-per-cpu", "mem-per-gpu"}
PRECISION_SECONDS = 60  # Slurm looks at time limits once in that time
# What a job gets of its submitter's environment; the rest is what a login on the node gives, and
# the prolog. slurm.export says otherwise.
EXPORTED = ("HOME", "USER", "LOGNAME", "SHELL", "PATH", "LANG", "LC_ALL", "TZ")


def batch_script(job: Job, run: RunFolder, *, seconds: int | None = None) -> str:
    """The text of the script.

    Args:
        job: the job; its cluster is Slurm's.
        run: its folder, below a root that the nodes share.
        seconds: before the time limit, when the supervisor is asked to save; by default 5 minutes,
            or a quarter of a shorter limit.

    Raises ConfigError for a root whose path does not fit into such a script.
    """
    if not SAFE_PATH.fullmatch(str(run.path)):
        hint = "letters, digits and _ . / + = : @ , - only: Slurm replaces others in names of files"
        raise ConfigError(
            f"clusters.{job.cluster.name}.root: {run.path} does not fit into a batch script",
            hint=hint,
        )
    python = job.cluster.python or sys.executable
    last = [python, "-I", str(program_path(run.code, "supervisor")), str(run.path)]
    failed = f'code=$?; [ "$code" = 0 ] || exec {shlex.join(last)} --prolog-failed "$code"'
    if job.cluster.prolog:
        prolog = [
            f"trap {shlex.quote(failed)} EXIT  # the other nodes may be good",
            *job.cluster.prolog,
            "trap - EXIT",
        ]
    else:
        prolog = []
    lines = [
        "#!/bin/bash",
        *option_lines(all_options(job, run, seconds=seconds)),
        "",
        f"# Run {run.id} of job {job.name}. By hand: sbatch {script_path(run)}",
        "# The supervisor takes Slurm's signals; until it listens they must not end this shell.",
        "trap '' USR1 TERM",
        'shopt -q login_shell || exec /bin/bash -l "$0"  # a login takes its time: only now',
        "set -e",
        *prolog,
        f"exec {shlex.join(last)}",
    ]
    return "\n".join(lines) + "\n"


def all_options(job: Job, run: RunFolder, *, seconds: int | None = None) -> SlurmOptions:
    """sbatch's options in the order they are written: the job's own over the cluster's over what
    trainkit needs."""
    given = job.sbatch_options
    own: SlurmOptions = {"job-name": f"{job.name}-{run.id}", "nodes": job.nodes}
    if "ntasks" not in given:
        own["ntasks-per-node"] = 1  # one agent; it starts the ranks
    own |= _resources(job, given)
    ends: SlurmOptions = {
        "output": f"{run.path}/launch/slurm-%j.out",
        "open-mode": "append",
        "export": ",".join(EXPORTED),
    }
    if job.resume == "requeue" and "no-requeue" not in given:
        ends["requeue"] = True
    elif "requeue" not in given:
        ends["no-requeue"] = True
    if "dependency" in given:
        ends["kill-on-invalid-dep"] = "yes"  # else a job whose dependency has failed never ends
    ends["signal"] = (
        f"B:USR1@{_within_limit(job, SIGNAL_SECONDS, LIMIT_SHARE) if seconds is None else seconds}"
    )
    return {**own, **given, **{name: value for name, value in ends.items() if name not in given}}


def _resources(job: Job, given: SlurmOptions) -> SlurmOptions:
    """What the job's ranks need of a node, as far as jobs.toml has not asked for it in sbatch's
    own words: Slurm gives a task one CPU and no GPU.

    Raises ConfigError where the ranks leave a part of a node to others: how much of its CPUs is
    theirs cannot be derived.
    """
    cluster = job.cluster
    ranks = job.ranks_per_node
    found = SlurmOptions()
    if (
        cluster.device_type == "cuda"
        and not GPU_OPTIONS & set(given)
        and "gpu" not in str(given.get("gres", ""))
    ):
        found["gpus-per-node"] = min(ranks, cluster.gpus_per_node or ranks)
    if CPU_OPTIONS & set(given):
        return found
    if cluster.device_type == "cpu":
        return found | {"cpus-per-task": ranks}
    if ranks < cluster.gpus_per_node:
        message = (
            f"{ranks} ranks use {ranks} of the {cluster.gpus_per_node} GPUs of a node, and no"
            " option of sbatch says how many of its CPUs they get"
        )
        raise ConfigError(
            f"clusters.{cluster.name}.slurm: {message}",
            hint=(
                "slurm.cpus-per-task = CPUs of a node for all its ranks, or slurm.exclusive = true"
            ),
        )
    found["exclusive"] = True
    # all of it: exclusive gives CPUs and GPUs only
    return found if MEMORY_OPTIONS & set(given) else found | {"mem": 0}


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
    """What sbatch will put into the job's environment of these options, as far as the line of
    srun depends on it (sbatch(1), output environment variables)."""
    names = {
        "cpus-per-task": "SLURM_CPUS_PER_TASK",
        "ntasks-per-node": "SLURM_NTASKS_PER_NODE",
        "hint": "SLURM_HINT",
        "export": "SLURM_EXPORT_ENV",
    }
    return {variable: str(options[name]) for name, variable in names.items() if name in options}


def seconds_before_limit(run: RunFolder, job: Job) -> int:
    """How long before its time limit a run must be asked to save: twice the last step and save,
    and Slurm's own precision."""
    speed = summarize_run(run).tokens_per_second
    saved = sorted(run.checkpoints.glob("step-*/manifest.json")) if run.checkpoints.is_dir() else []
    if not saved or not speed:
        return _within_limit(job, SIGNAL_SECONDS, LIMIT_SHARE)
    step = job.global_batch_size * job.model.seq_length / speed
    folder = saved[-1].parent
    times = [file.stat().st_mtime for file in folder.rglob("*") if file.is_file()]
    return _within_limit(
        job, math.ceil(2 * (max(times) - min(times) + step)) + PRECISION_SECONDS, 2
    )


def _within_limit(job: Job, seconds: int, share: int) -> int:
    """`seconds`, but no more than one part in `share` of the job's time limit, as far as
    jobs.toml says it: a job that is asked at once never trains."""
    limit = sbatch.limit_seconds(job.sbatch_options)
    return seconds if limit is None else max(1, min(seconds, limit // share))


def signal_seconds(run: RunFolder) -> int:
    """How long before its time limit the script of a run has Slurm tell it to save."""
    line = re.search(r"^#SBATCH --signal=(\S+)", script_path(run).read_text(), re.MULTILINE)
    return (sbatch.signal_time({"signal": line.group(1)}) or 0) if line else 0
