"""One rank's engine from its start to its end, and what neuron_parallel_compile says of graphs.

Its lines, each behind a time and `INFO ||NEURON_PARALLEL_COMPILE||: ` (`||PARALLEL_COMPILE||` in
2023): `Total graphs: 22`, `Total successful compilations: 22`, `Total failed compilations: 0`.
With NEURON_PARALLEL_COMPILE_DUMP_RESULTS=1 a report stands before them, in JSON over several
lines: `"compilation_report": {"/cache/.../MODULE_N+N/model.hlo_module.pb": {"status": true, ..`.
A compiler that fails: `Failed compilation with ['neuronx-cc', .., '/../model.MODULE_N+N.hlo...`.
"""

from __future__ import annotations

import errno
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from trainkit.base.documents import document, utc_now
from trainkit.base.files import write_json
from trainkit.base.lazy_dataclasses import dataclass, field
from trainkit.base.process import die_with_parent_hook
from trainkit.engines.rank.end import (
    USER,
    EngineEnd,
    Verdict,
    first_code,
    judge_end,
    judge_failure,
    last_iteration,
    script_name,
)
from trainkit.engines.rank.node_setup import prepare_node
from trainkit.engines.rank.preflight import check_this_host
from trainkit.engines.rank.printed import plain
from trainkit.engines.rank.readers import READERS, line_reader
from trainkit.engines.rank.report import RankReport
from trainkit.engines.rank.spec import RankSpec

_TOTAL = re.compile(r"\bTotal (graphs|successful compilations|failed compilations): ([0-9]+)\s*$")
_REPORTED = re.compile(r'^\s*"([^"]+\.pb)": \{\s*$')
_STATUS = re.compile(r'^\s*"status": (true|false),?\s*$')
_MODULE = re.compile(r"MODULE_[0-9A-Za-z]+(?:\+[0-9A-Za-z]+)?")
NAMED = 8


@dataclass
class GraphCounts:
    """What was read so far. Where it was printed twice the later one counts: each program that
    compiles on a node has its own."""

    graphs: int | None = None
    compiled: int | None = None
    failed: int | None = None
    failures: list[str] = field(default_factory=list)
    _reported: str = ""

    def read_line(self, text: str) -> bool:
        """Take in a line; whether it was the last of a summary."""
        text = plain(text)
        total = _TOTAL.search(text)
        if total is not None:
            return self._count(total.group(1), int(total.group(2)))
        if "Failed compilation with" in text:
            self._add(text)
            return False
        named = _REPORTED.match(text)
        if named is not None:
            self._reported = named.group(1)
            return False
        status = _STATUS.match(text)
        if status is not None and status.group(1) == "false":
            self._add(self._reported)
        return False

    def _count(self, what: str, number: int) -> bool:
        if what == "graphs":
            self.graphs = number
            self.compiled = None
            self.failed = None
        elif what == "successful compilations":
            self.compiled = number
        else:
            self.failed = number
            return True
        return False

    def _add(self, text: str) -> None:
        module = _MODULE.search(text)
        name = module.group(0) if module else text.strip()[:200]
        if name and name not in self.failures:
            self.failures.append(name)

    def problem(self) -> str:
        """Why not all graphs are compiled; "" where they are."""
        if self.graphs is None or self.compiled is None or self.failed is None:
            return (
                "neuron_parallel_compile never said `Total graphs`, `Total successful compilations`"
                " and `Total failed compilations`"
            )
        if self.failed == 0 and self.graphs == self.compiled:
            return ""
        words = f"{self.failed} of {self.graphs} graphs could not be compiled"
        if self.failed == 0:
            words = f"{self.compiled} of {self.graphs} graphs were compiled"
        if self.failures:
            more = len(self.failures) - NAMED
            words += f": {', '.join(self.failures[:NAMED])}"
            words += f" and {more} more" if more > 0 else ""
        return words


