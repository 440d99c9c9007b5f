"""The agents of one session, seen from the supervisor: who has come, what they say, whom we have
lost."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import TypeVar, cast

from trainkit.base.errors import TrainkitError
from trainkit.base.lazy_dataclasses import dataclass, replace
from trainkit.jobs.schema import Job
from trainkit.launch.containers.runtimes import NOT_STARTED, describe_exit
from trainkit.launch.hosts.hostfile import Host
from trainkit.launch.launchers.contract import Launcher, TransportExit, Transports
from trainkit.launch.protocol.frames import (
    CommandRefused,
    Frame,
    Goodbye,
    HeartbeatReport,
    HostFacts,
    Ping,
    StartParent,
    read_report,
)
from trainkit.launch.protocol.framing import BadFrame, encode, heartbeat_interval
from trainkit.launch.protocol.server import Connection, Server
from trainkit.launch.session import Session

POLL_SECONDS = 0.05
# heartbeats that do not come end the pings: a host that we do not hear must not live on by them
# when we have given it up
HEARD_BEATS = 3
# beyond lease and grace, until a host that we lost has surely stopped itself: it may have heard
# pings for so long, then looks at its lease once a beat, and ends what it has started
OWN_STOP_BEATS = HEARD_BEATS + 2
LEAST_OWN_STOP = 1.0  # seconds, however short the beat
# for agents that have nothing left to stop, and their transports, to end by themselves
BYE_SECONDS = 3.0
# of all agents together that nobody has looked at; more have to wait in their connections
HELD_FRAMES = 10_000
Answer = TypeVar("Answer", bound=Frame)


def own_stop_seconds(lease: float) -> float:
    """Beyond lease and grace, until a host that we lost has surely stopped its ranks itself."""
    return max(LEAST_OWN_STOP, OWN_STOP_BEATS * heartbeat_interval(lease))


def stop_seconds(job: Job) -> float:
    """From the last word of a host that we lost until it has surely stopped its ranks."""
    lease = job.cluster.watch.lease
    return lease + job.stop_grace + own_stop_seconds(lease)


@dataclass(frozen=True)
class JoinedAgent:
    """An agent that is there. `clock_offset`: seconds its clock is ahead of ours, less the
    quickest frame's way."""

    node: int
    host: str
    facts: HostFacts
    clock_offset: float


@dataclass(frozen=True)
class MissingAgent:
    """An agent that did not come, and why as far as is known here.

    `not_shared`: the host was reached and does not see the session's folder.
    """

    node: int
    host: str
    why: str
    not_shared: bool = False


@dataclass(frozen=True)
class AgentLost(Frame):
    """No agent says this: its connection is over.

    Args:
        why: for people.
        silent: nothing was closed, so what it started may still run for a while.
        heard: when it was heard last, by time.monotonic(): a loop that waits for a disk may look at
            this much later.
        closed: its host closed the connection: the agent has ended, or ends now and stops all it
            started. It does not live on for its lease.
    """

    why: str
    silent: bool
    heard: float
    closed: bool = False


