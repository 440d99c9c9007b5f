"""Options about hosts that several tasks have, and how chosen hosts are shown."""

from __future__ import annotations

from collections.abc import Sequence

from trainkit.cli.wrapper import TaskContext
from trainkit.experiment.hosts import quarantine_reasons, refuse_unread_options
from trainkit.experiment.options import HostOptions
from trainkit.jobs.schema import Cluster, Job
from trainkit.launch.hosts.hostfile import Host
from trainkit.launch.hosts.selection import HostList
from trainkit.launch.scheduler_contract import HostsToAsk
from trainkit.launch.scheduler_registry import scheduler_for

SHOWN = 8  # hosts named in one line


def hosts_to_ask(chosen: Cluster, hostfile: str, *, devices: bool) -> HostsToAsk:
    """Hosts of a cluster that can be looked at now; of a scheduler's nodes those that are free.

    Args:
        chosen: the cluster.
        hostfile: another hostfile than its own; "" for that.
        devices: GPUs will be used, not only counted.
    """
    refuse_unread_options(HostOptions(hostfile=hostfile), chosen)
    return scheduler_for(chosen).hosts_to_ask(chosen, hostfile, devices=devices)


def named(hosts: Sequence[Host]) -> str:
    """The names of hosts, the first of many."""
    names = ", ".join(host.name for host in hosts[:SHOWN])
    return names + (f" and {len(hosts) - SHOWN} more" if len(hosts) > SHOWN else "")


def say_hosts(task: TaskContext, job: Job, hosts: HostList) -> None:
    """Which hosts a run has, and which it would have had."""
    if hosts.hostfile is None:
        return
    spares = f"; spare: {named(hosts.spares)}" if hosts.spares else ""
    task.say(
        f"hosts of {hosts.hostfile}: {named(hosts.running)}, {hosts.ranks_per_node}"
        f" rank{'s' if hosts.ranks_per_node > 1 else ''} each{spares}"
    )
    if len(hosts.spares) < job.cluster.spares:
        task.say(f"{len(hosts.spares)} of {job.cluster.spares} spares: no more hosts are left")
    why = quarantine_reasons(job.cluster) if hosts.left_out else {}
    for name in hosts.left_out:
        task.say(
            f"{name} is left out: {why.get(name.lower())}; {task.command} nodes --cluster"
            f" {job.cluster.name} --release {name} lets it in again"
        )
