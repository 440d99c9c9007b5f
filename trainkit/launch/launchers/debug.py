"""launcher "debug": agents as coroutines of the supervisor's own loop, for tests and for
measuring a thousand of them. Not to be chosen in jobs.toml.

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
from typing import Any

from trainkit.base.files import read_json
from trainkit.base.process import identity
from trainkit.base.worker import PARENT_VARIABLE
from trainkit.launch.hosts.hostfile import Host
from trainkit.launch.launchers.contract import TransportExit, Transports
from trainkit.launch.protocol.frames import Frame, new_nonce, proof, proved
from trainkit.launch.protocol.server import Connection
from trainkit.launch.session import Session

BEAT_SECONDS = 0.2


class StubAgent:
    """One agent; a test overrides what should go wrong."""

    def __init__(self, session: Session, node: int) -> None:
        self.session = session
        self.node = node
        self.children: dict[str, asyncio.subprocess.Process] = {}
        self.stopped: set[str] = set()
        self.waiters: list[asyncio.Task[None]] = []
        self.listener: socket.socket | None = None
        self.said = read_json(session.folder / "session.json")

    def facts(self) -> dict[str, Any]:
        """What it says of itself."""
        return {
            "node": self.node,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "identity": identity().to_json(),
            "address": "127.0.0.1",
            "address_error": None,
            "interface": "lo",
            "versions": {"python": "3", "torch": "2"},
            "snapshot": self.said["snapshot"],
            "nonce": self.said["nonce"],
            "writable": None,
            "clock": time.time(),
            "gpus": [],
            "cpus": os.cpu_count(),
            "disk_free": 2**40,
            "slots": {},
        }

    async def run(self) -> None:
        """Knock, say hello, obey until the connection ends or bye is said."""
        self.connection = Connection(
            *await asyncio.open_connection(self.said["address"], self.said["port"])
        )
        beating = asyncio.create_task(self._beat())
        try:
            await self._knock()
            self.connection.send({"type": "hello", **self.facts()})
            while (frame := await self.connection.receive()) is not None and frame["type"] != "bye":
                if work := getattr(self, f"on_{frame['type']}", None):
                    await work(frame)
        finally:
            beating.cancel()
            await self.stop(0)
            self.connection.close()

    async def _knock(self) -> None:
        token = self.session.token
        ours = new_nonce()
        self.connection.send({"type": "knock", "role": "agent", "node": self.node, "nonce": ours})
        challenge = await self.connection.receive()
        assert challenge is not None and proved(
            challenge["proof"], token, "supervisor", challenge["nonce"], ours
        )
        self.connection.send(
            {
                "type": "answer",
                "proof": proof(token, "agent", ours, challenge["nonce"], f"agent:{self.node}"),
            }
        )
        self.connection.trust()

    async def on_reserve(self, frame: Frame) -> None:
        self.connection.send({"type": "reserved", "cleared": []})

    async def on_listen(self, frame: Frame) -> None:
        for port in frame["ports"]:
            self.listener = socket.socket()
            self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                self.listener.bind(("127.0.0.1", port))
                self.listener.listen()
                return self.connection.send({"type": "listening", "port": port})
        return self.connection.send({"type": "listening", "port": None, "error": "all taken"})

    async def on_connect(self, frame: Frame) -> None:
        self.connection.send({"type": "connected", "error": None})

    async def on_unlisten(self, frame: Frame) -> None:
        if self.listener is not None:
            self.listener.close()
        self.connection.send({"type": "unlistened"})

    async def on_go(self, frame: Frame) -> None:
        path = self.session.folder / "secrets.json"
        if path.exists():
            hidden = read_json(path)
        else:
            hidden = {}
        for process in frame["processes"]:
            own = {PARENT_VARIABLE: str(os.getpid()), "TRAINKIT_RUN": self.session.mark(self.node)}
            if process["heartbeat"]:
                beats = {"TRAINKIT_HEARTBEAT_FILE": str(self._beats(process["key"]))}
            else:
                beats = {}
            environment = {**self.session.environment, **process["env"], **hidden, **own, **beats}
            await self._start(process, environment)

    async def _start(self, process: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        key = process["key"]
        try:
            with open(process["log"] or os.devnull, "ab") as log:
                child = await asyncio.create_subprocess_exec(
                    *process["argv"],
                    env=dict(environment),
                    cwd=process["cwd"],
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
        except OSError as error:
            return self.connection.send({"type": "start_failed", "key": key, "error": str(error)})
        self.children[key] = child
        self.waiters.append(asyncio.create_task(self._wait(key, child, process)))
        return self.connection.send({"type": "started", "key": key, "pid": child.pid})

    async def _wait(
        self, key: str, child: asyncio.subprocess.Process, process: Mapping[str, Any]
    ) -> None:
        code = await child.wait()
        beat = self._beat_of(key)
        error = None
        with contextlib.suppress(OSError, ValueError, TypeError):
            error = read_json(Path(process["error"]))
        if process["log"]:
            last = Path(process["log"]).read_text(errors="replace").splitlines()[-30:]
        else:
            last = []
        said = {
            "type": "ended",
            "key": key,
            "code": code,
            "time": time.time(),
            "done": beat.get("phase") == "done",
            "stopped": key in self.stopped,
        }
        self.connection.send(
            {"type": "heartbeat", "beats": {key: beat} if beat else {}, "clock": time.time()}
        )
        self.connection.send({**said, "error": error, "last": last, "oom": False})

    def _beats(self, key: str) -> Path:
        return self.session.folder / f"heartbeat-{key}.json"

    def _beat_of(self, key: str) -> dict[str, Any]:
        try:
            return dict(read_json(self._beats(key)))
        except (OSError, ValueError):
            return {}

    async def _beat(self) -> None:
        known: dict[str, Any] = {}
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            fresh = {
                key: beat
                for key in self.children
                if (beat := self._beat_of(key)) and beat != known.get(key)
            }
            known |= fresh
            self.connection.send({"type": "heartbeat", "beats": fresh, "clock": time.time()})

    async def on_signal(self, frame: Frame) -> None:
        for key, child in self.children.items():
            if child.returncode is None and (frame["keys"] is None or key in frame["keys"]):
                child.send_signal(signal.Signals[f"SIG{frame['signal']}"])

    async def on_stacks(self, frame: Frame) -> None:
        self.connection.send(
            {"type": "stacks", "stacks": {}, "silent": sorted(self.children), "states": {}}
        )

    async def on_sweep(self, frame: Frame) -> None:
        self.connection.send({"type": "swept", "left": [], "killed": []})

    async def on_stop(self, frame: Frame) -> None:
        await self.stop(frame["grace"])
        self.connection.send({"type": "stopped", "left": []})

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

    name = "debug"

    def __init__(self, make: Callable[[Session, int], StubAgent] = StubAgent) -> None:
        self.make = make

    def commands(self, session: Session, hosts: Sequence[Host]) -> list[tuple[str, ...]]:
        return []

    def start(self, session: Session, hosts: Sequence[Host]) -> Transports:
        return _Tasks(
            [asyncio.create_task(self.make(session, node).run()) for node in range(len(hosts))]
        )


class _Tasks:
    def __init__(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        self.tasks = tasks

    def poll(self) -> Mapping[int, TransportExit]:
        return {
            node: TransportExit(_code(task), _words(task))
            for node, task in enumerate(self.tasks)
            if task.done()
        }

    def close(self) -> None:
        for task in self.tasks:
            task.cancel()


def _code(task: asyncio.Task[None]) -> int:
    if task.cancelled():
        return -signal.SIGKILL
    return int(task.exception() is not None)


def _words(task: asyncio.Task[None]) -> str:
    if task.cancelled():
        error = None
    else:
        error = task.exception()
    if error:
        return f"{type(error).__name__}: {error}"
    return ""
