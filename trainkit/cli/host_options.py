"""The hosts that a task was given: words of the command line, the cluster's hostfile, who is in
quarantine."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trainkit.base.errors import ConfigError, Problem, SourceLocation
from trainkit.cli.wrapper import TaskContext
from trainkit.jobs.load import Jobs
from trainkit.jobs.provenance import SET, SourcedValue
from trainkit.jobs.resolved import ResolvedJob
from trainkit.jobs.schema import Cluster, Job
from trainkit.launch.hosts.hostfile import OVER_SSH, Host, find_hostfile
from trainkit.launch.hosts.quarantine import read_quarantine
from trainkit.launch.hosts.selection import (
    HostList,
    choose_hosts,
    load_hosts,
    local_hosts,
    this_host,
)
from trainkit.launch.launchers.contract import Launcher
from trainkit.launch.launchers.slurm import Slurm
from trainkit.launch.slurm.allocation import granted, hosts_of
from trainkit.launch.slurm.node_access import ready_nodes, words_at_once

RANKS = "cluster.ranks_per_node"
SHOWN = 8  # hosts named in one line


@dataclass(frozen=True)
class HostOptions:
    """--cluster, --nodes, --hostfile, --include, --exclude, --existing; empty, 0 or false where
    not given."""

    cluster: str = ""
    nodes: int = 0
    hostfile: str = ""
    include: str = ""
    exclude: str = ""
    existing: bool = False

    def sets(self) -> list[str]:
        """Those that are values of the job, as overrides."""
        given = {
            "cluster": self.cluster,
            "cluster.hostfile": (
                self.hostfile and os.path.abspath(os.path.expanduser(self.hostfile))
            ),
        }
        words = [f"{key}={json.dumps(value)}" for key, value in given.items() if value]
        return [*words, *([f"nodes={self.nodes}"] if self.nodes else [])]

    def refuse_where_unread(self, cluster: Cluster) -> None:
        """Raise ConfigError for words about hosts where the cluster has no hostfile: they would
        be ignored."""
        if self.existing and cluster.launcher != "slurm":
            raise ConfigError(
                f"--existing is for clusters whose launcher is slurm; cluster '{cluster.name}' has"
                f" launcher = '{cluster.launcher}'"
            )
        given = [name for name in ("hostfile", "include", "exclude") if getattr(self, name)]
        if given and cluster.launcher not in OVER_SSH:
            raise ConfigError(
                f"--{given[0]} is for clusters whose launcher is ssh or pdsh; cluster"
                f" '{cluster.name}' has launcher = '{cluster.launcher}'",
                hint="name another with --cluster",
            )


NO_HOST_OPTIONS = HostOptions()


def left_out(cluster: Cluster) -> dict[str, str]:
    """Hosts in quarantine and why, by name in small letters."""
    entries = read_quarantine(Path(cluster.root or "."))
    return {
        name: f"{entry.why} (run {entry.run}), until {entry.until}"
        for name, entry in entries.items()
    }


def hosts_of_job(job: Job, words: HostOptions, former: HostList | None = None) -> HostList:
    """The hosts that a job runs on. Raises ConfigError as the hostfile's reader, its filters and
    `choose_hosts` do.

    Args:
        former: those that a run had, which goes on: they are taken again, as far as they are not
        in quarantine, where no others are asked for.
    """
    words.refuse_where_unread(job.cluster)
    if words.existing:
        return hosts_of(job, granted(os.environ))
    if job.cluster.launcher not in OVER_SSH:
        return local_hosts(job)
    bad = left_out(job.cluster)
    if former is not None and not (words.hostfile or words.include or words.exclude):
        usable = [host for host in former.hosts if host.name.lower() not in bad]
        if len(usable) >= job.nodes:
            passed_over = tuple(host.name for host in former.hosts if host not in usable)
            return HostList(
                tuple(usable[: job.nodes + job.cluster.spares]),
                job.nodes,
                former.hostfile,
                passed_over,
            )
    if former is not None and former.hostfile:
        before = former.hostfile
    else:
        before = ""
    path = find_hostfile(job.cluster, words.hostfile or before).absolute()
    return choose_hosts(job, path, include=words.include, exclude=words.exclude, bad=bad)


def resolve_on_hosts(
    jobs: Jobs, name: str, sets: Sequence[str], words: HostOptions
) -> tuple[ResolvedJob, HostList]:
    """A job and its hosts. The hosts' slots are its ranks a node, whatever the cluster says.

    Raises ConfigError for everything that is wrong with either, and where --set asks for another
    number of ranks than there are slots.
    """
    given = [*words.sets(), *sets]
    resolved = jobs.resolve(name, given)
    hosts = hosts_of_job(resolved.job, words)
    if hosts.ranks_per_node == resolved.job.ranks_per_node:
        return resolved, hosts
    before = resolved.origins[RANKS]
    _refuse_other_ranks(before, hosts)
    resolved = jobs.resolve(name, [*given, f"{RANKS}={hosts.ranks_per_node}"])
    slots = SourcedValue(
        hosts.ranks_per_node, SourceLocation(str(hosts.hostfile), hosts.hosts[0].line)
    ).over(before)
    return replace(resolved, origins={**resolved.origins, RANKS: slots}), hosts


def _refuse_other_ranks(asked: SourcedValue, hosts: HostList) -> None:
    if asked.place == SET:
        message = (
            f"{RANKS} = {asked.value}, but {hosts.hosts[0].name} has {hosts.ranks_per_node} slots"
            f" in {hosts.hostfile}"
        )
        raise ConfigError(
            [
                Problem(
                    message,
                    SET,
                    "a hostfile's slots are the ranks of a node: take some with --include HOST:0-3,"
                    " or change the file",
                )
            ]
        )


def hosts_to_ask(
    chosen: Cluster, hostfile: str, *, devices: bool
) -> tuple[list[Host], dict[str, str], Launcher | None]:
    """(hosts to look at, hosts that cannot be asked and why, the launcher where it is not simply
    the cluster's); of Slurm's nodes those that are free.

    Args:
        devices: GPUs will be used, not only counted.
    """
    HostOptions(hostfile=hostfile).refuse_where_unread(chosen)
    if chosen.launcher == "slurm":
        hosts, others = ready_nodes(chosen, os.environ)
        return hosts, others, Slurm(words_at_once(chosen, os.environ, devices=devices))
    if chosen.launcher in OVER_SSH:
        return list(load_hosts(find_hostfile(chosen, hostfile))), {}, None
    return [this_host()], {}, None


def sets_of_hosts(job: Job, hosts: HostList, sets: Sequence[str]) -> list[str]:
    """The override that gives a run that goes on as many ranks a node as its hosts have slots;
    none where it has them."""
    if hosts.ranks_per_node == job.ranks_per_node:
        return []
    for text in sets:
        if text.split("=")[0].strip() == RANKS:
            _refuse_other_ranks(SourcedValue(job.ranks_per_node, SET), hosts)
    return [f"{RANKS}={hosts.ranks_per_node}"]


def named(hosts: Sequence[Host]) -> str:
    """The names of hosts, the first of many."""
    names = ", ".join(host.name for host in hosts[:SHOWN])
    return names + (f" and {len(hosts) - SHOWN} more" if len(hosts) > SHOWN else "")


def say_hosts(task: TaskContext, job: Job, hosts: HostList) -> None:
    """Which hosts a run has, and which it would have had."""
    if hosts.hostfile is None:
        return
    if hosts.spares:
        spares = f"; spare: {named(hosts.spares)}"
    else:
        spares = ""
    task.say(
        f"hosts of {hosts.hostfile}: {named(hosts.running)}, {hosts.ranks_per_node}"
        f" rank{'s' if hosts.ranks_per_node > 1 else ''} each{spares}"
    )
    if len(hosts.spares) < job.cluster.spares:
        task.say(f"{len(hosts.spares)} of {job.cluster.spares} spares: no more hosts are left")
    if hosts.left_out:
        why = left_out(job.cluster)
    else:
        why = {}
    for name in hosts.left_out:
        task.say(
            f"{name} is left out: {why.get(name.lower())}; {task.command} nodes --cluster"
            f" {job.cluster.name} --release {name} lets it in again"
        )
