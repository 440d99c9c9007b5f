"""What a dry run shows of a batch job."""

from __future__ import annotations

import shlex
from pathlib import Path

from trainkit.engines.contract import engine_lines
from trainkit.engines.registry import ENGINES
from trainkit.jobs.schema import Job
from trainkit.launch.hosts.hostfile import Host
from trainkit.launch.launchers.slurm import mount_check_argv, pyxis_container, srun_argv
from trainkit.launch.scheduler_contract import DryRun
from trainkit.launch.session_preview import preview_session, script_lines
from trainkit.launch.slurm.batch_script import all_options, allocation_variables, batch_script
from trainkit.launch.slurm.sbatch import dependency_options, run_sbatch_argv
from trainkit.runs.folder import RunFolder


def preview_batch_job(job: Job, after: str) -> DryRun:
    """The batch script, the line that submits it and the line of srun in it. Nothing is written.

    Args:
        job: the job; its cluster is Slurm's.
        after: the job that completes its stages; "" where they are made.
    """
    root = Path(job.cluster.root or ".")
    run = RunFolder(root.absolute() / "runs" / job.name / "RUN")
    text = batch_script(job, run)
    submit_line = run_sbatch_argv(
        run, dependency_options(after, job.sbatch_options) if after else []
    )
    slots = tuple(range(job.ranks_per_node))
    hosts = [Host(f"NODE{node}", slots=slots) for node in range(job.nodes)]
    session = preview_session(job, run, 1, hosts)
    variables = {
        "SLURM_JOB_CPUS_PER_NODE": "CPUS_OF_A_NODE",
        **allocation_variables(all_options(job, run)),
    }
    launcher = [
        *([mount_check_argv(session, hosts, variables)] if pyxis_container(session) else []),
        srun_argv(session, hosts, variables),
    ]
    command = ENGINES[job.engine].command(job, run, 1)
    lines = [
        f"would submit: {shlex.join(submit_line)}",
        *(f"  {line}" for line in text.rstrip("\n").split("\n")),
        *(f"would run in it: {shlex.join(argv)}" for argv in launcher),
        *script_lines(session),
        f"would start on each of {job.nodes} nodes: {job.ranks_per_node} ranks, each"
        f" {shlex.join(command.argv)}",
        *engine_lines(command),
    ]
    values: dict[str, object] = {
        "command": command.to_json(),
        "files": dict(command.files),
        "sbatch": submit_line,
        "script": text,
        "launcher": [list(argv) for argv in launcher],
    }
    return DryRun(lines, values)
