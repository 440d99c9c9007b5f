"""The fork server of tests/forkserver.py: it imports everything, then forks a program for
whoever asks, as exec would have begun it.

It never has threads, so forking it is safe. It ends when its controller closes the pipe.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import gc
import importlib.util
import io
import json
import os
import re
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# what ranks, tasks, supervisors, agents and stages import; nothing that reads the environment
PRELOADED = (
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.pipelining",
    "trainkit.train.trainer",
    "trainkit.train.main",
    "trainkit.cli.tasks",
    "trainkit.cli.run.train",
    "trainkit.cli.run.summary",
    "trainkit.launch.main",
    "trainkit.launch.agent.loop",
    "trainkit.launch.agent.commands",
    "trainkit.launch.agent.stack_dump",
    "trainkit.stages.prep_data",
    "trainkit.stages.build_container",
    "trainkit.stages.array_task",
    "trainkit.data.tokenize.shard_worker",
    "trainkit.data.tokenize.merge_worker",
    "trainkit.data.tokenize.check_worker",
    "trainkit.data.curate.duplicates_worker",
    "trainkit.data.curate.filter_worker",
    "spacy.lang.en",  # what curation counts words with: a second
    "torch.utils.tensorboard",  # what rank 0 imports for its metrics: 0.3 s
    "torch.profiler._cupti_monitor",  # these four when ranks first need them; of torch >= 2.12
    "torch.nn.attention.varlen",
    "numpy.ma",
    "trainkit.train.parallel.pipeline_stage",
    "invoke.main",
    "rich._emoji_codes",
    "encodings.idna",
    "encodings.utf_8_sig",
    "gigatoken",
    "awkward",  # what gigatoken imports at its first document
    "httpx2",
    "httpcore2",  # what httpx2 and it import at their first request
    "anyio.to_thread",
    "truststore",
    "h11",
    "psutil",
    "trainkit.cli.completion",
    "trainkit.cli.hosts.nodes",
    "trainkit.cli.inspect.report",
    "trainkit.cli.run.images",
    "trainkit.engines.gpt_neox.engine",
    "trainkit.engines.megatron_lm.engine",
    "trainkit.engines.rank.run",
    "trainkit.experiment.cancel",
    "trainkit.train.rehearsal.trace",
    "tests.conftest",  # run_ranks calls functions of modules that import pytest and hypothesis
    "tests.distributed",
)
ARGV_ROOM, ENVIRONMENT_ROOM = 4096, 65536  # bytes that /proc can show of them
PADDING = "TRAINKIT_TESTS_PADDING"
# options by which the script's folder and the working folder are not places of modules
ALONE = frozenset({"-I", "-P"})
OPTIONS = ALONE | {"-S", "-u"}


# --- What a program is


@dataclass(frozen=True)
class Program:
    """A Python program by its command line: a file or a module, its words, and where its modules
    are looked for first."""

    module: str | None
    file: str
    words: tuple[str, ...]
    first: str | None

    @classmethod
    def read(cls, argv: Sequence[str]) -> Program | None:
        """None for what only an interpreter of its own can run. See `executed`."""
        # called as `../x/bin/python`, sys.executable holds the dots
        if not argv or os.path.abspath(argv[0]) != os.path.abspath(sys.executable):
            return None
        rest = list(argv[1:])
        options = set()
        while rest and rest[0] in OPTIONS:
            options.add(rest.pop(0))
        alone = bool(options & ALONE)
        if len(rest) > 1 and rest[0] == "-m":
            return cls(rest[1], rest[1], tuple(rest[2:]), None if alone else "")
        if rest and rest[0].endswith(".py"):
            return cls(
                None,
                rest[0],
                tuple(rest[1:]),
                None if alone else os.path.dirname(os.path.abspath(rest[0])),
            )
        return None

    def run(self) -> None:
        """As `python` would: never returns but by an exception."""
        sys.argv = [self.file, *self.words]
        base = [path for path in sys.path if path not in ("", str(ROOT))]
        sys.path[:] = base if self.first is None else [self.first or os.getcwd(), *base]
        # all other folders are as they were when the server began
        sys.path_importer_cache.pop(sys.path[0], None)
        if self.module:
            runpy.run_module(self.module, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(self.file, run_name="__main__")


EXPORT = re.compile(r"export ([A-Za-z_]+)=(.*)")


def executed(argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """What argv becomes at once, and what it adds to the environment.

    A node's script without a prolog (trainkit/launch/session.py) only exports words and ends
    with `exec PROGRAM "$1"`.
    """
    if len(argv) != 3 or argv[0] != "/bin/bash":
        return list(argv), {}
    try:
        lines = [
            line.replace('"$1"', argv[2])
            for line in Path(argv[1]).read_text().splitlines()
            if not line.startswith("#")
        ]
    except (OSError, UnicodeDecodeError):
        return list(argv), {}
    exports = [EXPORT.fullmatch(line) for line in lines[1:-1]]
    if lines[:1] != ["set -e"] or not lines[-1].startswith("exec ") or not all(exports):
        return list(argv), {}
    return shlex.split(lines[-1])[1:], {
        found[1]: shlex.split(found[2])[0] for found in exports if found
    }


# --- The child's side of a fork: what exec would have done

_kept: list[Any] = []  # what the parent's stack still holds must not be closed or flushed by us


def _become(argv: Sequence[str], environment: Mapping[bytes, bytes]) -> None:
    """Take the command line, environment and signals of a fresh process."""
    gc.freeze()
    gc.enable()
    sys.orig_argv[:] = argv
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)
    signal.setitimer(signal.ITIMER_REAL, 0)
    atexit._clear()
    os.environb.clear()  # from now on C's own pointers do not point at what /proc shows
    os.environb.update(environment)
    _show(45, argv_bytes := b"\0".join(os.fsencode(word) for word in argv) + b"\0")
    _show(47, b"\0".join(name + b"=" + value for name, value in environment.items()) + b"\0")
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_bytes(os.path.basename(argv_bytes.partition(b"\0")[0]))
    _kept.extend([sys.stdin, sys.stdout, sys.stderr])
    unbuffered = "-u" in argv[: len(argv) - 1]
    encoding = os.environ.get("PYTHONIOENCODING", "utf-8")
    sys.stdin = io.TextIOWrapper(_opened(0, "rb"), encoding=encoding)
    sys.stdout = io.TextIOWrapper(
        _opened(1, "wb"),
        encoding=encoding,
        line_buffering=_is_terminal(1),
        write_through=unbuffered,
    )
    sys.stderr = io.TextIOWrapper(
        _opened(2, "wb"), encoding=encoding, errors="backslashreplace", line_buffering=True
    )
    if threads := os.environ.get("OMP_NUM_THREADS"):
        _take_threads(int(threads))


def _take_threads(number: int) -> None:
    """As torch would have read it when it was loaded. Its pool's threads begin here: they must
    not take the signals of the program's own thread."""
    import torch

    former = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    torch.set_num_threads(number)
    signal.pthread_sigmask(signal.SIG_SETMASK, former)


