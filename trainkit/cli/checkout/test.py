"""The tasks `test` and `docs` (README.md, CONTRIBUTING.md and docs/ as a website), and where
trainkit's own checkout is."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from invoke.exceptions import Exit as InvokeExit

import trainkit
from trainkit.base.errors import ConfigError, Exit, TrainkitError
from trainkit.base.extras import MissingExtra
from trainkit.base.files import write_text
from trainkit.base.install import CHECKOUT_FILES, InstallError, ensure
from trainkit.cli.wrapper import TaskContext, TaskResult

NEEDED = ("pytest", "ruff", "mypy", "hypothesis", "xdist")
OF_TORCH = ("tests/train", "tests/ops")  # the tests of what leans on torch's private names


def checkout(part: str) -> Path:
    """The checkout that this package was installed from. Raises ConfigError if it was installed
    from something else.

    Args:
        part: a folder that the checkout must have.
    """
    root = Path(trainkit.__file__).parent.parent
    if not all((root / name).exists() for name in (*CHECKOUT_FILES, part)):
        raise ConfigError(
            f"trainkit is installed in {root}, which is not a checkout with {part}",
            hint="clone the project and run ./inv there",
        )
    return root


def environment_python(
    root: Path,
    extras: Sequence[str],
    folder: str,
    pins: str = "",
    constraints: str = "constraints.txt",
) -> Path:
    """The Python of an environment of the checkout, which is installed if need be. See
    `Environment`. Raises TrainkitError (exit 6) where that fails."""
    try:
        ensure(root, extras, folder, pins, constraints, extension=True)
    except InstallError as error:
        raise TrainkitError(str(error), exit=Exit.STAGE_FAILED) from None
    return root / folder / "bin" / "python"


def torch_python(root: Path, release: str) -> Path:
    """The Python of an environment of the checkout with another torch, installed if need be.

    Args:
        release: of torch, "2.15": the newest of it.

    Raises:
        ConfigError: `release` is none.
        TrainkitError: pip failed, as where pyproject.toml leaves this torch out (exit 6).
    """
    if not re.fullmatch(r"\d+\.\d+", release):
        raise ConfigError(f"--torch {release!r} is not a release of torch", hint="--torch 2.15")
    lines = (root / "constraints.txt").read_text().splitlines()
    # torch 2.11 asks for a setuptools before 82
    kept = [line for line in lines if not line.startswith(("torch==", "setuptools=="))]
    constraints = f"build/torch-{release}.txt"
    (root / "build").mkdir(exist_ok=True)
    write_text(root / constraints, "\n".join([*kept, f"torch=={release}.*", ""]))
    return environment_python(root, ["test"], f".venv-torch-{release}", constraints=constraints)


def test(
    paths: Sequence[str] = (),
    *,
    slow: bool = False,
    gpu: bool = False,
    k: str = "",
    last_failed: bool = False,
    torch: str = "",
    lint: bool = True,
) -> None:
    """Run ruff, mypy and pytest in this package's checkout, until the first failure.

    Args:
        paths: files, folders or tests (FILE::NAME) of the checkout; none: all of tests/.
        slow: run the slow tests too, with more examples of each property.
        gpu: run only the tests that need a GPU, one after the other.
        k: pytest's -k.
        last_failed: only tests that failed the last time.
        torch: only the tests that lean on torch, or `paths`, with this release of it.
        lint: run ruff and mypy first, unless only a part of the tests runs.
    """
    root = checkout("tests")
    _refuse_missing(root, paths, torch)
    python = sys.executable
    if torch:
        python = str(torch_python(root, torch))
        paths = paths or OF_TORCH
    commands = [_pytest(paths, slow=slow, gpu=gpu, k=k, last_failed=last_failed)]
    if lint and not (paths or gpu or k or last_failed):
        commands = [["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"], *commands]
    for command in commands:
        print(f"$ {' '.join(command)}", flush=True)
        if code := _run(root, python, command):
            raise InvokeExit(code=code)


def _refuse_missing(root: Path, paths: Sequence[str], torch: str) -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing and not torch:
        raise ConfigError(
            f"the test extra is not installed ({', '.join(missing)} missing)",
            hint="./inv test installs it",
        )
    absent = [path for path in paths if not (root / path.partition("::")[0]).exists()]
    if absent:
        raise ConfigError(
            f"no such test in {root}: {', '.join(absent)}",
            hint="give files or folders below it: ./inv test tests/data",
        )


def _run(root: Path, python: str, command: Sequence[str]) -> int:
    """Run a module of this Python; returns its exit code."""
    # Without bytecode on disk each worker and each of a thousand programs compiles the package and
    # the tests again.
    environment = {**os.environ}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    start = partial(subprocess.Popen, cwd=root, env=environment)
    beside = []
    if command == ["mypy"]:
        # mypy uses one processor: beside it, one pytest compiles what each of its workers would
        # compile again
        collect = [python, "-m", "pytest", "--collect-only", "--quiet"]
        beside = [start(collect, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)]
    code = start([python, "-m", *command]).wait()
    for process in beside:
        process.wait()  # errors in the tests' files are reported by the run that follows
    return code


def _pytest(paths: Sequence[str], *, slow: bool, gpu: bool, k: str, last_failed: bool) -> list[str]:
    if gpu:
        command = ["pytest", "-m", "gpu"]  # there may be one GPU: no workers beside each other
    else:
        # three more than processors: tests on several hosts mostly wait
        workers = len(os.sched_getaffinity(0)) + 3
        command = ["pytest", "-n", str(workers), "--dist", "worksteal"]
    if slow:
        command.append("--hypothesis-profile=slow")
    elif not gpu:
        command += ["-m", "not slow"]
    if k:
        command += ["-k", k]
    if last_failed:
        command.append("--last-failed")
    return [*command, *paths]


DOCS_NEEDED = ("mkdocs", "material")


def docs(task: TaskContext, output: str) -> TaskResult:
    """Build the website of this checkout with mkdocs; a broken link or anchor is an error.

    Args:
        task: where to print.
        output: the folder to write, relative to the current one; "": `site` of the checkout.

    Raises:
        ConfigError: trainkit is installed without its checkout.
        MissingExtra: mkdocs is not installed.
        TrainkitError: mkdocs failed (exit 6); what it printed says why.
    """
    root = checkout("docs")
    if not all(importlib.util.find_spec(name) for name in DOCS_NEEDED):
        raise MissingExtra("building the website needs mkdocs-material", "docs")
    site = Path(output).absolute() if output else root / "site"
    argv = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(site)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}  # an advertisement of the theme's
    if subprocess.run(argv, cwd=root, env=quiet, stdin=subprocess.DEVNULL, check=False).returncode:
        raise TrainkitError("mkdocs could not build the website", exit=Exit.STAGE_FAILED)
    task.say(f"wrote {site / 'index.html'}")
    return TaskResult({"schema": "docs/1", "path": str(site)})
