"""What is wrong with the hosts of a cluster, found before a run finds it: the same agents as a
run's, each host's own report, and advice for each finding."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainkit.base.errors import Exit, TrainkitError
from trainkit.jobs.clusters import Cluster
from trainkit.jobs.schema import Job
from trainkit.launch.cluster_care.container_checks import (
    ContainerReport,
    find_container_problems,
    look_at_containers,
)
from trainkit.launch.cluster_care.gpu_health import LOOK, LOOK_SECONDS, gpu_symptoms
from trainkit.launch.cluster_care.host_checks import Finding, find_host_problems
from trainkit.launch.cluster_care.pairwise_bandwidth import (
    PairBandwidth,
    find_slow_nodes,
    measure_pair_bandwidths,
)
from trainkit.launch.cluster_care.remote_commands import (
    RemoteCommand,
    bind_to_agents,
    run_on_agents,
)
from trainkit.launch.hosts.hostfile import Host
from trainkit.launch.launchers.contract import Launcher
from trainkit.launch.session import Session
from trainkit.launch.supervise.agent_pool import AgentPool, JoinedAgent, MissingAgent
from trainkit.launch.supervise.orphan_sweep import open_agent_pool

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
        Finding(pool.host(node), "gpus", symptom.message, symptom.advice, symptom.wrong)
        for (node, _), result in results.items()
        for symptom in gpu_symptoms(result)
    ]


def find_pair_problems(pairs: Sequence[PairBandwidth], session: Session) -> list[Finding]:
    """Findings of all-reduces."""
    found = []
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
        found.append(Finding(name, "all-reduce", slow.why, advice))
    return found
