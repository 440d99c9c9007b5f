"""Agents as coroutines of the supervisor's own loop, for tests and for measuring a thousand of
them.

They speak the whole protocol and really start the programs, but guard nothing: what outlives a
killed supervisor is not their business.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from trainkit.base.files import read_json
from trainkit.base.process import identity, on_this_node
from trainkit.base.worker import PARENT_VARIABLE
from trainkit.launch.launchers.contract import TransportExit, Transports
from trainkit.launch.protocol import frames
from trainkit.launch.protocol.frames import Frame, HostFacts, ProcessSpec
from trainkit.launch.protocol.handshake import ClientHandshake
from trainkit.launch.protocol.server import Connection
from trainkit.launch.protocol.session_document import SessionDocument, read_session
from trainkit.launch.session import Session


def read_command(value: Mapping[str, object]) -> Frame | None:
    """What a supervisor says; None for a type that is not known. Raises BadFrame. Reports, which
    stand behind the commands, have some of their types."""
    kinds = {kind.TYPE: kind for kind in reversed(Frame.__subclasses__())}
    kind = kinds.get(str(value.get("type")))
    return kind.from_json(value) if kind else None


class StubAgent:
    """One agent; a test overrides what should go wrong. `document` is what the session's folder
    says; a thousand agents of one process do not each read the names of a thousand hosts."""

    document: SessionDocument
    beat_seconds = 0.2

    def __init__(self, session: Session, node: int) -> None:
        self.session = session
        self.node = node
        self.children: dict[str, asyncio.subprocess.Process] = {}
        self.stopped: set[str] = set()
        self.waiters: list[asyncio.Task[None]] = []
        self.listener: socket.socket | None = None

    def facts(self) -> HostFacts:
        """What it says of itself."""
        return HostFacts(
            node=self.node,
            host=socket.gethostname(),
            pid=os.getpid(),
            identity=identity().to_json(),
            address="127.0.0.1",
            interface="lo",
            versions={"python": "3"},
            snapshot=self.document.snapshot,
            nonce=self.document.nonce,
            clock=time.time(),
            cpus=os.cpu_count(),
            disk_free=2**40,
        )

    async def run(self) -> None:
        """Connect, say hello, obey until the connection ends or bye is said."""
        self.connection = Connection(
            *await asyncio.open_connection(self.document.address, self.document.port)
        )
        beating = None
        try:
            await self._prove()
            self.connection.send(self.facts())
            beating = asyncio.create_task(self._beat())
            while (received := await self.connection.receive()) is not None:
                command = read_command(received)
                if isinstance(command, frames.Goodbye):
                    break
                if command and (work := getattr(self, f"on_{command.TYPE}", None)):
                    await work(command)
        finally:
            if beating:
                beating.cancel()
            await self.stop(0)
            self.connection.close()

    async def _prove(self) -> None:
        handshake = ClientHandshake(self.session.token, "agent", self.node)
        self.connection.send(handshake.request)
        challenge = await self.connection.receive()
        assert challenge is not None
        self.connection.send(handshake.answer(challenge))
        self.connection.trust()

    async def on_reserve(self, frame: frames.ReserveSlots) -> None:
        self.connection.send(frames.SlotsReserved())

    async def on_listen(self, frame: frames.Listen) -> None:
        for port in frame.ports:
            self.listener = socket.socket()
            self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                self.listener.bind(("127.0.0.1", port))
                self.listener.listen()
                return self.connection.send(frames.Listening(port))
        return self.connection.send(frames.Listening(None, "all taken"))

    async def on_connect(self, frame: frames.ConnectToPort) -> None:
        self.connection.send(frames.PortChecked())

    async def on_unlisten(self, frame: frames.StopListening) -> None:
        if self.listener is not None:
            self.listener.close()
        self.connection.send(frames.ListeningStopped())

    async def on_go(self, frame: frames.StartProcesses) -> None:
        path = self.session.folder / "secrets.json"
        secrets: dict[str, str] = read_json(path) if path.exists() else {}
        for process in frame.processes:
            own = {PARENT_VARIABLE: str(os.getpid()), "TRAINKIT_RUN": self.session.mark(self.node)}
            if process.heartbeat:
                own["TRAINKIT_HEARTBEAT_FILE"] = str(self._beats(process.key))
            await self._start(
                process,
                {**self.session.environment, **on_this_node(process.env), **secrets, **own},
            )

    async def _start(self, process: ProcessSpec, environment: Mapping[str, str]) -> None:
        key = process.key
        try:
            with open(process.log or os.devnull, "ab") as log:
                child = await asyncio.create_subprocess_exec(
                    *process.argv,
                    env=dict(environment),
                    cwd=process.cwd,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
        except OSError as error:
            return self.connection.send(frames.StartFailed(key, str(error)))
        self.children[key] = child
        self.waiters.append(asyncio.create_task(self._wait(child, process)))
        return self.connection.send(frames.ProcessStarted(key, child.pid))

    async def _wait(self, child: asyncio.subprocess.Process, process: ProcessSpec) -> None:
        key = process.key
        code = await child.wait()
        beat = self._beat_of(key)
        error = None
        if process.error:
            with contextlib.suppress(OSError, ValueError):
                error = read_json(Path(process.error))
        last: list[str] = []
        if process.log:
            last = Path(process.log).read_text(errors="replace").splitlines()[-30:]
        report = frames.ProcessEnded(
            key,
            code,
            time.time(),
            done=beat.get("phase") == "done",
            stopped=key in self.stopped,
            error=error,
            last=tuple(last),
        )
        self.connection.send(frames.HeartbeatReport({key: beat} if beat else {}, time.time()))
        self.connection.send(report)

    def _beats(self, key: str) -> Path:
        return self.session.folder / f"heartbeat-{key}.json"

    def _beat_of(self, key: str) -> dict[str, object]:
        try:
            return dict(read_json(self._beats(key)))
        except (OSError, ValueError):
            return {}

    async def _beat(self) -> None:
        known: dict[str, object] = {}
        while True:
            await asyncio.sleep(self.beat_seconds)
            fresh = {
                key: beat
                for key in self.children
                if (beat := self._beat_of(key)) and beat != known.get(key)
            }
            known |= fresh
            self.connection.send(frames.HeartbeatReport(fresh, time.time()))

    async def on_signal(self, frame: frames.SignalProcesses) -> None:
        for key, child in self.children.items():
            if child.returncode is None and (frame.keys is None or key in frame.keys):
                child.send_signal(signal.Signals[f"SIG{frame.signal}"])

    async def on_stacks(self, frame: frames.DumpStacks) -> None:
        self.connection.send(frames.StackReport(silent=tuple(sorted(self.children))))

    async def on_sweep(self, frame: frames.SweepRun) -> None:
        self.connection.send(frames.SweepDone())

    async def on_stop(self, frame: frames.StopProcesses) -> None:
        await self.stop(frame.grace)
        self.connection.send(frames.ProcessesStopped())

    async def stop(self, grace: float) -> None:
        """TERM, KILL after `grace` seconds, whole sessions."""
        left = {key: child for key, child in self.children.items() if child.returncode is None}
        self.stopped |= set(left)
        for number, seconds in ((signal.SIGTERM, grace), (signal.SIGKILL, 5)):
            for child in left.values():
                if child.returncode is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(child.pid, number)
            if self.waiters:
                await asyncio.wait(self.waiters, timeout=seconds)


class Debug:
    """In-process agents.

    Args:
        make: what makes the agent of a node; tests give their own.
    """

    name = "local"  # all of its hosts are this machine

    def __init__(self, make: Callable[[Session, int], StubAgent] = StubAgent) -> None:
        self.make = make

    def commands(self, session: Session, nodes: Sequence[int]) -> list[tuple[str, ...]]:
        return []

    def start(self, session: Session, nodes: Sequence[int]) -> Transports:
        document = read_session(session.folder)
        agents = [self.make(session, node) for node in nodes]
        for agent in agents:
            agent.document = document
        return _Tasks({agent.node: asyncio.create_task(agent.run()) for agent in agents})


class _Tasks:
    def __init__(self, tasks: Mapping[int, asyncio.Task[None]]) -> None:
        self.tasks = tasks

    def poll(self) -> Mapping[int, TransportExit]:
        return {
            node: TransportExit(_code(task), _error_text(task))
            for node, task in self.tasks.items()
            if task.done()
        }

    def close(self) -> None:
        for task in self.tasks.values():
            task.cancel()


def _code(task: asyncio.Task[None]) -> int:
    if task.cancelled():
        return -signal.SIGKILL
    return int(task.exception() is not None)


def _error_text(task: asyncio.Task[None]) -> str:
    error = None if task.cancelled() else task.exception()
    return f"{type(error).__name__}: {error}" if error else ""
