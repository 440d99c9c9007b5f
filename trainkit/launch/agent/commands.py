"""What the agent does on each frame of its supervisor. A command that takes time is a generator,
which the agent's loop resumes at each turn."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import selectors
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from trainkit.base import process_marks, slots
from trainkit.base.cgroup import find_cgroups, kill_cgroups
from trainkit.base.files import read_json
from trainkit.base.locks import LockBusy
from trainkit.base.old_python import without_prefix
from trainkit.base.process_marks import MarkedProcess
from trainkit.base.redact import Redactor
from trainkit.launch.agent.loop import Agent, Command, Task
from trainkit.launch.agent.memory_folder import (
    open_memory_folder,
    remove_memory_folder,
    remove_of_slots,
)
from trainkit.launch.agent.oom import OomDetector
from trainkit.launch.agent.process import ChildProcess, StartContext, child_mark
from trainkit.launch.agent.rank_parent import KEY, RankParent, parent_environment
from trainkit.launch.agent.spawn import Beginning, CannotStart, expanded, start_error
from trainkit.launch.agent.stack_dump import collect_stacks
from trainkit.launch.protocol import frames
from trainkit.launch.protocol.frames import Frame, LeftProcess, ProcessSpec, ReportedProcess
from trainkit.launch.protocol.handshake import make_proof

CONNECT_SECONDS = 5.0


def greeting(token: bytes, port: int) -> bytes:
    """What an agent sends to anything that connects to its port: only its own session can."""
    return make_proof(token, "listener", str(port), "").encode()


def reach(address: str, port: int, expected: bytes) -> Iterator[None]:
    """Connect and compare the greeting. To be resumed now and then.

    Args:
        address: a numeric one.
        port: of the listener.
        expected: its greeting.

    Raises:
        OSError: why it cannot be reached.
    """
    family, _, _, _, target = socket.getaddrinfo(
        address, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
    )[0]
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setblocking(False)
        yield from _read_greeting(sock, sock.connect_ex(target), expected)


def _read_greeting(sock: socket.socket, code: int, expected: bytes) -> Iterator[None]:
    deadline = time.monotonic() + CONNECT_SECONDS
    received = b""
    while len(received) < len(expected):
        if code not in (0, errno.EINPROGRESS, errno.EALREADY, errno.EISCONN):
            raise OSError(code, os.strerror(code))
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code == 0:
            with contextlib.suppress(BlockingIOError):
                data = _received(sock, len(expected) - len(received))
                if data == b"":
                    raise _something_else()
                received += data or b""
        if time.monotonic() > deadline:
            if _is_connected(sock):
                why = "connected, but nothing of this run answers there"
            else:
                why = os.strerror(errno.ETIMEDOUT)
            raise OSError(errno.ETIMEDOUT, why)
        if len(received) < len(expected):
            yield
    if received != expected:
        raise _something_else()


def _something_else() -> OSError:
    return OSError(errno.EPROTO, "something else than this run answers there")


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


SWEEP_SECONDS = 5.0
NODE_MARK = re.compile(r"[^/]+/\d+/\d+")  # run, attempt, node: an agent's part of a run
GREETED = 64  # connections in a turn of the loop: strangers may come as fast as they can
# reported where the kernel says that there is something, and no look finds it
UNSEEN = LeftProcess(0, "something that ends and begins faster than it can be looked at")
F = TypeVar("F", bound=Frame)


def ping(agent: Agent, frame: frames.Ping) -> None:
    """Only its coming matters."""


def reserve(agent: Agent, frame: frames.ReserveSlots) -> Task:
    """Take the host's slots, after ending what a dead run left on them. With `share`, take those
    that are free, so that the next one finds a holder."""
    folder = Path(agent.session.node_folder)
    _release_slots(agent)
    holder = {
        "run": frame.run,
        "attempt": frame.attempt,
        "mark": agent.mark,
        "folder": agent.session.folder or str(agent.folder),
    }
    try:
        reserved = slots.reserve_slots(folder, frame.slots, holder, share=frame.share)
    except LockBusy as busy:
        agent.send(frames.SlotsBusy(slots.slot_name(busy.path), busy.holder))
        return
    agent.slots = reserved
    remove_of_slots(folder, agent.session.run, reserved.names)
    agent.watchdog.hold(reserved.handles, lease=agent.session.lease)
    stale = [
        mark for dead in reserved.cleared if NODE_MARK.fullmatch(mark := str(dead.get("mark")))
    ]
    deadline = time.monotonic() + SWEEP_SECONDS
    while (left := [p for mark in stale for p in _left_of(mark)]) and time.monotonic() < deadline:
        for mark in stale:
            kill_cgroups(mark, 0.0)
        # nobody holds its lock any more: agent and keeper are dead, these are its orphans
        process_marks.kill_processes(left)
        yield
    if left:
        _release_slots(agent)
        orphans = [{"pid": p.pid, "argv0": p.argv0} for p in left]
        busy_slots = ",".join(frame.slots)
        agent.send(frames.SlotsBusy(busy_slots, {**reserved.cleared[0], "left": orphans}))
    else:
        agent.send(frames.SlotsReserved(tuple(reserved.cleared)))


def _release_slots(agent: Agent) -> None:
    if agent.slots:
        agent.slots.release()
        agent.slots = None
        agent.watchdog.let_go()


def listen(agent: Agent, frame: frames.Listen) -> None:
    """Listen on the first port that is free; what connects is shown that it is us."""
    family = socket.AF_INET6 if agent.connection and ":" in agent.local_address else socket.AF_INET
    _close_listener(agent)
    why = "no port was named"
    for port in frame.ports:
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
        agent.send(frames.Listening(listener.getsockname()[1]))
        return
    agent.send(frames.Listening(None, why))


def _greet(listener: socket.socket, token: bytes) -> None:
    with contextlib.suppress(OSError):
        for _ in range(GREETED):
            caller, _ = listener.accept()
            with caller, contextlib.suppress(OSError):
                caller.setblocking(False)
                caller.send(greeting(token, listener.getsockname()[1]))


def _close_listener(agent: Agent) -> None:
    if agent.listener:
        agent.selector.unregister(agent.listener)
        agent.listener.close()
        agent.listener = None


def stop_listening(agent: Agent, frame: frames.StopListening) -> None:
    """Free the port for rank 0."""
    _close_listener(agent)
    agent.send(frames.ListeningStopped())


def connect(agent: Agent, frame: frames.ConnectToPort) -> Task:
    """Try to reach rank 0's port, and see that it is the run's own agent that answers there."""
    error: str | None = None
    try:
        yield from reach(frame.address, frame.port, greeting(agent.token, frame.port))
    except OSError as failed:
        error = failed.strerror or str(failed)
    agent.send(frames.PortChecked(error))


def start(agent: Agent, frame: frames.StartProcesses) -> Task:
    """Start programs. The secrets they may have are read now, from the session's folder, and
    never again."""
    agent.starting |= {spec.key for spec in frame.processes}
    try:
        secrets = yield from agent.beside(partial(_prepared_files, agent, frame))
        node_folder = Path(agent.session.node_folder)
        agent.heartbeats = agent.heartbeats or _private_folder(node_folder, agent.mark)
        memory = None
        if keys := [spec.key for spec in frame.processes if spec.memory]:
            held = agent.slots.names if agent.slots else ()
            memory = open_memory_folder(node_folder, agent.session.run, held, keys)
    except (OSError, ValueError) as error:
        for spec in frame.processes:
            agent.starting.discard(spec.key)
            agent.send(frames.StartFailed(spec.key, str(error)))
        return
    agent.oom = agent.oom or OomDetector()
    agent.processes.any_started = True
    group = agent.processes.group
    agent.watchdog.guard(
        agent.mark, lease=agent.session.lease, folders=[agent.heartbeats], group=group
    )
    redactor = Redactor(secrets.values())
    context = StartContext(
        secrets,
        redactor,
        agent.writer,
        agent.heartbeats,
        group,
        agent.processes.parent,
        agent.processes.cold,
        memory,
    )
    for spec in frame.processes:
        try:
            child = yield from _start_one(agent, spec, context)
        except CannotStart as error:
            agent.send(frames.StartFailed(spec.key, redactor.text(str(error))))
            continue
        finally:
            agent.starting.discard(spec.key)
        agent.watch(child)
        agent.send(frames.ProcessStarted(spec.key, child.pid))


def _until_there(frame: frames.StartParent) -> None:
    """Wait for a shared root to give what exec would wait for, when the agent could not speak."""
    with contextlib.suppress(OSError):
        os.stat(frame.cwd)
        open(frame.argv[0], "rb").close()


def start_parent(agent: Agent, frame: frames.StartParent) -> Task:
    """Start what ranks are forked from, in place of an earlier one that has ended or is another.
    Why it cannot be started is said of the ranks that wanted it."""
    # before we look at an earlier one: the same may be asked for twice at once
    yield from agent.beside(partial(_until_there, frame))
    processes = agent.processes
    if (earlier := processes.parent) and earlier.code is None:
        if earlier.frame == frame:
            return
        earlier.kill()
        while earlier.code is None:
            yield
    if agent.leaving is not None:
        return
    mark = child_mark(agent.mark, KEY)
    processes.any_started = True
    try:
        environment = parent_environment(expanded(frame.env), mark)
        group = processes.group.inside(KEY) if processes.group else None
        start = Beginning(frame.argv, environment, frame.cwd, mark, group)
        processes.parent = RankParent(frame, start, agent.selector)
    except CannotStart as error:
        processes.cold = str(error)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        processes.cold = f"its parent cannot be started: {start_error(error, frame.argv)}"


def _start_one(
    agent: Agent, spec: ProcessSpec, context: StartContext
) -> Generator[None, None, ChildProcess]:
    if agent.leaving is not None:
        raise CannotStart("this agent is about to leave")
    if spec.key not in agent.starting:
        raise CannotStart("it was stopped before it began")
    if spec.key in agent.children:
        raise CannotStart(f"process {spec.key} runs already")
    child = ChildProcess(spec, child_mark(agent.mark, spec.key), context)
    yield from child.start(context, lambda: spec.key in agent.starting)
    agent.children[spec.key] = child
    return child


def _private_folder(folder: Path, mark: str) -> Path:
    """A folder of ours on this node; where the node's folder cannot be used, in the temporary
    one."""
    name = f"trainkit-{mark.replace('/', '-')}-"
    try:
        return Path(tempfile.mkdtemp(prefix=name, dir=folder))
    except OSError:
        return Path(tempfile.mkdtemp(prefix=name))


def _prepared_files(agent: Agent, frame: frames.StartProcesses) -> dict[str, str]:
    """Make folders for what the programs will say of their failures; returns the secrets that
    are there. Raises OSError or ValueError."""
    for spec in frame.processes:
        if spec.error:
            with contextlib.suppress(OSError):
                Path(spec.error).parent.mkdir(parents=True, exist_ok=True)
    names = frame.secret_names
    if not names:
        return {}
    stored = read_json(agent.folder / "secrets.json")
    return {name: str(stored[name]) for name in names if name in stored}


def send_signal(agent: Agent, frame: frames.SignalProcesses) -> None:
    """A signal to the programs themselves, not to what they started."""
    number = signal.Signals["SIG" + without_prefix(frame.signal, "SIG")]
    for child in agent.processes.by_keys(frame.keys):
        child.signal(number)


def stop(agent: Agent, frame: frames.StopProcesses) -> Task:
    """End programs, or everything; what is left is looked for, not assumed."""
    yield from agent.stop(frame.keys, frame.grace, keep_parent=frame.keep_parent)
    if frame.keys is None:
        found = agent.processes.strays()
    else:
        found = [
            process
            for key in frame.keys
            for process in process_marks.find_marked(child_mark(agent.mark, key))
        ]
    left = tuple(LeftProcess(process.pid, process.argv0) for process in found)
    if frame.keys is None and not left and not agent.processes.proved_empty():
        left = (UNSEEN,)
    agent.send(frames.ProcessesStopped(left, None if left else agent.processes.proof))


def dump_stacks(agent: Agent, frame: frames.DumpStacks) -> Task:
    """Where every program stands."""
    running = [child for child in agent.children.values() if child.running]
    for dump in collect_stacks(running, py_spy=frame.py_spy):
        if dump is None:
            yield
        else:
            agent.send(dump)


def sweep(agent: Agent, frame: frames.SweepRun) -> Task:
    """What is on this host of a run that this agent did not start; end it where asked to."""
    killed: dict[int, MarkedProcess] = {}
    deadline = time.monotonic() + SWEEP_SECONDS
    left = _left_of(frame.run)
    while frame.kill and time.monotonic() < deadline:
        killed.update({p.pid: p for p in left})
        kill_cgroups(frame.run, 0.0)
        process_marks.kill_processes(left)
        if not left:
            break
        yield
        left = _left_of(frame.run)
    if frame.forget:
        remove_memory_folder(Path(agent.session.node_folder), frame.run)
    agent.send(
        frames.SweepDone(
            left=_reported(left),
            killed=_reported([p for p in killed.values() if p not in left]),
            proof="cgroup" if agent.processes.group and not left else None,
        )
    )


def _reported(processes: Sequence[MarkedProcess]) -> tuple[ReportedProcess, ...]:
    return tuple(ReportedProcess(p.pid, p.mark, p.argv0) for p in processes)


def _left_of(run: str) -> list[MarkedProcess]:
    """What lives on this host with the mark of a run (its agents and keepers too) or of a part
    of it, in one of its find_cgroups, or with its limit."""
    in_groups = [
        process
        for group in find_cgroups(run)
        for pid in group.pids()
        if (process := process_marks.describe_process(pid))
    ]
    unmarked = [] if "/" in run else process_marks.find_by_limit(run)
    found = (*process_marks.find_marked(run), *in_groups, *unmarked)
    return list({process.pid: process for process in found}.values())


def say_goodbye(agent: Agent, frame: frames.Goodbye) -> None:
    """Stop what is left and end."""
    agent.run_ends = frame.run_ends
    agent.leave(0, "the supervisor said goodbye", agent.session.grace)


def _command(kind: type[F], do: Callable[[Agent, F], Task | None]) -> tuple[str, Command]:
    def carry_out(agent: Agent, value: Mapping[str, object]) -> Task | None:
        return do(agent, kind.from_json(value))

    return kind.TYPE, carry_out


COMMANDS: Mapping[str, Command] = dict(
    [
        _command(frames.Ping, ping),
        _command(frames.ReserveSlots, reserve),
        _command(frames.Listen, listen),
        _command(frames.StopListening, stop_listening),
        _command(frames.ConnectToPort, connect),
        _command(frames.StartParent, start_parent),
        _command(frames.StartProcesses, start),
        _command(frames.SignalProcesses, send_signal),
        _command(frames.StopProcesses, stop),
        _command(frames.DumpStacks, dump_stacks),
        _command(frames.SweepRun, sweep),
        _command(frames.Goodbye, say_goodbye),
    ]
)
