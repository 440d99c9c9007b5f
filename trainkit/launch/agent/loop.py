"""The agent's loop: one thread that hears the supervisor, reads what its programs print, notices
their ends, and never waits for any one of them."""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import socket
import stat
import sys
import time
from functools import partial
from pathlib import Path
from typing import Callable, Collection, Generator, Iterator, Mapping, Optional, TypeVar

from trainkit.base import process_marks
from trainkit.base.cgroup import create_cgroup
from trainkit.base.errors import Exit, TrainkitError
from trainkit.base.slots import SlotReservation
from trainkit.base.watchdog import START_LEASE, WatchdogLink
from trainkit.launch.agent.connection import SupervisorConnection, SupervisorLost, dial
from trainkit.launch.agent.file_work import FileWork
from trainkit.launch.agent.host_report import host_facts
from trainkit.launch.agent.memory_folder import remove_memory_folder
from trainkit.launch.agent.oom import OomDetector
from trainkit.launch.agent.output import LogWriter
from trainkit.launch.agent.process import ChildProcess
from trainkit.launch.agent.termination import HostProcesses
from trainkit.launch.protocol.frames import CommandRefused, Frame, HeartbeatReport, HostLeaves
from trainkit.launch.protocol.framing import BadFrame, heartbeat_interval
from trainkit.launch.protocol.session_document import SessionDocument, read_session

BATCH_SECONDS = 0.25  # between two batches of output
TICK = 0.05  # seconds between two looks at what has begun and is not done
LEAVE_SECONDS = 2.0  # how long the last frames may take

T = TypeVar("T")
Task = Iterator[None]  # it is resumed at each turn of the loop
Command = Callable[["Agent", Mapping[str, object]], Optional[Task]]


def run_agent(
    folder: Path, node: int, watchdog: WatchdogLink, commands: Mapping[str, Command]
) -> int:
    """Do one host's part of a session; returns the exit code. Nothing that was started is left.

    Args:
        folder: the session's folder, which this host must see as the supervisor does.
        node: this host's number in the session.
        watchdog: the keeper of this process, which is the agent's own: it takes the signals and
            answers for all descendants.
        commands: what is done on a frame, by its type.
    """
    host = os.uname().nodename
    try:
        session = read_session(folder)
        token = bytes.fromhex((folder / "token").read_text().strip())
    except (OSError, ValueError, TrainkitError) as error:
        say(f"{host} cannot read the session: {error} (is the root a folder that all nodes share?)")
        return int(Exit.HEALTH)
    mark = f"{session.run}/{session.attempt}/{node}"
    group = create_cgroup(mark)
    watchdog.guard(mark, lease=START_LEASE, group=group)
    try:
        connection = dial(session.address, session.port, token, node)
    except SupervisorLost as error:
        say(f"{host}: {error}")
        return int(Exit.START)
    agent = Agent(
        folder, session, token, HostProcesses(mark, group), watchdog, connection, commands
    )
    return agent.run(node)


