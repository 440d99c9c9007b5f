"""What the agent does on each frame of its supervisor. An order that takes time is a generator,
which the agent's loop goes on with at each turn."""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import signal
import socket
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from trainkit.base import process_marks, slots
from trainkit.base.cgroup import find_cgroups, kill_cgroups
from trainkit.base.files import read_json
from trainkit.base.locks import LockBusy
from trainkit.base.redact import Redactor
from trainkit.launch.agent.loop import Agent, Order, Task
from trainkit.launch.agent.process import CannotStart, ChildProcess, OomDetector, child_mark
from trainkit.launch.agent.stack_dump import collect_stacks
from trainkit.launch.protocol import frames
from trainkit.launch.protocol.frames import Frame

CONNECT_SECONDS = 5.0
SWEEP_SECONDS = 5.0


def ping(agent: Agent, frame: Frame) -> None:
    """Only its coming matters."""


def reserve(agent: Agent, frame: Frame) -> Task:
    """Take the host's slots; end first what a dead run left on them. Who shares takes those that
    are free, so that the next one finds a holder."""
    folder = Path(agent.session["node_folder"])
    _free(agent)
    words = {
        "run": frame["run"],
        "attempt": frame["attempt"],
        "mark": agent.mark,
        "folder": agent.session.get("folder", str(agent.folder)),
    }
    try:
        held = slots.reserve_slots(folder, frame["slots"], words, share=bool(frame.get("share")))
    except LockBusy as busy:
        agent.send({"type": "busy", "slot": slots.slot_name(busy.path), "holder": busy.holder})
        return
    agent.held = held
    agent.link.hold(held.handles, lease=agent.session["lease"])
    stale = _stale_marks(held.cleared, slots.slot_holders(folder))
    deadline = time.monotonic() + SWEEP_SECONDS
    while (left := [p for mark in stale for p in _left_of(mark)]) and time.monotonic() < deadline:
        for mark in stale:
            kill_cgroups(mark, 0.0)
        # nobody holds its lock any more: agent and keeper are dead, these are its orphans
        process_marks.kill_processes(left)
        yield
    if left:
        _free(agent)
        holder = held.cleared[0] | {"left": [{"pid": p.pid, "argv0": p.argv0} for p in left]}
        agent.send({"type": "busy", "slot": ",".join(frame["slots"]), "holder": holder})
    else:
        agent.send({"type": "reserved", "cleared": held.cleared})


def _stale_marks(cleared: list[dict[str, Any]], living: dict[str, dict[str, Any]]) -> list[str]:
    """Marks of what may be ended. Anybody can write into a slot that is free: a word against a
    run that holds one now is not believed."""
    said = [
        mark
        for holder in cleared
        if isinstance(mark := holder.get("mark"), str) and mark.count("/") >= 2
    ]
    held = [mark for holder in living.values() if isinstance(mark := holder.get("mark"), str)]
    return [
        mark
        for mark in said
        if not any(
            f"{mark}/".startswith(f"{other}/") or f"{other}/".startswith(f"{mark}/")
            for other in held
        )
    ]


def _free(agent: Agent) -> None:
    if agent.held:
        agent.held.release()
        agent.held = None
        agent.link.let_go()


def _private_folder(folder: Path, mark: str) -> Path:
    """A folder of ours on this node; where the node's folder cannot be used, in the temporary
    one."""
    name = f"trainkit-{mark.replace('/', '-')}-"
    try:
        return Path(tempfile.mkdtemp(prefix=name, dir=folder))
    except OSError:
        return Path(tempfile.mkdtemp(prefix=name))


def listen(agent: Agent, frame: Frame) -> None:
    """Listen on the first port that is free; who connects is told that it is us."""
    if agent.connection and ":" in agent.connection.sock.getsockname()[0]:
        family = socket.AF_INET6
    else:
        family = socket.AF_INET
    _close_listener(agent)
    why = "no port was named"
    for port in frame["ports"]:
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("", port))
            listener.listen(1024)
        except (OSError, OverflowError) as error:
            listener.close()
            why = f"port {port}: {getattr(error, 'strerror', None) or error}"
            continue
        listener.setblocking(False)
        agent.listener = listener
        agent.selector.register(
            listener, selectors.EVENT_READ, partial(_greet, listener, agent.token)
        )
        agent.send({"type": "listening", "port": listener.getsockname()[1]})
        return
    agent.send({"type": "listening", "port": None, "error": why})