READ = 2**16  # bytes a read
LONGEST = 2**16  # of a line that is looked at
LAST_LINES = 60  # of what it printed, kept to say why it failed
POLL_SECONDS = 0.2
PY_SPY_SECONDS = 8
BEFORE_SECONDS = 120
EXIT_SECONDS = 60.0  # from an engine's last traceback until it has left
IDLE_SECONDS = 6.0  # of a processor that waiting takes in that time, and computing exceeds
HEALTH = 7
START = 8
HEADER = "Traceback (most recent call last):"
# the outermost frame of what nothing in a script caught; torch puts the rank before each line
MODULE_FRAME = re.compile(r'^\S*\s*File "(?:[^"]*/)?([^"/]+)", line \d+, in <module>$')


class Signals:
    """What this process was asked to do. Handlers only note it: they run between any two lines.

    TERM and INT, as a scheduler sends them, ask to save as USR1 does: an agent that wants an end at
    once sends KILL after them.
    """

    def __init__(self) -> None:
        self.save = False  # save and leave
        self.stacks = False
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._save)
        signal.signal(signal.SIGUSR2, self._stacks)

    def _save(self, number: int, frame: object) -> None:
        self.save = True

    def _stacks(self, number: int, frame: object) -> None:
        self.stacks = True


class EngineProcess:
    """The engine's process, and what it prints.

    Args:
        spec: what to start.
        report: where to say how far it is.
    """

    def __init__(self, spec: RankSpec, report: RankReport) -> None:
        self.spec = spec
        self.report = report
        self.read_line = line_reader(spec)
        self.script = script_name(spec)
        self.last: list[str] = []
        self.line_before = ""  # the newest, of stderr
        self.raised_at: float | None = None  # when nothing caught an exception of its script
        self.worked_until = 0.0  # seconds of processor time that it had taken then
        self.hung_in_exit = False
        environment = engine_environment(spec)
        argv = [filled(word) for word in spec.argv]
        self.graphs = GraphCounts()
        self.process = subprocess.Popen(
            argv,
            env=environment,
            cwd=spec.cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # one call of the system; there are no threads
            preexec_fn=die_with_parent_hook(os.getpid()),  # noqa: PLW1509
        )
        assert self.process.stdout and self.process.stderr
        self.selector = selectors.DefaultSelector()
        self.partial: dict[int, bytes] = {}
        for stream, target in ((self.process.stdout, 1), (self.process.stderr, 2)):
            os.set_blocking(stream.fileno(), False)
            self.partial[target] = b""
            self.selector.register(stream, selectors.EVENT_READ, target)

    def pass_on(self, seconds: float) -> bool:
        """Pass on what is printed within so many seconds; whether either stream is still open."""
        for key, _ in self.selector.select(seconds):
            data = os.read(key.fd, READ)
            if data:
                self._take(key.data, data)
            else:
                self.selector.unregister(key.fileobj)
                self._take(key.data, b"\n" if self.partial[key.data] else b"", shown=False)
        return bool(self.selector.get_map())

    def _take(self, target: int, data: bytes, *, shown: bool = True) -> None:
        if shown:
            write_all(target, data)
        if self.spec.compiled:
            self.report.alive("compile")
        lines = (self.partial[target] + data).replace(b"\r", b"\n").split(b"\n")
        self.partial[target] = lines.pop()[-LONGEST:]
        for line in lines:
            text = line[:LONGEST].decode("utf-8", "replace")
            if text.strip():
                self.last = [*self.last[1 - LAST_LINES :], text]
                self.graphs.read_line(text)
                if not self.spec.compiled:  # whose losses are none
                    self._report(text)
                    if target == 2:
                        self._note_end(text)

    def _report(self, text: str) -> None:
        for reading in self.read_line(text):
            self.raised_at = None  # it goes on
            self.report.take(reading)

    def _note_end(self, line: str) -> None:
        """Python prints what nothing caught, then waits for threads and runs exit handlers."""
        frame = MODULE_FRAME.match(line)
        if frame and frame[1] == self.script and self.line_before.endswith(HEADER):
            self.raised_at = time.monotonic()
            self.worked_until = _processor_seconds(self.process.pid)
        self.line_before = line

    def end_hung_exit(self) -> None:
        """KILL, where its script is over and it does not leave: a thread that is not a daemon, or
        an NCCL that waits for its peers, holds it, and the peers wait for this rank."""
        if self.hung_in_exit or self.raised_at is None:
            return
        if time.monotonic() - self.raised_at < EXIT_SECONDS:
            return
        if _processor_seconds(self.process.pid) - self.worked_until > IDLE_SECONDS:
            self.raised_at = None  # it computes: the script itself has printed what it caught
            return
        self.hung_in_exit = True
        self.process.kill()
        said = (
            f"trainkit: {self.script} had not left {EXIT_SECONDS:g} s after its traceback: ended\n"
        )
        write_all(2, said.encode())

    def ask_to_end(self) -> None:
        """TERM: an engine that can saves first."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def show_stacks(self) -> None:
        """Where the engine stands, by py-spy where it is installed; on stderr, in the form that
        the agent looks for."""
        tool = shutil.which("py-spy")
        if tool is None:
            return
        argv = [tool, "dump", "--nonblocking", "--pid", str(self.process.pid)]
        try:
            done = subprocess.run(
                argv,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                timeout=PY_SPY_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return
        write_all(2, b"Engine, by py-spy (most recent call first):\n" + done.stdout + b"\n")


def write_all(target: int, data: bytes) -> None:
    """Write to one of our own streams; what nobody reads any more is dropped."""
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(target, rest) :]
        except InterruptedError:
            continue
        except OSError as error:
            if error.errno == errno.EAGAIN:
                time.sleep(0.01)
                continue
            return


# by the names that the words of a command have for them
_PLACES = {
    "LOCAL_RANK": "LOCAL_RANK",
    "NODE_RANK": "GROUP_RANK",
    "MASTER_ADDR": "MASTER_ADDR",
    "MASTER_PORT": "MASTER_PORT",
}
# torchrun's, of one rank: a program that starts its node's ranks gives each its own
_OF_ONE_RANK = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
)


def filled(word: str) -> str:
    """A word of the command with what only this process knows."""
    for name, variable in _PLACES.items():
        word = word.replace(f"${{{name}}}", os.environ.get(variable, ""))
    return word


def engine_environment(spec: RankSpec) -> dict[str, str]:
    """What the engine's process has: ours, without what is only for us, and the folder of its
    interpreter first in PATH (GPT-NeoX builds its helper with the `python3` found there)."""
    ours = ["TORCHELASTIC_ERROR_FILE", "TRAINKIT_HEARTBEAT_FILE"]
    if spec.starts_ranks:
        ours += _OF_ONE_RANK
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    folder = os.path.dirname(spec.interpreter)
    first = [each for each in (*spec.path, folder) if each]
    environment["PATH"] = os.pathsep.join([*first, environment.get("PATH", os.defpath)])
    if spec.python_path:
        there = [environment["PYTHONPATH"]] if environment.get("PYTHONPATH") else []
        environment["PYTHONPATH"] = os.pathsep.join([*spec.python_path, *there])
    return environment


def run_before(spec: RankSpec) -> None:
    """Run what the engine's scripts run in each rank before it, as `a; b` does: how it ends decides
    nothing. NeMo's numa_mapping.py wants Slurm's word for the ranks of a node."""
    if not spec.before:
        return
    environment = engine_environment(spec)
    environment.setdefault("SLURM_NTASKS_PER_NODE", environment.get("LOCAL_WORLD_SIZE", "1"))
    try:
        done = subprocess.run(
            spec.before,
            env=environment,
            cwd=spec.cwd,
            stdin=subprocess.DEVNULL,
            timeout=BEFORE_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        sys.stderr.write(f"trainkit: {spec.before[0]} before the engine: {error}\n")
        return
    if done.returncode:
        sys.stderr.write(
            f"trainkit: {' '.join(spec.before[:3])} ended with {done.returncode}; the engine starts"
            " all the same, as in its own script\n"
        )


def run_engine(spec: RankSpec) -> int:
    """Run the engine to its end; returns the exit code of this rank, negative for a signal."""
    signals = Signals()
    report = RankReport(spec)
    report.beat("start")
    if os.environ.get("LOCAL_RANK", "0") == "0":
        check = check_this_host(spec, engine_environment(spec))
        for note in check.notes:
            sys.stderr.write(f"trainkit: {note}\n")
        if check.missing:
            report.fail(Verdict(HEALTH, "PreflightError", "; ".join(check.missing)))
            return HEALTH
        for note in prepare_node(spec.node, os.environ.get("MASTER_PORT", "0")):
            sys.stderr.write(f"trainkit: {note}\n")
    began_at = READERS[spec.engine].tracked_step(Path(spec.checkpoints))
    report.begin(began_at)
    run_before(spec)
    try:
        engine = EngineProcess(spec, report)
    except (OSError, ValueError) as error:
        what = f"{spec.argv[0]} cannot be started in {spec.cwd}: {error}"
        report.fail(Verdict(START, "StartError", what))
        return START
    asked_to_save = _follow(engine, signals)
    code = engine.process.wait()
    if engine.hung_in_exit:
        code = 1  # as Python would have left
    elif spec.starts_ranks:
        code = first_code(engine.last, code)
    end = EngineEnd(
        code=code,
        began_at=began_at or 0,
        asked_to_save=asked_to_save,
        last_iteration=report.last_iteration,
        last_lines=engine.last,
    )
    if spec.compiled:
        return _conclude(spec, report, end, judge_compiled(spec, engine.graphs, end))
    return _conclude(spec, report, end, judge_end(spec, READERS[spec.engine], end))


def judge_compiled(spec: RankSpec, graphs: GraphCounts, end: EngineEnd) -> Verdict | None:
    """None where all graphs are compiled, which the file of the spec then says; else why not. The
    exit code of neuron_parallel_compile alone proves nothing."""
    if end.asked_to_save:
        return Verdict(0, "", "")
    if end.code != 0:
        return judge_failure(spec.argv[0], end)
    if problem := graphs.problem():
        return Verdict(USER, "CompilationFailed", problem)
    words = {"graphs": graphs.graphs, "compiled_for": spec.compiled_for, "at": utc_now()}
    # where they lie: once that is emptied they are not compiled any more
    words["cache"] = os.environ.get("NEURON_COMPILE_CACHE_URL", "")
    write_json(Path(filled(spec.compiled)), document("compiled-graphs/1", **words))
    return None


def _processor_seconds(pid: int) -> float:
    """What a process has computed so far, in seconds (proc(5), utime and stime); 0 where it is
    gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _follow(engine: EngineProcess, signals: Signals) -> bool:
    """Pass on the engine's output until it has ended; whether it was asked to save and leave."""
    asked = False
    while engine.process.poll() is None:
        if not engine.pass_on(POLL_SECONDS):
            time.sleep(POLL_SECONDS)
        if signals.save and not asked:
            asked = True
            engine.ask_to_end()
        if signals.stacks:
            signals.stacks = False
            engine.show_stacks()
        engine.end_hung_exit()
    # its children may hold the pipes open: only what is there now is read
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline and engine.selector.get_map():
        if not engine.selector.select(0):
            break
        engine.pass_on(0)
    return asked


def _conclude(spec: RankSpec, report: RankReport, end: EngineEnd, verdict: Verdict | None) -> int:
    """Say how it ended; returns the exit code of this rank."""
    if verdict is None:
        report.done()
        return 0
    if verdict.message:
        # most engines' ranks print nothing: the one that does says how far all are
        report.step = max(report.step, last_iteration(spec, end))
        report.fail(verdict)
        sys.stderr.write(f"trainkit: {verdict.message}\n")
    return end.code if end.code < 0 and verdict.exit != 12 else verdict.exit