class AgentPool:
    """All agents of a session, by their numbers. The server's thread hears them and pings them,
    whatever the loop that asks them waits for.

    Args:
        session: already written.
        launcher: what starts the agents.
        server: where they knock; it listens already.
        clock: seconds, by which agents are waited for.
        standbys: how many of the session's last hosts are not in use yet.
    """

    def __init__(
        self,
        session: Session,
        launcher: Launcher,
        server: Server,
        clock: Callable[[], float] = time.monotonic,
        standbys: int = 0,
    ) -> None:
        self.session = session
        # the agents in use, in order of the nodes of ranks; others stand by
        self.nodes = list(range(len(session.hosts) - standbys))
        self.parent: StartParent | None = None  # what each agent starts at once, as it comes
        self.launcher = launcher
        self.server = server
        self.clock = clock
        self.received: asyncio.Queue[tuple[int, Frame]] = asyncio.Queue()
        # frames that the server's thread has given, and those that have come to `received`
        self._given = self._arrived = 0
        self.hellos: dict[int, JoinedAgent] = {}
        self.lost: dict[int, AgentLost] = {}
        self.run_ends = False  # when we say bye
        self._connections: dict[int, Connection] = {}
        self._leaving: set[int] = set()
        self._transports: list[Transports] = []
        self._ends: Mapping[int, TransportExit] = {}
        self._looking: asyncio.Task[None] | None = None
        self._beating: Future[None] | None = None

    async def __aenter__(self) -> AgentPool:
        await self.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def open(self) -> None:
        """Send the agents on their way."""
        self._home = asyncio.get_running_loop()
        self.server.token = self.session.token
        self.server.handlers["agent"] = self._serve
        self._launch(self.nodes)
        for node in range(len(self.nodes), len(self.session.hosts)):
            try:
                self._launch([node])
            except (TrainkitError, OSError) as error:  # nobody waits for it
                self.lost[node] = AgentLost(str(error), silent=True, heard=time.monotonic())
        self._beating = asyncio.run_coroutine_threadsafe(self._beat(), self.server.loop)

    def _launch(self, nodes: Sequence[int]) -> None:
        self._transports.append(self.launcher.start(self.session, nodes))

    def use(self, hosts: Sequence[Host]) -> list[int]:
        """From now on the agents in use are those of these hosts, in this order: where none is
        there, or on its way, a new one starts; one in use so far that is not wanted ends.

        Returns:
            Those that were not in use before.

        Raises as `Launcher.start`.
        """
        former = set(self.nodes)
        gone = self.lost.keys() | self._leaving | self._ends.keys()
        there = {self.host(n): n for n in range(len(self.session.hosts)) if n not in gone}
        wanted = [host for host in hosts if host.name not in there]
        new = {host.name: self.session.add(host) for host in wanted}
        self.nodes = [{**there, **new}[host.name] for host in hosts]
        self.dismiss(sorted(former - {*self.nodes}))
        if new:
            self._launch(list(new.values()))
        return [node for node in self.nodes if node not in former]

    async def close(self) -> None:
        """Dismiss all agents and wait for their end, bounded."""
        if self._beating is not None:
            self._beating.cancel()
        self.dismiss(range(len(self.session.hosts)))
        try:
            await self._all_gone(BYE_SECONDS)
        finally:
            self.server.handlers.pop("agent", None)
            for connection in list(self._connections.values()):
                self.server.loop.call_soon_threadsafe(connection.close)
            for transports in self._transports:
                transports.close()

    @property
    def present(self) -> list[int]:
        """Agents that are there, in order."""
        gone = self.lost.keys() | self._leaving
        return sorted(node for node in list(self.hellos) if node not in gone)

    @property
    def at_work(self) -> list[int]:
        """Those of them that are in use."""
        in_use = set(self.nodes)
        return [node for node in self.present if node in in_use]

    def start_parents(self, frame: StartParent | None) -> None:
        """Have this run on every host, of agents that are still to come too; one that lives stays.
        It begins while its host is still looked at: both take seconds from a slow root."""
        self.parent = frame
        if frame is not None:
            for node in self._connections.keys() - self._leaving:
                self.send(node, frame)

    def host(self, node: int) -> str:
        """A node's name in the hostfile."""
        return self.session.hosts[node].name

    def send(self, node: int, frame: Frame) -> None:
        """Send a frame; one to an agent that is lost goes nowhere."""
        if node in self._connections and node not in self.lost:
            data = encode(frame.to_json())
            self.server.loop.call_soon_threadsafe(self._connections[node].write, data)

    def dismiss(self, nodes: Sequence[int]) -> None:
        """Say bye: these agents stop what is left and end, and their end is not a loss. Who is
        still on the way hears it on arrival."""
        for node in nodes:
            self._leaving.add(node)
            self.send(node, Goodbye(self.run_ends))

    async def gather(self, timeout: float) -> list[JoinedAgent | MissingAgent]:
        """Wait until every agent in use has said hello or cannot come any more, at most `timeout`
        seconds; the answers in order."""
        deadline = self.clock() + timeout
        nodes = self.nodes
        ended = await self._ended()
        while self.clock() < deadline and not all(
            node in self.hellos or node in self.lost or node in ended for node in nodes
        ):
            await asyncio.sleep(POLL_SECONDS)
            ended = await self._ended()
        if any(node not in self.hellos and node in ended for node in nodes):
            # a hello may be on its way although its transport has just ended
            await asyncio.sleep(2 * POLL_SECONDS)
        return [
            self.hellos.get(node) or self._missing(node, ended.get(node), timeout) for node in nodes
        ]

    async def ask(
        self, frames: Mapping[int, Frame], answers: tuple[type[Answer], ...], timeout: float
    ) -> tuple[dict[int, Answer | CommandRefused], dict[int, str]]:
        """Send each node its frame and wait for one answer of each.

        Args:
            frames: by node.
            answers: types of frames that are answers; `CommandRefused` always is one.
            timeout: seconds for all of them.

        Returns:
            ({node: answer}, {node: why there is none}); frames of other types that come
            meanwhile are dropped.
        """
        for node, frame in frames.items():
            self.send(node, frame)
        got: dict[int, Answer | CommandRefused] = {}
        deadline = self.clock() + timeout
        waiting = set(frames).difference(self.lost)
        while waiting:
            try:
                async with asyncio.timeout(deadline - self.clock()):
                    node, frame = await self.received.get()
            except TimeoutError:
                if self.clock() < deadline:
                    continue
                return got, self._silent(got, frames) | dict.fromkeys(
                    sorted(waiting), f"no answer within {timeout:g} s"
                )
            if node in frames and isinstance(frame, (*answers, CommandRefused)):
                got.setdefault(node, cast(Answer, frame))
                waiting.discard(node)
            waiting.difference_update(self.lost)
        return got, self._silent(got, frames)

    def _silent(self, got: Mapping[int, Frame], asked: Mapping[int, Frame]) -> dict[int, str]:
        return {
            node: self.lost[node].why for node in asked if node not in got and node in self.lost
        }

    async def _ended(self) -> Mapping[int, TransportExit]:
        """How transports have ended, as far as is known."""
        return await self.server.run(self._look_once())

    async def _look_once(self) -> Mapping[int, TransportExit]:
        """A look reads files on the shared root: it has a thread, one at a time, and while that
        waits for the file system we go on with what we knew."""
        if self._looking is None or self._looking.done():
            looked_at = list(self._transports)
            self._looking = asyncio.create_task(asyncio.to_thread(self._look, looked_at))
        if self._looking is not None:
            await asyncio.wait({self._looking}, timeout=POLL_SECONDS)
        return self._ends

    def _look(self, transports: Sequence[Transports]) -> None:
        with contextlib.suppress(OSError):
            self._ends = {node: end for each in transports for node, end in each.poll().items()}

    def _missing(self, node: int, end: TransportExit | None, timeout: float) -> MissingAgent:
        host = self.host(node)
        if end is not None:
            words = end.last or f"{self.launcher.name} ended with {end.code} and said nothing"
            if self.session.container is not None and end.code in NOT_STARTED:
                words = describe_exit(self.session.container, end.code, end.last)
            # bash's words, about no file but this
            unseen = re.search(
                re.escape(f"{self.session.folder}/") + r"[a-z]+\d*\.sh: No such file", end.last
            )
            return MissingAgent(node, host, words, unseen is not None)
        if node in self.lost:
            return MissingAgent(node, host, f"its agent came and went: {self.lost[node].why}")
        if node in self._connections:
            why = f"its agent connected and then hung: no hello within {timeout:g} s"
            heard = time.monotonic() - self._connections[node].heard
            if heard < HEARD_BEATS * heartbeat_interval(self.session.lease):
                why += f", though it is heard: {self.session.cluster.root} does not answer there"
            return MissingAgent(node, host, why)
        return MissingAgent(
            node, host, f"no agent came within {timeout:g} s; {self.launcher.name} is still trying"
        )

    async def _serve(self, connection: Connection, node: int) -> None:
        """Take in all that one agent says."""
        if node in self._connections or not 0 <= node < len(self.session.hosts):
            raise BadFrame(f"node {node} is there already or is none of ours")
        self._connections[node] = connection
        if node in self._leaving:
            self.send(node, Goodbye(self.run_ends))
        elif self.parent is not None:
            self.send(node, self.parent)
        why = "its agent's connection ended"
        closed = True
        try:
            while (received := await connection.receive()) is not None:
                frame = read_report(received)
                if isinstance(frame, HostFacts) and node not in self.hellos:
                    self.hellos[node] = self._hello(node, frame)
                elif frame is not None:
                    self._compare_clocks(node, frame)
                    while self._given - self._arrived + self.received.qsize() >= HELD_FRAMES:
                        await asyncio.sleep(POLL_SECONDS)
                        connection.heard = time.monotonic()  # it is we who do not listen
                    self._give(node, frame)
        except BadFrame as error:
            why = f"its agent speaks another protocol: {error}"
            closed = False
        self._lose(node, why, silent=False, closed=closed)

    def _compare_clocks(self, node: int, frame: Frame) -> None:
        """A frame is late by its way and by what we do meanwhile: of all that tell their time,
        the one that was least late is nearest."""
        if not isinstance(frame, HeartbeatReport | HostFacts) or frame.clock is None:
            return
        hello = self.hellos.get(node)
        offset = frame.clock - time.time()
        if hello is not None and offset > hello.clock_offset:
            self.hellos[node] = replace(hello, clock_offset=offset)

    def _hello(self, node: int, facts: HostFacts) -> JoinedAgent:
        offset = (facts.clock or time.time()) - time.time()
        return JoinedAgent(node, self.host(node), facts, offset)

    def _lose(self, node: int, why: str, *, silent: bool, closed: bool = False) -> None:
        if node in self.lost or node in self._leaving:
            return
        heard = self._connections[node].heard if silent else time.monotonic()
        frame = AgentLost(why, silent, heard, closed)
        self.lost[node] = frame
        self._connections[node].close()
        self._give(node, frame)

    def _give(self, node: int, frame: Frame) -> None:
        """Hand a frame on from the server's thread to the loop that asks."""
        self._given += 1
        self._home.call_soon_threadsafe(self._arrive, node, frame)

    def _arrive(self, node: int, frame: Frame) -> None:
        self._arrived += 1
        self.received.put_nowait((node, frame))

    async def _beat(self) -> None:
        """Once a second, or more often: say that we live, and look who does not."""
        last = time.monotonic()
        gap = heartbeat_interval(self.session.lease)
        while True:
            await asyncio.sleep(gap)
            now = time.monotonic()
            late = now - last > 3 * gap
            last = now
            connections = {
                node: connection
                for node, connection in self._connections.items()
                if node not in self.lost and node not in self._leaving
            }
            for connection in connections.values():
                if now - connection.heard < HEARD_BEATS * gap:
                    connection.send(Ping())
            ended = await self._look_once()
            for node, connection in connections.items():
                # after a pause of our own their frames are still to be read
                if now - connection.heard > self.session.lease and not late:
                    self._lose(
                        node,
                        f"its agent was silent for {now - connection.heard:.0f} s",
                        silent=True,
                    )
                elif node in ended and node in self.hellos:
                    end = ended[node]
                    self._lose(
                        node,
                        f"{self.launcher.name} to it ended with {end.code}:"
                        f" {end.last or 'without a word'}",
                        silent=False,
                    )

    async def _all_gone(self, timeout: float) -> None:
        """What leads to a host that we do not hear any more does not end by itself."""
        silent = {node for node, lost in self.lost.items() if lost.silent}
        others = set(range(len(self.session.hosts))) - silent
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and others - set(await self._ended()):
            await asyncio.sleep(POLL_SECONDS / 5)
