"""Which nodes of Slurm's can be looked at now, and the words by which srun gets to them without
a place in the queue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainkit.jobs.clusters import Cluster
from trainkit.launch.hosts.hostfile import Host
from trainkit.launch.slurm.allocation import current_allocation, slurm_output

# states in which a node takes another small job; with a mark behind (idle~: powered down) it does
# not answer at once
READY = ("idle", "mixed")
AT_ONCE_SECONDS = 20  # a node that is not free by then is busy
# of sbatch's options, what decides where a job may run
OWN = ("partition", "account", "qos", "reservation", "constraint")
FORM = "%N|%T|%P|%E"


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
        f"--format={FORM}",
        *([f"--partition={partition}"] if partition else []),
    ]
    ready = dict[str, Host]()
    others = dict[str, str]()
    for line in slurm_output(words).splitlines():
        if line.count("|") >= FORM.count("|"):
            name, state, _, reason = line.split("|", FORM.count("|"))
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
    wanted = (*OWN, "gpus-per-node", "gres") if devices else OWN
    given = [f"--{name}={cluster.slurm[name]}" for name in wanted if name in cluster.slurm]
    if (
        devices
        and cluster.device_type == "cuda"
        and cluster.gpus_per_node
        and not {"gpus-per-node", "gres"} & set(cluster.slurm)
    ):
        given.append(f"--gpus-per-node={cluster.gpus_per_node}")
    return ("--job-name=trainkit-doctor", f"--immediate={AT_ONCE_SECONDS}", "--time=10", *given)
