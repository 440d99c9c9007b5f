"""The task test, and where trainkit's own checkout is."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from invoke.exceptions import Exit as Leave

import trainkit
from trainkit.base.errors import ConfigError
from trainkit.base.install import CHECKOUT_FILES

NEEDED = ("pytest", "ruff", "mypy", "hypothesis", "xdist")


def checkout(part: str) -> Path:
    """The checkout this package was installed from, with its folder `part` in it. Raises ConfigError where it is none."""
    root = Path(trainkit.__file__).parent.parent
    if not all((root / name).exists() for name in (*CHECKOUT_FILES, part)):
        raise ConfigError(f"trainkit is installed in {root}, which is no checkout with {part}", hint="clone the project and run ./inv there")
    return root


def test(*, slow: bool, k: str, lint: bool) -> None:
    """Ruff, mypy, pytest, in the checkout this package was installed from; the first failure ends it."""
    root = checkout("tests")
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"the test extra is not installed ({', '.join(missing)} missing)", hint="./inv test installs it; or pip install -e '.[test]' -c constraints.txt"
        )
    checks = [["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"]] if lint else []
    workers = len(os.sched_getaffinity(0)) + 1  # one more than processors: tests on several hosts mostly wait
    pytest = ["pytest", "-n", str(workers), "--dist", "worksteal", *(["-k", k] if k else []), *([] if slow else ["-m", "not slow"])]
    for words in [*checks, pytest]:
        print(f"$ {' '.join(words)}", flush=True)
        code = subprocess.run([sys.executable, "-m", *words], cwd=root, check=False).returncode
        if code:
            raise Leave(code=code)
