"""What `train`, `resume`, `cancel` and `nodes` do where Slurm has the nodes."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from rich.markup import escape

from trainkit.base.documents import document
from trainkit.base.errors import Exit, TrainkitError
from trainkit.cli.run.dry_run import say_scripts, session_to_show
from trainkit.cli.tables import Listing
from trainkit.cli.wrapper import TaskContext, TaskResult
from trainkit.engines import ENGINES
from trainkit.jobs.schema import Cluster, Job
from trainkit.launch.hosts.hostfile import Host
from trainkit.launch.launchers.slurm import mount_check_argv, pyxis_container, srun_argv
from trainkit.launch.slurm.allocation import ask
from trainkit.launch.slurm.arrays import over_in_slurm
from trainkit.launch.slurm.batch_script import all_options, allocation_variables, batch_script
from trainkit.launch.slurm.job_graph import still_to_be_made
from trainkit.launch.slurm.reconcile import newest_job
from trainkit.launch.slurm.sbatch import note_end, submit_words, words_after
from trainkit.launch.slurm.squeue import look
from trainkit.launch.slurm.withdraw import take_out
from trainkit.plan.planner import Plan
from trainkit.runs.folder import RunFolder
from trainkit.runs.slurm import SlurmJob, drop_slurm_job, read_slurm_jobs

CANCEL_SECONDS = 120.0  # for Slurm to end a job: KillWait, and epilogs
POLL_SECONDS = 0.5


def dry_run(task: TaskContext, job: Job, plan: Plan, root: Path, after: str = "") -> TaskResult:
    """Print the batch script, the line that submits it and the line of srun in it. Nothing is
    written. `after`: the job that completes its stages."""
    run = RunFolder(root.absolute() / "runs" / job.name / "RUN")
    text = batch_script(job, run)
    line = submit_words(run, words_after(after, job.sbatch_options) if after else [])
    hosts = [
        Host(f"NODE{node}", slots=tuple(range(job.ranks_per_node))) for node in range(job.nodes)
    ]
    session = session_to_show(job, run, 1, hosts)
    variables = {
        "SLURM_JOB_CPUS_PER_NODE": "CPUS_OF_A_NODE",
        **allocation_variables(all_options(job, run)),
    }
    lines = [
        *([mount_check_argv(session, hosts, variables)] if pyxis_container(session) else []),
        srun_argv(session, hosts, variables),
    ]
    command = ENGINES[job.engine].command(job, run, 1)
    task.say(f"would submit: {shlex.join(line)}")
    for each in text.rstrip("\n").split("\n"):
        task.say(f"  {each}")
    for words in lines:
        task.say(f"would run in it: {shlex.join(words)}")
    say_scripts(task, session)
    task.say(
        f"would start on each of {job.nodes} nodes: {job.ranks_per_node} ranks, each"
        f" {shlex.join(command.argv)}"
    )
    return TaskResult(
        document(
            "dry-run/1",
            plan=plan.to_json(),
            command=command.to_json(),
            sbatch=line,
            script=text,
            launcher=[list(words) for words in lines],
        )
    )


def say_submitted(task: TaskContext, run: RunFolder, id: str, *, detach: bool) -> None:
    """What has been done, and how to go on from here."""
    task.say(f"run {run.id} is job {id} of Slurm; its script: {run.path / 'launch' / 'slurm.sh'}")
    if detach:
        task.say(f"  {task.command} attach {id} follows it, {task.command} cancel {id} stops it")


def end_job(run: RunFolder, job: SlurmJob) -> tuple[str, list[str]]:
    """scancel the run's job, its successors and those that make its stages, and wait until Slurm
    says that all are over: (its last state, jobs of its stages that were taken out too). Raises
    TrainkitError (exit 13), naming them, where they are not."""
    ids = [job.id, *(each.id for each in read_slurm_jobs(run) if each.follows == job.id)]
    refused = ""
    try:
        ask(["scancel", *ids])
    except TrainkitError as error:  # as for a job that is over, by some versions
        refused = error.message
    deadline = time.monotonic() + CANCEL_SECONDS
    if still_to_be_made(run):
        stages = end_stages(run, deadline)
    else:
        stages = []
    while going := _still_going(ids, refused):
        if refused or time.monotonic() > deadline:
            if refused:
                told = f"could not be cancelled ({refused})"
            else:
                told = f"were cancelled {CANCEL_SECONDS:.0f} s ago"
            states = ", ".join(f"{id} {state}" for id, state in going.items())
            raise TrainkitError(
                f"jobs {told}, and Slurm still has them: {states}",
                exit=Exit.CONTACT_LOST,
                hint=f"scancel {' '.join(going)}",
            )
        time.sleep(POLL_SECONDS)
    for each in ids[1:]:
        drop_slurm_job(run, each)
    seen = look([job.id]).get(job.id)
    return seen.state if seen else "gone", stages


def _still_going(ids: Sequence[str], refused: str) -> dict[str, str]:
    """State of those of the jobs that are not over. Raises TrainkitError (exit 13), naming them
    all, where Slurm cannot be asked."""
    try:
        return {id: seen.state for id, seen in look(ids).items() if not seen.over}
    except TrainkitError as error:
        message = f"whether jobs {', '.join(ids)} are over is not known: {refused or error.message}"
        raise TrainkitError(
            message, exit=Exit.CONTACT_LOST, hint=f"scancel {' '.join(ids)}, once Slurm answers"
        ) from None


def end_stages(run: RunFolder, deadline: float) -> list[str]:
    """scancel the jobs that make a run's stages, but for those that another run waits for too,
    and wait for their end: their numbers.

    Raises TrainkitError (exit 13) where they are not over by `deadline` (of time.monotonic()).
    """
    ids = take_out(run)
    while ids and not over_in_slurm(ids):
        if time.monotonic() > deadline:
            raise TrainkitError(
                f"jobs {', '.join(ids)} were cancelled, and Slurm still runs them",
                exit=Exit.CONTACT_LOST,
                hint=f"squeue --jobs={','.join(ids)}",
            )
        time.sleep(POLL_SECONDS)
    return ids


def cancel_queued(task: TaskContext, run: RunFolder) -> None:
    """Take a run that waits out of the queue, and note that."""
    job = newest_job(run)
    assert job is not None
    state, stages = end_job(run, job)
    note_end(
        run,
        job.id,
        {
            "state": "CANCELLED",
            "message": f"job {job.id} was taken out of the queue",
            "exit": int(Exit.CANCELLED),
        },
    )
    if stages:
        with_stages = f", with jobs {', '.join(stages)} that were to make its stages"
    else:
        with_stages = ""
    task.say(f"job {job.id} is out of the queue ({state}){with_stages}")


def make_sure(run: RunFolder) -> None:
    """After its supervisor has stopped a run: the job is to end too, with any successor. Raises
    TrainkitError (exit 13) where it does not."""
    jobs = read_slurm_jobs(run)
    if jobs:  # of a chain the one that the newest follows may still run
        end_job(run, next((job for job in jobs if job.id == jobs[-1].follows), jobs[-1]))


def nodes(task: TaskContext, cluster: Cluster) -> TaskResult:
    """The task `nodes` of a cluster of Slurm's: what sinfo knows, drained nodes with the reason."""
    argv = ["sinfo", "--Node", "--noheader", "--format=%N|%T|%P|%c|%G|%E"]
    rows = [
        dict(
            zip(
                ("host", "state", "partition", "cpus", "gres", "reason"),
                line.split("|"),
                strict=True,
            )
        )
        for line in ask(argv).splitlines()
        if line
    ]
    table = Listing(
        "host", "state", "partition", "CPUs", "GRES", "reason", drop=("GRES", "CPUs", "partition")
    )
    for row in rows:
        if row["reason"] == "none":
            row["reason"] = ""
        table.add_row(
            *(escape(row[key]) for key in ("host", "state", "partition", "cpus", "gres", "reason"))
        )
    if not task.json:
        task.console.print(table)
    return TaskResult(document("nodes/1", cluster=cluster.name, hosts=rows))
