"""Where processes that do not move stand: stacks by faulthandler and py-spy, states by the
kernel, and from ranks of our own trainer which collectives they wait in."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from trainkit.base.process import WAITS_SIGNAL, waits_path
from trainkit.launch.agent.process import ChildProcess
from trainkit.launch.protocol.frames import StackReport

ANSWER_SECONDS = 3.0  # how long a process has for its own stacks
QUIET_SECONDS = 0.3  # no more output for so long: the dump is complete
PY_SPY_SECONDS = 10.0
DUMP_SIGN = b"most recent call first"  # in what faulthandler writes
WAITS_BYTES = 2**16
BUSY = 0.2  # of the time: more than a thread that waits
STUCK = ("D", "t")  # states that something else ends: a disk or a driver, a debugger


def collect_stacks(
    children: Sequence[ChildProcess], *, py_spy: bool
) -> Iterator[StackReport | None]:
    """Asks every process for its stacks; yields None while it waits, at the end the dump.

    A process that does not catch USR2 is not sent it: the signal would end it. Nor is one asked
    for its collectives that does not wait for that signal.
    """
    began = {child.key: (time.monotonic(), runnable_seconds(child.pid)) for child in children}
    asked = _ask(children)
    spies = _start_py_spy(children) if py_spy else {}
    yield from _until_answered(
        [child for child in children if catches(child.pid, signal.SIGUSR2)], list(asked.values())
    )
    states = {
        child.key: state(child.pid) + _busy(child.pid, *began[child.key]) for child in children
    }
    waits = {key: _read_waits(path) for key, path in asked.items()}
    stacks = {child.key: _captured(child) for child in children}
    deadline = time.monotonic() + PY_SPY_SECONDS
    for child in children:
        if child.key in spies:
            spy, report = spies[child.key]
            while spy.poll() is None and time.monotonic() < deadline:
                yield None
            stacks[child.key] += _report(child, spy, report)
    silent = tuple(child.key for child in children if not stacks[child.key])
    yield StackReport(stacks, silent, states, waits)


def _ask(children: Sequence[ChildProcess]) -> dict[str, Path]:
    """Send the signals; where the answers of those come that can say what they wait in."""
    asked = {}
    for child in children:
        child.output.captured = bytearray()
        if child.heartbeat and has_signal(child.pid, "SigBlk", WAITS_SIGNAL):
            asked[child.key] = waits_path(child.heartbeat)
            asked[child.key].unlink(missing_ok=True)
            child.signal(WAITS_SIGNAL)
        if catches(child.pid, signal.SIGUSR2):
            child.signal(signal.SIGUSR2)
    return asked


def _read_waits(path: Path) -> str:
    """What a rank has answered; "" where it has not."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return file.read(WAITS_BYTES).decode("utf-8", "replace")
    return ""


def _busy(pid: int, since: float, before: float) -> str:
    """The share of the time since then in which the process's main thread ran, or wanted a core, if
    it is much."""
    share = (runnable_seconds(pid) - before) / max(1e-9, time.monotonic() - since)
    return f", ran or wanted to {share:.0%} of the time" if share > BUSY else ""


def _captured(child: ChildProcess) -> str:
    """What faulthandler has written to the child's stderr; "" where it has not. Nothing more is
    captured."""
    text = bytes(child.output.captured or b"").decode("utf-8", "replace")
    child.output.captured = None
    return text if DUMP_SIGN.decode() in text else ""


def _until_answered(asked: Sequence[ChildProcess], answers: Sequence[Path]) -> Iterator[None]:
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
        ) and all(path.exists() for path in answers):
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
    return f"\npy-spy:\n{text}" if text.strip() else ""


def state(pid: int) -> str:
    """The process's state as ps shows it (R, S, D, T, Z), with what it waits for in the kernel
    where that can be read; "" where it is gone. Where another of its threads waits for a disk or a
    driver, or is traced, its state follows: "S, a thread D"."""
    own = _thread_state(Path(f"/proc/{pid}"))
    if own[:1] in STUCK:
        return own
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            if (found := _thread_state(thread))[:1] in STUCK:
                return f"{own}, a thread {found}"
    return own


def _thread_state(folder: Path) -> str:
    with contextlib.suppress(OSError, IndexError):
        letter = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        waits = ""
        if letter == "D":
            with contextlib.suppress(OSError):
                waits = (folder / "wchan").read_text().strip("0\n")
        return f"{letter} {waits}".strip()
    return ""


def runnable_seconds(pid: int) -> float:
    """Seconds in which the process's main thread ran or waited for a core, which on a busy machine
    is most of it; 0.0 where it is gone, or the kernel does not count them (proc(5): schedstat)."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        ran, waited = Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[:2]
        return (int(ran) + int(waited)) / 1e9
    return 0.0


def catches(pid: int, number: int) -> bool:
    """Whether the process has a handler for the signal."""
    return has_signal(pid, "SigCgt", number)


def has_signal(pid: int, mask: str, number: int) -> bool:
    """Whether the signal is in one of the process's masks (proc(5): SigCgt, SigBlk)."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(f"{mask}:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False