def _opened(handle: int, mode: str) -> Any:
    try:
        return open(handle, mode, closefd=False)
    except OSError:
        return open(os.devnull, mode)


def _is_terminal(handle: int) -> bool:
    try:
        return os.isatty(handle)
    except OSError:
        return False


def _show(field: int, text: bytes) -> None:
    """Write over the memory that /proc/PID/cmdline (from 45) or environ (47) shows, as far as
    there is room (proc(5), stat)."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, room = int(fields[field]), int(fields[field + 1]) - int(fields[field])
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        memory.seek(start)
        memory.write(text[: room - 1].ljust(room, b"\0"))


def _run(program: Program) -> int:
    """Run to its end; the exit code, what it says at the end said."""
    try:
        program.run()
        code = 0
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            code = (error.code or 0) & 0xFF
        else:
            print(error.code, file=sys.stderr)
            code = 1
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
        code = 130
    except BaseException:
        traceback.print_exc()
        code = 1
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    return code


_execute: Callable[..., int] = subprocess._fork_exec  # type: ignore[attr-defined]


def execute_again() -> None:
    """From now on this process executes programs: it tests them, and is none itself."""
    subprocess._fork_exec = _execute  # type: ignore[attr-defined]


def _fork(*given: Any) -> int:
    """In the place of CPython's fork_exec(): Modules/_posixsubprocess.c says what its arguments
    mean."""
    (
        argv,
        _,
        close_fds,
        keep,
        cwd,
        environment,
        p2cread,
        _,
        _,
        c2pwrite,
        _,
        errwrite,
        _,
        error_write,
    ) = given[:14]
    start_new_session, process_group = given[15:17]
    preexec = given[21]
    argv, exports = executed([os.fsdecode(word) for word in argv])
    program = Program.read(argv)
    if program is None:
        return _execute(*given)
    # What hooks of os.fork raise is lost, as KeyboardInterrupt is by a signal that comes meanwhile;
    # fork_exec() has no hooks.
    former = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    pid = os.fork()
    if pid:
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, former)
        except BaseException:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        return pid
    try:
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, former)
            _connect(p2cread, c2pwrite, errwrite)
            if cwd is not None:
                os.chdir(cwd)
            if start_new_session:
                os.setsid()
            if process_group >= 0:
                os.setpgid(0, process_group)
            if preexec is not None:
                preexec()
        except OSError as error:
            os.write(error_write, b"OSError:%x:noexec" % (error.errno or 0))
            os._exit(255)
        if close_fds:
            _close_all(set(keep) - {error_write})
        else:
            os.close(error_write)
        _become(argv, _environment(environment, exports))
        os._exit(_run(program))
    finally:
        os._exit(255)


def _environment(given: list[bytes] | None, exports: dict[str, str]) -> dict[bytes, bytes]:
    """That of the new program: what is given (else this process's own), and the exports."""
    if given is None:
        variables = dict(os.environb)
    else:
        variables = {pair.partition(b"=")[0]: pair.partition(b"=")[2] for pair in given}
    return variables | {os.fsencode(name): os.fsencode(value) for name, value in exports.items()}


def _connect(*handles: int) -> None:
    """The given ones as 0, 1 and 2; -1 leaves one as it is."""
    copies = [os.dup(handle) if handle >= 0 else -1 for handle in handles]
    for target, copy in enumerate(copies):
        if copy >= 0:
            os.dup2(copy, target)
            os.close(copy)


def _close_all(keep: set[int]) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in keep:
            with contextlib.suppress(OSError):
                os.close(int(name))


# --- The server


class Programs:
    """What runs, as the parent of all: who is told how it ended."""

    def __init__(self) -> None:
        self._told: dict[int, socket.socket] = {}

    def start(self, connection: socket.socket) -> None:
        """Start one program and say its pid."""
        order, handles = _receive(connection)
        pid = os.fork()
        if pid == 0:
            _connect(*handles)
            _close_all(set())
            _start(order)
        for handle in handles:
            os.close(handle)
        self._told[pid] = connection
        with contextlib.suppress(OSError):
            connection.sendall(f"{pid}\n".encode())

    def end(self) -> None:
        """Say of those that ended how they did."""
        while self._told:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            with contextlib.suppress(OSError), self._told.pop(pid) as connection:
                connection.sendall(f"{status}\n".encode())


def _make_lazy_parts() -> None:
    """What the classes of trainkit make when they are first used: 0.15 s of each program."""
    from trainkit.base import lazy_dataclasses
    from trainkit.jobs.table import Table

    tables = [Table]
    for table in tables:
        tables += table.__subclasses__()
        table.model_rebuild()
    modules = [module for name, module in sys.modules.items() if name.startswith("trainkit.")]
    for each in {each for module in modules for each in vars(module).values() if _is_lazy(each)}:
        each.__init__ = lazy_dataclasses._compiled_init(each)


def _is_lazy(value: object) -> bool:
    made = vars(value).get("__init__") if isinstance(value, type) else None
    return getattr(made, "__name__", "") == "first_init"


def serve(listener: socket.socket, control: int) -> None:
    """Import everything, then fork for whoever connects, until `control` is at its end."""
    for name in PRELOADED:
        if not name.startswith("torch.profiler") or importlib.util.find_spec(name):
            importlib.import_module(name)
    _make_lazy_parts()
    linked_code = importlib.import_module("tests.linked_code")
    linked_code.link_snapshots(Path(listener.getsockname()).with_name("code"))
    subprocess._fork_exec = _fork  # type: ignore[attr-defined]
    # a program may be imported already
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="runpy")
    warnings.filterwarnings(
        "ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning
    )
    woken, wakes = socket.socketpair()
    woken.setblocking(False)
    wakes.setblocking(False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the test run, and that ends us
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wakes.fileno())
    gc.collect()
    gc.disable()
    gc.freeze()
    _use_huge_pages()
    # of Python and of libraries: a fork has only the one that forks
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, threads
    programs = Programs()
    while True:
        waited: list[Any] = [listener, control, woken]
        ready, _, _ = select.select(waited, [], [])
        if control in ready:
            return
        if woken in ready:
            woken.recv(4096)
            programs.end()
        if listener in ready:
            connection, _ = listener.accept()
            programs.start(connection)


