"""Where the runs of a sweep go that no scheduler places: hosts of a hostfile, devices of this
machine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainkit.experiment.hosts import quarantine_reasons
from trainkit.jobs.schema import Job
from trainkit.launch.hosts.hostfile import find_hostfile
from trainkit.launch.hosts.selection import load_hosts

VISIBLE = "CUDA_VISIBLE_DEVICES"  # which GPUs a run of this machine may have, and takes first


@dataclass(frozen=True)
class Place:
    """Room for one run.

    Args:
        include: hosts of the hostfile, as --include has them; "": the run chooses.
        devices: GPUs of this machine; none: the run chooses.
    """

    include: str = ""
    devices: Sequence[str] = ()

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """What is started in the block sees the place's GPUs alone."""
        before = os.environ.get(VISIBLE)
        if not self.devices:
            yield
            return
        os.environ[VISIBLE] = ",".join(self.devices)
        try:
            yield
        finally:
            if before is None:
                del os.environ[VISIBLE]
            else:
                os.environ[VISIBLE] = before


def places_of(jobs: Sequence[Job]) -> list[Place]:
    """Places that do not overlap, each with room for any of the jobs, which share a cluster; at
    least one. Raises ConfigError as the reader of hostfiles."""
    job = jobs[0]
    if job.cluster.launcher_traits.hostfile:
        return _places_of_hosts(job, max(each.nodes + each.cluster.spares for each in jobs))
    ranks = max(each.ranks_per_node for each in jobs)
    given = os.environ.get(VISIBLE, "").split(",")
    devices = [name.strip() for name in given if name.strip()]
    devices = devices or [str(number) for number in range(job.cluster.gpus_per_node)]
    named = any(VISIBLE in each.environment for each in jobs)  # by jobs.toml, which comes first
    if job.cluster.device_type != "cuda" or named or len(devices) < 2 * ranks:
        return [Place()]
    last = len(devices) - ranks
    return [Place(devices=devices[first : first + ranks]) for first in range(0, last + 1, ranks)]


def _places_of_hosts(job: Job, nodes: int) -> list[Place]:
    bad = quarantine_reasons(job.cluster)
    found = load_hosts(find_hostfile(job.cluster, "").absolute(), slots=job.ranks_per_node)
    names = [host.name for host in found if host.name.lower() not in bad]
    groups = [names[at : at + nodes] for at in range(0, len(names) - nodes + 1, nodes)]
    if len(groups) < 2:
        return [Place()]
    return [Place(include="@".join(group)) for group in groups]
