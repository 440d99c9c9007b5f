"""The task bench: runs the files of benchmarks/ of this checkout, each beside its peers, in an
environment of their own.

As a program: says as one JSON object what machine this is and which versions stand in the
environment it runs in.
"""

from __future__ import annotations

import ast
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainkit.base.errors import ConfigError, Exit, TrainkitError
from trainkit.base.install import InstallError, ensure
from trainkit.cli.checkout.test import checkout
from trainkit.cli.wrapper import TaskContext, TaskResult

FOLDER = ".venv-bench"
PINS = "benchmarks/peers.txt"
# whose versions a table is read with
COMPARED = ("torch", "transformers", "litgpt", "lightning", "megatron-core", "numpy")
ENDS = 60.0  # seconds a benchmark has to end after Ctrl-C


@dataclass(frozen=True)
class Benchmark:
    """One file of benchmarks/.

    Args:
        path: the file.
        claim: the first line of its docstring.
        words: every string in it, among them the options it takes.
    """

    path: Path
    claim: str
    words: frozenset[str]

    @property
    def name(self) -> str:
        return self.path.stem

    def takes(self, option: str) -> bool:
        return option in self.words


def read_benchmark(path: Path) -> Benchmark:
    """What a file says of itself, without running it."""
    tree = ast.parse(path.read_text())
    words = frozenset(
        n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)
    )
    return Benchmark(path, (ast.get_docstring(tree) or "").split("\n")[0], words)


def benchmarks(root: Path) -> list[Benchmark]:
    """Those of a checkout, by name."""
    return [read_benchmark(path) for path in sorted((root / "benchmarks").glob("*.py"))]


def chosen(
    found: list[Benchmark], name: str, options: dict[str, str]
) -> tuple[list[Benchmark], list[str]]:
    """(the benchmarks to run, lines about those left out). Those that do not take one of the
    options are left out, or refused if named.

    Args:
        found: all there are.
        name: the only one to run; "": all.
        options: what was asked for besides, {"--quick": ""}.

    Raises ConfigError.
    """
    if name and name not in {b.name for b in found}:
        raise ConfigError(
            f"there is no benchmarks/{name}.py",
            hint=f"there are: {', '.join(b.name for b in found)}",
        )
    run = []
    left_out = []
    for benchmark in (b for b in found if name in ("", b.name)):
        missing = [option for option in options if not benchmark.takes(option)]
        if missing and name:
            raise ConfigError(f"benchmarks/{name}.py has no {missing[0]}", hint="run it without")
        if missing:
            left_out.append(f"{benchmark.name} is left out: it has no {missing[0]}")
        else:
            run.append(benchmark)
    return run, left_out


def machine() -> dict[str, Any]:
    """CPU model, cores this process may use, GPUs, versions, date."""
    from importlib.metadata import PackageNotFoundError, version

    versions = {"python": platform.python_version()}
    for package in COMPARED:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    cores = len(os.sched_getaffinity(0))
    return {
        "cpu": _cpu_model(),
        "cores": cores,
        "gpus": _gpu_names(),
        "versions": versions,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def describe(machine: dict[str, Any]) -> str:
    """`machine()` as two lines."""
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    gpus = "; ".join(machine["gpus"]) or "no GPU"
    return f"{machine['cpu']}, {machine['cores']} cores; {gpus}; {machine['date']}\n{versions}"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    # the first of each counts
    fields = dict(
        reversed(
            [
                (key.strip(), value.strip())
                for key, _, value in (line.partition(":") for line in lines)
            ]
        )
    )
    model = fields.get("model name") or platform.processor() or platform.machine()
    if not fields.get("cpu family"):
        return model
    widest = next(
        (
            name
            for name in ("amx_bf16", "avx512_bf16", "avx512f", "avx2")
            if name in fields.get("flags", "").split()
        ),
        "",
    )
    return (
        f"{model} (family {fields['cpu family']}, model"
        f" {fields.get('model', '?')}{f', {widest}' if widest else ''})"
    )


def _gpu_names() -> list[str]:
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    if done.returncode == 0:
        return done.stdout.splitlines()
    return []


def _peers_environment(root: Path) -> Path:
    """The Python of the environment of peers, made if need be."""
    try:
        ensure(root, [], FOLDER, PINS, extension=True)
    except InstallError as error:
        raise TrainkitError(str(error), exit=Exit.STAGE_FAILED) from None
    return root / FOLDER / "bin" / "python"


def _run(
    task: TaskContext, python: Path, benchmark: Benchmark, options: list[str]
) -> dict[str, Any]:
    """Run one, its words passed on as they come; returns what the document says of it."""
    began = time.monotonic()
    lines = []
    rows = None
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "rows.json"
        if benchmark.takes("--rows"):
            told = ["--rows", str(table)]
        else:
            told = []
        argv = [str(python), "-P", str(benchmark.path), *options, *told]
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
        except KeyboardInterrupt:  # the terminal has told the child as well
            try:
                child.wait(ENDS)
            except subprocess.TimeoutExpired:
                child.kill()
            raise
        if table.is_file():
            rows = json.loads(table.read_text())
    words = {
        "name": benchmark.name,
        "claim": benchmark.claim,
        "exit": code,
        "seconds": round(time.monotonic() - began, 1),
    }
    return {**words, "output": lines, "rows": rows}


def bench(task: TaskContext, name: str, *, list_only: bool, quick: bool, device: str) -> TaskResult:
    """Run all benchmarks, or the one called `name`; exit 6 if one of them failed. Raises
    ConfigError for a name or an option that is none."""
    root = checkout("benchmarks")
    found = benchmarks(root)
    if list_only:
        width = max(len(b.name) for b in found)
        for benchmark in found:
            task.say(f"{benchmark.name:{width}}  {benchmark.claim}")
        return TaskResult(
            {
                "schema": "benchmarks/1",
                "benchmarks": [{"name": b.name, "claim": b.claim} for b in found],
            }
        )
    options = {**({"--quick": ""} if quick else {}), **({"--device": device} if device else {})}
    run, left_out = chosen(found, name, options)
    python = _peers_environment(root)
    asked = subprocess.run(
        [str(python), "-P", "-m", "trainkit.cli.checkout.bench"],
        cwd=root,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
    )
    where = json.loads(asked.stdout)
    task.say(describe(where))
    for line in left_out:
        task.say(line)
    words = [word for option, value in options.items() for word in (option, value) if word]
    done = []
    for benchmark in run:
        task.say(f"\n== {benchmark.name}: {benchmark.claim}")
        done.append(_run(task, python, benchmark, words))
    failed = [d["name"] for d in done if d["exit"]]
    if failed:
        task.say(f"failed: {', '.join(failed)}")
    return TaskResult(
        {"schema": "bench/1", "machine": where, "benchmarks": done},
        Exit.STAGE_FAILED if failed else Exit.DONE,
    )


if __name__ == "__main__":
    json.dump(machine(), sys.stdout)