def _greet(listener: socket.socket, token: bytes) -> None:
    with contextlib.suppress(OSError):
        caller, _ = listener.accept()
        with caller:
            caller.setblocking(False)
            caller.send(_greeting(token, listener.getsockname()[1]))


def _greeting(token: bytes, port: int) -> bytes:
    return frames.proof(token, "listener", str(port), "").encode()


def _close_listener(agent: Agent) -> None:
    if agent.listener:
        agent.selector.unregister(agent.listener)
        agent.listener.close()
        agent.listener = None


def unlisten(agent: Agent, frame: Frame) -> None:
    """Free the port for rank 0."""
    _close_listener(agent)
    agent.send({"type": "unlistened"})


def connect(agent: Agent, frame: Frame) -> Task:
    """Try to reach rank 0's port, and see that it is the run's own agent who answers there."""
    address = frame["address"]
    port = int(frame["port"])
    error: str | None = None
    try:
        family, _, _, _, place = socket.getaddrinfo(
            address, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )[0]
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.setblocking(False)
            yield from _reach(sock, place, _greeting(agent.token, port))
    except OSError as failed:
        error = failed.strerror or str(failed)
    agent.send({"type": "connected", "error": error})


def _reach(sock: socket.socket, place: tuple[Any, ...], expected: bytes) -> Task:
    deadline = time.monotonic() + CONNECT_SECONDS
    code = sock.connect_ex(place)
    said = b""
    while len(said) < len(expected):
        if code not in (0, errno.EINPROGRESS, errno.EALREADY, errno.EISCONN):
            raise OSError(code, os.strerror(code))
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code == 0:
            with contextlib.suppress(BlockingIOError):
                data = _received(sock, len(expected) - len(said))
                if data == b"":
                    raise OSError(errno.EPROTO, "something else than this run answers there")
                said += data or b""
        if time.monotonic() > deadline:
            raise OSError(
                errno.ETIMEDOUT,
                (
                    "connected, but nothing of this run answers there"
                    if _is_connected(sock)
                    else os.strerror(errno.ETIMEDOUT)
                ),
            )
        if len(said) < len(expected):
            yield
    if said != expected:
        raise OSError(errno.EPROTO, "something else than this run answers there")


def _received(sock: socket.socket, size: int) -> bytes | None:
    """What has come; None while there is no connection yet."""
    try:
        return sock.recv(size)
    except OSError as error:
        if error.errno in (errno.ENOTCONN, errno.EAGAIN):
            return None
        raise


def _is_connected(sock: socket.socket) -> bool:
    with contextlib.suppress(OSError):
        sock.getpeername()
        return True
    return False


def go(agent: Agent, frame: Frame) -> None:
    """Start programs. The secrets they may have are read now, from the session's folder, and
    never again."""
    try:
        secrets = _secrets(agent, frame.get("secret_names") or [])
        agent.heartbeats = agent.heartbeats or _private_folder(
            Path(agent.session["node_folder"]), agent.mark
        )
    except (OSError, ValueError) as error:
        for spec in frame["processes"]:
            agent.send({"type": "start_failed", "key": str(spec["key"]), "error": str(error)})
        return
    redactor = Redactor(secrets.values())
    agent.memory = agent.memory or OomDetector()
    agent.link.guard(
        agent.mark, lease=agent.session["lease"], folders=[agent.heartbeats], group=agent.group
    )
    for spec in frame["processes"]:
        key = str(spec["key"])
        try:
            if agent.leaving is not None:
                raise CannotStart("this agent is about to leave")
            if key in agent.children:
                raise CannotStart(f"process {key} runs already")
            child = ChildProcess(
                spec,
                child_mark(agent.mark, key),
                secrets,
                redactor,
                agent.writer,
                agent.heartbeats,
                agent.group,
            )
        except CannotStart as error:
            agent.send({"type": "start_failed", "key": key, "error": redactor.text(str(error))})
            continue
        agent.children[key] = child
        agent.watch(child)
        agent.send({"type": "started", "key": key, "pid": child.pid})


