"""The task `bench`: runs the files of benchmarks/ of this checkout, each beside its peers, in their
own environment."""

from __future__ import annotations

import ast
import json
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from trainkit.base.documents import document
from trainkit.base.errors import ConfigError, Exit
from trainkit.base.lazy_dataclasses import asdict, dataclass
from trainkit.cli.checkout.machine import Machine, describe
from trainkit.cli.checkout.test import checkout, environment_python
from trainkit.cli.wrapper import TaskContext, TaskResult

FOLDER = ".venv-bench"
PINS = "benchmarks/peers.txt"
INTERRUPT_SECONDS = 60.0  # that a benchmark may take to end after Ctrl-C


@dataclass(frozen=True)
class Benchmark:
    """One file of benchmarks/.

    Args:
        path: the file.
        claim: the first paragraph of its docstring.
        strings: every string in it, among them the options it takes.
    """

    path: Path
    claim: str
    strings: frozenset[str]

    @property
    def name(self) -> str:
        return self.path.stem

    def takes(self, option: str) -> bool:
        """Whether it has this option, such as "--quick"."""
        return option in self.strings


@dataclass(frozen=True)
class BenchmarkResult:
    """What one benchmark printed: an entry of the document bench/1.

    Args:
        name: of its file.
        claim: what it is to show.
        exit: its exit code.
        seconds: it took.
        output: the lines it printed.
        rows: what it wrote to `--rows`, any JSON; None where it has no such option.
    """

    name: str
    claim: str
    exit: int
    seconds: float
    output: list[str]
    rows: object


def read_benchmark(path: Path) -> Benchmark:
    """What a file says about itself, without running it."""
    tree = ast.parse(path.read_text())
    constants = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    strings = frozenset(value for value in constants if isinstance(value, str))
    claim = (ast.get_docstring(tree) or "").partition("\n\n")[0]
    return Benchmark(path, " ".join(claim.split()), strings)


def benchmarks(root: Path) -> list[Benchmark]:
    """The benchmarks of a checkout, by name."""
    return [read_benchmark(path) for path in sorted((root / "benchmarks").glob("*.py"))]


def select(
    found: Sequence[Benchmark], name: str, options: Sequence[str]
) -> tuple[list[Benchmark], list[str]]:
    """(the benchmarks to run, a line about each that is left out). One that does not take an option
    is left out, or refused if it was named.

    Args:
        found: all there are.
        name: the only one to run; "": all.
        options: those that were given, such as "--quick".

    Raises:
        ConfigError: no benchmark has this name, or the one that was named lacks an option.
    """
    if name and name not in {benchmark.name for benchmark in found}:
        raise ConfigError(
            f"there is no benchmarks/{name}.py",
            hint=f"there are: {', '.join(benchmark.name for benchmark in found)}",
        )
    selected = []
    left_out = []
    for benchmark in found:
        if name not in ("", benchmark.name):
            continue
        missing = [option for option in options if not benchmark.takes(option)]
        if not missing:
            selected.append(benchmark)
        elif name:
            raise ConfigError(f"benchmarks/{name}.py has no {missing[0]}", hint="run it without")
        else:
            left_out.append(f"{benchmark.name} is left out: it has no {missing[0]}")
    return selected, left_out


def bench(task: TaskContext, name: str, *, list_only: bool, quick: bool, device: str) -> TaskResult:
    """Run all benchmarks, or the one called `name`.

    Args:
        task: how it was called.
        name: only this one; "": all.
        list_only: only print which there are.
        quick: with --quick.
        device: with --device; "": without.

    Raises:
        ConfigError: as `select`.
    """
    root = checkout("benchmarks")
    found = benchmarks(root)
    if list_only:
        return _list(found)
    options = ["--quick"] if quick else []
    values = ["--device", device] if device else []
    selected, left_out = select(found, name, [*options, *values[:1]])
    python = environment_python(root, [], FOLDER, PINS)
    where = _machine_of(python, root)
    task.say(describe(where))
    for line in left_out:
        task.say(line)
    results = []
    for benchmark in selected:
        task.say(f"\n== {benchmark.name}: {benchmark.claim}")
        results.append(_run(task, python, benchmark, [*options, *values]))
    failed = [result.name for result in results if result.exit]
    if failed:
        task.say(f"failed: {', '.join(failed)}")
    return TaskResult(
        document(
            "bench/1", machine=asdict(where), benchmarks=[asdict(result) for result in results]
        ),
        Exit.STAGE_FAILED if failed else Exit.DONE,
    )


def _list(found: Sequence[Benchmark]) -> TaskResult:
    width = max(len(benchmark.name) for benchmark in found)
    lines = [f"{benchmark.name:{width}}  {benchmark.claim}" for benchmark in found]
    rows = [{"name": benchmark.name, "claim": benchmark.claim} for benchmark in found]
    return TaskResult(document("benchmarks/1", benchmarks=rows), page=lines)


def _machine_of(python: Path, root: Path) -> Machine:
    """This machine, with the versions in the environment of `python`."""
    done = subprocess.run(
        [str(python), "-P", "-m", "trainkit.cli.checkout.machine"],
        cwd=root,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
    )
    return Machine(**json.loads(done.stdout))


def _run(
    task: TaskContext, python: Path, benchmark: Benchmark, options: Sequence[str]
) -> BenchmarkResult:
    """Run one, and print its lines as they come."""
    started = time.monotonic()
    lines: list[str] = []
    rows: object = None
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "rows.json"
        argv = [str(python), "-P", str(benchmark.path), *options]
        if benchmark.takes("--rows"):
            argv += ["--rows", str(table)]
        child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            errors="replace",
            bufsize=1,
        )
        try:
            assert child.stdout is not None
            for line in child.stdout:
                lines.append(line.rstrip("\n"))
                task.say(lines[-1])
            code = child.wait()
        except KeyboardInterrupt:  # the terminal has sent it to the child as well
            try:
                child.wait(INTERRUPT_SECONDS)
            except subprocess.TimeoutExpired:
                child.kill()
            raise
        if table.is_file():
            rows = json.loads(table.read_text())
    seconds = round(time.monotonic() - started, 1)
    return BenchmarkResult(benchmark.name, benchmark.claim, code, seconds, lines, rows)
