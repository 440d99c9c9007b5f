"""Programs that are hard to end: they ignore signals, hide, and clear their environment."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.launch.fake_supervisor import (
    AGENT,
    Session,
    alive,
    ignoring,
    pid_in,
    process,
    setsid,
    wait_until,
)


def nameless(path: Path, *, limited: bool) -> str:
    """A program that leaves a grandchild in a session of its own with an empty environment,
    whose parent is gone; with the limit it inherited, or without."""
    limits = (
        ""
        if limited
        else (
            "import resource; resource.setrlimit(resource.RLIMIT_MSGQUEUE,"
            " (resource.getrlimit(resource.RLIMIT_MSGQUEUE)[1],) * 2); "
        )
    )
    middle = (
        f"{limits}import subprocess, sys; subprocess.Popen([sys.executable, '-I', '-c',"
        f" {setsid(path)!r}], env={{}})"
    )
    return (
        f"import subprocess, sys, time; subprocess.run([sys.executable, '-c', {middle!r}]);"
        " time.sleep(10_000)"
    )


class Hard:
    """A session's agent with programs that are hard to end."""

    def __init__(
        self,
        session: Session,
        folder: Path,
        *,
        stdin: int = subprocess.DEVNULL,
        around: Sequence[str] = (),
        limited: bool = False,
        agent: Path = AGENT,
    ) -> None:
        self.peer = session.begin(stdin=stdin, around=around, agent=agent)
        paths = [folder / name for name in ("ignores", "nameless", "stopped")]
        stopped = (
            f"import os, signal; open({str(paths[2])!r}, 'w').write(str(os.getpid()));"
            " os.kill(os.getpid(), signal.SIGSTOP)"
        )
        self.peer.go(
            process("0", ignoring(paths[0])),
            process("1", nameless(paths[1], limited=limited)),
            process("2", stopped),
        )
        ranks = [self.peer.hear("started", key)["pid"] for key in "012"]
        self.peer.until(lambda: all(path.exists() and path.read_text() for path in paths))
        self.pids = [*ranks, *(pid_in(path) for path in paths[:2])]
        assert all(alive(pid) for pid in self.pids)

    def gone(self) -> bool:
        return wait_until(lambda: not any(alive(pid) for pid in self.pids))


def cmdline(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""
