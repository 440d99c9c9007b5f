"""The hosts of one run, chosen from a hostfile: launch/hosts.json. Its order is that of the
ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainkit.base.errors import ConfigError, Exit, Problem, SourceLocation, raise_problems
from trainkit.base.lazy_dataclasses import dataclass, field, replace
from trainkit.base.records import UNWRITTEN, Record
from trainkit.jobs.schema import Job
from trainkit.launch.hosts.hostfile import Host, filter_hosts, host_key, read_hostfile

HERE = "localhost"  # what a hostfile may call this machine


@dataclass(frozen=True)
class HostList(Record):
    """Hosts in rank order; each has its slots.

    Args:
        hosts: those that run, then the spares.
        nodes: how many run.
        hostfile: where they come from; None: no file.
        left_out: names of those that would have been taken, were they not suspected of failures.
            Not kept in hosts.json.
    """

    SCHEMA = "hosts/1"
    hosts: tuple[Host, ...]
    nodes: int
    hostfile: str | None = None
    left_out: tuple[str, ...] = field(default=(), metadata=UNWRITTEN)

    @property
    def running(self) -> tuple[Host, ...]:
        return self.hosts[: self.nodes]

    @property
    def spares(self) -> tuple[Host, ...]:
        return self.hosts[self.nodes :]

    @property
    def ranks_per_node(self) -> int:
        """The same on every host."""
        return len(self.hosts[0].slots)


def this_host() -> Host:
    """This machine by its own name."""
    return Host(os.uname().nodename)


def local_hosts(job: Job) -> HostList:
    """This machine alone, with as many slots as the job has ranks a node."""
    return HostList((replace(this_host(), slots=tuple(range(job.ranks_per_node))),), 1)


def load_hosts(
    path: Path, include: str = "", exclude: str = "", slots: int = 1
) -> tuple[Host, ...]:
    """The hosts of a hostfile after its filters. `localhost` has this machine's own name then:
    others see it too.

    Args:
        path: the hostfile.
        include: as in `filter_hosts`.
        exclude: as in `filter_hosts`.
        slots: of hosts without `slots=`.

    Raises ConfigError as the reader and `filter_hosts`, and where this machine is there by its own
    name as well.
    """
    usual = tuple(range(slots))
    own = this_host().name
    found = filter_hosts(
        [replace(host, slots=host.slots or usual) for host in read_hostfile(path)], include, exclude
    )
    hosts = tuple(
        replace(host, name=own) if host_key(host.name) == HERE else host for host in found
    )
    here = [host for host in hosts if host.name.lower() == own.lower()]
    if len(here) > 1:
        message = f"'localhost' and '{own}' are this same machine (line {here[0].line})"
        raise ConfigError(
            [Problem(message, SourceLocation(str(path), here[1].line), "a host has one line")]
        )
    return hosts


def choose_hosts(
    job: Job,
    path: Path,
    *,
    include: str = "",
    exclude: str = "",
    bad: Mapping[str, str] | None = None,
) -> HostList:
    """The first hosts of a hostfile, as many as the job has nodes, and its spares.

    Args:
        job: the job; its cluster's launcher is ssh or pdsh.
        path: the hostfile.
        include: as in `filter_hosts`.
        exclude: as in `filter_hosts`.
        bad: hosts to leave out now, and why (those in quarantine).

    Raises ConfigError where there are fewer hosts than nodes (exit 8 where there would be enough
    if none were left out), and where hosts differ in their number of slots: every node has as
    many ranks.
    """
    bad = bad or {}
    found = load_hosts(path, include, exclude, job.ranks_per_node)
    usable = [host for host in found if host.name.lower() not in bad]
    passed_over = tuple(host.name for host in found if host.name.lower() in bad)
    if len(usable) < job.nodes:
        filtered = " that --include and --exclude leave" if include or exclude else ""
        message = (
            f"job '{job.name}' wants {job.nodes} nodes, and {path} has {len(found)}"
            f" host{'s' if len(found) != 1 else ''}{filtered}"
        )
        out = [f"{name} is left out: {bad[name.lower()]}" for name in passed_over]
        hint = "--nodes N runs it on fewer" + (
            ", `invoke nodes --release HOST` lets a host in again" if out else ""
        )
        raise ConfigError(
            "; ".join([message, *out]),
            exit=Exit.START if len(found) >= job.nodes else Exit.CONFIG,
            hint=hint,
        )
    chosen = usable[: job.nodes + job.cluster.spares]
    _refuse_unequal(chosen, path)
    return HostList(tuple(chosen), job.nodes, str(path), passed_over)


def _refuse_unequal(hosts: Sequence[Host], path: Path) -> None:
    first = hosts[0]
    problems = [
        Problem(
            f"host '{host.name}' has {len(host.slots)} slots, '{first.name}' has"
            f" {len(first.slots)}; every node must have the same number of ranks",
            SourceLocation(str(path), host.line),
            "leave it out with --exclude, or give it as many: HOST slots=N, --include HOST:0-3",
        )
        for host in hosts
        if len(host.slots) != len(first.slots)
    ]
    raise_problems(problems)
