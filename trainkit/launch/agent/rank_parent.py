"""The process from which a host's ranks are forked (`trainkit.train.parent`): it has imported what
they need, so that a rank need not.

It is no rank: its end is never reported, and a rank that cannot be forked from it is started like
any other program.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import socket
import time
from collections.abc import Callable, Collection, Generator, Iterator

from trainkit.base.old_python import exit_code_of, send_handles
from trainkit.base.process_marks import MARK_VARIABLE
from trainkit.base.worker import PARENT_VARIABLE
from trainkit.launch.agent.spawn import Beginning, CannotStart, exec_program
from trainkit.launch.protocol.frames import StartParent

KEY = "parent"  # of its mark and its cgroup
READY = b"ready"
GO = b"go"
FORK_SECONDS = 10.0  # that a fork may take, many times of what it does
OWN_VARIABLES = "TRAINKIT_"  # what begins so is read by the rank's own program, after the fork


class CannotFork(Exception):
    """A rank must be started as a program of its own; the message says why."""


class ForkedProcess:
    """A process that our rank parent forked: the kernel made it our child when the one between
    them had ended."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def wait(self) -> int:
        """Reap it; its exit code, negative for a signal."""
        return exit_code_of(os.waitpid(self.pid, 0)[1])


class RankParent:
    """One such process, from its start on.

    Args:
        frame: what to start, and what a rank may have otherwise.
        start: the same as a program.
        selector: of the agent's loop, which has to look at what we wait for.

    Raises:
        OSError, ValueError, subprocess.SubprocessError: it could not be started.
    """

    def __init__(
        self, frame: StartParent, start: Beginning, selector: selectors.BaseSelector
    ) -> None:
        self.frame = frame
        self.began = time.monotonic()
        self.stopped = False  # we ended it
        self._environment = start.environment
        self._selector = selector
        self._deadline = self.began + frame.seconds
        self._ready = False
        self._refused = ""  # why it forks nothing
        self._said = os.memfd_create("rank-parent")  # what it prints: its ranks repeat it
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._line.setblocking(False)
        with theirs:
            self.process = exec_program(
                start, stdin=theirs.fileno(), stdout=self._said, stderr=self._said
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def code(self) -> int | None:
        """How it ended, negative for a signal; None: it lives. Looked up by `collect`."""
        return self.process.returncode

    def collect(self) -> bool:
        """Reap it if it has ended; whether that was now."""
        return self.code is None and self.process.poll() is not None

    def kill(self) -> None:
        """End it at once: it has nothing to save."""
        if self.process.poll() is None:
            self.stopped = True
            os.killpg(self.pid, signal.SIGKILL)

    def fork(
        self,
        start: Beginning,
        pipes: tuple[int, int],
        secrets: Collection[str],
        wanted: Callable[[], bool],
    ) -> Generator[None, None, ForkedProcess]:
        """For a task: have a rank forked.

        Args:
            start: what it is to be.
            pipes: where its output and its errors go; they stay ours.
            secrets: names of variables that only ranks have.
            wanted: whether it is still to begin.

        Raises:
            CannotFork: it has not begun, and can be started otherwise.
            CannotStart: it is not wanted any more.
        """
        if names := self._read_at_import(start, secrets):
            raise CannotFork(f"it needs another {', '.join(names)}, which is read while importing")
        yield from self._until_ready(wanted)
        if not self._runs(start):
            raise CannotFork(f"{start.argv[0]} is a program that starts another one")
        own, theirs = socket.socketpair()
        with own, theirs, self._watched(own):
            own.setblocking(False)
            self._ask(start, (theirs.fileno(), *pipes))
            theirs.close()
            pid = yield from self._answer(own, wanted)
            try:
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                own.send(GO)
            except (ChildProcessError, BrokenPipeError):
                raise CannotFork(f"process {pid} ended before it began") from None
        return ForkedProcess(pid)

    def _runs(self, start: Beginning) -> bool:
        """Whether the program that was asked for is the interpreter itself, and no script around
        it, which may do for each rank what we could not."""
        asked = shutil.which(start.argv[0], path=start.environment.get("PATH"))
        try:
            return asked is not None and os.path.samefile(asked, f"/proc/{self.pid}/exe")
        except OSError:  # it has ended, which is seen when it is asked
            return True

    def _read_at_import(self, start: Beginning, secrets: Collection[str]) -> list[str]:
        """Variables that differ from ours and may not."""
        may = {*self.frame.late, *secrets}
        own = self._environment
        return sorted(
            name
            for name in {*own, *start.environment}
            if own.get(name) != start.environment.get(name)
            and name not in may
            and not name.startswith(OWN_VARIABLES)
        )

    def _until_ready(self, wanted: Callable[[], bool]) -> Iterator[None]:
        with self._watched(self._line):
            while not self._ready:
                with contextlib.suppress(BlockingIOError):
                    words = self._line.recv(2**16)
                    if words != READY:
                        self._refused = words.decode(errors="replace") or self._refused
                        raise CannotFork(self._refused or self._how_it_ended())
                    self._ready = True
                    return
                if time.monotonic() > self._deadline:
                    raise CannotFork(
                        f"the rank parent has not imported everything within {self.frame.seconds:g}"
                        " s"
                    )
                refuse_unwanted(wanted)
                yield
        if self.code is not None:
            raise CannotFork(self._how_it_ended())

    def _how_it_ended(self) -> str:
        said = os.pread(self._said, 2**16, 0).decode(errors="replace").strip().splitlines()
        last = f": {said[-1]}" if said else ""
        self.kill()  # it has closed its line: it is of no use
        return f"the rank parent has ended with {self.process.wait()}{last}"

    def _ask(self, start: Beginning, handles: tuple[int, ...]) -> None:
        """Send what the rank is to be, with its open files. The request itself lies in memory: an
        environment may be longer than a message, and must not be seen by others."""
        request = {
            "argv": list(start.argv),
            "env": dict(start.environment),
            "cwd": start.cwd,
            "mark": start.mark,
            "agent": os.getpid(),
            "limit": start.limit(),
        }
        words = os.memfd_create("rank")
        entrance = -1
        try:
            entrance = start.entrance()
            with open(words, "wb", closefd=False) as file:
                file.write(json.dumps(request).encode())
            given = [words, *handles] + ([entrance] if entrance >= 0 else [])
            send_handles(self._line, b"fork", given)
        except OSError:  # nobody is at the other end
            raise CannotFork(self._how_it_ended()) from None
        finally:
            os.close(words)
            if entrance >= 0:
                os.close(entrance)

    def _answer(self, own: socket.socket, wanted: Callable[[], bool]) -> Generator[None, None, int]:
        """The pid of what was forked. Whoever holds the other end and ends before it says "go" to
        itself closes it: then nothing has begun."""
        deadline = time.monotonic() + FORK_SECONDS
        while True:
            with contextlib.suppress(BlockingIOError):
                words = own.recv(2**16).decode(errors="replace")
                if words.isdigit():
                    refuse_unwanted(wanted)
                    return int(words)
                raise CannotFork(words or "the rank parent ended while it forked")
            if time.monotonic() > deadline:
                self.kill()
                raise CannotFork(f"the rank parent forked nothing within {FORK_SECONDS:g} s")
            refuse_unwanted(wanted)
            yield

    @contextlib.contextmanager
    def _watched(self, sock: socket.socket) -> Iterator[None]:
        """Have the agent's loop turn as soon as something comes."""
        key = os.dup(sock.fileno())  # a loop's selector has each number once
        self._selector.register(key, selectors.EVENT_READ, lambda: None)
        try:
            yield
        finally:
            self._selector.unregister(key)
            os.close(key)


def parent_environment(environment: dict[str, str], mark: str) -> dict[str, str]:
    """What a rank parent has in its environment."""
    return {
        **os.environ,
        **environment,
        MARK_VARIABLE: mark,
        PARENT_VARIABLE: str(os.getpid()),
    }


def refuse_unwanted(wanted: Callable[[], bool]) -> None:
    """Raise CannotStart where nobody wants it to begin any more."""
    if not wanted():
        raise CannotStart("it was stopped before it began")
