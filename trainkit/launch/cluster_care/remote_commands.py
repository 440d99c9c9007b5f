"""Programs that are run once on the agents of a pool, for what they print."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainkit.jobs.clusters import Cluster
from trainkit.launch.hosts.hostfile import Host
from trainkit.launch.launchers.contract import Launcher
from trainkit.launch.protocol.frames import (
    ProcessEnded,
    ProcessesStopped,
    ProcessOutput,
    ProcessReport,
    ProcessSpec,
    ReserveSlots,
    SlotsReserved,
    StartFailed,
    StartProcesses,
    StopProcesses,
)
from trainkit.launch.supervise.agent_pool import AgentPool, JoinedAgent, MissingAgent
from trainkit.launch.supervise.orphan_sweep import open_agent_pool

STOP_SECONDS = 5.0  # beyond the grace, until an agent has ended what was too slow


@dataclass
class CommandResult:
    """What one program said, and how it ended.

    Args:
        code: its exit code, negative for a signal; None where it did not end by itself.
        out: what it printed.
        err: what it printed to stderr.
        error: why it could not be run to its end; None where it could.
    """

    code: int | None = None
    out: str = ""
    err: str = ""
    error: str | None = None

    @property
    def last(self) -> str:
        """One line for a table: why it failed."""
        lines = [
            line.strip()
            for line in (self.error or self.err or self.out).splitlines()
            if line.strip()
        ]
        if lines:
            return lines[-1]
        return f"it ended with {self.code} and said nothing"


@dataclass(frozen=True)
class RemoteCommand:
    """One program on one node; `key` names it there."""

    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    key: str = "0"

    def process(self, key: str) -> ProcessSpec:
        """What an agent is sent."""
        return ProcessSpec(key, tuple(self.argv), self.env, cwd="/", whole=True)


async def bind_to_agents(pool: AgentPool) -> None:
    """What will be started on the pool's agents is to die with them; they hold no slot."""
    session = pool.session
    await pool.ask(
        {
            node: ReserveSlots(session.run, 0, (), share=True, mark=session.mark(node))
            for node in pool.present
        },
        (SlotsReserved,),
        session.connect,
    )


async def run_on_agents(
    pool: AgentPool,
    programs: Mapping[int, Sequence[RemoteCommand]],
    seconds: float,
    *,
    turn: str = "",
) -> dict[tuple[int, str], CommandResult]:
    """Start programs by node, all at once, and wait until all have ended; what has not after so
    many `seconds` is stopped.

    Args:
        turn: tells the programs of several calls on one pool apart.

    Returns:
        What each said, by (node, its key).
    """
    said = {
        (node, program.key): CommandResult() for node, each in programs.items() for program in each
    }
    ended = set[tuple[int, str]]()
    for node, each in programs.items():
        processes = tuple(program.process(turn + program.key) for program in each)
        pool.send(node, StartProcesses(processes))
    deadline = time.monotonic() + seconds
    while len(ended) < len(said):
        for node, lost in pool.lost.items():
            for who in [who for who in said if who[0] == node and who not in ended]:
                said[who].error = lost.why
                ended.add(who)
        try:
            async with asyncio.timeout(min(deadline - time.monotonic(), 1.0)):
                node, frame = await pool.received.get()
        except TimeoutError:
            if time.monotonic() < deadline:
                continue
            break
        if not isinstance(frame, ProcessReport):
            continue
        who = node, frame.key.removeprefix(turn)
        if who in said and frame.key.startswith(turn):
            _take(said[who], frame, ended, who)
    if slow := [who for who in said if who not in ended]:
        for who in slow:
            said[who].error = f"no end within {seconds:g} s"
        frames = {
            node: StopProcesses(1.0, tuple(turn + k for n, k in slow if n == node))
            for node in {n for n, _ in slow}
        }
        await pool.ask(frames, (ProcessesStopped,), 1.0 + STOP_SECONDS)
    return said


def _take(
    said: CommandResult, frame: ProcessReport, ended: set[tuple[int, str]], who: tuple[int, str]
) -> None:
    match frame:
        case ProcessOutput(stream="out"):
            said.out += frame.text
        case ProcessOutput():
            said.err += frame.text
        case StartFailed():
            said.error = frame.error
            ended.add(who)
        case ProcessEnded():
            said.code = frame.code
            ended.add(who)


def run_on_hosts(
    cluster: Cluster,
    hosts: Sequence[Host],
    root: Path,
    argv: Sequence[str],
    seconds: float,
    *,
    launcher: Launcher | None = None,
) -> dict[str, CommandResult]:
    """What one command line says on each host, by host, in order."""

    async def run() -> dict[str, CommandResult]:
        async with open_agent_pool(cluster, hosts, root, "once", launcher=launcher) as pool:
            answers = await pool.gather(pool.session.connect)
            await bind_to_agents(pool)
            said = await run_on_agents(
                pool,
                {node: [RemoteCommand(argv, dict(cluster.env))] for node in pool.present},
                seconds,
            )
        return {
            a.host: (
                said[a.node, "0"]
                if isinstance(a, JoinedAgent) and (a.node, "0") in said
                else CommandResult(error=_why(a))
            )
            for a in answers
        }

    return asyncio.run(run())


def _why(answer: JoinedAgent | MissingAgent) -> str:
    if isinstance(answer, MissingAgent):
        return answer.why
    return "its agent was lost"
