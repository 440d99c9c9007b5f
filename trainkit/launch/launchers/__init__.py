"""How agents are started: one file a launcher."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from trainkit.base.address import local_address_in, local_address_toward
from trainkit.base.errors import ConfigError, TrainkitError
from trainkit.jobs.clusters import Cluster
from trainkit.launch.hosts.hostfile import OVER_SSH, Host
from trainkit.launch.launchers.contract import Launcher
from trainkit.launch.launchers.kubernetes import Kubernetes
from trainkit.launch.launchers.local import Local
from trainkit.launch.launchers.pdsh import Pdsh
from trainkit.launch.launchers.slurm import Slurm
from trainkit.launch.launchers.ssh import Ssh, ssh_host_name
from trainkit.launch.session import is_this_machine

LAUNCHERS: dict[str, Launcher] = {
    launcher.name: launcher for launcher in (Local(), Ssh(), Pdsh(), Slurm(), Kubernetes())
}

TRIED = 8  # hosts: a name server that does not answer takes seconds for each


def supervisor_address(cluster: Cluster, hosts: Sequence[Host]) -> str:
    """The address of this machine that the agents dial: on the cluster's network where we have
    one there, else on the way to the first other host that has an address.

    Raises TrainkitError (exit 8) where no way leads to any of the first hosts.
    """
    away = [host for host in hosts if not is_this_machine(host)]
    if not away:
        return "127.0.0.1"
    if cluster.interface:
        # the head of a cluster need not be on the network of its ranks
        with contextlib.suppress(ConfigError):
            return local_address_in(cluster.interface)
    problem: TrainkitError | None = None
    for host in away[:TRIED]:
        try:
            return local_address_toward(
                ssh_host_name(cluster, host) if cluster.launcher in OVER_SSH else host.name
            )
        except TrainkitError as error:
            # a host that has no address is a row of a table later; here it only cannot show the way
            problem = problem or error
    assert problem is not None
    raise problem


__all__ = ["LAUNCHERS", "Launcher", "supervisor_address"]