# madvise(2), Linux 6.1; bytes of a huge page of x86-64 and of arm64 with pages of 4 KiB
MADV_COLLAPSE, HUGE = 25, 2**21


def _use_huge_pages() -> None:
    """Put what imports left into huge pages, where the kernel can: a fork copies page tables,
    and so takes 8 ms instead of 27."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, access = (fields := line.split())[:2]
        if access.startswith("rw") and (len(fields) == 5 or fields[5] == "[heap]"):
            first, end = (int(address, 16) for address in span.split("-"))
            for address in range(-(-first // HUGE) * HUGE, end - HUGE + 1, HUGE):
                madvise(address, HUGE, MADV_COLLAPSE)


def _start(order: Mapping[str, Any]) -> None:
    """In the program's own process."""
    try:
        if order["inside"]:
            _enter(order["inside"])
        os.chdir(order["cwd"])
        if order["session"]:
            os.setsid()
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup pytest` ignores it
        program = Program.read(order["argv"])
        assert program is not None
        pairs = [bytes.fromhex(pair).partition(b"=")[::2] for pair in order["environment"]]
        _become(order["argv"], dict(pairs))
        os._exit(_run(program))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(255)


def _enter(pid: int) -> None:
    """setns(2) into what a host of tests/cluster has of its own."""
    library = ctypes.CDLL(None, use_errno=True)
    handles = [
        os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY) for kind in ("net", "uts", "ipc", "mnt")
    ]
    for handle in handles:
        if library.setns(handle, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(handle)


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """One line of JSON, and the file descriptors that came with its first byte."""
    handles = array.array("i")
    data, ancillary, _, _ = connection.recvmsg(65536, socket.CMSG_SPACE(64 * handles.itemsize))
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            handles.frombytes(content[: len(content) - len(content) % handles.itemsize])
    while not data.endswith(b"\n"):
        more = connection.recv(65536)
        assert more, "the caller is gone"
        data += more
    return json.loads(data), list(handles)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
