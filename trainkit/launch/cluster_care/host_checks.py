"""The checks of `doctor` that look at one host's report: each is a function, HOST_CHECKS is their
order. Those that every start makes too are in supervise/host_consistency.py."""

from __future__ import annotations

import ipaddress
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import get_args

from trainkit.jobs.clusters import Cluster
from trainkit.launch.hosts.hostfile import Host
from trainkit.launch.session import Session
from trainkit.launch.supervise.agent_pool import JoinedAgent, MissingAgent
from trainkit.launch.supervise.host_consistency import (
    COMPARED,
    Finding,
    HostCheck,
    check_address,
    check_clock,
    check_own_code,
    check_root,
    other_versions,
)

MIB = 2**20
GIB = 2**30
LEAST_DISK = 2 * GIB  # less is as good as full: a checkpoint's first file would fill it
LEAST_SHARED = 128 * 2**20  # a container has 64 MiB where nobody asks for more
LEAST_FILES = 16_384  # a rank holds a file a shard of the data, and a socket a peer
LEAST_LOCKED = 64 * 2**20
COLUMNS: tuple[HostCheck, ...] = get_args(HostCheck)
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


def find_host_problems(
    answers: Sequence[JoinedAgent | MissingAgent], hosts: Sequence[Host], session: Session
) -> list[Finding]:
    """What is wrong with hosts, each by itself and beside the others.

    Args:
        answers: of the agents, in order of nodes.
        hosts: the nodes.
        session: theirs.
    """
    joined = [answer for answer in answers if isinstance(answer, JoinedAgent)]
    others = list(other_versions(joined, COMPARED))
    found = list(_open_root(hosts[0], session.cluster))
    for answer in answers:
        if isinstance(answer, MissingAgent):
            found.append(Finding(answer.host, "reach", answer.why, _advice(answer.why)))
            continue
        own = [finding for finding in others if finding.host == answer.host]
        found += own
        torch = answer.facts.versions.get("torch")
        if torch is None and not any(finding.what == "torch" for finding in own):
            message = f"{answer.facts.executable} has no torch"
            advice = "install it there; `prep-data` alone does not need it"
            found.append(Finding(answer.host, "torch", message, advice))
        for check in HOST_CHECKS:
            found += check(answer, session)
        found += _devices(answer, hosts[answer.node], session.cluster, joined)
    return found


def _advice(why: str) -> str:
    return next(
        (advice for pattern, advice in UNREACHED if re.search(pattern, why)),
        "`ssh HOST true` must work without a question",
    )


def _disk(agent: JoinedAgent, session: Session) -> Iterator[Finding]:
    free = agent.facts.disk_free
    if free is not None and free < LEAST_DISK:
        yield Finding(
            agent.host,
            "disk",
            f"{free / GIB:.1f} GiB are free below the root",
            "remove old runs, keep fewer checkpoints (checkpoint.keep_last), or move"
            " clusters.X.root",
        )


def _loopback(agent: JoinedAgent, session: Session) -> Iterator[Finding]:
    address = agent.facts.address
    if agent.facts.address_error or not address or len(session.hosts) == 1:
        return
    if ipaddress.ip_address(address).is_loopback:
        yield Finding(
            agent.host,
            "address",
            f"its address is {address}, which others cannot reach",
            f"name the network: clusters.{session.cluster.name}.interface = 'eth0' or a CIDR",
        )


def _open_files(agent: JoinedAgent, session: Session) -> Iterator[Finding]:
    files = agent.facts.open_files
    if files is not None and 0 <= files < LEAST_FILES:
        yield Finding(
            agent.host,
            "files",
            f"a process may open {files:,} files; {LEAST_FILES:,} are wanted",
            "`* hard nofile 1048576` in /etc/security/limits.conf (then restart sshd and slurmd),"
            " or LimitNOFILE of their units",
            wrong=False,
        )


def _shared_memory(agent: JoinedAgent, session: Session) -> Iterator[Finding]:
    shared = agent.facts.shared_memory
    if shared is not None and shared < LEAST_SHARED:
        yield Finding(
            agent.host,
            "shm",
            f"/dev/shm has {shared / MIB:,.0f} MiB free; NCCL and the data loader want"
            f" {LEAST_SHARED / MIB:.0f}",
            "docker run --shm-size=16g or --ipc=host; a tmpfs of half the memory on /dev/shm; old"
            " files there are left by dead runs",
        )


def _locked_memory(agent: JoinedAgent, session: Session) -> Iterator[Finding]:
    locked = agent.facts.locked_memory
    if agent.facts.gpus and locked is not None and 0 <= locked < LEAST_LOCKED:
        yield Finding(
            agent.host,
            "files",
            f"{locked / MIB:,.0f} MiB of memory may be locked",
            "`* hard memlock unlimited` in /etc/security/limits.conf: RDMA (InfiniBand, EFA) pins"
            " its buffers",
            wrong=False,
        )


def _proof_of_end(agent: JoinedAgent, session: Session) -> Iterator[Finding]:
    if agent.facts.proof not in (None, "cgroup"):
        yield Finding(
            agent.host,
            "proof",
            "no cgroup v2 to write to: agents prove that nothing is left of a run; if agent and"
            " keeper are killed at once, only marks are left to look for",
            "run as root, let systemd delegate (`systemd-run --user --scope -p Delegate=yes`), or"
            " mount cgroup2 writable; runs go well without",
            wrong=False,
        )


def _open_root(host: Host, cluster: Cluster) -> Iterator[Finding]:
    """Whether others can put files in place of those that hosts run. It is one folder on all
    hosts, looked at from here."""
    root = cluster.root_folder.absolute()
    mode = root.stat().st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        yield Finding(
            host.name,
            "root",
            f"every user may write into {root}: they could change what runs as you",
            f"`chmod o-w {root}`",
            wrong=False,
        )


# in the order in which a host's findings are printed
HOST_CHECKS: tuple[Callable[[JoinedAgent, Session], Iterator[Finding]], ...] = (
    check_own_code,
    check_clock,
    check_root,
    _disk,
    check_address,
    _loopback,
    _open_files,
    _shared_memory,
    _locked_memory,
    _proof_of_end,
)


def _devices(
    agent: JoinedAgent, host: Host, cluster: Cluster, agents: Sequence[JoinedAgent]
) -> Iterator[Finding]:
    if cluster.device_type != "cuda":
        return
    gpus = agent.facts.gpus
    wanted = max(host.slots, default=cluster.gpus_per_node - 1) + 1
    if objection := agent.facts.errors.get("triton"):
        why, _, advice = objection.rpartition(": ")
        what = "training.compile and kernels = 'fused' fail there"
        yield Finding(agent.host, "gpus", f"{why}; {what}", advice, wrong=False)
    if len(gpus) < wanted:
        yield Finding(
            agent.host,
            "gpus",
            f"{len(gpus)} GPUs; its slots need {wanted}",
            "`nvidia-smi` and `dmesg | grep -i xid` there: a GPU that fell off the bus needs a"
            " reboot; or write fewer slots",
        )
    kinds = Counter(other.facts.gpus[:1] for other in agents)
    usual = kinds.most_common(1)[0][0]
    if gpus and usual and gpus[0] != usual[0]:
        yield Finding(
            agent.host,
            "gpus",
            f"{gpus[0]}; most hosts have {usual[0]}",
            "the slowest kind is everybody's speed: leave it out",
            wrong=False,
        )
