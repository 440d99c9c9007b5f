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
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from trainkit.base import process_marks
from trainkit.base.cgroup import Cgroup, create_cgroup
from trainkit.base.documents import read_document
from trainkit.base.errors import Exit, TrainkitError
from trainkit.base.slots import SlotReservation
from trainkit.base.watchdog import START_LEASE, WatchdogLink
from trainkit.launch.agent.connection import SupervisorConnection, SupervisorLost, dial
from trainkit.launch.agent.host_report import hello
from trainkit.launch.agent.output import LogWriter
from trainkit.launch.agent.process import ChildProcess, OomDetector
from trainkit.launch.protocol.frames import HEARTBEAT_SECONDS, BadFrame, Frame, heartbeat_interval

BATCH_SECONDS = 0.25  # between two batches of output
TICK = 0.05  # seconds between two looks at what has begun and is not done
KILL_SECONDS = 5.0  # how long what got KILL may take to vanish
LEAVE_SECONDS = 2.0  # how long the last words may take

Task = Iterator[None]
Order = Callable[["Agent", Frame], Task | None]


class Agent:
    """One host's part of a session.

    Args:
        folder: the session's folder, which this host must see as the supervisor does. node: this
        host's number in the session. link: to the keeper of this process, which is the agent's
        own: it takes the signals and answers for all descendants. orders: what is done on a
        frame, by its type.
    """

    def __init__(
        self, folder: Path, node: int, link: WatchdogLink, orders: Mapping[str, Order]
    ) -> None:
        self.folder = folder
        self.node = node
        self.link = link
        self.orders = orders
        self.session: dict[str, Any] = {}
        self.token = b""
        self.mark = ""
        self.connection: SupervisorConnection | None = None
        self.selector = selectors.DefaultSelector()
        self.children: dict[str, ChildProcess] = {}
        self.telling: list[ChildProcess] = []  # ended, not yet told
        self.tasks: list[Task] = []
        self.writer = LogWriter()
        self.memory: OomDetector | None = None
        self.held: SlotReservation | None = None
        self.group: Cgroup | None = None  # that everything is started in
        self.heartbeats: Path | None = None
        self.listener: socket.socket | None = None
        self.heard = self.beaten = self.batched = 0.0
        self.beat = HEARTBEAT_SECONDS  # seconds between two heartbeats
        self.leaving: int | None = None  # the exit code of why we leave
        self.code: int | None = None

    def run(self) -> int:
        """Do the session; returns the exit code. Nothing that was started is left."""
        try:
            self.session = read_document(self.folder / "session.json", "session/1")
            self.token = bytes.fromhex((self.folder / "token").read_text().strip())
        except (OSError, ValueError, TrainkitError) as error:
            say(
                f"{os.uname().nodename} cannot read the session: {error} (is the root a folder that"
                " all nodes share?)"
            )
            return int(Exit.HEALTH)
        self.mark = f"{self.session['run']}/{self.session['attempt']}/{self.node}"
        self.group = create_cgroup(self.mark)
        self.link.guard(self.mark, lease=START_LEASE, group=self.group)
        try:
            self.connection = dial(
                self.session["address"], self.session["port"], self.token, self.node
            )
        except SupervisorLost as error:
            say(f"{os.uname().nodename}: {error}")
            return int(Exit.START)
        self.heard, self.beat = time.monotonic(), heartbeat_interval(self.session["lease"])
        try:
            self._listen_to_all()
            code = Path(__file__).resolve().parents[3]
            self.send(
                {
                    **hello(
                        self.session,
                        self.folder,
                        self.node,
                        self.connection.sock.getsockname()[0],
                        code,
                    ),
                    "proof": self.proof,
                }
            )
            while self.code is None:
                self._turn()
            return self.code
        finally:
            self._close()

    # what may happen

    def _listen_to_all(self) -> None:
        assert self.connection
        self.selector.register(self.connection.sock, selectors.EVENT_READ, self._hear)
        self.selector.register(
            self.link, selectors.EVENT_READ, lambda: self.lose("the keeper of this agent is gone")
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
        if self.session.get("stdin") != "none" and _open_pipe(0):
            self.selector.register(0, selectors.EVENT_READ, self._stdin)

    def _signalled(self, numbers: bytes) -> None:
        if self.session.get("term") == "save":
            # Slurm tells every process of the job: the ranks save, and the supervisor says what is
            # next
            return
        if {signal.SIGTERM, signal.SIGINT, signal.SIGHUP} & set(numbers):
            self.leave(
                int(Exit.CANCELLED),
                "it was told to stop by a signal",
                self.session["grace"] if self.leaving is None else 0.0,
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
                self.heard = time.monotonic()
                self._do(frame)
        except (SupervisorLost, BadFrame) as error:
            self.lose(str(error))

    def _do(self, frame: Frame) -> None:
        if order := self.orders.get(frame["type"]):
            self.tasks.append(self._done(order, frame))
        else:
            self._refuse(frame, "this agent does not know it")

    def _done(self, order: Order, frame: Frame) -> Task:
        """Carry an order out; a bad one must not end what runs."""
        try:
            yield from order(self, frame) or ()
        except Exception as error:
            self._refuse(frame, f"{type(error).__name__}: {error}")

    def _refuse(self, frame: Frame, why: str) -> None:
        self.send({"type": "refused", "frame": frame["type"], "error": why})

    # one turn

    def _turn(self) -> None:
        if self.connection:
            wanted = selectors.EVENT_READ | (
                selectors.EVENT_WRITE if self.connection.waiting else 0
            )
            if self.selector.get_key(self.connection.sock).events != wanted:
                self.selector.modify(self.connection.sock, wanted, self._hear)
        for key, events in self.selector.select(self._patience(time.monotonic())):
            if events & selectors.EVENT_WRITE and self.connection:
                self._flush()
            # an earlier event may have taken it out
            if events & selectors.EVENT_READ and self._watched(key.fd):
                key.data()
        now = time.monotonic()
        self._collect()
        self._tell(now)
        for task in list(self.tasks):  # in the order they came; a task may add another
            if next(task, StopIteration) is StopIteration:
                self.tasks.remove(task)
        if self.connection and self.leaving is None and now - self.heard > self.session["lease"]:
            self.lose(f"the supervisor has been silent for {now - self.heard:.0f} s")

    def _watched(self, handle: int) -> bool:
        return handle in self.selector.get_map()

    def _patience(self, now: float) -> float:
        """Seconds until something must be done that no event tells of."""
        if self.tasks or self.telling:
            return TICK
        if any(child.output.waiting for child in self.children.values()):
            return max(0.0, min(self.batched + BATCH_SECONDS, self.beaten + self.beat) - now)
        return max(0.0, self.beaten + self.beat - now)

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
        self.telling += ended
        if not self.tasks:
            _reap_orphans({child.pid for child in self.children.values() if child.running})
        if ended and not any(child.running for child in self.children.values()):
            # what overwrote its environment; the last of the run here has ended
            process_marks.kill_processes(self.strays())
        for child in [c for c in self.telling if c.logged()]:
            self.telling.remove(child)
            self._note_troubles()
            self._send_output(child)
            if last := child.beat():
                self.send({"type": "heartbeat", "beats": {child.key: last}, "clock": time.time()})
            assert self.memory
            self.send(child.ended(oom=self.memory.killed(child)))
            del self.children[child.key]

    def _collect_one(self, child: ChildProcess) -> bool:
        handles = list(child.pipes.open)
        if not child.collect():
            return False
        for handle in handles:
            if self._watched(handle):
                self.selector.unregister(handle)
        return True

    def _tell(self, now: float) -> None:
        """Heartbeats and output, as far as the supervisor keeps up."""
        if now - self.batched >= BATCH_SECONDS:
            self.batched = now
            self._note_troubles()
            for child in self.children.values():
                child.output.tick(now)
                if self.connection is None or self.connection.room:
                    self._send_output(child)
                self.watch(child)
        if now - self.beaten >= self.beat:
            self.beaten = now
            self.link.beat()
            if self.connection and self.connection.room:  # else: the next one says it all
                beats = {
                    child.key: said for child in self.children.values() if (said := child.beat())
                }
                self.send({"type": "heartbeat", "beats": beats, "clock": time.time()})

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
            watched = self._watched(handle)
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

    # for the orders

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
            self.selector.unregister(self.link)  # readable for ever once the keeper is gone
        self.leave(int(Exit.CONTACT_LOST), why, self.session["grace"])

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
        yield from self.end(None, grace)
        while self.telling:
            yield
        if self.connection:
            with contextlib.suppress(SupervisorLost):
                self.connection.drain(LEAVE_SECONDS)
        self.code = self.leaving

    def end(self, keys: list[str] | None, grace: float) -> Task:
        """TERM, KILL after the grace, until nothing is left or does not die: of these processes,
        or with None of everything."""
        if self.memory is None:
            return  # nothing was ever started
        children = [child for child in self.children.values() if keys is None or child.key in keys]
        deadline = time.monotonic() + grace
        for child in children:
            child.stop()
        for process in self.strays() if keys is None else ():
            for number in (signal.SIGTERM, signal.SIGCONT):
                process_marks.send_signal(process, number)
        while time.monotonic() < deadline and (
            any(c.running for c in children) or (keys is None and self.strays())
        ):
            yield
        until = time.monotonic() + KILL_SECONDS
        clean = 0
        # one look may miss a child in the middle of its exec
        while clean < 2 and time.monotonic() < until:
            if keys is None:
                left = self.strays()
            else:
                left = [p for child in children for p in process_marks.find_marked(child.mark)]
            for child in children:
                child.kill()
            if keys is None and self.group:
                with contextlib.suppress(OSError):
                    self.group.kill()
            if keys is None:
                process_marks.kill_children()
            process_marks.kill_processes(left)
            if (
                left
                or any(child.running for child in children)
                or (keys is None and not self.proved())
            ):
                clean = 0
            else:
                clean = clean + 1
            yield
        while any(child in self.telling for child in children):
            yield

    def strays(self) -> list[process_marks.MarkedProcess]:
        """Everything of the run on this host, as this agent knows it."""
        held = [
            p
            for pid in (self.group.pids() if self.group else ())
            if (p := process_marks.describe_process(pid))
        ]
        return list(
            {
                p.pid: p
                for p in (
                    *process_marks.find_marked(self.mark),
                    *process_marks.find_descendants(os.getpid()),
                    *held,
                )
            }.values()
        )

    @property
    def proof(self) -> str:
        """What this host can prove with that nothing is left: a cgroup, which whoever comes
        later finds too, or that this process has no child."""
        if self.group:
            return "cgroup"
        return "children"

    def proved(self) -> bool:
        """Whether the kernel says that nothing is left: no child, and so no descendant, for
        orphans become our children; and nobody in the group."""
        _reap_orphans({child.pid for child in self.children.values() if child.running})
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return self.group is None or self.group.empty()
        return False

    def _close(self) -> None:
        for child in self.children.values():
            child.kill()
        if self.heartbeats:
            shutil.rmtree(self.heartbeats, ignore_errors=True)
        if self.group:
            self.group.remove()
        if self.held and not self.children:
            self.held.release()
        if self.listener:
            self.listener.close()
        if self.connection:
            self.connection.sock.close()
        self.selector.close()


def say(words: str) -> None:
    """A line for who reads the transport's output; that may be nobody any more."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"trainkit agent: {words}\n")
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


def _reap_orphans(own: set[int]) -> None:
    """Take the exit codes of descendants that became our children. One of ours at the head of
    the line waits for its turn."""
    with contextlib.suppress(ChildProcessError):
        while (
            ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        ) and ended.si_pid not in own:
            os.waitpid(ended.si_pid, 0)
