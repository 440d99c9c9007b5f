"""Processes: who one is beyond its pid, and how to start and stop ours without leaving any
behind."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from trainkit.base.lazy_dataclasses import dataclass
from trainkit.base.records import Record

CORES = "cores/"
# asks a rank of our own trainer which collectives it waits in; who does not know it passes it over
WAITS_SIGNAL = signal.SIGURG
NODE_VALUE = re.compile(rf"\$\{{node:([A-Za-z_][A-Za-z0-9_]*|{CORES}[0-9]+)\}}")


@dataclass(frozen=True)
class ProcessIdentity(Record):
    """A process that cannot be confused with a later one of the same pid: start time in clock
    ticks, and the boot."""

    host: str
    pid: int
    start_time: int
    boot_id: str


def start_time(pid: int) -> int:
    """When a process began, in clock ticks since boot: field 22 of /proc/PID/stat (proc(5)); 0
    where it is gone or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    fields = text.rpartition(")")[2].split()
    return 0 if fields[0] == "Z" else int(fields[19])


def waits_path(heartbeat: Path) -> Path:
    """Where a rank answers that, beside its heartbeat."""
    return heartbeat.with_suffix(".waits")


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


def identity(pid: int | None = None) -> ProcessIdentity:
    """The identity of `pid` (default: this process)."""
    number = os.getpid() if pid is None else pid
    return ProcessIdentity(os.uname().nodename, number, start_time(number), _boot_id())


def is_alive(who: ProcessIdentity) -> bool | None:
    """Whether that very process lives. None: it is another host's, and cannot be asked from
    here."""
    if who.host != os.uname().nodename:
        return None
    return (
        who.boot_id == _boot_id() and who.start_time != 0 and start_time(who.pid) == who.start_time
    )


def _prctl(option: int, argument: int) -> None:
    """prctl(2) of this process; nothing on systems other than Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, argument, 0, 0, 0)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends (Linux,
    PR_SET_CHILD_SUBREAPER): setsid and double forks do not get away from us."""
    PR_SET_CHILD_SUBREAPER = 36
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel send SIGKILL to this process when the thread that started it ends (Linux,
    prctl(2)).

    Call it first thing in a child. If the parent died before the call, exits at once.
    """
    PR_SET_PDEATHSIG = 1
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(128 + signal.SIGKILL)


def die_with_parent_hook(parent_pid: int) -> Callable[[], None]:
    """`die_with_parent` for a child between fork and exec, of any program: the library call is
    looked up before the fork."""
    prctl: Callable[..., int] = (
        ctypes.CDLL(None, use_errno=True).prctl if sys.platform == "linux" else lambda *_: 0
    )
    PR_SET_PDEATHSIG = 1

    def prepare() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent_pid:
            os._exit(128 + signal.SIGKILL)

    return prepare


def set_process_title(title: str) -> None:
    """Show `title` as this process's command line in ps, as far as the old one leaves room, and
    its first word as its name.

    Writes over the memory that holds argv (proc(5): arg_start, arg_end); Python has its own
    copy. Best effort.
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(title.partition(" ")[0])
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start_child = int(fields[45])
        room = int(fields[46]) - int(fields[45])
        with open("/proc/self/mem", "r+b", buffering=0) as memory:
            memory.seek(start_child)
            memory.write(title.encode()[: room - 1].ljust(room, b"\0"))


def show_as(argv: Sequence[str], variable: str, value: str) -> None:
    """Have /proc/self show another command line, as far as the old one leaves room, and another
    value of a variable of the environment that this process began with (proc(5): arg_start to
    env_end). What the program itself reads of its environment stays.

    Raises:
        OSError: the memory cannot be written.
        ValueError: the variable is not there, or its value too short for another.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    arguments, arguments_end, begin, end = (int(field) for field in fields[45:49])
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        memory.seek(begin)
        shown = b"\0" + memory.read(end - begin)
        name = b"\0" + os.fsencode(variable) + b"="
        at = shown.index(name) + len(name)
        room = shown.index(b"\0", at) - at
        if len(os.fsencode(value)) > room:
            raise ValueError(f"{variable} has room for {room} bytes, not for {value!r}")
        memory.seek(begin + at - 1)
        memory.write(os.fsencode(value).ljust(room, b"\0"))
        room = arguments_end - arguments
        memory.seek(arguments)
        memory.write(b"\0".join(map(os.fsencode, argv))[: room - 1].ljust(room, b"\0"))


def raise_open_file_limit() -> None:
    """As many open files as this process may have at all: a blend of a thousand datasets holds
    some thousand."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """For imports: their objects live as long as the process, and looking for garbage among
    them takes two fifths of the time that importing torch takes. They are left out of later
    collections too."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def start_child(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: Path,
    stdout: int | IO[Any],
    stderr: int | IO[Any],
) -> subprocess.Popen[bytes]:
    """Start a child in a session of its own: the terminal's Ctrl-C reaches us alone, and
    `stop_children` reaches all it started."""
    return subprocess.Popen(
        list(argv),
        env=dict(env),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
    )