class Agent:
    """One host's part of a session, connected to its supervisor.

    Args:
        folder: the session's.
        session: its document.
        token: its secret.
        processes: all that is started on this host.
        watchdog: the keeper of this process.
        connection: to the supervisor.
        commands: what is done on a frame, by its type.
    """

    def __init__(
        self,
        folder: Path,
        session: SessionDocument,
        token: bytes,
        processes: HostProcesses,
        watchdog: WatchdogLink,
        connection: SupervisorConnection,
        commands: Mapping[str, Command],
    ) -> None:
        self.folder = folder
        self.session = session
        self.token = token
        self.processes = processes
        self.watchdog = watchdog
        self.connection: SupervisorConnection | None = connection
        self.commands = commands
        self.local_address: str = connection.sock.getsockname()[0]
        self.selector = selectors.DefaultSelector()
        self.ended: list[ChildProcess] = []  # not yet reported
        self.starting: set[str] = set()  # keys of programs that wait for their files
        self.tasks: list[Task] = []
        self.writer = LogWriter()
        self.oom: OomDetector | None = None
        self.slots: SlotReservation | None = None
        self.heartbeats: Path | None = None
        self.listener: socket.socket | None = None
        self.heard_at = time.monotonic()
        self.beaten_at = 0.0
        self.batched_at = 0.0
        self.heartbeat_seconds = heartbeat_interval(session.lease)
        self.run_ends = False  # nothing goes on from what its ranks have kept in memory
        self.leaving: int | None = None  # the exit code of why we leave
        self.code: int | None = None

    @property
    def mark(self) -> str:
        """TRAINKIT_RUN of all that this agent starts, without the keys of processes."""
        return self.processes.mark

    @property
    def children(self) -> dict[str, ChildProcess]:
        """Programs that were started and not yet reported as ended, by key."""
        return self.processes.children

    def run(self, node: int) -> int:
        """Report this host's facts, then do what the supervisor says; returns the exit code."""
        try:
            self._register_events()
            self.tasks.append(self._introduce(node))
            self._wake_up()  # it begins in the first turn
            self._hear()  # what came with the handshake: no more may come for seconds
            while self.code is None:
                self._turn()
            return self.code
        finally:
            self._close()

    def _introduce(self, node: int) -> Task:
        """Say what this host is; all of it is read from files."""
        proof = self.processes.proof
        look = partial(host_facts, self.session, self.folder, node, self.local_address, proof)
        self.send((yield from self.beside(look)))

    def beside(self, work: Callable[[], T]) -> Generator[None, None, T]:
        """For a task: have work that may wait for the shared root done beside the loop. Raises
        what it raises."""
        begun = FileWork(work, self._wake_up)
        while not begun.done:
            yield
        return begun.result()

    def _wake_up(self) -> None:
        with contextlib.suppress(OSError):  # it is full, and so the loop wakes anyway
            self._wake.send(b"\0")

    # events

    def _register_events(self) -> None:
        assert self.connection
        self.selector.register(self.connection.sock, selectors.EVENT_READ, self._hear)
        self.selector.register(
            self.watchdog,
            selectors.EVENT_READ,
            lambda: self.lose("the keeper of this agent is gone"),
        )
        woken, wake = socket.socketpair()
        woken.setblocking(False)
        wake.setblocking(False)
        self._wake = wake  # kept open
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        self.selector.register(
            woken, selectors.EVENT_READ, lambda: self._signalled(woken.recv(4096))
        )
        if self.session.stdin != "none" and _open_pipe(0):
            self.selector.register(0, selectors.EVENT_READ, self._stdin)

    def _signalled(self, numbers: bytes) -> None:
        if self.session.term == "pass" and signal.SIGTERM in numbers and self.children:
            self.send(HostLeaves())  # ranks of other hosts must save with ours
            return
        if self.session.term == "save":
            # Slurm signals every process of the job: the ranks save, and the supervisor says what
            # is next
            return
        if {signal.SIGTERM, signal.SIGINT, signal.SIGHUP} & set(numbers):
            self.leave(
                int(Exit.CANCELLED),
                "it was stopped by a signal",
                self.session.grace if self.leaving is None else 0.0,
            )

    def _stdin(self) -> None:
        """ssh and pdsh hold our stdin open for as long as they live."""
        with contextlib.suppress(OSError):
            if os.read(0, 4096):
                return
        self.selector.unregister(0)
        self.lose("the transport that started it closed its stdin")

    def _hear(self) -> None:
        try:
            for frame in self.connection.receive() if self.connection else ():
                self.heard_at = time.monotonic()
                self._accept(frame)
        except (SupervisorLost, BadFrame) as error:
            self.lose(str(error))

    def _accept(self, frame: Mapping[str, object]) -> None:
        kind = str(frame["type"])
        if command := self.commands.get(kind):
            self.tasks.append(self._carry_out(command, frame))
        else:
            self.send(CommandRefused(kind, "this agent does not know it"))

    def _carry_out(self, command: Command, frame: Mapping[str, object]) -> Task:
        """A bad command must not end what runs."""
        try:
            yield from command(self, frame) or ()
        except Exception as error:
            self.send(CommandRefused(str(frame["type"]), f"{type(error).__name__}: {error}"))

    # one turn

    def _turn(self) -> None:
        if self.connection:
            wanted = selectors.EVENT_READ | (
                selectors.EVENT_WRITE if self.connection.waiting else 0
            )
            if self.selector.get_key(self.connection.sock).events != wanted:
                self.selector.modify(self.connection.sock, wanted, self._hear)
        for key, events in self.selector.select(self._timeout(time.monotonic())):
            if events & selectors.EVENT_WRITE and self.connection:
                self._flush()
            # an earlier event may have taken it out
            if events & selectors.EVENT_READ and self._is_registered(key.fd):
                key.data()
        now = time.monotonic()
        self._collect()
        self._report(now)
        for task in list(self.tasks):  # in the order they came; a task may add another
            if next(task, StopIteration) is StopIteration:
                self.tasks.remove(task)
        if self.connection and self.leaving is None and now - self.heard_at > self.session.lease:
            self.lose(f"the supervisor has been silent for {now - self.heard_at:.0f} s")

    def _is_registered(self, handle: int) -> bool:
        return handle in self.selector.get_map()

    def _timeout(self, now: float) -> float:
        """Seconds until something must be done that no event tells of."""
        if self.tasks or self.ended:
            return TICK
        if any(child.output.waiting for child in self.children.values()):
            return max(
                0.0,
                min(self.batched_at + BATCH_SECONDS, self.beaten_at + self.heartbeat_seconds) - now,
            )
        return max(0.0, self.beaten_at + self.heartbeat_seconds - now)

    def _flush(self) -> None:
        try:
            if self.connection:
                self.connection.flush()
        except SupervisorLost as error:
            self.lose(str(error))

    def _collect(self) -> None:
        """Notice who has ended."""
        ended = [
            child for child in self.children.values() if child.running and self._collect_one(child)
        ]
        self.ended += ended
        parent = self.processes.parent
        if parent and parent.collect() and self.oom:  # a kill that is none of a rank's
            self.oom.killed(parent, self.children.values())
        if not self.tasks:
            self.processes.reap_orphans()
        if ended and not self.starting and not any(c.running for c in self.children.values()):
            # what overwrote its environment; the last of the run here has ended
            process_marks.kill_processes(self.processes.strays())
        for child in [c for c in self.ended if c.logged()]:
            self.ended.remove(child)
            self._note_troubles()
            self._send_output(child)
            if last := child.beat():
                self.send(HeartbeatReport({child.key: last}, time.time()))
            assert self.oom
            self.send(child.end_report(oom=self.oom.killed(child, self.children.values())))
            del self.children[child.key]

    def _collect_one(self, child: ChildProcess) -> bool:
        handles = list(child.pipes.open)
        if not child.collect():
            return False
        for handle in handles:
            if self._is_registered(handle):
                self.selector.unregister(handle)
        return True

    def _report(self, now: float) -> None:
        """HeartbeatReport and output, as far as the supervisor keeps up."""
        if now - self.batched_at >= BATCH_SECONDS:
            self.batched_at = now
            self._note_troubles()
            for child in self.children.values():
                child.output.tick(now)
                if self.connection is None or self.connection.room:
                    self._send_output(child)
                self.watch(child)
        if now - self.beaten_at >= self.heartbeat_seconds:
            self.beaten_at = now
            self.watchdog.beat()
            if self.connection and self.connection.room:  # else: the next one says it all
                beats = {
                    child.key: beat for child in self.children.values() if (beat := child.beat())
                }
                self.send(HeartbeatReport(beats, time.time()))

    def _note_troubles(self) -> None:
        """Say once of a log that it cannot be written."""
        while self.writer.troubles:
            path, why = self.writer.troubles.popleft()
            for child in self.children.values():
                if child.log == path:
                    child.output.note(
                        f"cannot write {path} on {os.uname().nodename}: {why}; the process goes on,"
                        " its log is incomplete"
                    )

    def _send_output(self, child: ChildProcess) -> None:
        for frame in child.output.frames():
            self.send(frame)

    def watch(self, child: ChildProcess) -> None:
        """Read the child's pipes, or let it wait while its output must be whole and nobody takes
        it."""
        for handle in child.pipes.open:
            watched = self._is_registered(handle)
            if watched and child.output.full:
                self.selector.unregister(handle)
            elif not watched and not child.output.full:
                self.selector.register(
                    handle, selectors.EVENT_READ, partial(self._read, child, handle)
                )

    def _read(self, child: ChildProcess, handle: int) -> None:
        child.pipes.read(handle)
        if handle not in child.pipes.open or child.output.full:
            self.selector.unregister(handle)

    # for the commands

    def send(self, frame: Frame) -> None:
        """Send a frame, as long as there is somebody to send it to."""
        try:
            if self.connection:
                self.connection.send(frame)
        except SupervisorLost as error:
            self.lose(str(error))

    def lose(self, why: str) -> None:
        """The lease is lost: stop everything and leave."""
        if self.connection:
            self.selector.unregister(self.connection.sock)
            self.connection.sock.close()
            self.connection = None
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(self.watchdog)  # it stays readable once the keeper is gone
        self.leave(int(Exit.CONTACT_LOST), why, self.session.grace)

    def leave(self, code: int, why: str, grace: float) -> None:
        """Stop everything, then end. Asked again, the shorter grace counts."""
        with contextlib.suppress(OSError):
            os.kill(os.getppid(), signal.SIGCONT)  # a keeper that was stopped has to end after us
        if self.leaving is None or grace == 0:
            if self.leaving is None and code:
                say(f"{os.uname().nodename}: stops everything: {why}")
            if self.leaving is None:
                self.leaving = code
            self.tasks.append(self._leave(grace))

    def _leave(self, grace: float) -> Task:
        yield from self.stop(None, grace)
        while self.ended:
            yield
        if self.connection:
            with contextlib.suppress(SupervisorLost):
                self.connection.drain(LEAVE_SECONDS)
        self.code = self.leaving

    def stop(
        self, keys: Collection[str] | None, grace: float, *, keep_parent: bool = False
    ) -> Task:
        """End these programs, or with None everything; returns once their ends are reported.

        Args:
            keys: of programs.
            grace: seconds from TERM to KILL.
            keep_parent: of everything, all but the rank parent.
        """
        children = self.processes.by_keys(keys)
        self.starting -= self.starting if keys is None else set(keys)
        yield from self.processes.terminate(keys, grace, keep_parent=keep_parent)
        while any(child in self.ended for child in children):
            yield

    def _close(self) -> None:
        for child in self.children.values():
            child.kill()
        if self.processes.parent:
            self.processes.parent.kill()
        if self.heartbeats:
            shutil.rmtree(self.heartbeats, ignore_errors=True)
        if self.run_ends:
            remove_memory_folder(Path(self.session.node_folder), self.session.run)
        if self.processes.group:
            self.processes.group.remove()
        if self.slots and not self.children:
            self.slots.release()
        if self.listener:
            self.listener.close()
        if self.connection:
            self.connection.sock.close()
        self.selector.close()


def say(text: str) -> None:
    """A line for people who read the transport's output; there may be none any more."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"trainkit agent: {text}\n")
        sys.stderr.flush()


def _open_pipe(handle: int) -> bool:
    """Whether it is a pipe or socket that somebody holds open at the other end: its end of file
    will mean something."""
    with contextlib.suppress(OSError):
        mode = os.fstat(handle).st_mode
        if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
            return False
        with selectors.DefaultSelector() as selector:
            selector.register(handle, selectors.EVENT_READ)
            return not selector.select(0)
    return False
