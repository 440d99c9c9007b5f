"""Ending everything that was started on a host, until nothing is left; and how that is known."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection, Iterator, Sequence

from trainkit.base import process_marks
from trainkit.base.cgroup import Cgroup
from trainkit.base.process_marks import MarkedProcess
from trainkit.launch.agent.process import ChildProcess

KILL_SECONDS = 5.0  # how long what got KILL may take to vanish
CLEAN_LOOKS = 2  # one look may miss a child in the middle of its exec


class HostProcesses:
    """All processes of a session on this host.

    Args:
        mark: that they carry, without their keys.
        group: the cgroup that everything is started in; None: this machine has none.
    """

    def __init__(self, mark: str, group: Cgroup | None) -> None:
        self.mark = mark
        self.group = group
        self.children: dict[str, ChildProcess] = {}
        self.any_started = False

    def by_keys(self, keys: Collection[str] | None) -> list[ChildProcess]:
        """The children with these keys; None: all."""
        return [child for child in self.children.values() if keys is None or child.key in keys]

    def terminate(self, keys: Collection[str] | None, grace: float) -> Iterator[None]:
        """TERM, KILL after the grace, until nothing is left or what is left does not die. To be
        resumed now and then.

        Args:
            keys: of the children to end; None: everything, whatever it was started by.
            grace: seconds from TERM to KILL.
        """
        if not self.any_started:
            return
        children = self.by_keys(keys)
        deadline = time.monotonic() + grace
        self._send_term(children, everything=keys is None)
        while time.monotonic() < deadline and (
            any(child.running for child in children) or (keys is None and self.strays())
        ):
            yield
        until = time.monotonic() + KILL_SECONDS
        clean = 0
        while clean < CLEAN_LOOKS and time.monotonic() < until:
            clean = clean + 1 if self._kill(children, everything=keys is None) else 0
            yield

    def _send_term(self, children: Sequence[ChildProcess], *, everything: bool) -> None:
        for child in children:
            child.stop()
        if everything:
            for process in self.strays():
                for number in (signal.SIGTERM, signal.SIGCONT):
                    process_marks.send_signal(process, number)

    def _kill(self, children: Sequence[ChildProcess], *, everything: bool) -> bool:
        """KILL what there is; whether there was nothing."""
        if everything:
            left = self.strays()
        else:
            left = [p for child in children for p in process_marks.find_marked(child.mark)]
        for child in children:
            child.kill()
        if everything:
            if self.group:
                with contextlib.suppress(OSError):
                    self.group.kill()
            process_marks.kill_children()
        process_marks.kill_processes(left)
        if left or any(child.running for child in children):
            return False
        return not everything or self.proved_empty()

    def strays(self) -> list[MarkedProcess]:
        """Everything of the session on this host: by its mark, by descent, by its cgroup."""
        pids = self.group.pids() if self.group else ()
        in_group = [process for pid in pids if (process := process_marks.describe_process(pid))]
        found = (
            *process_marks.find_marked(self.mark),
            *process_marks.find_descendants(os.getpid()),
            *in_group,
        )
        return list({process.pid: process for process in found}.values())

    @property
    def proof(self) -> str:
        """How this host can prove that nothing is left: "cgroup", which a later agent finds too,
        or "children": this process has none."""
        if self.group:
            return "cgroup"
        return "children"

    def proved_empty(self) -> bool:
        """Whether the kernel says that nothing is left: no child, and so no descendant, for
        orphans become our children; and nothing in the cgroup."""
        self.reap_orphans()
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return self.group is None or self.group.empty()
        return False

    def reap_orphans(self) -> None:
        """Take the exit codes of descendants that became our children. One of ours at the head
        of the line waits for its turn."""
        own = {child.pid for child in self.children.values() if child.running}
        with contextlib.suppress(ChildProcessError):
            while (
                ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            ) and ended.si_pid not in own:
                os.waitpid(ended.si_pid, 0)
