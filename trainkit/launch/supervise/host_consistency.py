"""What the agents of a run must agree on before a rank starts, and how those that do not are
told to a person."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from trainkit.base.old_python import NEEDED_PYTHON
from trainkit.engines.native import torch_problem
from trainkit.launch.protocol.frames import HostFacts
from trainkit.launch.session import Session
from trainkit.launch.supervise.agent_pool import JoinedAgent

# versions that make ranks of one run incompatible; kernels may differ
COMPARED = ("python", "torch", "nccl", "cuda")
SHOWN = 20  # hosts of a table


def host_inconsistencies(
    hellos: Sequence[JoinedAgent], session: Session, gpus: int, *, own_code: bool
) -> list[tuple[str, str]]:
    """(host, what is wrong) for everything that would make the processes fail later or, worse,
    not fail.

    Args:
        hellos: of all hosts.
        session: theirs.
        gpus: how many each host must have.
        own_code: trainkit's own code is to run there, not only agents and an engine of others.
    """
    found = []
    for name in COMPARED:
        values = {hello.node: hello.facts.versions.get(name) for hello in hellos}
        if len(set(values.values())) > 1:
            usual, times = Counter(values.values()).most_common(1)[0]
            for hello in hellos:
                if values[hello.node] != usual:
                    found.append(
                        (
                            hello.host,
                            (
                                f"{name} {values[hello.node] or 'is missing'}; {usual or 'none'} on"
                                f" {times} of {len(hellos)} hosts"
                            ),
                        )
                    )
    for hello in hellos:
        found += [(hello.host, problem) for problem in _problems(hello, session, gpus)]
        if own_code:
            found += [(hello.host, problem) for problem in _own_code_problems(hello, session)]
    return found


def python_is_old(facts: HostFacts) -> bool:
    """Whether the host's Python is older than trainkit's own code needs."""
    match = re.match(r"(\d+)\.(\d+)", facts.versions.get("python") or "")
    return match is not None and (int(match[1]), int(match[2])) < NEEDED_PYTHON


def needed_python() -> str:
    """NEEDED_PYTHON for people."""
    return ".".join(map(str, NEEDED_PYTHON))


def _own_code_problems(hello: JoinedAgent, session: Session) -> list[str]:
    """Why one host's Python cannot run trainkit's own code."""
    facts = hello.facts
    where = ""
    setting = f"clusters.{session.cluster.name}.python"
    if session.container:
        where = f"of {session.container.settings.image} "
        setting = f"{session.container.label}.python"
    if python_is_old(facts):
        return [
            f"its Python {where}({facts.executable}) is {facts.versions['python']}; trainkit's own"
            f" code needs {needed_python()} or newer: {setting}"
        ]
    if why := torch_problem(facts.versions.get("torch") or ""):
        return [f"its Python {where}({facts.executable}): {why}: {setting}"]
    if facts.extension:
        return [
            f"its Python {where}({facts.executable}) cannot load the code's compiled part:"
            f" {facts.extension}"
        ]
    return []


def _problems(hello: JoinedAgent, session: Session, gpus: int) -> list[str]:
    """What is wrong with one host by itself."""
    facts = hello.facts
    cluster = session.cluster
    problems = []
    if facts.nonce != session.nonce:
        problems.append(
            f"sees another {session.folder} than this machine: clusters.{cluster.name}.root is not"
            " shared"
        )
    elif facts.snapshot != session.code.name:
        problems.append(
            f"sees other code in {session.code} (sha256 {str(facts.snapshot)[:12]}, not"
            f" {session.code.name[:12]}): a stale copy, or an edited one"
        )
    if facts.writable:
        problems.append(f"cannot write into {session.folder}: {facts.writable}")
    if abs(hello.clock_offset) > cluster.watch.clock:
        ahead = "ahead" if hello.clock_offset > 0 else "behind"
        problems.append(
            f"its clock is {abs(hello.clock_offset):.0f} s {ahead}; {cluster.watch.clock:g} s are"
            f" allowed (clusters.{cluster.name}.watch.clock)"
        )
    if facts.address_error:
        problems.append(facts.address_error)
    if len(facts.gpus) < gpus:
        problems.append(f"has {len(facts.gpus)} GPUs; {gpus} ranks a node need one each")
    return problems


def table(rows: Sequence[tuple[str, str]]) -> str:
    """Hosts and what is wrong, one a line; the first of many."""
    width = max((len(host) for host, _ in rows[:SHOWN]), default=0)
    lines = [f"  {host:<{width}}  {what}" for host, what in rows[:SHOWN]]
    return "\n".join(lines + ([f"  and {len(rows) - SHOWN} more"] if len(rows) > SHOWN else []))
