"""What is wrong with the hosts of a cluster, found before a run finds it: the same agents as a
run's, each host's own report, and advice for each finding.

GPUs are asked by `nvidia-smi -q -x`, read by what the names of its elements end in: they have kept
that over drivers (clocks_throttle_reasons became clocks_event_reasons), while a single field of
--query-gpu that a driver does not know makes it say nothing at all.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.etree import ElementTree

from trainkit.base.errors import Exit, TrainkitError
from trainkit.base.lazy_dataclasses import dataclass, field
from trainkit.jobs.clusters import Cluster
from trainkit.jobs.schema import Job
from trainkit.launch.cluster_care.container_checks import (
    ContainerReport,
    find_container_problems,
    look_at_containers,
)
from trainkit.launch.cluster_care.host_checks import find_host_problems
from trainkit.launch.cluster_care.pairwise_bandwidth import (
    PairBandwidth,
    find_slow_nodes,
    measure_pair_bandwidths,
)
from trainkit.launch.cluster_care.remote_commands import (
    CommandResult,
    RemoteCommand,
    run_on_agents,
)
from trainkit.launch.hosts.hostfile import Host
from trainkit.launch.launchers.contract import Launcher
from trainkit.launch.session import Session
from trainkit.launch.supervise.agent_pool import AgentPool, JoinedAgent, MissingAgent
from trainkit.launch.supervise.host_consistency import Finding
from trainkit.launch.supervise.orphan_sweep import bind_to_agents, open_agent_pool

LOOK = ("nvidia-smi", "-q", "-x")
LOOK_SECONDS = 60.0  # where drivers are not kept loaded it takes seconds a GPU
NO_DEVICES = "No devices were found"  # of a step of Slurm's that has none
SLOWED = {
    "hw_slowdown": "hardware slowdown",
    "hw_thermal_slowdown": "too hot: hardware slowdown",
    "hw_power_brake_slowdown": "power brake",
    "sw_thermal_slowdown": "too hot: driver's slowdown",
}


def find_gpu_problems(host: str, said: CommandResult) -> Iterator[Finding]:
    """What is wrong with the GPUs of a host that has said this; nothing where it has no such
    tool."""
    # no such program, or no GPU to be seen: how many there are is another question
    if said.error is not None or NO_DEVICES in said.out:
        return
    advice = "`nvidia-smi` and `dmesg | grep -i xid` there"
    if said.code:
        yield Finding(host, "gpus", f"nvidia-smi ends with {said.code}: {said.last}", advice)
        return
    try:
        log = ElementTree.fromstring(said.out)
    except ElementTree.ParseError as error:
        message = f"nvidia-smi -q -x prints no XML: {error}"
        yield Finding(host, "gpus", message, advice, wrong=False)
        return
    for number, gpu in enumerate(log.iter("gpu")):
        yield from _of_gpu(host, number, gpu)


def _of_gpu(host: str, number: int, gpu: ElementTree.Element) -> Iterator[Finding]:
    name = f"GPU {number} ({gpu.get('id', '?')})"
    reset = f"`nvidia-smi -r -i {number}` when it is idle, or a reboot"
    if errors := sum(_uncorrectable(volatile) for volatile in gpu.iter("volatile")):
        yield Finding(
            host,
            "gpus",
            f"{name}: {errors} uncorrectable memory error{'s' if errors > 1 else ''} since its"
            " driver was loaded",
            f"{reset}; where they come again leave the host out (--exclude) and have the GPU"
            " replaced",
        )
    flags = {
        element.tag for element in gpu.iter() if (element.text or "").strip() in ("Yes", "Active")
    }
    if "remapped_row_failure" in flags:
        yield Finding(
            host,
            "gpus",
            f"{name}: a broken row of its memory could not be remapped",
            "leave the host out (--exclude) and have the GPU replaced",
        )
    if flags & {"remapped_row_pending", "pending_retirement", "pending_blacklist"}:
        message = f"{name}: broken memory waits to be taken out of use"
        yield Finding(host, "gpus", message, reset, wrong=False)
    if slowed := [
        words for end, words in SLOWED.items() if any(flag.endswith(f"_{end}") for flag in flags)
    ]:
        yield Finding(
            host,
            "gpus",
            f"{name}: its clocks are slowed down ({', '.join(slowed)})",
            "temperature, fans, power supply and power cap of the host: the slowest GPU is"
            " everybody's speed",
        )


def _uncorrectable(volatile: ElementTree.Element) -> int:
    """Errors since the driver was loaded: by kind of memory, or on GPUs before Ampere the total
    of double-bit ones."""
    old = [element.find("total") for element in volatile.iter("double_bit")]
    new = [element for element in volatile.iter() if "uncorrectable" in element.tag]
    return sum(
        int(text)
        for element in (*old, *new)
        if element is not None and (text := (element.text or "").strip()).isdigit()
    )


UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)


@dataclass(frozen=True)
class ClusterExamination:
    """All that was found.

    Args:
        answers: of the hosts that were asked, in order.
        findings: host by host.
        pairs: all-reduces, as (host, host, what was measured); empty where none were asked for.
        containers: of jobs, by host.
    """

    answers: Sequence[JoinedAgent | MissingAgent]
    findings: Sequence[Finding]
    pairs: Sequence[tuple[str, str, PairBandwidth]] = field(default_factory=list)
    containers: Sequence[ContainerReport] = ()


def examine_hosts(
    cluster: Cluster,
    hosts: Sequence[Host],
    root: Path,
    *,
    all_reduce: bool = False,
    launcher: Launcher | None = None,
    boxed: Sequence[Job] = (),
) -> ClusterExamination:
    """Ask all hosts at once what they are.

    Args:
        cluster: how the hosts are reached.
        hosts: the nodes, in order.
        root: the folder they share.
        all_reduce: also measure the network between pairs of those that came.
        launcher: another than the cluster's.
        boxed: jobs whose containers are looked at, too.

    Raises TrainkitError (exit 7) where the root cannot be written.
    """

    async def examine() -> ClusterExamination:
        async with open_agent_pool(cluster, hosts, root, "doctor", launcher=launcher) as pool:
            answers = await pool.gather(pool.session.connect)
            findings = find_host_problems(answers, hosts, pool.session)
            cuda = cluster.device_type == "cuda"
            if cuda or all_reduce or boxed:
                await bind_to_agents(pool)
            if cuda:
                findings += await _gpu_findings(pool)
            containers = await look_at_containers(pool, boxed)
            findings += find_container_problems(containers, boxed)
            pairs: list[PairBandwidth] = []
            if all_reduce and len(pool.present) > 1:
                pairs = await measure_pair_bandwidths(pool)
                findings += find_pair_problems(pairs, pool.session)
        named = [(hosts[pair.first].name, hosts[pair.second].name, pair) for pair in pairs]
        return ClusterExamination(answers, findings, named, containers)

    try:
        return asyncio.run(examine())
    except OSError as error:  # its agents need a folder there
        if error.errno not in UNWRITABLE:
            raise
        hint = (
            "make room there (old runs, checkpoint.keep_last), or a folder that may be written:"
            " clusters.X.root"
        )
        message = (
            f"{root} cannot be written ({error.strerror}): no run could start, and nothing else was"
            " looked at"
        )
        raise TrainkitError(message, exit=Exit.HEALTH, hint=hint) from None


async def _gpu_findings(pool: AgentPool) -> list[Finding]:
    """What nvidia-smi says of the GPUs of all hosts."""
    session = pool.session
    query = {node: [RemoteCommand(LOOK, dict(session.cluster.env))] for node in pool.present}
    results = await run_on_agents(pool, query, LOOK_SECONDS, key_prefix="gpu-health-")
    return [
        finding
        for (node, _), result in results.items()
        for finding in find_gpu_problems(pool.host(node), result)
    ]


def find_pair_problems(pairs: Sequence[PairBandwidth], session: Session) -> Iterator[Finding]:
    """Findings of all-reduces."""
    for slow in find_slow_nodes(pairs, session.cluster.network_gb_per_second):
        name = " - ".join(session.hosts[node].name for node in slow.nodes)
        if len(slow.nodes) == 1:
            advice = (
                "leave it out (--exclude) and look at its network: `ethtool`, `ibstat`, cables, a"
                " neighbour's traffic, clocks of its CPU or GPUs"
            )
        else:
            advice = (
                "the way between the two: switch ports, another subnet, a firewall; NCCL_DEBUG=INFO"
                " says which transport was taken"
            )
        yield Finding(name, "all-reduce", slow.why, advice)
