"""Agents without a run: the agents of a short session, a survey of hosts, and what a dead run left
on them."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import trainkit
from trainkit.base.errors import Exit, TrainkitError
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.jobs.clusters import Cluster
from trainkit.launch.containers import NodeContainer
from trainkit.launch.hosts.hostfile import Host
from trainkit.launch.launchers import LAUNCHERS, supervisor_address
from trainkit.launch.launchers.contract import Launcher
from trainkit.launch.protocol.frames import (
    CommandRefused,
    HostFacts,
    ReportedProcess,
    ReserveSlots,
    SlotsReserved,
    SweepDone,
    SweepRun,
)
from trainkit.launch.protocol.server import Server
from trainkit.launch.session import Session
from trainkit.launch.supervise.agent_pool import AgentPool, JoinedAgent
from trainkit.launch.supervise.code_snapshot import take_snapshot
from trainkit.launch.supervise.host_consistency import table
from trainkit.launch.supervise.rank_environment import passed_environment
from trainkit.launch.supervise.rendezvous import StartError, gather
from trainkit.runs.events import (
    AgentJoined,
    AllRanksStarted,
    AttemptEnded,
    events_of,
    first_event,
    last_event,
    read_events,
)
from trainkit.runs.folder import RunFolder
from trainkit.runs.record import read_supervisor_status

PACKAGE = Path(trainkit.__file__).parent
SWEEP_SECONDS = 15.0  # for an agent to look at every process of its host, and to end some
# for an agent to come to a host that has just lost one, which may be busy: what it leaves stays
COME_SECONDS = 15.0


@contextlib.asynccontextmanager
async def open_agent_pool(
    cluster: Cluster,
    hosts: Sequence[Host],
    root: Path,
    name: str,
    *,
    code: Path | None = None,
    launcher: Launcher | None = None,
    container: Callable[[Path, str], NodeContainer] | None = None,
) -> AsyncIterator[AgentPool]:
    """The agents of some hosts in a session of their own below <root>/sessions, which is gone
    afterwards; they are on their way, none is waited for.

    Args:
        cluster: how the hosts are reached.
        hosts: the nodes, in order.
        root: the folder they share.
        name: what it is for; with a random end, part of the mark of every process.
        code: the code snapshot they run; by default one of this very package is taken.
        launcher: another than the cluster's.
        container: what the agents run in, by the session's folder and name; None: outside.
    """
    name = f"{name}-{secrets.token_hex(4)}"
    folder = root / "sessions" / name
    snapshot = code or take_snapshot(PACKAGE, root / "code").folder
    box = container(folder.absolute(), name) if container else None
    session = Session(
        folder,
        name,
        0,
        hosts,
        cluster,
        snapshot,
        folder / "transports",
        passed_environment(),
        box,
    )
    server = Server()
    await server.listen(supervisor_address(cluster, hosts))
    try:
        session.write(root, server.address, server.port, {})
        async with AgentPool(session, launcher or LAUNCHERS[cluster.launcher], server) as pool:
            yield pool
    finally:
        await server.close()
        session.remove()


async def wait_for_consistent_agents(pool: AgentPool) -> list[JoinedAgent]:
    """All agents, once they have come and agree, and guard what they will start. Raises
    TrainkitError: 8 or 7, with a table of hosts."""
    try:
        hellos = await gather(pool, pool.nodes, own_code=True)
    except StartError as error:
        cause = error.outcome.root_cause or {}
        raise TrainkitError(
            str(cause["message"]), exit=error.outcome.exit, hint=str(cause.get("advice", ""))
        ) from None
    if silent := await bind_to_agents(pool):
        raise TrainkitError(
            "agents do not"
            f" answer:\n{table([(pool.host(node), why) for node, why in silent.items()])}",
            exit=Exit.START,
        )
    return hellos


async def bind_to_agents(pool: AgentPool) -> dict[int, str]:
    """What will be started on the pool's agents is to die with them; they hold no slot. Returns
    why there is no answer, by the nodes that gave none."""
    session = pool.session
    frames = {
        node: ReserveSlots(session.run, 0, (), share=True, mark=session.mark(node))
        for node in pool.present
    }
    return (await pool.ask(frames, (SlotsReserved,), session.connect))[1]


@dataclass(frozen=True)
class HostReport:
    """A host as `nodes` shows it: why it cannot be used, or what its agent says of it."""

    host: str
    error: str | None
    facts: HostFacts | None


@dataclass(frozen=True)
class SweepReport:
    """What a run has left on a host: processes ({pid, mark, argv0}) after those in `killed` were
    ended; `error` where it could not be asked. `proof` that nothing is left: "cgroup"; None:
    nothing can be seen, which is not the same."""

    host: str
    error: str | None
    left: tuple[ReportedProcess, ...] = ()
    killed: tuple[ReportedProcess, ...] = ()
    proof: str | None = None


def survey_hosts(cluster: Cluster, hosts: Sequence[Host], root: Path) -> list[HostReport]:
    """Every host's own word, or why there is none, in order."""

    async def look() -> list[HostReport]:
        async with open_agent_pool(cluster, hosts, root, "nodes") as pool:
            answers = await pool.gather(pool.session.connect)
        return [
            HostReport(a.host, None, a.facts)
            if isinstance(a, JoinedAgent)
            else HostReport(a.host, a.why, None)
            for a in answers
        ]

    return asyncio.run(look())


