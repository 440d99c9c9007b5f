"""Which processes of a host belong to a run: each carries its run's mark in its environment,
which children inherit, across setsid and double forks.

A mark is "<run id>/<attempt>/<node>/<key of the process>"; a shorter one, in whole parts, means
all below it. What overwrites its own environment is found as a descendant instead
(`find_descendants`), and where its ancestors are dead by a limit that it has inherited
(`find_by_limit`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import zlib
from collections.abc import Iterable

from trainkit.base.lazy_dataclasses import dataclass
from trainkit.base.old_python import open_process, signal_process
from trainkit.base.process import start_time

MARK_VARIABLE = "TRAINKIT_RUN"
ROUNDS = 50
# bytes of POSIX message queues, of which Linux allows 819,200: nobody comes near, so that the
# number can be a mark
LIMITS = range(400_000, 800_000)
# what pidfd_open(2) answers before Linux 5.3, and where the filter of a container's runtime does
# not know it
NO_HANDLES = (errno.ENOSYS, errno.EPERM)


@dataclass(frozen=True)
class MarkedProcess:
    """A living process: who it is, whose it is ("" where it carries no mark), and what it runs."""

    pid: int
    start_time: int
    mark: str
    argv0: str


def find_marked(prefix: str) -> list[MarkedProcess]:
    """The living processes on this host whose mark is `prefix` or below it, zombies and this
    process left out.

    Only those whose environment may be read: one's own user's, or all for root.
    """
    found = []
    for pid in _pids():
        mark = _mark(pid)
        if (
            mark
            and (mark == prefix or mark.startswith(prefix.rstrip("/") + "/"))
            and pid != os.getpid()
            and (process := describe_process(pid, mark))
        ):
            found.append(process)
    return found


def find_descendants(root: int) -> list[MarkedProcess]:
    """The living processes below `root`, itself left out."""
    children: dict[int, list[int]] = {}
    for pid in _pids():
        children.setdefault(_parent(pid), []).append(pid)
    below = list(children.get(root, []))
    found = []
    while below:
        pid = below.pop()
        below += children.get(pid, [])
        if process := describe_process(pid, _mark(pid)):
            found.append(process)
    return found


def limit_mark(run: str) -> tuple[int, int] | None:
    """RLIMIT_MSGQUEUE, soft and hard, of what a run starts: a mark that also survives a cleared
    environment; None where this process may not have it."""
    _, hard = resource.getrlimit(resource.RLIMIT_MSGQUEUE)
    if hard == resource.RLIM_INFINITY or hard >= LIMITS.stop:
        return (LIMITS[zlib.crc32(run.encode()) % len(LIMITS)], hard)
    return None


def find_by_limit(run: str) -> list[MarkedProcess]:
    """The living processes on this host that carry no mark but the run's limit; as `find_marked`,
    only those whose environment may be read: anybody can take the limit."""
    if (limit := limit_mark(run)) is None:
        return []
    line = b"Max msgqueue size         %d " % limit[0]  # proc(5): /proc/PID/limits
    found = [
        pid
        for pid in _pids()
        if line in _read(f"/proc/{pid}/limits")
        and os.access(f"/proc/{pid}/environ", os.R_OK)
        and not _mark(pid)
    ]
    return [process for pid in found if (process := describe_process(pid, ""))]


def send_signal(process: MarkedProcess, number: int) -> bool:
    """Send a signal to that very process, never to a later one of its pid. Returns whether it
    was still there."""
    try:
        handle = open_process(process.pid)
    except OSError as error:
        return error.errno in NO_HANDLES and _signal_by_pid(process, number)
    try:
        if start_time(process.pid) != process.start_time:
            return False
        signal_process(handle, number)
        return True
    except OSError:
        return False
    finally:
        os.close(handle)


def _signal_by_pid(process: MarkedProcess, number: int) -> bool:
    """`send_signal` where no open file can mean a process: only the moment between the look and
    the signal is left in which the pid could become another's."""
    if start_time(process.pid) != process.start_time:
        return False
    try:
        os.kill(process.pid, number)
    except OSError:
        return False
    return True


def kill_processes(processes: Iterable[MarkedProcess]) -> None:
    """SIGKILL to all, stopped first: while one of them dies another cannot fork a successor."""
    listed = list(processes)
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for process in listed:
            send_signal(process, number)


def own_children() -> list[int]:
    """The pids of this process's children (proc(5))."""
    return [
        int(pid)
        for thread in os.listdir("/proc/self/task")
        for pid in _read(f"/proc/self/task/{thread}/children").split()
    ]


def kill_children(spared: int | None = None) -> None:
    """SIGKILL to this process's own children but one, some times in a row. Of a subreaper, what
    forks and ends as fast as it can is a child at any moment; a look at all of /proc is too slow
    for it."""
    for _ in range(ROUNDS):
        there = [pid for pid in own_children() if pid != spared]
        if not there:
            return
        for pid in there:
            with contextlib.suppress(ProcessLookupError):
                # not reaped meanwhile, for that is ours to do: the pid is nobody else's
                os.kill(pid, signal.SIGKILL)


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _read(path: str) -> bytes:
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return file.read()
    return b""


def _mark(pid: int) -> str:
    _, found, rest = (b"\0" + _read(f"/proc/{pid}/environ")).partition(
        f"\0{MARK_VARIABLE}=".encode()
    )
    return os.fsdecode(rest.partition(b"\0")[0]) if found else ""


def _parent(pid: int) -> int:
    fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    return int(fields[1]) if fields else 0


def describe_process(pid: int, mark: str | None = None) -> MarkedProcess | None:
    """A living process by its pid, None for a zombie or nobody. `mark`: where it is known
    already."""
    began = start_time(pid)
    if began:
        return MarkedProcess(
            pid,
            began,
            _mark(pid) if mark is None else mark,
            os.fsdecode(_read(f"/proc/{pid}/cmdline").partition(b"\0")[0]),
        )
    return None
