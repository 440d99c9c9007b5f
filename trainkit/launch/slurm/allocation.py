"""The allocation this process runs in: which job, which nodes, in the order of their numbers. And
which nodes can be looked at now, with the words by which srun gets to them without a place in the
queue."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainkit.base.errors import ConfigError, Exit, TrainkitError
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.jobs.clusters import Cluster
from trainkit.jobs.schema import Job
from trainkit.launch.hosts.hostfile import Host
from trainkit.launch.hosts.selection import HostList

ANSWER_SECONDS = 30.0  # for slurmctld under load
# states in which a node takes another small job; with a mark behind (idle~: powered down) it does
# not answer at once
READY = ("idle", "mixed")
AT_ONCE_SECONDS = 20  # a node that is not free by then is busy
# of sbatch's options, what decides where a job may run
PLACE_OPTIONS = ("partition", "account", "qos", "reservation", "constraint")
NODE_FORM = "%N|%T|%P|%E"


@dataclass(frozen=True)
class SlurmAllocation:
    """What Slurm gave.

    Args:
        job: Slurm's number of the job; of an element of an array ARRAY_INDEX, which its commands
            take too.
        hosts: names of its nodes, in Slurm's order.
        restarts: how often Slurm has put it back into the queue.
    """

    job: str
    hosts: tuple[str, ...]
    restarts: int


def current_allocation(environment: Mapping[str, str]) -> SlurmAllocation:
    """The allocation that the environment tells of. Raises ConfigError (exit 3) outside of one."""
    job = environment.get("SLURM_JOB_ID")
    nodes = environment.get("SLURM_JOB_NODELIST")
    if not job or not nodes:
        raise ConfigError(
            "this is not an allocation of Slurm: SLURM_JOB_ID and SLURM_JOB_NODELIST are not set",
            hint="salloc --nodes=N, then train --existing",
        )
    array = environment.get("SLURM_ARRAY_JOB_ID")
    if array and "SLURM_ARRAY_TASK_ID" in environment:
        job = f"{array}_{environment['SLURM_ARRAY_TASK_ID']}"
    return SlurmAllocation(job, hostnames(nodes), int(environment.get("SLURM_RESTART_COUNT") or 0))


def hostnames(nodelist: str) -> tuple[str, ...]:
    """The names in a node list of Slurm's, "a-[1-3,7]": scontrol alone knows its grammar. Raises
    TrainkitError (exit 8)."""
    return tuple(slurm_output(["scontrol", "show", "hostnames", nodelist]).split())


def allocation_hosts(job: Job, granted: SlurmAllocation) -> HostList:
    """The first nodes of the allocation, as many as the job has. Raises ConfigError where there
    are fewer."""
    if len(granted.hosts) < job.nodes:
        message = (
            f"job '{job.name}' wants {job.nodes} nodes, and allocation {granted.job} has"
            f" {len(granted.hosts)}: {', '.join(granted.hosts)}"
        )
        raise ConfigError(message, hint=f"--nodes {len(granted.hosts)}, or another salloc")
    slots = tuple(range(job.ranks_per_node))
    return HostList(
        tuple(Host(name, slots=slots) for name in granted.hosts[: job.nodes]), job.nodes
    )


def slurm_output(argv: Sequence[str], timeout: float = ANSWER_SECONDS) -> str:
    """What one of Slurm's commands prints. Raises TrainkitError (exit 8) with its words where it
    fails or is not there."""
    done = run_slurm(argv, timeout, late="is slurmctld up? `scontrol ping` says")
    if done.returncode != 0:
        raise TrainkitError(f"{' '.join(argv[:3])}: {slurms_words(done)}", exit=Exit.START)
    return done.stdout


def run_slurm(
    argv: Sequence[str],
    timeout: float,
    *,
    late: str,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run one of Slurm's commands. Raises TrainkitError (exit 8) where it is not there, or does
    not answer in time.

    Args:
        argv: the command.
        timeout: seconds.
        late: the way out where that is over.
        folder: that it runs in; None: this one.
        environment: that it gets; None: ours.
    """
    try:
        return subprocess.run(
            argv,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )
    except FileNotFoundError:
        raise TrainkitError(
            f"there is no {argv[0]} on this machine",
            exit=Exit.START,
            hint="load Slurm's module, install its client, or type it where jobs are submitted",
        ) from None
    except subprocess.TimeoutExpired:
        raise TrainkitError(
            f"{argv[0]} did not answer within {timeout:g} s", exit=Exit.START, hint=late
        ) from None


def slurms_words(done: subprocess.CompletedProcess[str]) -> str:
    """What a command that failed has said, in one line."""
    said = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
    return " ".join(said.split())


def available_nodes(
    cluster: Cluster, environment: Mapping[str, str]
) -> tuple[list[Host], dict[str, str]]:
    """(nodes that can be asked, {other node: why not}). In an allocation (salloc) these are its
    nodes, else the free ones of the cluster's partition.

    Raises TrainkitError (exit 8) where Slurm cannot be asked.
    """
    slots = tuple(range(cluster.gpus_per_node))
    if environment.get("SLURM_JOB_NODELIST"):
        return [Host(name, slots=slots) for name in current_allocation(environment).hosts], {}
    partition = cluster.slurm.get("partition")
    words = [
        "sinfo",
        "--Node",
        "--noheader",
        f"--format={NODE_FORM}",
        *([f"--partition={partition}"] if partition else []),
    ]
    ready = dict[str, Host]()
    others = dict[str, str]()
    for line in slurm_output(words).splitlines():
        if line.count("|") >= NODE_FORM.count("|"):
            name, state, _, reason = line.split("|", NODE_FORM.count("|"))
            if state in READY:
                ready[name] = Host(name, slots=slots)
            else:
                others[name] = f"Slurm says {state}" + (
                    f": {reason}" if reason not in ("", "none") else ""
                )
    return list(ready.values()), {name: why for name, why in others.items() if name not in ready}


def immediate_options(
    cluster: Cluster, environment: Mapping[str, str], *, devices: bool
) -> Sequence[str]:
    """More words of srun. Outside an allocation it makes a small one of its own, at once or not
    at all.

    Args:
        devices: ask for the GPUs too, as far as the cluster's own jobs do.
    """
    if environment.get("SLURM_JOB_ID"):
        return ()
    wanted = (*PLACE_OPTIONS, "gpus-per-node", "gres") if devices else PLACE_OPTIONS
    given = [f"--{name}={cluster.slurm[name]}" for name in wanted if name in cluster.slurm]
    if (
        devices
        and cluster.device_type == "cuda"
        and cluster.gpus_per_node
        and not {"gpus-per-node", "gres"} & set(cluster.slurm)
    ):
        given.append(f"--gpus-per-node={cluster.gpus_per_node}")
    return ("--job-name=trainkit-doctor", f"--immediate={AT_ONCE_SECONDS}", "--time=10", *given)
