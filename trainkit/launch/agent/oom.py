"""Whether the kernel killed a process because memory ran out."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Collection
from pathlib import Path

from trainkit.launch.agent.process import ChildProcess
from trainkit.launch.agent.rank_parent import RankParent


class OomDetector:
    """Evidence that memory ran out: the memory cgroup's own count of kills, or the kernel's line
    about the pid. Best effort."""

    def __init__(self) -> None:
        self._seen = _oom_kills()

    def killed(self, child: ChildProcess | RankParent, others: Collection[ChildProcess]) -> bool:
        """Whether `child`, ended by a SIGKILL that we did not send, was killed for that.

        Args:
            child: it has ended.
            others: whose ends are not reported yet: a kill that the kernel's log gives to one of
                them is not this one's.
        """
        if child.code != -signal.SIGKILL or child.stopped:
            return False
        named = _killed_pids(child.began)
        theirs = sum(other.pid in named for other in others if other is not child)
        counted = _oom_kills() - self._seen > theirs
        if counted:
            self._seen += 1  # one count a process
        return counted or child.pid in named


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
