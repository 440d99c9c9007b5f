"""Where a run goes: its options about hosts, the cluster's hostfile, who is in quarantine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from trainkit.base.errors import ConfigError, Problem, SourceLocation
from trainkit.experiment.options import HostOptions
from trainkit.jobs.load import Jobs
from trainkit.jobs.provenance import SET, SourcedValue
from trainkit.jobs.resolved import ResolvedJob
from trainkit.jobs.schema import Cluster, Job
from trainkit.launch.hosts.hostfile import find_hostfile
from trainkit.launch.hosts.quarantine import read_quarantine
from trainkit.launch.hosts.selection import HostList, choose_hosts, local_hosts
from trainkit.launch.scheduler_registry import launchers_with_queue, scheduler_for

RANKS = "cluster.ranks_per_node"


def refuse_unread_options(options: HostOptions, cluster: Cluster) -> None:
    """Raise ConfigError for options about hosts that the cluster's launcher would ignore."""
    if options.existing and not scheduler_for(cluster).queues:
        raise ConfigError(
            f"--existing is for clusters whose launcher is {' or '.join(launchers_with_queue())};"
            f" cluster '{cluster.name}' has launcher = '{cluster.launcher}'"
        )
    given = [name for name in ("hostfile", "include", "exclude") if getattr(options, name)]
    if given and not cluster.launcher_traits.hostfile:
        raise ConfigError(
            f"--{given[0]} is for clusters whose launcher is ssh or pdsh; cluster"
            f" '{cluster.name}' has launcher = '{cluster.launcher}'",
            hint="name another with --cluster",
        )


def quarantine_reasons(cluster: Cluster) -> dict[str, str]:
    """Hosts in quarantine and why, by name in small letters."""
    entries = read_quarantine(cluster.root_folder)
    return {
        name: entry.why + (f" (run {entry.run})" if entry.run else "") + f", until {entry.until}"
        for name, entry in entries.items()
    }


def hosts_of_job(job: Job, options: HostOptions, former: HostList | None = None) -> HostList:
    """The hosts that a job runs on. Raises ConfigError as the hostfile's reader, its filters and
    `choose_hosts` do.

    Args:
        job: the job.
        options: which hosts are asked for.
        former: those that a run had, which goes on: they are used again, as far as they are not
            in quarantine, where no others are asked for.
    """
    refuse_unread_options(options, job.cluster)
    if options.existing:
        return scheduler_for(job.cluster).allocated_hosts(job)
    if not job.cluster.launcher_traits.hostfile:
        return local_hosts(job)
    bad = quarantine_reasons(job.cluster)
    if former is not None and not (options.hostfile or options.include or options.exclude):
        usable = [host for host in former.hosts if host.name.lower() not in bad]
        if len(usable) >= job.nodes:
            passed_over = tuple(host.name for host in former.hosts if host not in usable)
            return HostList(
                tuple(usable[: job.nodes + job.cluster.spares]),
                job.nodes,
                former.hostfile,
                passed_over,
            )
    before = former.hostfile if former is not None and former.hostfile else ""
    path = find_hostfile(job.cluster, options.hostfile or before).absolute()
    return choose_hosts(job, path, include=options.include, exclude=options.exclude, bad=bad)


def job_on_hosts(
    jobs: Jobs, resolved: ResolvedJob, options: HostOptions
) -> tuple[ResolvedJob, HostList]:
    """A job on its hosts, and these: the hosts' slots are its ranks a node, whatever the cluster
    says.

    Args:
        jobs: those of a jobs.toml.
        resolved: one of them, with what the options change of it.
        options: which hosts are asked for.

    Raises ConfigError for everything that is wrong with the hosts, and where an override asks for
    another number of ranks than there are slots.
    """
    hosts = hosts_of_job(resolved.job, options)
    if hosts.ranks_per_node == resolved.job.ranks_per_node:
        return resolved, hosts
    before = resolved.origins[RANKS]
    _refuse_other_ranks(before, hosts)
    ranks = f"{RANKS}={hosts.ranks_per_node}"
    changed = jobs.resolve(resolved.job.name, [*options.overrides(), ranks])
    slots = SourcedValue(
        hosts.ranks_per_node, SourceLocation(str(hosts.hostfile), hosts.hosts[0].line)
    ).over(before)
    return replace(changed, origins={**changed.origins, RANKS: slots}), hosts


def _refuse_other_ranks(asked: SourcedValue, hosts: HostList) -> None:
    if asked.place == SET:
        message = (
            f"{RANKS} = {asked.value}, but {hosts.hosts[0].name} has {hosts.ranks_per_node} slots"
            f" in {hosts.hostfile}"
        )
        hint = (
            "a hostfile's slots are the ranks of a node: take some with --include HOST:0-3, or"
            " change the file"
        )
        raise ConfigError([Problem(message, SET, hint)])


def rank_override(job: Job, hosts: HostList, overrides: Sequence[str]) -> list[str]:
    """The override that gives a run that goes on as many ranks a node as its hosts have slots;
    none where it has them.

    Args:
        job: the job as it goes on.
        hosts: its hosts.
        overrides: those that the user gave, KEY=VALUE each.
    """
    if hosts.ranks_per_node == job.ranks_per_node:
        return []
    for text in overrides:
        if text.split("=")[0].strip() == RANKS:
            _refuse_other_ranks(SourcedValue(job.ranks_per_node, SET), hosts)
    return [f"{RANKS}={hosts.ranks_per_node}"]
