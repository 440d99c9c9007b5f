"""Programs that are run once on the agents of a pool, for what they print."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainkit.base.lazy_dataclasses import dataclass, field
from trainkit.jobs.clusters import Cluster
from trainkit.launch.hosts.hostfile import Host
from trainkit.launch.launchers.contract import Launcher
from trainkit.launch.protocol.frames import (
    Frame,
    ProcessEnded,
    ProcessesStopped,
    ProcessOutput,
    ProcessReport,
    ProcessSpec,
    StartFailed,
    StartProcesses,
    StopProcesses,
)
from trainkit.launch.supervise.agent_pool import AgentPool, MissingAgent
from trainkit.launch.supervise.orphan_sweep import bind_to_agents, open_agent_pool

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
        return lines[-1] if lines else f"it ended with {self.code} and said nothing"


@dataclass(frozen=True)
class RemoteCommand:
    """One program on one node; `key` names it there."""

    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    key: str = "0"

    def process(self, key: str) -> ProcessSpec:
        """What an agent is sent."""
        return ProcessSpec(key, tuple(self.argv), self.env, cwd="/", whole=True)


Program = tuple[int, str]  # (node, the command's key)


async def run_on_agents(
    pool: AgentPool,
    commands: Mapping[int, Sequence[RemoteCommand]],
    seconds: float,
    *,
    key_prefix: str = "",
) -> dict[Program, CommandResult]:
    """Start programs by node, all at once, and wait until all have ended.

    Args:
        pool: whose agents start them.
        commands: by node.
        seconds: what has not ended after so many is stopped.
        key_prefix: tells the programs of several calls on one pool apart.

    Returns:
        What each printed, by (node, its key).
    """
    running = _RunningCommands(commands, key_prefix)
    for node, each in commands.items():
        processes = tuple(command.process(key_prefix + command.key) for command in each)
        pool.send(node, StartProcesses(processes))
    deadline = time.monotonic() + seconds
    while running.left and time.monotonic() < deadline:
        for node, lost in pool.lost.items():
            running.lose(node, lost.why)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(deadline - time.monotonic(), 1.0)):
                running.handle(*await pool.received.get())
    await _stop_slow(pool, running, seconds)
    return running.results


class _RunningCommands:
    """Programs that have been started, and what they have printed so far."""

    def __init__(self, commands: Mapping[int, Sequence[RemoteCommand]], key_prefix: str) -> None:
        self.key_prefix = key_prefix
        self.results: dict[Program, CommandResult] = {}
        for node, each in commands.items():
            for command in each:
                self.results[node, command.key] = CommandResult()
        self.left = set(self.results)  # those that have not ended

    def lose(self, node: int, why: str) -> None:
        """A node's agent is lost, and with it what has not ended there."""
        for program in [each for each in self.left if each[0] == node]:
            self.results[program].error = why
            self.left.discard(program)

    def handle(self, node: int, frame: Frame) -> None:
        """Take in a frame; one about programs of another call is passed over."""
        if not isinstance(frame, ProcessReport) or not frame.key.startswith(self.key_prefix):
            return
        program = node, frame.key.removeprefix(self.key_prefix)
        result = self.results.get(program)
        if result is None:
            return
        match frame:
            case ProcessOutput(stream="out"):
                result.out += frame.text
            case ProcessOutput():
                result.err += frame.text
            case StartFailed():
                result.error = frame.error
                self.left.discard(program)
            case ProcessEnded():
                result.code = frame.code
                self.left.discard(program)


async def _stop_slow(pool: AgentPool, running: _RunningCommands, seconds: float) -> None:
    """Stop what has not ended in time."""
    slow: dict[int, list[str]] = {}
    for node, key in sorted(running.left):
        running.results[node, key].error = f"no end within {seconds:g} s"
        slow.setdefault(node, []).append(running.key_prefix + key)
    if slow:
        frames = {node: StopProcesses(1.0, tuple(keys)) for node, keys in slow.items()}
        await pool.ask(frames, (ProcessesStopped,), 1.0 + STOP_SECONDS)


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
        lost = CommandResult(error="its agent was lost")
        return {
            a.host: CommandResult(error=a.why)
            if isinstance(a, MissingAgent)
            else said.get((a.node, "0"), lost)
            for a in answers
        }

    return asyncio.run(run())
