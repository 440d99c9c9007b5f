"""What is wrong with the hosts of a cluster, found before a run finds it: the same agents as a
run's, each host's own word, and advice for each finding."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainkit.base.errors import Exit, TrainkitError
from trainkit.jobs.clusters import Cluster
from trainkit.launch.cluster_care.gpu_health import LOOK, LOOK_SECONDS, gpu_symptoms
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
from trainkit.launch.supervise.agent_pool import JoinedAgent, MissingAgent
from trainkit.launch.supervise.orphan_sweep import open_agent_pool

GIB = 2**30
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
LEAST_DISK = 2 * GIB  # less is as good as full: a checkpoint's first file would fill it
LEAST_SHARED = 128 * 2**20  # a container has 64 MiB where nobody asks for more
LEAST_FILES = 16_384  # a rank holds a file a shard of the data, and a socket a peer
LEAST_LOCKED = 64 * 2**20
COLUMNS = (
    "python",
    "torch",
    "driver",
    "kernel",
    "clock",
    "root",
    "disk",
    "gpus",
    "address",
    "files",
    "shm",
    "proof",
)
# what the end of a transport says, and what to do about it
UNREACHED = (
    (
        r"Permission denied",
        (
            "no key of this machine is accepted there: `setup-hosts --perform`, or name user and"
            " key in ~/.ssh/config"
        ),
    ),
    (
        r"Host key verification failed",
        (
            "its host key is not known here, or has changed: log in once by hand, after you have"
            " checked the key"
        ),
    ),
    (
        r"Could not resolve|has no address|Name or service|Temporary failure in name",
        "its name has no address: correct the hostfile, DNS or /etc/hosts",
    ),
    (
        r"Connection refused",
        (
            "nothing listens on that port: is sshd running there? Another port is written HOST:PORT"
            " in the hostfile"
        ),
    ),
    (
        r"timed out|No route|unreachable|still trying",
        "it is down, or a firewall drops what is sent to it",
    ),
    (
        r"node\.sh: No such file",
        (
            "the cluster's root is not mounted there: `setup-hosts --share ROOT` prints export and"
            " mount"
        ),
    ),
    (
        r"(python\S*|agent\.py).*(No such file|not found)",
        "clusters.X.python must be an interpreter that is there on every host",
    ),
    (
        r"drain|down",
        (
            "Slurm keeps it out: `scontrol show node HOST` says since when; `scontrol update"
            " nodename=HOST state=resume` lets it in again"
        ),
    ),
)


@dataclass(frozen=True)
class Finding:
    """One thing to know about a host.

    Args:
        host: its name; two with "-" between them for a pair.
        what: "reach", one of COLUMNS, or "all-reduce".
        message: what was seen.
        advice: the way out.
        wrong: it will break runs, or make them slow; else it is only worth knowing.
    """

    host: str
    what: str
    message: str
    advice: str
    wrong: bool = True


@dataclass(frozen=True)
class ClusterExamination:
    """All that was found.

    Args:
        answers: of the hosts that were asked, in order.
        findings: host by host.
        pairs: all-reduces, as (host, host, what was measured); empty where none were asked for.
    """

    answers: Sequence[JoinedAgent | MissingAgent]
    findings: Sequence[Finding]
    pairs: Sequence[tuple[str, str, PairBandwidth]] = field(default_factory=list)


def examine_hosts(
    cluster: Cluster,
    hosts: Sequence[Host],
    root: Path,
    *,
    all_reduce: bool = False,
    launcher: Launcher | None = None,
) -> ClusterExamination:
    """Ask all hosts at once what they are, and with `all_reduce` also measure pairs of those
    that came."""

    async def look() -> ClusterExamination:
        async with open_agent_pool(cluster, hosts, root, "doctor", launcher=launcher) as pool:
            answers = await pool.gather(pool.session.connect)
            findings = find_host_problems(answers, hosts, pool.session)
            pairs: list[PairBandwidth] = []
            if cluster.device_type == "cuda" or all_reduce:
                await bind_to_agents(pool)
            if cluster.device_type == "cuda":
                look = {node: [RemoteCommand(LOOK, dict(cluster.env))] for node in pool.present}
                said = await run_on_agents(pool, look, LOOK_SECONDS, turn="gpu-health-")
                findings += [
                    Finding(hosts[node].name, "gpus", **vars(symptom))
                    for (node, _), words in said.items()
                    for symptom in gpu_symptoms(words)
                ]
            if all_reduce and len(pool.present) > 1:
                pairs = await measure_pair_bandwidths(pool)
                findings += find_pair_problems(pairs, pool.session)
        return ClusterExamination(
            answers,
            findings,
            [(hosts[pair.first].name, hosts[pair.second].name, pair) for pair in pairs],
        )

    try:
        return asyncio.run(look())
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


def find_host_problems(
    answers: Sequence[JoinedAgent | MissingAgent], hosts: Sequence[Host], session: Session
) -> list[Finding]:
    """What is wrong with hosts, each by itself and beside the others."""
    hellos = [answer for answer in answers if isinstance(answer, JoinedAgent)]
    usual = {name: _most(hellos, name) for name in ("python", "torch", "driver", "kernel")}
    found: list[Finding] = []
    for answer in answers:
        if isinstance(answer, MissingAgent):
            found.append(Finding(answer.host, "reach", answer.why, _advice(answer.why)))
            continue
        found += _versions(answer, usual, len(hellos))
        found += _place(answer, session)
        found += _limits(answer)
        found += _devices(answer, hosts[answer.node], session.cluster, hellos)
    return found


def _most(hellos: Sequence[JoinedAgent], name: str) -> tuple[str | None, int]:
    """(what most hosts have of a version, how many of them)."""
    counted = Counter(_version(hello, name) for hello in hellos)
    if counted:
        return counted.most_common(1)[0]
    return (None, 0)


def _version(hello: JoinedAgent, name: str) -> str | None:
    value = hello.facts.versions.get(name)
    if value is None:
        return None
    return str(value)


def _advice(why: str) -> str:
    return next(
        (advice for pattern, advice in UNREACHED if re.search(pattern, why)),
        "`ssh HOST true` must work without a question",
    )


def _versions(
    hello: JoinedAgent, usual: Mapping[str, tuple[str | None, int]], count: int
) -> list[Finding]:
    found = []
    advice = {
        "python": "install the same, or let clusters.X.python name an interpreter that all have",
        "torch": "ranks of two versions fail or, worse, do not: install the same on all",
        "driver": "most collectives bear it, some do not: bring all hosts to one driver",
        "kernel": (
            "harmless to ranks as a rule; a host that was not updated with the others often lacks"
            " more"
        ),
    }
    for name, (value, times) in usual.items():
        own = _version(hello, name)
        if own != value:
            message = f"{name} {own or 'is missing'}; {value or 'none'} on {times} of {count} hosts"
            found.append(
                Finding(hello.host, name, message, advice[name], wrong=name in ("python", "torch"))
            )
    if _version(hello, "torch") is None and usual["torch"][0] is None:
        found.append(
            Finding(
                hello.host,
                "torch",
                f"{hello.facts.executable} has no torch",
                "install it there; `prep-data` alone does not need it",
            )
        )
    return found


def _place(hello: JoinedAgent, session: Session) -> list[Finding]:
    """Clock, shared root, disk, address."""
    facts = hello.facts
    cluster = session.cluster
    host = hello.host
    found = []
    if abs(hello.clock_offset) > cluster.watch.clock:
        if hello.clock_offset > 0:
            ahead = "ahead"
        else:
            ahead = "behind"
        message = (
            f"its clock is {abs(hello.clock_offset):.0f} s {ahead}; {cluster.watch.clock:g} s are"
            " allowed"
        )
        found.append(
            Finding(
                host,
                "clock",
                message,
                "`chronyc makestep` (or ntpd) there; logs and time limits are compared by these"
                " clocks",
            )
        )
    remount = (
        f"mount the same folder on every host: `setup-hosts --share {cluster.root or 'FOLDER'}`"
        " prints how"
    )
    if facts.nonce != session.nonce:
        found.append(
            Finding(
                host,
                "root",
                f"sees another {session.folder} than this machine: clusters.{cluster.name}.root is"
                " not shared",
                remount,
            )
        )
    elif facts.snapshot != session.code.name:
        found.append(
            Finding(
                host,
                "root",
                f"sees other files in {session.code}",
                "a stale cache of the file system: mount it again (NFS: actimeo)",
            )
        )
    if facts.writable:
        found.append(
            Finding(
                host,
                "root",
                f"cannot write into {session.folder}: {facts.writable}",
                "export it rw, and let the user have it (NFS: no root)",
            )
        )
    free = facts.disk_free
    if free is not None and free < LEAST_DISK:
        advice = (
            "remove old runs, keep fewer checkpoints (checkpoint.keep_last), or move"
            " clusters.X.root"
        )
        found.append(Finding(host, "disk", f"{free / GIB:.1f} GiB are free below the root", advice))
    address = facts.address
    if facts.address_error:
        found.append(
            Finding(
                host,
                "address",
                facts.address_error,
                f"`ip -br address` there; clusters.{cluster.name}.interface is a name or a CIDR",
            )
        )
    elif address and len(session.hosts) > 1 and ipaddress.ip_address(str(address)).is_loopback:
        message = f"its address is {address}, which others cannot reach"
        found.append(
            Finding(
                host,
                "address",
                message,
                f"name the network: clusters.{cluster.name}.interface = 'eth0' or a CIDR",
            )
        )
    return found


def _limits(hello: JoinedAgent) -> list[Finding]:
    facts = hello.facts
    host = hello.host
    found = []
    files = facts.open_files
    shared = facts.shared_memory
    locked = facts.locked_memory
    if files is not None and 0 <= files < LEAST_FILES:
        advice = (
            "`* hard nofile 1048576` in /etc/security/limits.conf (sshd and slurmd have to start"
            " anew), or LimitNOFILE of their units"
        )
        found.append(
            Finding(
                host,
                "files",
                f"a process may open {files:,} files; {LEAST_FILES:,} are wanted",
                advice,
                wrong=False,
            )
        )
    if shared is not None and shared < LEAST_SHARED:
        advice = (
            "docker run --shm-size=16g or --ipc=host; a tmpfs of half the memory on /dev/shm; old"
            " files there are left by dead runs"
        )
        found.append(
            Finding(
                host,
                "shm",
                f"/dev/shm has {shared / 2**20:,.0f} MiB free; NCCL and the data loader want"
                f" {LEAST_SHARED / 2**20:.0f}",
                advice,
            )
        )
    if facts.gpus and locked is not None and 0 <= locked < LEAST_LOCKED:
        advice = (
            "`* hard memlock unlimited` in /etc/security/limits.conf: RDMA (InfiniBand, EFA) pins"
            " its buffers"
        )
        found.append(
            Finding(
                host,
                "files",
                f"{locked / 2**20:,.0f} MiB of memory may be locked",
                advice,
                wrong=False,
            )
        )
    if facts.proof not in (None, "cgroup"):
        message = (
            "no cgroup v2 to write to: agents prove that nothing is left of a run; if agent and"
            " keeper are killed at once, only marks are left to look for"
        )
        advice = (
            "run as root, let systemd delegate (`systemd-run --user --scope -p Delegate=yes`), or"
            " mount cgroup2 writable; runs go well without"
        )
        found.append(Finding(host, "proof", message, advice, wrong=False))
    return found


def _devices(
    hello: JoinedAgent, host: Host, cluster: Cluster, hellos: Sequence[JoinedAgent]
) -> list[Finding]:
    if cluster.device_type != "cuda":
        return []
    gpus = list(hello.facts.gpus)
    wanted = max(host.slots, default=cluster.gpus_per_node - 1) + 1
    found = []
    if len(gpus) < wanted:
        advice = (
            "`nvidia-smi` and `dmesg | grep -i xid` there: a GPU that fell off the bus needs a"
            " reboot; or write fewer slots"
        )
        found.append(
            Finding(hello.host, "gpus", f"{len(gpus)} GPUs; its slots need {wanted}", advice)
        )
    kinds = Counter(h.facts.gpus[:1] for h in hellos)
    usual = kinds.most_common(1)[0][0]
    if gpus and usual and gpus[0] != usual[0]:
        found.append(
            Finding(
                hello.host,
                "gpus",
                f"{gpus[0]}; most hosts have {usual[0]}",
                "the slowest kind is everybody's speed: leave it out",
                wrong=False,
            )
        )
    return found


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
