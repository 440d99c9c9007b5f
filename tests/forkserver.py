"""Python programs that start in milliseconds: forked from one process that has imported what
they all import.

A rank's imports cost 3.6 s of a processor, a task's 0.4 s; a test run starts thousands of both.
The server (tests/fork_programs.py) imports everything once. `Popen` is subprocess.Popen but for
one thing: a program of this interpreter (`python FILE`, `python -m MODULE`, with -I, -P, -S, -u)
is not executed but forked from the server, and so are the programs that it starts: supervisor,
agent and ranks of a run are processes of their own with the parents, sessions, pipes, marks and
command lines that they really have. What differs: `sys.flags`, and trainkit is the checkout's,
not the run's snapshot. Tests of just these, of what is imported, and of other programs start
real ones: `subprocess.Popen`.
"""

from __future__ import annotations

import array
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.fork_programs import ARGV_ROOM, ENVIRONMENT_ROOM, PADDING, ROOT, Program

# Libraries that make threads when they are loaded: numpy's OpenBLAS, and the jemalloc in pyarrow.
NO_THREADS = {"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}


class Server:
    """The server of one test run, started when it is first asked for. It answers as soon as it
    has imported everything."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "forkserver"
        self._started: tuple[subprocess.Popen[bytes], int] | None = None

    def address(self) -> str:
        """Where it listens."""
        if self._started is None:
            reader, writer = os.pipe()
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(self._path))
                listener.listen(512)
                argv = [
                    sys.executable,
                    "-m",
                    "tests.fork_programs",
                    str(listener.fileno()),
                    str(reader),
                    "x" * ARGV_ROOM,
                ]
                environment = {**os.environ, **NO_THREADS, PADDING: "x" * ENVIRONMENT_ROOM}
                child = subprocess.Popen(
                    argv,
                    cwd=ROOT,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    pass_fds=(listener.fileno(), reader),
                )
            os.close(reader)
            self._started = child, writer
        return str(self._path)

    def close(self) -> None:
        """End it. What it forked goes on."""
        if self._started is not None:
            child, writer = self._started
            os.close(writer)
            child.wait()


_address: list[Callable[[], str]] = []  # of this process


def use(address: Callable[[], str]) -> None:
    """Where `Popen` finds the server from now on; before, it executes programs."""
    _address[:] = [address]


class Popen(subprocess.Popen[Any]):
    """subprocess.Popen whose program is forked from the server, where there is one and it can be.

    Args:
        inside: a process in whose network, host name, IPC and mounts it runs (as `nsenter -n -u
        -i -m`); 0: the caller's.
    """

    _connection: socket.socket | None = None

    def __init__(self, argv: Any, *given: Any, inside: int = 0, **named: Any) -> None:
        self._inside = inside
        super().__init__(argv, *given, **named)

    def _execute_child(
        self,
        args: Any,
        executable: Any,
        preexec_fn: Any,
        close_fds: bool,
        pass_fds: Any,
        cwd: Any,
        env: Any,
        *more: Any,
    ) -> None:
        argv = [os.fsdecode(word) for word in args] if not isinstance(args, str | bytes) else []
        if not _address or executable or preexec_fn or pass_fds or Program.read(argv) is None:
            if self._inside:  # nsenter executes in place: the pid stays
                args = [
                    "nsenter",
                    f"--target={self._inside}",
                    "--net",
                    "--uts",
                    "--ipc",
                    "--mount",
                    f"--wd={os.path.abspath(cwd or '.')}",
                    *argv,
                ]
            super()._execute_child(  # type: ignore[misc]
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *more
            )
            return
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite = more[3:9]
        streams = [
            handle if handle >= 0 else number
            for number, handle in enumerate((p2cread, c2pwrite, errwrite))
        ]
        order = {
            "argv": argv,
            "cwd": os.path.abspath(os.fsdecode(cwd or ".")),
            "environment": [
                (os.fsencode(name) + b"=" + os.fsencode(value)).hex()
                for name, value in (os.environ if env is None else env).items()
            ],
            "session": bool(more[14]),
            "inside": self._inside,
        }
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(_address[0]())
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", streams))]
        text = json.dumps(order).encode() + b"\n"
        sent = self._connection.sendmsg([text], rights)
        self._connection.sendall(text[sent:])
        self._said = b""
        self.pid = int(self._line(block=True))
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]

    def _line(self, *, block: bool) -> bytes:
        """The server's next line; b"" where there is none yet."""
        assert self._connection is not None
        self._connection.setblocking(block)
        while b"\n" not in self._said:
            try:
                data = self._connection.recv(64)
            except BlockingIOError:
                return b""
            if not data:
                raise ChildProcessError(f"the fork server is gone, with {self.args!r}")
            self._said += data
        line, _, self._said = self._said.partition(b"\n")
        return line

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._connection is None:
            return super()._try_wait(wait_flags)  # type: ignore[misc, no-any-return]
        line = self._line(block=not wait_flags & os.WNOHANG)
        return (self.pid, int(line)) if line else (0, 0)

    def __del__(self, *given: Any, **named: Any) -> None:
        """Not kept to be reaped later, as the parent class keeps who has not ended: the server
        reaps, and the connection may be closed already where both are collected together."""
        if getattr(self, "_connection", None) is None:
            super().__del__(*given, **named)

    def _internal_poll(self, *given: Any, **named: Any) -> int | None:
        if self._connection is None:
            return super()._internal_poll(*given, **named)  # type: ignore[misc, no-any-return]
        if self.returncode is None:
            pid, status = self._try_wait(os.WNOHANG)
            if pid:
                self._handle_exitstatus(status)  # type: ignore[attr-defined]
                self._connection.close()
        return self.returncode


def run(
    argv: Sequence[str], *, capture_output: bool = False, check: bool = False, **named: Any
) -> subprocess.CompletedProcess[Any]:
    """subprocess.run of such a program."""
    if capture_output:
        named |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(argv, **named) as process:
        out, err = process.communicate()
    done = subprocess.CompletedProcess(argv, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done
