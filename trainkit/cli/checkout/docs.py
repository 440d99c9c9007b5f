"""The task docs: README.md, CONTRIBUTING.md and docs/ as a website."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from trainkit.base.errors import Exit, TrainkitError
from trainkit.base.extras import MissingExtra
from trainkit.cli.checkout.test import checkout
from trainkit.cli.wrapper import TaskContext, TaskResult

NEEDED = ("mkdocs", "material")


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
    if not all(importlib.util.find_spec(name) for name in NEEDED):
        raise MissingExtra("building the website needs mkdocs-material", "docs")
    site = Path(output).absolute() if output else root / "site"
    argv = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(site)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}  # an advertisement of the theme's
    if subprocess.run(argv, cwd=root, env=quiet, stdin=subprocess.DEVNULL, check=False).returncode:
        raise TrainkitError("mkdocs could not build the website", exit=Exit.STAGE_FAILED)
    task.say(f"wrote {site / 'index.html'}")
    return TaskResult({"schema": "docs/1", "path": str(site)})
