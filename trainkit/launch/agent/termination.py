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
from trainkit.launch.agent.rank_parent import KEY, RankParent

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
        self.parent: RankParent | None = None  # the last one; it may have ended
        self.cold = "it has no rank parent"  # why ranks are not forked, where there is none
        self.any_started = False

    def by_keys(self, keys: Collection[str] | None) -> list[ChildProcess]:
        """The children with these keys; None: all."""
        return [child for child in self.children.values() if keys is None or child.key in keys]

    def terminate(
        self, keys: Collection[str] | None, grace: float, *, keep_parent: bool = False
    ) -> Iterator[None]:
        """TERM, KILL after the grace, until nothing is left or what is left does not die. To be
        resumed now and then.

        Args:
            keys: of the children to end; None: everything, whatever it was started by.
            grace: seconds from TERM to KILL.
            keep_parent: of everything, all but the rank parent.
        """
        if not self.any_started:
            return
        children = self.by_keys(keys)
        deadline = time.monotonic() + grace
        if keys is None and not keep_parent and self.parent:
            self.parent.kill()
        if grace:
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
        """KILL what there is, first what need not be looked for; whether there was nothing."""
        for child in children:
            child.kill()
        if everything:
            for group in self._groups():
                with contextlib.suppress(OSError):
                    group.kill()
            process_marks.kill_children(self._kept)
            left = self.strays()
        else:
            left = [p for child in children for p in process_marks.find_marked(child.mark)]
        process_marks.kill_processes(left)
        if left or any(child.running for child in children):
            return False
        return not everything or self.proved_empty()

    @property
    def _kept(self) -> int | None:
        """The pid of a rank parent that lives and that nobody has ended."""
        if self.parent and self.parent.code is None and not self.parent.stopped:
            return self.parent.pid
        return None

    def _groups(self) -> Sequence[Cgroup]:
        """The cgroups that hold everything but a rank parent."""
        if self.group is None:
            return ()
        if self._kept is None:
            return (self.group,)
        return [group for group in self.group.parts() if group.path.name != KEY]

    def strays(self) -> list[MarkedProcess]:
        """Everything of the session on this host, but a rank parent: by its mark, by descent, by
        its cgroup."""
        pids = [pid for group in self._groups() for pid in group.pids()]
        in_group = [process for pid in pids if (process := process_marks.describe_process(pid))]
        found = (
            *process_marks.find_marked(self.mark),
            *process_marks.find_descendants(os.getpid()),
            *in_group,
        )
        return list({p.pid: p for p in found if p.pid != self._kept}.values())

    @property
    def proof(self) -> str:
        """How this host can prove that nothing is left: "cgroup", which a later agent finds too,
        or "children": this process has none."""
        return "cgroup" if self.group else "children"

    def proved_empty(self) -> bool:
        """Whether the kernel says that nothing is left: no child, and so no descendant, for
        orphans become our children; and nothing in the cgroup. A rank parent that is kept is no
        child too many."""
        self.reap_orphans()
        if self._kept is None:
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                return False
        elif process_marks.own_children() != [self._kept]:
            return False
        return all(group.empty() for group in self._groups())

    def reap_orphans(self) -> None:
        """Take the exit codes of descendants that became our children. One of ours at the head
        of the line waits for its turn."""
        own = {child.pid for child in self.children.values() if child.running}
        if self.parent and self.parent.code is None:
            own.add(self.parent.pid)
        with contextlib.suppress(ChildProcessError):
            while (
                ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            ) and ended.si_pid not in own:
                os.waitpid(ended.si_pid, 0)
