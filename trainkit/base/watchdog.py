"""Two processes that answer for each other: the worker, which starts programs, and its keeper,
which outlives it and ends what it left.

The keeper is the parent. When the worker dies, by SIGKILL too, or does not move for as long as
its lease, its descendants become the keeper's (PR_SET_CHILD_SUBREAPER); it kills them, all in
the worker's cgroup and everything with its mark, until the kernel says that nothing is left:
ECHILD from wait(2), which means no descendant, and an empty cgroup. Only then it lets go of the
slots. When the keeper dies, the worker sees its link end and stops by itself. SIGKILL of both at
one moment leaves what the worker's own children had started (these die by PR_SET_PDEATHSIG);
a later look for the run finds that by its cgroup (`cgroup`) or, where there is none, by
its mark (`marks`).
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

from trainkit.base import process_marks
from trainkit.base.cgroup import Cgroup
from trainkit.base.errors import Exit
from trainkit.base.old_python import exit_code_of, receive_handles, send_handles
from trainkit.base.process import adopt_orphans, set_process_title

MANY = 250  # file descriptors in one message (the kernel's limit is 253)
WAIT = 0.02  # seconds between two looks at what still lives
PATIENCE = 2.0  # seconds until the keeper says what does not die
START_LEASE = 90.0  # seconds that a worker may take until it says how often it will move


class WatchdogLink:
    """The worker's end of the line to its keeper."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line

    def fileno(self) -> int:
        """Readable once the keeper is gone: it never says anything."""
        return self._line.fileno()

    def guard(
        self, mark: str, *, lease: float, folders: Iterable[Path] = (), group: Cgroup | None = None
    ) -> None:
        """From now on everything below `mark` dies with us. To be said before the first of it is
        started.

        Args:
            lease: seconds without `beat` after which we count as dead.
            folders: removed at the end.
            group: that what is started is put in; removed at the end.
        """
        words = {
            "marks": [mark],
            "lease": lease,
            "folders": [str(folder) for folder in folders],
            "group": str(group.path) if group else None,
        }
        self._line.send(json.dumps(words).encode())

    def hold(self, handles: Iterable[int], *, lease: float) -> None:
        """Keep these files open until nothing is left of us. `lease` as above."""
        words = json.dumps({"marks": [], "lease": lease, "folders": []})
        send_handles(self._line, words.encode(), list(handles)[:MANY])

    def let_go(self) -> None:
        """Close what `hold` handed over."""
        self._line.send(b"let go")

    def beat(self) -> None:
        """Say that we move."""
        # a keeper that does not read is stopped itself, or gone: the latter is seen by `fileno`
        with contextlib.suppress(OSError):
            self._line.send(b"beat", socket.MSG_DONTWAIT)


def run_under_watchdog(work: Callable[[WatchdogLink], int], title: str) -> int:
    """Run `work` in a child process in a session of its own and keep it; returns its exit code
    (128 + number for a signal), nothing left behind.

    TERM, INT and HUP to the keeper reach the worker as TERM. To be called before there are threads.
    """
    own, workers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    adopt_orphans()
    pid = os.fork()
    if pid == 0:
        own.close()
        _work(work, workers)
    workers.close()
    keeper = _Keeper(pid, own)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, keeper.pass_on)
    set_process_title(title)
    return keeper.keep()


def _work(work: Callable[[WatchdogLink], int], line: socket.socket) -> None:
    code = int(Exit.BUG)
    try:
        os.setsid()
        adopt_orphans()
        code = work(WatchdogLink(line))
    except BaseException:
        with contextlib.suppress(OSError):
            traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)  # threads that hang in a file system do not hold us


class _Keeper:
    def __init__(self, worker: int, line: socket.socket) -> None:
        self.worker = worker
        self.line = line
        self.lease = START_LEASE
        self.group: Cgroup | None = None
        self.marks: set[str] = set()
        self.folders: set[str] = set()
        self.held: list[int] = []
        self.code: int | None = None

    def pass_on(self, number: int, frame: object) -> None:
        if self.code is None:  # not reaped: the pid is the worker's
            os.kill(self.worker, signal.SIGTERM)

    def keep(self) -> int:
        while self._listen():
            pass
        self._end_all()
        for folder in self.folders:
            shutil.rmtree(folder, ignore_errors=True)
        for handle in self.held:
            with contextlib.suppress(OSError):
                os.ftruncate(handle, 0)
            os.close(handle)
        assert self.code is not None
        return self.code if self.code >= 0 else 128 - self.code

    def _listen(self) -> bool:
        """One message of the worker; False once it is dead, or as good as."""
        if not select.select([self.line], [], [], self.lease)[0]:
            _say(f"the agent has not moved for {self.lease:g} s; it and all it started are killed")
            return False
        data, handles = receive_handles(self.line, 65536, MANY)
        self.held += handles
        if data == b"let go":
            for handle in self.held:
                os.close(handle)
            self.held = []
        elif data not in (b"beat", b""):
            message = json.loads(data)
            self.marks |= set(message["marks"])
            self.folders |= set(message["folders"])
            self.lease = message["lease"]
            if message.get("group"):
                self.group = Cgroup(Path(message["group"]))
        return bool(data)

    def _end_all(self) -> None:
        """Kill until the kernel says that nothing is left, however long that takes: what does
        not die holds its slot."""
        began = time.monotonic()
        said = False
        with contextlib.suppress(ProcessLookupError):
            # it may be a hung one; of one that has ended already, the exit code stays
            os.kill(self.worker, signal.SIGKILL)
        while True:
            if self.group:
                with contextlib.suppress(OSError):
                    self.group.kill()
            process_marks.kill_children()
            childless = self._reap()
            found = {
                p.pid: p
                for p in (
                    *process_marks.find_descendants(os.getpid()),
                    *(m for mark in self.marks for m in process_marks.find_marked(mark)),
                )
            }
            left = list(found.values())
            process_marks.kill_processes(left)
            if childless and not left and (self.group is None or self.group.empty()):
                break
            waited = time.monotonic() - began
            if left and not said and waited > PATIENCE:
                said = True
                _say("these do not die: " + ", ".join(f"{p.pid} {p.argv0}" for p in left))
            time.sleep(WAIT if waited < PATIENCE else 1.0)
        if self.group:
            self.group.remove()

    def _reap(self) -> bool:
        """Take the exit codes of those that have ended; whether we have no child any more, and
        so no descendant: orphans become our children."""
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self.worker:
                    self.code = exit_code_of(ended[1])
        except ChildProcessError:
            return True
        return False


def _say(words: str) -> None:
    with contextlib.suppress(OSError):
        sys.stderr.write(f"trainkit keeper: {words}\n")
        sys.stderr.flush()