def _signal_group(child: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, number)


def is_running(child: subprocess.Popen[bytes]) -> bool:
    """Whether the child still runs. Does not reap it: its pid, and so its group's number, stay
    ours until `reap_child`."""
    if child.returncode is not None:
        return False
    return os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def reap_child(child: subprocess.Popen[bytes]) -> int:
    """Collect an ended child after killing what it left behind in its group; returns its exit
    code (negative: a signal)."""
    if child.returncode is None:
        _signal_group(child, signal.SIGKILL)
    return child.wait()


def stop_children(children: Sequence[subprocess.Popen[bytes]], grace: float = 3.0) -> list[int]:
    """TERM to all children's groups, KILL after `grace` seconds; returns the pids that outlived
    even that (none, as a rule)."""
    for child in children:
        if is_running(child):
            _signal_group(child, signal.SIGTERM)
    deadline = time.monotonic() + grace
    while time.monotonic() < deadline and any(is_running(child) for child in children):
        time.sleep(0.02)
    survivors = []
    for child in children:
        if child.returncode is not None:
            continue
        _signal_group(child, signal.SIGKILL)
        try:
            child.wait(timeout=2.0)
        except subprocess.TimeoutExpired:
            survivors.append(child.pid)
    return survivors


class FlatHeap:
    """Keeps the memory of this process flat from step to step: malloc keeps what a step frees, and
    holes that later tensors do not fit into add up. Where they do, the heap's free pages go back
    to the system (malloc_trim(3)); the next step asks for those that it needs. What is not glibc's
    malloc is left as it is."""

    GROWTH = 0.05  # of resident memory, before the heap is trimmed

    def __init__(self) -> None:
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._least = 0  # pages resident after the step that followed a trim
        self._trimmed = True

    def before_step(self) -> None:
        """Look at resident memory (proc(5)), and trim the heap if it has grown."""
        resident = int(Path("/proc/self/statm").read_text().split()[1])
        if self._trimmed:
            self._least = max(self._least, resident)
            self._trimmed = False
        elif self._trim and resident > (1 + self.GROWTH) * self._least:
            self._trim(0)
            self._trimmed = True


def on_this_node(environment: Mapping[str, str]) -> dict[str, str]:
    """Values with ${node:VAR} replaced from this machine's environment, and ${node:cores/N} by the
    cores that each of N of its processes may have for itself.

    Raises:
        KeyError: of the names, in order, that are not in it.
    """
    names = {name for value in environment.values() for name in NODE_VALUE.findall(value)}
    found = {name: _of_this_node(name) for name in names}
    if missing := sorted(name for name, value in found.items() if value is None):
        raise KeyError(*missing)
    return {
        name: NODE_VALUE.sub(lambda match: str(found[match[1]]), value)
        for name, value in environment.items()
    }


def _of_this_node(name: str) -> str | None:
    if name.startswith(CORES):
        return str(max(1, len(os.sched_getaffinity(0)) // int(name[len(CORES) :])))
    return os.environ.get(name)


def cpu_sharing(ranks: int, environment: Mapping[str, str]) -> dict[str, str]:
    """What CPU ranks must have before they load torch, to share their machine's cores with each
    other and with everybody else; for `on_this_node`, for other machines have other cores.

    Threads of OpenMP that wait for the next operation sleep (OMP_WAIT_POLICY, OpenMP 5.2, 21.7).
    By default they spin, also while the rank waits for a peer, and take the cores from what
    could make them go on: on a busy machine a step of 0.2 s took 45 s.

    Args:
        ranks: how many share the cores.
        environment: the caller's. Its own OMP_WAIT_POLICY stays.
    """
    return {
        "OMP_NUM_THREADS": f"${{node:{CORES}{ranks}}}",
        "OMP_WAIT_POLICY": environment.get("OMP_WAIT_POLICY", "PASSIVE"),
    }
