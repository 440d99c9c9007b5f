"""Where processes that do not move stand: stacks by faulthandler and py-spy, states by the
kernel."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from trainkit.launch.agent.process import ChildProcess
from trainkit.launch.protocol.frames import StackReport

ANSWER_SECONDS = 3.0  # how long a process has for its own stacks
QUIET_SECONDS = 0.3  # no more output for so long: the dump is complete
PY_SPY_SECONDS = 10.0
DUMP_SIGN = b"most recent call first"  # in what faulthandler writes


def collect_stacks(
    children: Sequence[ChildProcess], *, py_spy: bool
) -> Iterator[StackReport | None]:
    """Asks every process for its stacks; yields None while it waits, at the end the dump.

    A process that does not catch USR2 is not sent it: the signal would end it.
    """
    states = {child.key: state(child.pid) for child in children}
    for child in children:
        child.output.captured = bytearray()
        if catches(child.pid, signal.SIGUSR2):
            child.signal(signal.SIGUSR2)
    spies = _start_py_spy(children) if py_spy else {}
    yield from _until_answered([child for child in children if catches(child.pid, signal.SIGUSR2)])
    stacks = {child.key: _captured(child) for child in children}
    deadline = time.monotonic() + PY_SPY_SECONDS
    for child in children:
        if child.key in spies:
            spy, report = spies[child.key]
            while spy.poll() is None and time.monotonic() < deadline:
                yield None
            stacks[child.key] += _report(child, spy, report)
    silent = tuple(child.key for child in children if not stacks[child.key])
    yield StackReport(stacks, silent, states)


def _captured(child: ChildProcess) -> str:
    """What faulthandler has written to the child's stderr; "" where it has not. Nothing more is
    captured."""
    text = bytes(child.output.captured or b"").decode("utf-8", "replace")
    child.output.captured = None
    if DUMP_SIGN.decode() in text:
        return text
    return ""


def _until_answered(asked: Sequence[ChildProcess]) -> Iterator[None]:
    deadline = time.monotonic() + ANSWER_SECONDS
    sizes = {child.key: 0 for child in asked}
    since = {child.key: 0.0 for child in asked}
    while (now := time.monotonic()) < deadline:
        for child in asked:
            captured = child.output.captured or b""
            if len(captured) != sizes[child.key] or not captured:
                sizes[child.key] = len(captured)
                since[child.key] = now
        if all(
            DUMP_SIGN in (child.output.captured or b"") and now - since[child.key] > QUIET_SECONDS
            for child in asked
        ):
            return
        yield None


def _start_py_spy(
    children: Sequence[ChildProcess],
) -> dict[str, tuple[subprocess.Popen[bytes], IO[bytes]]]:
    started: dict[str, tuple[subprocess.Popen[bytes], IO[bytes]]] = {}
    for child in children:
        report = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            argv = ["py-spy", "dump", "--nonblocking", "--pid", str(child.pid)]
            started[child.key] = (
                subprocess.Popen(
                    argv, stdin=subprocess.DEVNULL, stdout=report, stderr=subprocess.DEVNULL
                ),
                report,
            )
        except OSError:  # not installed here
            report.close()
    return started


def _report(child: ChildProcess, spy: subprocess.Popen[bytes], report: IO[bytes]) -> str:
    if spy.poll() is None:
        spy.kill()
        spy.wait()
    with report:
        report.seek(0)
        text = child.redactor.bytes(report.read(2**18)).decode("utf-8", "replace")
    if text.strip():
        return f"\npy-spy:\n{text}"
    return ""


def state(pid: int) -> str:
    """The process's state as ps shows it (R, S, D, T, Z), with what it waits for in the kernel
    where that can be read; "" where it is gone."""
    with contextlib.suppress(OSError, IndexError):
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        waits = ""
        if letter == "D":
            with contextlib.suppress(OSError):
                waits = Path(f"/proc/{pid}/wchan").read_text().strip("0\n")
        return f"{letter} {waits}".strip()
    return ""


def catches(pid: int, number: int) -> bool:
    """Whether the process has a handler for the signal (proc(5): SigCgt)."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False
