"""Where the runs of a sweep go that no scheduler places: hosts of a hostfile, devices of this
machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from trainkit.experiment.hosts import quarantine_reasons
from trainkit.experiment.start import NewRun, ResumedRun
from trainkit.jobs.schema import Job
from trainkit.launch.hosts.hostfile import find_hostfile
from trainkit.launch.hosts.selection import HostList, load_hosts


@dataclass(frozen=True)
class Place:
    """Room for one run.

    Args:
        include: hosts of the hostfile, as --include has them; "": the run chooses.
        slots: of this machine; none: the run's own.
    """

    include: str = ""
    slots: Sequence[int] = ()

    def new_run(self, run: NewRun) -> NewRun:
        """The run here."""
        return replace(run, hosts=self._hosts(run.hosts))

    def resumed_run(self, run: ResumedRun) -> ResumedRun:
        """The run here."""
        return replace(run, hosts=self._hosts(run.hosts))

    def _hosts(self, hosts: HostList) -> HostList:
        if not self.slots:
            return hosts
        moved = tuple(replace(host, slots=tuple(self.slots)) for host in hosts.hosts)
        return replace(hosts, hosts=moved)


def places_of(jobs: Sequence[Job]) -> list[Place]:
    """Places that do not overlap, each with room for any of the jobs, which share a cluster; at
    least one. Raises ConfigError as the reader of hostfiles."""
    job = jobs[0]
    if job.cluster.launcher_traits.hostfile:
        return _places_of_hosts(job, max(each.nodes + each.cluster.spares for each in jobs))
    ranks = max(each.ranks_per_node for each in jobs)
    devices = job.cluster.gpus_per_node
    if job.cluster.device_type != "cuda" or devices < 2 * ranks:
        return [Place()]
    if len({each.ranks_per_node for each in jobs}) > 1:
        return [Place()]
    return [
        Place(slots=range(first, first + ranks)) for first in range(0, devices - ranks + 1, ranks)
    ]


def _places_of_hosts(job: Job, nodes: int) -> list[Place]:
    bad = quarantine_reasons(job.cluster)
    found = load_hosts(find_hostfile(job.cluster, "").absolute(), slots=job.ranks_per_node)
    names = [host.name for host in found if host.name.lower() not in bad]
    groups = [names[at : at + nodes] for at in range(0, len(names) - nodes + 1, nodes)]
    if len(groups) < 2:
        return [Place()]
    return [Place(include="@".join(group)) for group in groups]
