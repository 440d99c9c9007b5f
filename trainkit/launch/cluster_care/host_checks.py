"""The checks of `doctor` that look at one host's report: each is a function, HOST_CHECKS is their
order."""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from trainkit.engines.native import torch_problem
from trainkit.jobs.clusters import Cluster
from trainkit.launch.hosts.hostfile import Host
from trainkit.launch.session import Session
from trainkit.launch.supervise.agent_pool import JoinedAgent, MissingAgent
from trainkit.launch.supervise.host_consistency import needed_python, python_is_old

MIB = 2**20
GIB = 2**30
LEAST_DISK = 2 * GIB  # less is as good as full: a checkpoint's first file would fill it
LEAST_SHARED = 128 * 2**20  # a container has 64 MiB where nobody asks for more
LEAST_FILES = 16_384  # a rank holds a file a shard of the data, and a socket a peer
LEAST_LOCKED = 64 * 2**20
HostCheck = Literal[
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
]
# those that are no column of a table of hosts: a host that is not reached has none, `all-reduce` is
# of pairs, and `container` has a table of its own
Check = Literal[HostCheck, "reach", "all-reduce", "container"]
COLUMNS: tuple[HostCheck, ...] = get_args(HostCheck)
# versions that hosts are compared by, and what to do where one has another than most
COMPARED: Mapping[Check, str] = {
    "python": "install the same, or let clusters.X.python name an interpreter that all have",
    "torch": "ranks of two versions fail or, worse, do not: install the same on all",
    "driver": "most collectives bear it, some do not: bring all hosts to one driver",
    "kernel": (
        "harmless to ranks as a rule; a host that was not updated with the others often lacks more"
    ),
}
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
        what: which check found it.
        message: what was seen.
        advice: the way out.
        wrong: it will break runs, or make them slow; else it is only worth knowing.
    """

    host: str
    what: Check
    message: str
    advice: str
    wrong: bool = True


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
    usual = {name: _most(joined, name) for name in COMPARED}
    found: list[Finding] = []
    for answer in answers:
        if isinstance(answer, MissingAgent):
            found.append(Finding(answer.host, "reach", answer.why, _advice(answer.why)))
            continue
        found += _versions(answer, usual, len(joined))
        for check in HOST_CHECKS:
            found += check(answer, session)
        found += _devices(answer, hosts[answer.node], session.cluster, joined)
    return found


def _most(agents: Sequence[JoinedAgent], name: str) -> tuple[str | None, int]:
    """(what most hosts have of a version, how many of them)."""
    counted = Counter(_version(agent, name) for agent in agents)
    if counted:
        return counted.most_common(1)[0]
    return (None, 0)


def _version(agent: JoinedAgent, name: str) -> str | None:
    value = agent.facts.versions.get(name)
    if value is None:
        return None
    return str(value)


def _advice(why: str) -> str:
    return next(
        (advice for pattern, advice in UNREACHED if re.search(pattern, why)),
        "`ssh HOST true` must work without a question",
    )


def _versions(
    agent: JoinedAgent, usual: Mapping[Check, tuple[str | None, int]], count: int
) -> Iterator[Finding]:
    for name, (value, times) in usual.items():
        own = _version(agent, name)
        if own != value:
            message = f"{name} {own or 'is missing'}; {value or 'none'} on {times} of {count} hosts"
            wrong = name in ("python", "torch")
            yield Finding(agent.host, name, message, COMPARED[name], wrong=wrong)
    if _version(agent, "torch") is None and usual["torch"][0] is None:
        yield Finding(
            agent.host,
            "torch",
            f"{agent.facts.executable} has no torch",
            "install it there; `prep-data` alone does not need it",
        )


def _clock(agent: JoinedAgent, session: Session) -> Iterator[Finding]:
    limit = session.cluster.watch.clock
    if abs(agent.clock_offset) <= limit:
        return
    direction = "behind"
    if agent.clock_offset > 0:
        direction = "ahead"
    yield Finding(
        agent.host,
        "clock",
        f"its clock is {abs(agent.clock_offset):.0f} s {direction}; {limit:g} s are allowed",
        "`chronyc makestep` (or ntpd) there; logs and time limits are compared by these clocks",
    )


def _shared_root(agent: JoinedAgent, session: Session) -> Iterator[Finding]:
    facts = agent.facts
    cluster = session.cluster
    if facts.nonce != session.nonce:
        yield Finding(
            agent.host,
            "root",
            f"sees another {session.folder} than this machine: clusters.{cluster.name}.root is not"
            " shared",
            f"mount the same folder on every host: `setup-hosts --share {cluster.root or 'FOLDER'}`"
            " prints how",
        )
    elif facts.snapshot != session.code.name:
        yield Finding(
            agent.host,
            "root",
            f"sees other files in {session.code}",
            "a stale cache of the file system: mount it again (NFS: actimeo)",
        )
    if facts.writable:
        yield Finding(
            agent.host,
            "root",
            f"cannot write into {session.folder}: {facts.writable}",
            "export it rw, and let the user have it (NFS: no root)",
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


def _address(agent: JoinedAgent, session: Session) -> Iterator[Finding]:
    facts = agent.facts
    name = session.cluster.name
    if facts.address_error:
        yield Finding(
            agent.host,
            "address",
            facts.address_error,
            f"`ip -br address` there; clusters.{name}.interface is a name or a CIDR",
        )
        return
    several = len(session.hosts) > 1
    if facts.address and several and ipaddress.ip_address(facts.address).is_loopback:
        yield Finding(
            agent.host,
            "address",
            f"its address is {facts.address}, which others cannot reach",
            f"name the network: clusters.{name}.interface = 'eth0' or a CIDR",
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


def _own_code(agent: JoinedAgent, session: Session) -> Iterator[Finding]:
    if python_is_old(agent.facts):
        yield Finding(
            agent.host,
            "python",
            f"{agent.facts.executable} is Python {agent.facts.versions['python']}; trainkit's own"
            f" trainer and the stages need {needed_python()} or newer",
            f"clusters.{session.cluster.name}.python names an interpreter; engines other than"
            " 'native' and ranks in containers run beside this one too",
        )
    if why := torch_problem(agent.facts.versions.get("torch") or ""):
        yield Finding(
            agent.host,
            "torch",
            why,
            f"clusters.{session.cluster.name}.python names an interpreter with another; engines"
            " other than 'native' have their own",
        )


# in the order in which a host's findings are printed
HOST_CHECKS: tuple[Callable[[JoinedAgent, Session], Iterator[Finding]], ...] = (
    _own_code,
    _clock,
    _shared_root,
    _disk,
    _address,
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
