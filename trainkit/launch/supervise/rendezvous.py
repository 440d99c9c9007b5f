"""From started transports to a world: all agents there, in agreement, their slots held, and rank
0's port proved reachable from every node."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence

from trainkit.base.errors import Exit
from trainkit.engines.contract import Command
from trainkit.jobs.schema import Job
from trainkit.launch.protocol.frames import (
    CommandRefused,
    ConnectToPort,
    Frame,
    Listen,
    Listening,
    ListeningStopped,
    PortChecked,
    ReserveSlots,
    SlotsBusy,
    SlotsReserved,
    StopListening,
)
from trainkit.launch.session import Session, is_this_machine
from trainkit.launch.supervise.agent_pool import AgentPool, Answer, JoinedAgent, MissingAgent
from trainkit.launch.supervise.host_consistency import host_inconsistencies, table
from trainkit.launch.supervise.outcome import Outcome
from trainkit.launch.supervise.rank_environment import (
    port_candidates,
    slot_names,
    visible_devices,
)
from trainkit.runs.events import RootCause
from trainkit.runs.world import RunWorld, WorldNode

# beyond lease and grace, for agents of an earlier attempt of this run to be gone
OWN_SECONDS = 10.0
AGAIN_SECONDS = 0.5


class StartError(Exception):
    """The ranks cannot be started; `outcome` says why."""

    def __init__(
        self,
        exit: Exit,
        message: str,
        rows: Sequence[tuple[str, str]] = (),
        *,
        hint: str = "",
        suspects: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        cause: RootCause = {
            "message": f"{message}:\n{table(rows)}" if rows else message,
            "hosts": [{"host": host, "why": why} for host, why in rows],
        }
        if hint:
            cause["advice"] = hint
        self.outcome = Outcome(exit, "infra", cause, tuple(suspects))


async def gather(
    pool: AgentPool, new: Sequence[int], *, own_code: bool, gpus: int = 0
) -> list[JoinedAgent]:
    """The hello of every agent in use, once they all agree. Raises StartError: 8 with all hosts
    that did not come, 7 with all that differ.

    Args:
        pool: entered.
        new: agents that are judged; others were before, and what they said then may be old.
        own_code: trainkit's own code is to run there.
        gpus: how many each host must have.
    """
    answers = await pool.gather(pool.session.connect)
    hellos = [answer for answer in answers if isinstance(answer, JoinedAgent)]
    if missing := [answer for answer in answers if isinstance(answer, MissingAgent)]:
        _refuse_missing(missing, len(answers), pool.session)
    judged = {pool.host(node) for node in new}
    found = host_inconsistencies(hellos, pool.session, gpus, own_code=own_code)
    if wrong := [finding for finding in found if finding.host in judged]:
        hosts = list(dict.fromkeys(finding.host for finding in wrong))
        ways_out = dict.fromkeys(finding.advice for finding in wrong)
        raise StartError(
            Exit.HEALTH,
            f"{_count(len(hosts), len(hellos))} not fit to run together",
            [(finding.host, finding.message) for finding in wrong],
            hint="; ".join([*ways_out, "or leave them out with --exclude"]),
            suspects=hosts,
        )
    return hellos


def _refuse_missing(missing: Sequence[MissingAgent], hosts: int, session: Session) -> None:
    cluster = session.cluster
    root = f"does not see {cluster.root}: it is not shared with this host, or mounted elsewhere"
    rows = [(m.host, root if m.not_shared else m.why) for m in missing]
    exit = Exit.START
    what = "not reached"
    connect = f"clusters.{cluster.name}.watch.connect"
    if all(m.not_shared for m in missing):
        exit = Exit.HEALTH
        what = "without the shared root"
        hint = f"set clusters.{cluster.name}.root to a folder that all hosts share under one path"
    elif session.container is not None:
        what = "without an agent in its container"
        hint = (
            f"each host has to start {session.container.label} within {connect} ="
            f" {session.connect:g} s; what was said: {session.logs}"
        )
    elif all(session.local or is_this_machine(session.hosts[m.node]) for m in missing):
        hint = (
            "that is this machine, with no ssh in between: what its agent said is in"
            f" {session.logs}; it needs clusters.{cluster.name}.python = {session.python} and to"
            " reach its own address"
        )
    elif cluster.launcher_traits.batch:
        hint = (
            f"what the nodes said is in {session.logs}; a prolog, an image that is pulled or a file"
            f" system that is slow needs a longer {connect} than {session.connect:g} s"
        )
    else:
        hint = (
            "`ssh HOST true` must work without a question; ports, users and keys belong into"
            " ~/.ssh/config or the hostfile"
        )
    raise StartError(
        exit,
        f"{_count(len(rows), hosts)} {what}",
        rows,
        hint=hint,
        suspects=[m.host for m in missing],
    )


def _count(some: int, all: int) -> str:
    return f"{some} of {all} host{'s are' if all > 1 else ' is'}"


async def _asked(
    pool: AgentPool,
    phase: str,
    frames: Mapping[int, Frame],
    answers: tuple[type[Answer], ...],
    timeout: float,
) -> dict[int, Answer]:
    """All nodes' answers. Raises StartError (8) naming those that hung, and in which phase; and
    what a node said it cannot do."""
    got, silent = await pool.ask(frames, answers, timeout)
    rows = [(pool.host(node), f"hung while {phase}: {why}") for node, why in sorted(silent.items())]
    done = dict[int, Answer]()
    for node, frame in sorted(got.items()):
        if isinstance(frame, CommandRefused):
            rows.append((pool.host(node), f"could not do its part of {phase}: {frame.error}"))
        else:
            done[node] = frame
    if rows:
        raise StartError(
            Exit.START,
            f"{_count(len(rows), len(pool.nodes))} there, but did not go on",
            rows,
            suspects=[host for host, _ in rows],
        )
    return done


async def reserve(pool: AgentPool, nodes: Sequence[int], job: Job, *, share: bool) -> None:
    """Hold the job's slots on the hosts of these agents. Raises StartError (17) naming the runs
    that hold them.

    What an earlier attempt of the same run still holds is waited for: its agents let go when
    nothing of it is left.
    """
    session = pool.session
    watch = job.cluster.watch
    frames = {
        node: ReserveSlots(
            session.run,
            session.attempt,
            tuple(slot_names(job, session.hosts[node])),
            share=share,
            mark=session.mark(node),
        )
        for node in nodes
    }
    hosts = len(frames)
    deadline = time.monotonic() + watch.lease + watch.grace + OWN_SECONDS
    while True:
        kinds = (SlotsReserved, SlotsBusy)
        got = await _asked(pool, "reserving its slots", frames, kinds, session.connect)
        answers = {node: frame for node, frame in got.items() if isinstance(frame, SlotsBusy)}
        busy = {node: frame.holder or {} for node, frame in answers.items()}
        frames = {node: frames[node] for node in busy}
        if not busy:
            return
        _refuse_twins(pool, busy)
        # marks are shown of this user's own runs alone
        own = [str(holder.get("mark")).startswith(f"{session.run}/") for holder in busy.values()]
        if not all(own) or time.monotonic() > deadline:
            break
        await asyncio.sleep(AGAIN_SECONDS)
    rows = [
        (pool.host(node), f"{answers[node].slot} is taken by {_named(holder)}")
        for node, holder in busy.items()
    ]
    raise StartError(
        Exit.HOSTS_BUSY,
        f"{_count(len(rows), hosts)} busy",
        rows,
        hint="wait for it, stop it, or run beside it with --share",
    )


def _named(holder: Mapping[str, object]) -> str:
    """Who holds a slot: the user as the kernel has it, the run as that user says."""
    user = holder.get("user", "an unknown user")
    if "why" in holder:
        return f"{user}, who has put something else in its place ({holder['why']})"
    pid = f"pid {holder.get('pid', '?')}"
    if "run" not in holder:
        return f"{user} ({pid}), who names no run"
    return f"run {holder['run']} of {user} ({pid}, {holder.get('folder', '?')})"


def _refuse_twins(pool: AgentPool, busy: Mapping[int, Mapping[str, object]]) -> None:
    """Raise StartError (7) where a host's slots are held by another agent of this very attempt: two
    names of one machine, or one folder of several."""
    session = pool.session
    nodes = {session.mark(node): node for node in pool.nodes}
    pairs = [
        (node, nodes[mark])
        for node, holder in busy.items()
        if (mark := str(holder.get("mark"))) in nodes and nodes[mark] != node
    ]
    if not pairs:
        return
    folder = f"clusters.{session.cluster.name}.node_folder = {session.cluster.node_folder}"
    rows = []
    for node, other in pairs:
        why = f"has its slots' locks where {pool.host(other)} has them: {folder}"
        if _machine(pool.hellos[node]) == _machine(pool.hellos[other]):
            why = f"is the same machine as {pool.host(other)}"
        rows.append((pool.host(node), why))
    hint = (
        "a machine has one line in the hostfile, slots=N says how many ranks it runs; node_folder"
        " is a folder of each node's own, such as /dev/shm"
    )
    raise StartError(
        Exit.HEALTH, f"{_count(len(rows), len(pool.nodes))} not by themselves", rows, hint=hint
    )


def _machine(hello: JoinedAgent) -> tuple[object, object]:
    """What a machine calls itself, and its boot."""
    return hello.facts.host, hello.facts.identity.get("boot_id")


async def rendezvous(pool: AgentPool, wanted: int = 0) -> tuple[str, int]:
    """(address, port) of rank 0: free there, and reached from every node. Raises StartError (8).

    Args:
        pool: all of whose used agents are there.
        wanted: the port that is tried before others; 0: none.
    """
    session, timeout = pool.session, pool.session.connect
    ports = port_candidates(f"{session.run}/{session.attempt}")
    if wanted:
        ports = [wanted, *ports]
    first = pool.nodes[0]
    listens = {first: Listen(tuple(ports))}
    listening = await _asked(pool, "listening for the others", listens, (Listening,), timeout)
    address = str(pool.hellos[first].facts.address)
    port = listening[first].port
    if port is None:
        raise StartError(
            Exit.START,
            f"none of {len(ports)} ports tried on {pool.host(first)} is free:"
            f" {listening[first].error}",
        )
    if len(pool.nodes) > 1:
        frames = {node: ConnectToPort(address, port) for node in pool.nodes}
        phase = f"connecting to {address}:{port}"
        got = await _asked(pool, phase, frames, (PortChecked,), timeout)
        if rows := [
            (pool.host(node), frame.error) for node, frame in sorted(got.items()) if frame.error
        ]:
            hint = (
                "a firewall, or an address of another network: clusters.X.interface names the"
                " right one"
            )
            raise StartError(
                Exit.START,
                f"{_count(len(rows), len(got))} unable to reach rank 0's host {pool.host(first)} at"
                f" {address}:{port}",
                rows,
                hint=hint,
            )
    freed = {first: StopListening()}
    await _asked(pool, "freeing the port again", freed, (ListeningStopped,), timeout)
    return address, int(port)


def build_world(
    pool: AgentPool, attempt: int, job: Job, command: Command, address: str, port: int
) -> RunWorld:
    """Ranks over the hosts of the used agents, in order.

    Args:
        pool: all of whose used agents are there.
        attempt: its number; the agents may be those of an earlier one.
        job: as the attempt runs it.
        command: what the ranks run.
        address: where rank 0 listens.
        port: where rank 0 listens.
    """
    session = pool.session
    devices_by_hostfile = job.cluster.device_type == "cuda" and job.cluster.launcher_traits.hostfile
    nodes = []
    for number, agent in enumerate(pool.nodes):
        facts = pool.hellos[agent].facts
        visible = None
        if devices_by_hostfile:
            visible = ",".join(visible_devices(job, session.hosts[agent]))
        first = number * command.ranks_per_node
        nodes.append(
            WorldNode(
                pool.host(agent),
                str(facts.address),
                number,
                tuple(range(first, first + command.ranks_per_node)),
                facts.interface,
                visible,
            )
        )
    return RunWorld(
        session.run,
        attempt,
        address,
        port,
        network=job.cluster.interface is not None,
        nodes=tuple(nodes),
        command=command.to_json(),
    )
