"""What is wrong with hosts, each by itself and beside the others: what the agents of a run must
agree on before a rank starts. `doctor` says it too, among other things."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

from trainkit.base.lazy_dataclasses import dataclass
from trainkit.base.old_python import NEEDED_PYTHON
from trainkit.engines.native import torch_problem
from trainkit.launch.protocol.frames import HostFacts
from trainkit.launch.session import Session
from trainkit.launch.supervise.agent_pool import JoinedAgent

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
# those that are not columns of a table of hosts: a host that is not reached has none, `all-reduce`
# is of pairs, and `container` has a table of its own
Check = Literal[HostCheck, "reach", "all-reduce", "container", "cluster"]
INCOMPATIBLE: tuple[Check, ...] = ("python", "torch")  # where ranks of one run must be alike
# versions that hosts are compared by, and what to do where one has another than most
COMPARED: Mapping[Check, str] = {
    "python": "install the same, or let clusters.X.python name an interpreter that all have",
    "torch": "ranks of two versions fail or, worse, do not: install the same on all",
    "driver": "most collectives bear it, some do not: bring all hosts to one driver",
    "kernel": (
        "harmless to ranks as a rule; a host that was not updated with the others often lacks more"
    ),
}
SHOWN = 20  # hosts of a table


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


def host_inconsistencies(
    agents: Sequence[JoinedAgent], session: Session, gpus: int, *, own_code: bool
) -> list[Finding]:
    """Everything that would make the processes fail later or, worse, not fail.

    Args:
        agents: of all hosts.
        session: theirs.
        gpus: how many each host must have.
        own_code: trainkit's own code is to run there, not only agents and an engine of others.
    """
    found = list(other_versions(agents, INCOMPATIBLE))
    for agent in agents:
        found += check_root(agent, session)
        found += check_clock(agent, session)
        found += check_address(agent, session)
        if len(agent.facts.gpus) < gpus:
            message = f"has {len(agent.facts.gpus)} GPUs; {gpus} ranks a node need one each"
            found.append(Finding(agent.host, "gpus", message, "`nvidia-smi` there says which"))
        if own_code:
            found += check_own_code(agent, session)
    return found


def other_versions(agents: Sequence[JoinedAgent], names: Iterable[Check]) -> Iterator[Finding]:
    """Hosts with another version than most, by what is compared."""
    for name in names if agents else ():
        counted = Counter(agent.facts.versions.get(name) for agent in agents)
        usual, times = counted.most_common(1)[0]
        most = f"{usual or 'none'} on {times} of {len(agents)} hosts"
        for agent in agents:
            own = agent.facts.versions.get(name)
            if own != usual:
                message = f"{name} {own or 'is missing'}; {most}"
                wrong = name in INCOMPATIBLE
                yield Finding(agent.host, name, message, COMPARED[name], wrong=wrong)


def check_root(agent: JoinedAgent, session: Session) -> Iterator[Finding]:
    """It sees the session's folder as this machine does, and can write there."""
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
            f"sees other code in {session.code} (sha256 {str(facts.snapshot)[:12]}, not"
            f" {session.code.name[:12]}): a stale copy, or an edited one",
            "a stale cache of the file system: mount it again (NFS: actimeo)",
        )
    if facts.writable:
        yield Finding(
            agent.host,
            "root",
            f"cannot write into {session.folder}: {facts.writable}",
            "export it rw, and let the user have it (NFS: no root)",
        )


def check_clock(agent: JoinedAgent, session: Session) -> Iterator[Finding]:
    """Its clock is near this machine's."""
    limit = session.cluster.watch.clock
    if abs(agent.clock_offset) <= limit:
        return
    direction = "ahead" if agent.clock_offset > 0 else "behind"
    yield Finding(
        agent.host,
        "clock",
        f"its clock is {abs(agent.clock_offset):.0f} s {direction}; {limit:g} s are allowed"
        f" (clusters.{session.cluster.name}.watch.clock)",
        "`chronyc makestep` (or ntpd) there; logs and time limits are compared by these clocks",
    )


def check_address(agent: JoinedAgent, session: Session) -> Iterator[Finding]:
    """The network that the cluster names has an address there."""
    if agent.facts.address_error:
        yield Finding(
            agent.host,
            "address",
            agent.facts.address_error,
            f"`ip -br address` there; clusters.{session.cluster.name}.interface is a name or a"
            " CIDR",
        )


def check_own_code(agent: JoinedAgent, session: Session) -> Iterator[Finding]:
    """The host's Python runs trainkit's own code: one reason of several, the first."""
    facts = agent.facts
    where = ""
    setting = f"clusters.{session.cluster.name}.python"
    if session.container:
        where = f"of {session.container.settings.image} "
        setting = f"{session.container.label}.python"
    python = f"its Python {where}({facts.executable})"
    if python_is_old(facts):
        yield Finding(
            agent.host,
            "python",
            f"{python} is {facts.versions['python']}; trainkit's own code needs"
            f" {'.'.join(map(str, NEEDED_PYTHON))} or newer: {setting}",
            "name an interpreter that every host has; engines other than 'native', and ranks in"
            " containers, run beside an older one too",
        )
    elif why := torch_problem(facts.versions.get("torch") or ""):
        yield Finding(
            agent.host,
            "torch",
            f"{python}: {why}: {setting}",
            "name an interpreter with another; engines other than 'native' have their own",
        )
    elif facts.extension:
        yield Finding(
            agent.host,
            "python",
            f"{python} cannot load the code's compiled part: {facts.extension}",
            "compile it there too, into the checkout: `PYTHON setup.py build_ext --inplace` puts a"
            " file for that Python beside the other",
        )


def python_is_old(facts: HostFacts) -> bool:
    """Whether the host's Python is older than trainkit's own code needs."""
    match = re.match(r"(\d+)\.(\d+)", facts.versions.get("python") or "")
    return match is not None and (int(match[1]), int(match[2])) < NEEDED_PYTHON


def table(rows: Sequence[tuple[str, str]]) -> str:
    """Hosts and what is wrong, one a line; the first of many."""
    width = max((len(host) for host, _ in rows[:SHOWN]), default=0)
    lines = [f"  {host:<{width}}  {what}" for host, what in rows[:SHOWN]]
    return "\n".join(lines + ([f"  and {len(rows) - SHOWN} more"] if len(rows) > SHOWN else []))
