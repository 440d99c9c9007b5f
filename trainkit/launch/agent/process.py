"""One program that the agent started: its environment, its pipes, how far it says it is, and how
it ended."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from trainkit.base import process_marks
from trainkit.base.cgroup import Cgroup
from trainkit.base.files import write_json, write_text
from trainkit.base.process import die_with_parent_hook, on_this_node
from trainkit.base.process_marks import MARK_VARIABLE
from trainkit.base.redact import Redactor
from trainkit.base.worker import PARENT_VARIABLE
from trainkit.launch.agent.file_work import FileWork
from trainkit.launch.agent.output import LogWriter, Output, Pipes
from trainkit.launch.protocol.frames import ProcessEnded, ProcessSpec

HEARTBEAT_VARIABLE = "TRAINKIT_HEARTBEAT_FILE"
# kept for a rank's words: any user of the host can fill the file system of the node's folder
BEAT_BYTES = 1024
LARGEST = 2**20  # bytes of a heartbeat or an error file that are read
GONE_SECONDS = 1.0  # that a killed group may take to be empty
LOG_SECONDS = 2.0  # how long the report of a process's end waits for its log


class CannotStart(Exception):
    """The program could not be started; the message says why."""


@dataclass(frozen=True)
class StartContext:
    """What the programs of one StartProcesses frame have in common.

    Args:
        secrets: the values of its `secret_names`.
        redactor: takes them out of all that is said.
        writer: writes logs.
        heartbeats: the folder on this node where heartbeat files go.
        group: the cgroup of the agent, in which each program gets one of its own; None: this
            machine has none.
    """

    secrets: Mapping[str, str]
    redactor: Redactor
    writer: LogWriter
    heartbeats: Path
    group: Cgroup | None


class ChildProcess:
    """A running or ended program.

    Args:
        spec: what to start.
        mark: of this process, exported as TRAINKIT_RUN.
        context: what it has in common with others.

    Raises:
        CannotStart: with the reason.
    """

    def __init__(self, spec: ProcessSpec, mark: str, context: StartContext) -> None:
        self.key = spec.key
        self.mark = mark
        self.log = _path(spec.log)
        self.error = _path(spec.error)
        self.heartbeat: Path | None = None
        if spec.heartbeat:
            self.heartbeat = context.heartbeats / f"{_file_name(spec.key)}.json"
        self.redactor = context.redactor
        self.writer = context.writer
        self.output = Output(
            self.key,
            self.log,
            context.redactor,
            context.writer,
            whole=spec.whole,
            reported=spec.output,
        )
        self.code: int | None = None
        self.began = time.monotonic()
        self.ended_at = 0.0
        self._error: FileWork[dict[str, object] | None] | None = None  # once it has ended
        self._log_until = 0.0
        self.stopped = False  # we ended it
        self._last_beat = (0, 0)  # (modification time, inode) of the heartbeat file
        environment = self._environment(spec, context.secrets)
        try:
            if self.heartbeat:
                write_text(self.heartbeat, " " * BEAT_BYTES)
            self.group = context.group.inside(_file_name(self.key)) if context.group else None
            self.process = _spawn(spec, mark, environment, self.group)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            if self.log:
                context.writer.close(self.log)
            raise CannotStart(_start_error(error, spec)) from None
        assert self.process.stdout and self.process.stderr
        self.pipes = Pipes(
            self.output, os.dup(self.process.stdout.fileno()), os.dup(self.process.stderr.fileno())
        )
        self.process.stdout.close()
        self.process.stderr.close()

    def _environment(self, spec: ProcessSpec, secrets: Mapping[str, str]) -> dict[str, str]:
        own = {MARK_VARIABLE: self.mark, PARENT_VARIABLE: str(os.getpid())}
        if self.heartbeat:
            own[HEARTBEAT_VARIABLE] = str(self.heartbeat)
        return {**os.environ, **_expanded(spec.env), **secrets, **own}

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def running(self) -> bool:
        """Whether it has not been reaped: as long as it is, its pid and its group's number are
        its own."""
        return self.code is None

    def signal(self, number: int, *, group: bool = False) -> None:
        """Send a signal to it, or to its whole process group."""
        if self.running:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number) if group else os.kill(self.pid, number)

    def stop(self) -> None:
        """TERM to its group, which must be able to hear it."""
        if self.running and not self._has_ended():
            self.stopped = True
            self.signal(signal.SIGTERM, group=True)
            self.signal(signal.SIGCONT, group=True)

    def kill(self) -> None:
        """KILL to its group."""
        if self.running:
            self.stopped = self.stopped or not self._has_ended()
            self.signal(signal.SIGKILL, group=True)

    def _has_ended(self) -> bool:
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def collect(self) -> bool:
        """Reap it if it has ended, kill what it left behind and read the rest of its output.
        Returns whether that was now."""
        if not self.running or not self._has_ended():
            return False
        self.ended_at = time.time()
        self._log_until = time.monotonic() + LOG_SECONDS
        # before the reaping: until then the group's number is nobody else's
        self.signal(signal.SIGKILL, group=True)
        self.code = self.process.wait()
        if self.group:
            with contextlib.suppress(OSError):
                self.group.kill(GONE_SECONDS)
            self.group.remove()
        for _ in range(20):
            if not (left := process_marks.find_marked(self.mark)):
                break
            process_marks.kill_processes(left)
            time.sleep(0.005)
        self.pipes.close()
        if self.log:
            self.writer.close(self.log)
        self._error = FileWork(self._redacted_error)
        return True

    def logged(self) -> bool:
        """Whether its log is written and its error file read as far as they can be, or that has
        taken too long."""
        assert self._error is not None
        written = self.log is None or self.writer.idle(self.log)
        return (written and self._error.done) or time.monotonic() > self._log_until

    def beat(self) -> dict[str, object] | None:
        """What its heartbeat file says, if that changed since the last call."""
        if self.heartbeat is None:
            return None
        try:
            status = self.heartbeat.stat()
        except OSError:
            return None
        seen = (status.st_mtime_ns, status.st_ino)
        if seen == self._last_beat:
            return None
        self._last_beat = seen
        return _read_object(self.heartbeat)

    def done(self) -> bool:
        """Whether it recorded that it has done all its work."""
        if self.heartbeat is None:
            return False
        beat = _read_object(self.heartbeat)
        return beat is not None and beat.get("phase") == "done"

    def end_report(self, *, oom: bool) -> ProcessEnded:
        """How it ended; its error file is without secrets from now on.

        Args:
            oom: the kernel killed it because memory ran out.
        """
        assert self.code is not None and self._error is not None
        return ProcessEnded(
            key=self.key,
            code=self.code,
            time=self.ended_at,
            done=self.done(),
            stopped=self.stopped,
            error=self._error.result() if self._error.done else None,
            last=tuple(self.output.last()),
            oom=oom,
        )

    def _redacted_error(self) -> dict[str, object] | None:
        if self.error is None:
            return None
        error = _read_object(self.error)
        shown: dict[str, object] | None = self.redactor.value(error)
        if shown != error:
            with contextlib.suppress(OSError):
                write_json(self.error, shown)
        return shown


def _spawn(
    spec: ProcessSpec, mark: str, environment: Mapping[str, str], group: Cgroup | None
) -> subprocess.Popen[bytes]:
    """Start the program, in its cgroup from its first instruction on. Raises as Popen does."""
    entrance = -1
    try:
        if group:
            entrance = group.entrance()
        limit = process_marks.limit_mark(mark.partition("/")[0])
        return subprocess.Popen(
            list(spec.argv),
            env=dict(environment),
            cwd=spec.cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            # two calls of the system; other threads only read and write files
            preexec_fn=_contained(  # noqa: PLW1509
                entrance, limit, die_with_parent_hook(os.getpid())
            ),
        )
    finally:
        if entrance >= 0:
            os.close(entrance)


def _start_error(error: Exception, spec: ProcessSpec) -> str:
    """Why a program could not be started, with the file that is to blame."""
    file = getattr(error, "filename", None) or next(iter(spec.argv), "")
    return f"{getattr(error, 'strerror', None) or error}: {file}"


def _contained(
    entrance: int, limit: tuple[int, int] | None, then: Callable[[], None]
) -> Callable[[], None]:
    """For a child between fork and exec: enter the group behind an open file, take the limit
    that is a mark, where there are such, and go on."""

    def prepare() -> None:
        if entrance >= 0:
            os.write(entrance, b"0")
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_MSGQUEUE, limit)
        then()

    return prepare


def _path(text: str | None) -> Path | None:
    if text:
        return Path(text)
    return None


def _file_name(key: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", lambda match: f"%{ord(match[0]):x}", key)


def child_mark(mark: str, key: str) -> str:
    """The mark of one process below the node's."""
    return f"{mark}/{_file_name(key)}"


def _expanded(environment: Mapping[str, str]) -> dict[str, str]:
    """Values with ${node:VAR} replaced from this node's environment. Raises CannotStart naming
    every one that is not there."""
    try:
        return on_this_node(environment)
    except KeyError as missing:
        raise CannotStart(
            f"${{node:VAR}} asks for what is not in the environment of {os.uname().nodename}:"
            f" {', '.join(missing.args)}"
        ) from None


def _read_object(path: Path) -> dict[str, object] | None:
    """The JSON object in a file that any program may have written; None where there is none."""
    try:
        with open(path, "rb") as file:
            value = json.loads(file.read(LARGEST))
    except (OSError, ValueError, RecursionError):
        return None
    if isinstance(value, dict):
        return value
    return None
