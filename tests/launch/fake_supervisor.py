"""A small supervisor with blocking sockets, to see what real agents do:
tests/launch/agent/test_agent*.py."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import trainkit
from trainkit.base import cgroup, process_marks
from trainkit.launch.protocol import framing, handshake
from trainkit.launch.protocol.framing import Decoder

AGENT = Path(trainkit.__file__).parent / "launch" / "agent" / "main.py"
# what agents run with: as in the images of others, where such a Python is named
PYTHON = os.environ.get("TRAINKIT_OLD_PYTHON") or sys.executable
SECRET = "a-secret-value"
LONG = 300.0  # seconds until a wait counts as a hang: no machine is so slow

Frame = dict[str, Any]  # as it is on the wire


class Session:
    """A session folder, the port its agents dial, and real agent processes, one a node.

    Args:
        folder: made.
        values: put into session.json.
    """

    def __init__(self, folder: Path, **values: Any) -> None:
        self.folder, self.token = folder / "session", secrets.token_bytes(32)
        self.node_folder = folder / "node"
        for made in (self.folder, self.node_folder):
            made.mkdir(parents=True)
        self.server = socket.create_server(("127.0.0.1", 0))
        self.server.settimeout(LONG)
        self.run = "test-" + secrets.token_hex(6)
        self.mark = f"{self.run}/1/0"
        session = {
            "schema": "session/1",
            "run": self.run,
            "attempt": 1,
            "address": "127.0.0.1",
            "port": self.server.getsockname()[1],
        }
        session |= {
            "interface": None,
            "root": str(folder),
            "lease": 60,
            "grace": 1,
            "node_folder": str(self.node_folder),
            "nonce": "abc",
        }
        (self.folder / "session.json").write_text(json.dumps(session | values))
        (self.folder / "token").write_text(self.token.hex())
        (self.folder / "secrets.json").write_text(json.dumps({"KEY": SECRET}))
        self.agent: subprocess.Popen[bytes] | None = None  # the last one that was started
        self.agents: list[subprocess.Popen[bytes]] = []

    def start(
        self,
        *,
        stdin: int = subprocess.DEVNULL,
        environment: Mapping[str, str] | None = None,
        agent: Path = AGENT,
        around: Sequence[str] = (),
        python: str = PYTHON,
        node: int = 0,
    ) -> subprocess.Popen[bytes]:
        """Start the agent of a node as a launcher does, by way of the program `around`; the
        process is its keeper."""
        argv = [*around, python, "-I", "-S", str(agent), str(self.folder), str(node)]
        own = {
            **(os.environ if environment is None else environment),
            process_marks.MARK_VARIABLE: f"{self.run}/1/agents/{node}",
        }
        self.agent = subprocess.Popen(
            argv,
            stdin=stdin,
            stderr=open(self.folder.parent / "agent.err", "ab"),  # noqa: SIM115
            env=own,
            start_new_session=True,
        )
        self.agents.append(self.agent)
        return self.agent

    def accept(self, *together: Frame) -> Peer:
        """The agent's connection, proved on both sides; `together`: what comes with the last word
        of that."""
        peer = Peer(self.server.accept()[0])
        knock, own = peer.hear("knock"), handshake.new_nonce()
        peer.say(
            type="challenge",
            nonce=own,
            proof=handshake.make_proof(self.token, "supervisor", own, knock["nonce"]),
        )
        answer = peer.hear("answer")
        assert handshake.proof_is_valid(
            answer["proof"], self.token, "agent", knock["nonce"], own, f"agent:{knock['node']}"
        )
        peer.decoder.limit = framing.MAX_FRAME_BYTES
        last = ({"type": "ping"}, *together)
        peer.sock.sendall(b"".join(map(framing.encode, last)))
        return peer

    def begin(self, *, slots: tuple[str, ...] = ("cpu",), **how: Any) -> Peer:
        """Start the agent, hear its hello, reserve."""
        self.start(**how)
        peer = self.accept()
        peer.hello = peer.hear("hello")
        mark = f"{self.run}/1/{how.get('node', 0)}"
        peer.say(type="reserve", run=self.run, attempt=1, slots=slots, share=False, mark=mark)
        peer.hear("reserved")
        return peer

    def left(self) -> list[process_marks.MarkedProcess]:
        """What lives on this machine of the run, its agent and keeper left out."""
        return [p for p in process_marks.find_marked(self.run) if "/agents/" not in p.mark]

    def words(self) -> str:
        """What the agent said on stderr."""
        return (self.folder.parent / "agent.err").read_text()

    def close(self) -> None:
        """End everything, whatever the test has done to it."""
        self.server.close()
        for agent in self.agents:
            agent.kill()
            agent.wait()
        while left := process_marks.find_marked(self.run):
            process_marks.kill_processes(left)
        cgroup.kill_cgroups(self.run, LONG)


class Peer:
    """The supervisor's end of one agent's connection. Frames that are not waited for are kept in
    `heard`."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self.decoder = sock, Decoder()
        self.waiting: list[Frame] = []
        self.heard: list[Frame] = []
        self.hello: Frame = {}

    def say(self, **frame: Any) -> None:
        """Send a frame."""
        self.sock.sendall(framing.encode(frame))

    def go(self, *processes: Frame, secret_names: tuple[str, ...] = ()) -> None:
        """Start processes."""
        self.say(type="go", processes=processes, secret_names=secret_names)

    def hear(self, kind: str, key: str | None = None, seconds: float = LONG) -> Frame:
        """The next frame of that type (and process); pings go on meanwhile. Raises EOFError at
        the end of the connection."""
        deadline, pinged = time.monotonic() + seconds, time.monotonic()
        while True:
            while self.waiting:
                frame = self.waiting.pop(0)
                self.heard.append(frame)
                if frame["type"] == kind and key in (None, frame.get("key")):
                    return frame
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {kind} of {key} within {seconds} s; last {self.heard[-3:]}")
            if self.decoder.limit == framing.MAX_FRAME_BYTES and time.monotonic() - pinged > 0.5:
                pinged = time.monotonic()
                self.say(type="ping")
            self.sock.settimeout(0.25)
            try:
                data = self.sock.recv(2**18)
            except TimeoutError:
                continue
            if not data:
                raise EOFError(f"the agent closed the connection before {kind}")
            self.waiting += self.decoder.feed(data)

    def output(self, key: str, stream: str | None = None) -> str:
        """All output heard so far of a process."""
        return "".join(
            f["text"]
            for f in self.heard
            if f["type"] == "output" and f["key"] == key and stream in (None, f["stream"])
        )

    def until(self, condition: Callable[[], object]) -> None:
        """Wait for what comes true by itself; pings go on meanwhile."""

        def pinged() -> object:
            self.say(type="ping")
            return condition()

        assert wait_until(pinged)

    def until_output(self, key: str, words: str) -> None:
        """Hear until a process has printed some words."""
        while words not in self.output(key):
            self.hear("output", key)


def process(key: str, program: str, **values: Any) -> Frame:
    """An entry of "go": a Python program."""
    return {
        "key": key,
        "argv": [sys.executable, "-u", "-c", program],
        "env": {},
        "cwd": "/",
        "log": None,
        "error": None,
        "heartbeat": False,
        "whole": False,
    } | values


def wait_until(condition: Callable[[], object], seconds: float = LONG) -> bool:
    """Whether it came true in that time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def alive(pid: int) -> bool:
    """Whether the process runs, and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def setsid(path: Path) -> str:
    """A program in a session of its own that ignores TERM and writes its pid to `path`."""
    return (
        "import os, signal, time; os.setsid(); signal.signal(15, signal.SIG_IGN);"
        f" open({str(path)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    )


def ignoring(path: Path) -> str:
    """A program that ignores TERM and has such a child."""
    return (
        "import signal, subprocess, sys, time; signal.signal(15, signal.SIG_IGN);"
        f" subprocess.Popen([sys.executable, '-c', {setsid(path)!r}]); time.sleep(600)"
    )


def pid_in(path: Path) -> int:
    """The pid that a program writes to `path`."""
    assert wait_until(lambda: path.exists() and path.read_text())
    return int(path.read_text())