async def sweep_orphans(
    run: RunFolder,
    cluster: Cluster,
    hosts: Sequence[Host],
    seconds: float,
    launcher: Launcher | None = None,
    *,
    forget: bool = False,
) -> list[SweepReport]:
    """Ask every host what a run without a supervisor has left there, and end it.

    Args:
        run: the run.
        cluster: how its hosts are reached.
        hosts: that are asked.
        seconds: that agents have to come.
        launcher: another than the cluster's.
        forget: what ranks have kept in memory goes too.
    """
    code = run.root / "code" / run.code.resolve().name
    async with open_agent_pool(
        cluster, hosts, run.root, "sweep", code=code, launcher=launcher
    ) as pool:
        answers = await pool.gather(seconds)
        frames = {node: SweepRun(run.id, kill=True, forget=forget) for node in pool.present}
        got, silent = await pool.ask(frames, (SweepDone,), SWEEP_SECONDS)
    reports = []
    for node, answer in enumerate(answers):
        frame = got.get(node)
        if not isinstance(answer, JoinedAgent):
            reports.append(SweepReport(answer.host, answer.why))
        elif frame is None:
            reports.append(SweepReport(answer.host, silent[node]))
        elif isinstance(frame, CommandRefused):
            reports.append(SweepReport(answer.host, frame.error))
        else:
            reports.append(SweepReport(answer.host, None, frame.left, frame.killed, frame.proof))
    return reports


async def sweep_dead_agents(
    run: RunFolder, cluster: Cluster, hosts: Sequence[Host], launcher: Launcher
) -> list[SweepReport]:
    """End what agents that died have left on hosts of a run that goes on."""
    try:
        async with asyncio.timeout(2 * COME_SECONDS):
            return await sweep_orphans(run, cluster, hosts, COME_SECONDS, launcher)
    except (TrainkitError, OSError, TimeoutError) as error:
        return [SweepReport(host.name, str(error) or "no answer in time") for host in hosts]


def hosts_left_by_last_attempt(run: RunFolder, hosts: Sequence[Host]) -> tuple[list[Host], float]:
    """(Hosts on which something of a run's last attempts may still run, when its supervisor was
    last seen, by time.time()): that supervisor died, or could not learn of every host that nothing
    is left. What an attempt began after is over.

    Args:
        run: whose supervisor is another one now.
        hosts: those of the run.
    """
    attempts = run.attempts()
    if not attempts:
        return [], 0.0
    names: dict[str, None] = {}
    for attempt in reversed(attempts):
        events = read_events(attempt)
        ended = last_event(events, AttemptEnded)
        if ended is None or ended.survivors or ended.unanswered:
            names |= dict.fromkeys(event.host for event in events_of(events, AgentJoined))
        if first_event(events, AllRanksStarted) is not None:
            break
    sign = read_supervisor_status(run)
    known = {host.name: host for host in hosts}
    seen = sign.time if sign is not None else time.time()
    return [known.get(name) or Host(name) for name in names], seen
