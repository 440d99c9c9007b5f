"""How the agent begins a program: what it has from its first instruction on."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Callable, Mapping, Sequence

from trainkit.base import process_marks
from trainkit.base.cgroup import Cgroup
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.base.process import die_with_parent_hook, on_this_node


class CannotStart(Exception):
    """The program could not be started; the message says why."""


@dataclass(frozen=True)
class Beginning:
    """A program that is about to begin.

    Args:
        argv: the command line.
        environment: all of it.
        cwd: its working folder; None: the agent's.
        mark: its TRAINKIT_RUN, which is in the environment too.
        group: its cgroup; None: this machine has none.
    """

    argv: Sequence[str]
    environment: Mapping[str, str]
    cwd: str | None
    mark: str
    group: Cgroup | None

    def entrance(self) -> int:
        """An open file by which one enters the group, ours to close; -1: there is none. Raises
        OSError."""
        return self.group.entrance() if self.group else -1

    def limit(self) -> tuple[int, int] | None:
        """The limit by which it is known as the run's."""
        return process_marks.limit_mark(self.mark.partition("/")[0])


def exec_program(
    start: Beginning, *, stdin: int, stdout: int, stderr: int
) -> subprocess.Popen[bytes]:
    """Start a program in a session of its own, in its cgroup from its first instruction on; it
    dies with us. Raises as Popen does."""
    entrance = start.entrance()
    try:
        return subprocess.Popen(
            list(start.argv),
            env=dict(start.environment),
            cwd=start.cwd,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
            # two calls of the system; other threads only read and write files and load libraries
            preexec_fn=_contained(  # noqa: PLW1509
                entrance, start.limit(), die_with_parent_hook(os.getpid())
            ),
        )
    finally:
        if entrance >= 0:
            os.close(entrance)


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


def expanded(environment: Mapping[str, str]) -> dict[str, str]:
    """Values with ${node:VAR} replaced from this node's environment. Raises CannotStart naming
    every one that is not there."""
    try:
        return on_this_node(environment)
    except KeyError as missing:
        raise CannotStart(
            f"${{node:VAR}} asks for what is not in the environment of {os.uname().nodename}:"
            f" {', '.join(missing.args)}"
        ) from None


def start_error(error: Exception, argv: Sequence[str]) -> str:
    """Why a program could not be started, with the file that is to blame."""
    file = getattr(error, "filename", None) or next(iter(argv), "")
    return f"{getattr(error, 'strerror', None) or error}: {file}"
