"""Child processes that carry agents: started so that they die with us, watched without waiting,
ended by pid."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainkit.base.process import die_with_parent_hook
from trainkit.launch.launchers.contract import TransportExit

TAIL_BYTES = 4096
END_SECONDS = 1.0  # for a killed transport to be gone

# what docker says last, after the error
USAGE = re.compile(r"(See|Run) '(docker|podman) [^']*--help'")


def start_transport(
    argv: Sequence[str],
    output: Path,
    *,
    environment: Mapping[str, str] | None = None,
    keep_stdin: bool,
) -> subprocess.Popen[bytes]:
    """Start a child in a session of its own whose output goes to a file and who dies with the
    thread that calls this.

    Args:
        keep_stdin: its stdin is a pipe that stays open while we live; else /dev/null.
    """
    with open(output, "ab") as file:
        return subprocess.Popen(
            list(argv),
            stdin=subprocess.PIPE if keep_stdin else subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=None if environment is None else dict(environment),
            start_new_session=True,
            # two calls of the system, nothing that could hold a lock
            preexec_fn=die_with_parent_hook(os.getpid()),  # noqa: PLW1509
        )


def last_line(path: Path) -> str:
    """The last line of a file that says something; "" where there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            lines = [line.strip() for line in file.read().decode(errors="replace").splitlines()]
    except OSError:
        return ""
    return next((line for line in reversed(lines) if line and not USAGE.match(line)), "")


def read_new_lines(path: Path, at: int) -> bytes:
    """What a file has from byte `at` on, up to the end of its last whole line."""
    with open(path, "rb") as file:
        file.seek(at)
        data = file.read()
    return data[: data.rfind(b"\n") + 1]


# by node, each with the file its output goes to
Children = dict[int, tuple[subprocess.Popen[bytes], Path]]


@contextlib.contextmanager
def kill_on_error() -> Iterator[Children]:
    """Where children are put as they are started: if one cannot be, those before it are ended."""
    children: Children = {}
    try:
        yield children
    except BaseException:
        kill_transports([child for child, _ in children.values()])
        raise


class TransportPerHost:
    """A child a host."""

    def __init__(self, children: Children) -> None:
        self.children = children
        self.ended: dict[int, TransportExit] = {}

    def poll(self) -> Mapping[int, TransportExit]:
        for node, (child, output) in self.children.items():
            if node not in self.ended and child.poll() is not None:
                self.ended[node] = TransportExit(child.returncode, last_line(output))
        return self.ended

    def close(self) -> None:
        kill_transports([child for child, _ in self.children.values()])


@dataclass(eq=False)
class SharedTransport:
    """One child for several hosts.

    Args:
        child: the process.
        output: the file that its own words go to.
        logs: where each node's go.
        nodes: numbers by the names that it calls hosts.
    """

    child: subprocess.Popen[bytes]
    output: Path
    logs: Mapping[int, Path]
    nodes: Mapping[str, int]
    _read: int = field(default=0, init=False)

    def new_lines(self) -> bytes:
        """Whole lines that it has said since the last call."""
        lines = read_new_lines(self.output, self._read)
        self._read += len(lines)
        return lines

    def node_of(self, name: bytes) -> int | None:
        """The number of the host that it calls so; None: it is none of ours."""
        return self.nodes.get(name.decode(errors="replace"))


def kill_transports(children: Sequence[subprocess.Popen[bytes]]) -> None:
    """KILL what still runs and collect it, within END_SECONDS; agents find the end of their
    transport by themselves."""
    for child in children:
        if child.poll() is None:
            child.kill()
    deadline = time.monotonic() + END_SECONDS
    while time.monotonic() < deadline and any(child.poll() is None for child in children):
        time.sleep(0.01)
    for child in children:
        if child.stdin is not None:
            child.stdin.close()