def _secrets(agent: Agent, names: list[str]) -> dict[str, str]:
    """The values of those that are there. Raises OSError or ValueError."""
    stored: dict[str, Any]
    if names:
        stored = read_json(agent.folder / "secrets.json")
    else:
        stored = {}
    return {name: str(stored[name]) for name in names if name in stored}


def send_signal(agent: Agent, frame: Frame) -> None:
    """A signal to the programs themselves, not to what they started."""
    number = signal.Signals["SIG" + frame["signal"].removeprefix("SIG")]
    for child in agent.children.values():
        if frame.get("keys") is None or child.key in frame["keys"]:
            child.signal(number)


def stop(agent: Agent, frame: Frame) -> Task:
    """End programs, or everything; what is left is looked for, not assumed."""
    keys = frame.get("keys")
    if keys is None:
        wanted = None
    else:
        wanted = [str(key) for key in keys]
    yield from agent.end(wanted, float(frame["grace"]))
    if wanted is None:
        left = agent.strays()
    else:
        left = [p for key in wanted for p in process_marks.find_marked(child_mark(agent.mark, key))]
    told = [{"pid": p.pid, "argv0": p.argv0} for p in left]
    if wanted is None and not told and not agent.proved():
        told = [
            {"pid": 0, "argv0": "something that ends and begins faster than it can be looked at"}
        ]
    agent.send({"type": "stopped", "left": told, "proof": agent.proof if not told else None})


def stacks(agent: Agent, frame: Frame) -> Task:
    """Where every program stands."""
    for answer in collect_stacks(
        [c for c in agent.children.values() if c.running], py_spy=bool(frame.get("py_spy"))
    ):
        if answer is None:
            yield
        else:
            agent.send(answer)


def sweep(agent: Agent, frame: Frame) -> Task:
    """What is on this host of a run that this agent did not start; end it where asked to."""
    run = str(frame["run"])
    killed: dict[int, process_marks.MarkedProcess] = {}
    deadline = time.monotonic() + SWEEP_SECONDS
    left = _left_of(run)
    while frame.get("kill") and time.monotonic() < deadline:
        killed |= {p.pid: p for p in left}
        kill_cgroups(run, 0.0)
        process_marks.kill_processes(left)
        if not left:
            break
        yield
        left = _left_of(run)
    told = [
        [{"pid": p.pid, "mark": p.mark, "argv0": p.argv0} for p in found]
        for found in (left, [p for p in killed.values() if p not in left])
    ]
    agent.send(
        {
            "type": "swept",
            "left": told[0],
            "killed": told[1],
            "proof": "cgroup" if agent.group and not left else None,
        }
    )


def _left_of(run: str) -> list[process_marks.MarkedProcess]:
    """What lives on this host with the mark of a run (its agents and keepers too) or of a part
    of it, in one of its groups, or with its limit."""
    held = [
        process
        for group in find_cgroups(run)
        for pid in group.pids()
        if (process := process_marks.describe_process(pid))
    ]
    if "/" in run:
        nameless = []
    else:
        nameless = process_marks.find_by_limit(run)
    return list({p.pid: p for p in (*process_marks.find_marked(run), *held, *nameless)}.values())


def bye(agent: Agent, frame: Frame) -> None:
    """All is said."""
    agent.leave(0, "the supervisor said goodbye", agent.session["grace"])


ORDERS: dict[str, Order] = {
    "ping": ping,
    "reserve": reserve,
    "listen": listen,
    "unlisten": unlisten,
    "connect": connect,
    "go": go,
    "signal": send_signal,
    "stop": stop,
    "stacks": stacks,
    "sweep": sweep,
    "bye": bye,
}
