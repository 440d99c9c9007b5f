"""Processes: who one is beyond its pid, and how to start and stop ours without leaving any behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any


@dataclass(frozen=True)
class Identity:
    """A process that cannot be confused with a later one of the same pid: start time in clock ticks, and the boot."""

    host: str
    pid: int
    start_time: int
    boot_id: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def _start_time(pid: int) -> int:
    """Field 22 of /proc/PID/stat (proc(5)), or 0 where the process is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    fields = text.rpartition(")")[2].split()
    return 0 if fields[0] == "Z" else int(fields[19])


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


def identity(pid: int | None = None) -> Identity:
    """The identity of `pid` (default: this process)."""
    number = os.getpid() if pid is None else pid
    return Identity(os.uname().nodename, number, _start_time(number), _boot_id())


def is_alive(who: Identity) -> bool | None:
    """Whether that very process lives. None: it is another host's, and cannot be asked from here."""
    if who.host != os.uname().nodename:
        return None
    return who.boot_id == _boot_id() and who.start_time != 0 and _start_time(who.pid) == who.start_time


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel send SIGKILL to this process when the thread that started it ends (Linux, prctl(2)).

    Call it first thing in a child. If the parent died before the call, exits at once.
    """
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(128 + signal.SIGKILL)


def allow_open_files() -> None:
    """As many open files as this process may have at all: a blend of a thousand datasets holds some thousand."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def start(argv: Sequence[str], *, env: Mapping[str, str], cwd: Path, stdout: int | IO[Any], stderr: int | IO[Any]) -> subprocess.Popen[bytes]:
    """Start a child in a session of its own: the terminal's Ctrl-C reaches us alone, and `stop` reaches all it started."""
    return subprocess.Popen(list(argv), env=dict(env), cwd=cwd, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, start_new_session=True)


def _signal_group(child: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, number)


def running(child: subprocess.Popen[bytes]) -> bool:
    """Whether the child still runs. Does not reap it: its pid, and so its group's number, stay ours until `reap`."""
    if child.returncode is not None:
        return False
    return os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def reap(child: subprocess.Popen[bytes]) -> int:
    """Collect an ended child after killing what it left behind in its group; returns its exit code (negative: a signal)."""
    if child.returncode is None:
        _signal_group(child, signal.SIGKILL)
    return child.wait()


def stop(children: Sequence[subprocess.Popen[bytes]], grace: float = 3.0) -> list[int]:
    """TERM to all children's groups, KILL after `grace` seconds; returns the pids that outlived even that (none, as a rule)."""
    for child in children:
        if running(child):
            _signal_group(child, signal.SIGTERM)
    deadline = time.monotonic() + grace
    while time.monotonic() < deadline and any(running(child) for child in children):
        time.sleep(0.02)
    survivors = []
    for child in children:
        if child.returncode is not None:
            continue
        _signal_group(child, signal.SIGKILL)
        try:
            child.wait(timeout=2.0)
        except subprocess.TimeoutExpired:
            survivors.append(child.pid)
    return survivors
