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
from pathlib import Path
from typing import Any

from trainkit.base import process_marks
from trainkit.base.cgroup import Cgroup
from trainkit.base.files import write_json
from trainkit.base.process import die_with_parent_hook
from trainkit.base.process_marks import MARK_VARIABLE
from trainkit.base.redact import Redactor
from trainkit.base.worker import PARENT_VARIABLE
from trainkit.launch.agent.output import LogWriter, Output, Pipes
from trainkit.launch.protocol.frames import Frame

HEARTBEAT_VARIABLE = "TRAINKIT_HEARTBEAT_FILE"
NODE_VALUE = re.compile(r"\$\{node:([A-Za-z_][A-Za-z0-9_]*)\}")
LARGEST = 2**20  # bytes of a heartbeat or an error file that are read
GONE_SECONDS = 1.0  # that a killed group may take to be empty
LOG_SECONDS = 2.0  # how long the word of a process's end waits for its log


class CannotStart(Exception):
    """The program could not be started; the words say why."""


class ChildProcess:
    """A running or ended program.

    Args:
        spec: an entry of a "go" frame's "processes".
        mark: of this process, exported as TRAINKIT_RUN.
        secrets: what "go" names of the session's secrets.
        heartbeats: the folder on this node where heartbeat files go.
        group: that it is put in, in one of its own; None: this machine has none.

    Raises CannotStart.
    """

    def __init__(
        self,
        spec: Mapping[str, Any],
        mark: str,
        secrets: Mapping[str, str],
        redactor: Redactor,
        writer: LogWriter,
        heartbeats: Path,
        group: Cgroup | None,
    ) -> None:
        self.key = str(spec["key"])
        self.mark = mark
        self.log = _path(spec.get("log"))
        self.error = _path(spec.get("error"))
        self.heartbeat = (
            heartbeats / f"{_file_name(self.key)}.json" if spec.get("heartbeat") else None
        )
        self.redactor = redactor
        self.writer = writer
        self.output = Output(
            self.key,
            self.log,
            redactor,
            writer,
            whole=bool(spec.get("whole")),
            told=bool(spec.get("output", True)),
        )
        self.code: int | None = None
        self.began = time.monotonic()
        self.ended_at = 0.0
        self._log_until = 0.0
        self.stopped = False  # we told it to end
        self._beat_seen = (0, 0)
        own = {MARK_VARIABLE: mark, PARENT_VARIABLE: str(os.getpid())}
        if self.heartbeat:
            own[HEARTBEAT_VARIABLE] = str(self.heartbeat)
        environment = {**os.environ, **_expanded(spec.get("env") or {}), **secrets, **own}
        if self.error:
            with contextlib.suppress(OSError):
                self.error.parent.mkdir(parents=True, exist_ok=True)
        entrance = -1
        try:
            self.group = group.inside(_file_name(self.key)) if group else None
            if self.group:
                entrance = self.group.entrance()
            else:
                entrance = -1
            limit = process_marks.limit_mark(mark.partition("/")[0])
            contained = _contained(entrance, limit, die_with_parent_hook(os.getpid()))
            self.process = subprocess.Popen(
                [str(word) for word in spec["argv"]],
                env=environment,
                cwd=spec.get("cwd"),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                # two calls of the system; the only other thread writes logs
                preexec_fn=contained,  # noqa: PLW1509
            )
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            if self.log:
                writer.close(self.log)
            if isinstance(error, OSError) and error.filename:
                where = f" {error.filename}"
            else:
                where = ""
            raise CannotStart(
                f"{getattr(error, 'strerror', None) or error}:{where or ' ' + str(spec['argv'][0])}"
            ) from None
        finally:
            if entrance >= 0:
                os.close(entrance)
        assert self.process.stdout and self.process.stderr
        self.pipes = Pipes(
            self.output, os.dup(self.process.stdout.fileno()), os.dup(self.process.stderr.fileno())
        )
        self.process.stdout.close()
        self.process.stderr.close()

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
        return True

    def logged(self) -> bool:
        """Whether its log is written as far as it can be, or has taken too long."""
        return self.log is None or self.writer.idle(self.log) or time.monotonic() > self._log_until

    def beat(self) -> dict[str, Any] | None:
        """What its heartbeat file says, if that changed since the last call."""
        if self.heartbeat is None:
            return None
        try:
            status = self.heartbeat.stat()
        except OSError:
            return None
        seen = (status.st_mtime_ns, status.st_ino)
        if seen == self._beat_seen:
            return None
        self._beat_seen = seen
        return _document(self.heartbeat)

    def done(self) -> bool:
        """Whether it said that it has done all its work."""
        if self.heartbeat:
            said = _document(self.heartbeat)
        else:
            said = None
        return bool(said and said.get("phase") == "done")

    def ended(self, *, oom: bool) -> Frame:
        """The "ended" frame."""
        if self.error:
            error = _document(self.error)
        else:
            error = None
        shown = self.redactor.value(error)
        if self.error and shown != error:
            with contextlib.suppress(OSError):
                write_json(self.error, shown)
        words = {
            "key": self.key,
            "code": self.code,
            "time": self.ended_at,
            "done": self.done(),
            "stopped": self.stopped,
        }
        return {"type": "ended", **words, "error": shown, "last": self.output.last(), "oom": oom}


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
    missing = {
        name
        for value in environment.values()
        for name in NODE_VALUE.findall(value)
        if name not in os.environ
    }
    if missing:
        raise CannotStart(
            f"${{node:VAR}} asks for what is not in the environment of {os.uname().nodename}:"
            f" {', '.join(sorted(missing))}"
        )
    return {
        name: NODE_VALUE.sub(lambda match: os.environ[match[1]], value)
        for name, value in environment.items()
    }


def _document(path: Path) -> dict[str, Any] | None:
    try:
        with open(path, "rb") as file:
            value = json.loads(file.read(LARGEST))
    except (OSError, ValueError, RecursionError):
        return None
    if isinstance(value, dict):
        return value
    return None


class OomDetector:
    """Evidence that the kernel killed for want of memory: the memory cgroup's own count, or its
    line about the pid. Best effort."""

    def __init__(self) -> None:
        self._seen = _oom_kills()

    def killed(self, child: ChildProcess) -> bool:
        """Whether `child`, ended by SIGKILL that we did not send, was killed for that."""
        if child.code != -signal.SIGKILL or child.stopped:
            return False
        if _oom_kills() > self._seen:
            self._seen += 1  # one count a process
            return True
        return child.pid in _killed_pids(child.began)


def _oom_kills() -> int:
    total = 0
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            if not kinds:
                total += _count(Path(f"/sys/fs/cgroup{path}/memory.events"))
            elif "memory" in kinds.split(","):
                total += _count(Path(f"/sys/fs/cgroup/memory{path}/memory.oom_control"))
    return total


def _count(path: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def _killed_pids(since: float) -> set[int]:
    """Pids of the kernel log's "Killed process N" lines after a moment of the monotonic clock
    (this pid namespace's pids on a plain host).

    A record is "priority,number,microseconds,flags;text" (Documentation/ABI/testing/dev-kmsg).
    """
    found = set()
    with contextlib.suppress(OSError):
        log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
        try:
            for _ in range(20_000):
                try:
                    record = os.read(log, 8192)
                except BrokenPipeError:  # the kernel wrote over it meanwhile
                    continue
                match = re.match(rb"\d+,\d+,(\d+),[^;]*;.*Killed process (\d+)", record)
                if match and int(match[1]) / 1e6 >= since - 1:
                    found.add(int(match[2]))
        finally:
            os.close(log)
    return found
