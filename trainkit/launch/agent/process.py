"""One program that the agent started: its environment, its pipes, how far it says it is, and how
it ended."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Generator, Mapping
from pathlib import Path

from trainkit.base import process_marks
from trainkit.base.cgroup import Cgroup
from trainkit.base.files import write_json, write_text
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.base.process_marks import MARK_VARIABLE
from trainkit.base.redact import Redactor
from trainkit.base.worker import PARENT_VARIABLE
from trainkit.launch.agent import memory_folder
from trainkit.launch.agent.file_work import FileWork
from trainkit.launch.agent.output import LogWriter, Output, Pipes
from trainkit.launch.agent.rank_parent import (
    CannotFork,
    ForkedProcess,
    RankParent,
    refuse_unwanted,
)
from trainkit.launch.agent.spawn import (
    Beginning,
    CannotStart,
    exec_program,
    expanded,
    start_error,
)
from trainkit.launch.protocol.frames import ProcessEnded, ProcessSpec

HEARTBEAT_VARIABLE = "TRAINKIT_HEARTBEAT_FILE"
# kept for a rank's words: any user of the host can fill the file system of the node's folder
BEAT_BYTES = 1024
LARGEST = 2**20  # bytes of a heartbeat or an error file that are read
GONE_SECONDS = 1.0  # that a killed group may take to be empty
LOG_SECONDS = 2.0  # how long the report of a process's end waits for its log


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
        parent: what ranks are forked from; None: there is nothing, and `cold` says why.
        memory: the folder of those that keep copies of their state; None: none does.
    """

    secrets: Mapping[str, str]
    redactor: Redactor
    writer: LogWriter
    heartbeats: Path
    group: Cgroup | None
    parent: RankParent | None
    cold: str
    memory: Path | None = None


class ChildProcess:
    """A program: `start` makes it run.

    Args:
        spec: what to start.
        mark: of this process, exported as TRAINKIT_RUN.
        context: what it has in common with others.
    """

    def __init__(self, spec: ProcessSpec, mark: str, context: StartContext) -> None:
        self.spec = spec
        self.key = spec.key
        self.mark = mark
        self.group: Cgroup | None = None
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

    def start(
        self, context: StartContext, wanted: Callable[[], bool]
    ) -> Generator[None, None, None]:
        """For a task: start it. Raises CannotStart with the reason.

        Args:
            context: as above.
            wanted: whether it is still to begin.
        """
        try:
            environment = self._environment(context)
            if self.heartbeat:
                write_text(self.heartbeat, " " * BEAT_BYTES)
            if context.group:
                self.group = context.group.inside(_file_name(self.key))
            start = Beginning(self.spec.argv, environment, self.spec.cwd, self.mark, self.group)
            yield from self._begin(start, context, wanted)
        except (OSError, ValueError, subprocess.SubprocessError, CannotStart) as error:
            if self.log:
                context.writer.close(self.log)
            if isinstance(error, CannotStart):
                raise
            raise CannotStart(start_error(error, self.spec.argv)) from None

    def _begin(
        self, start: Beginning, context: StartContext, wanted: Callable[[], bool]
    ) -> Generator[None, None, None]:
        out = os.pipe()
        err = os.pipe()
        try:
            self.process = yield from self._forked_or_executed(
                start, context, wanted, (out[1], err[1])
            )
        except BaseException:
            os.close(out[0])
            os.close(err[0])
            raise
        finally:
            os.close(out[1])
            os.close(err[1])
        self.pipes = Pipes(self.output, out[0], err[0])

    def _forked_or_executed(
        self,
        start: Beginning,
        context: StartContext,
        wanted: Callable[[], bool],
        pipes: tuple[int, int],
    ) -> Generator[None, None, subprocess.Popen[bytes] | ForkedProcess]:
        if self.spec.forked:
            try:
                if context.parent is None:
                    raise CannotFork(context.cold)
                return (yield from context.parent.fork(start, pipes, context.secrets, wanted))
            except CannotFork as why:
                refuse_unwanted(wanted)
                self.output.note(f"rank {self.key} is started as a program of its own: {why}")
        out, err = pipes
        return exec_program(start, stdin=subprocess.DEVNULL, stdout=out, stderr=err)

    def _environment(self, context: StartContext) -> dict[str, str]:
        own = {MARK_VARIABLE: self.mark, PARENT_VARIABLE: str(os.getpid())}
        if self.heartbeat:
            own[HEARTBEAT_VARIABLE] = str(self.heartbeat)
        if self.spec.memory and context.memory:
            own[memory_folder.VARIABLE] = str(context.memory)
        return {**os.environ, **expanded(self.spec.env), **context.secrets, **own}

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


def _path(text: str | None) -> Path | None:
    return Path(text) if text else None


def _file_name(key: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", lambda match: f"%{ord(match[0]):x}", key)


def child_mark(mark: str, key: str) -> str:
    """The mark of one process below the node's."""
    return f"{mark}/{_file_name(key)}"


def _read_object(path: Path) -> dict[str, object] | None:
    """The JSON object in a file that any program may have written; None where there is none."""
    try:
        with open(path, "rb") as file:
            value = json.loads(file.read(LARGEST))
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
