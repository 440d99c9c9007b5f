"""Interpreters of other versions than the tests' own, where this machine has them: what trainkit
runs in the images of others is run with each.

They are looked for as TRAINKIT_OLD_PYTHON names them, as python3.X on PATH, and below pyenv's
folder.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

VERSIONS = ("3.8", "3.10", "3.13")  # the oldest that the published images have, and newer ones
TOO_OLD = ("3.6", "3.7")
SAY = "import sys; print('%d.%d' % sys.version_info[:2], sys.executable)"


def candidates(version: str) -> Iterator[Path]:
    """Where an interpreter may be."""
    if named := os.environ.get("TRAINKIT_OLD_PYTHON"):
        yield Path(named)
    if on_path := shutil.which(f"python{version}"):
        yield Path(on_path)
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    # the newest release last, by number
    releases = sorted(
        pyenv.glob(f"versions/{version}.*/bin/python{version}"),
        key=lambda path: [int(part) for part in path.parts[-3].split(".") if part.isdigit()],
    )
    yield from reversed(releases)


@functools.cache
def find_python(version: str) -> str | None:
    """The interpreter of a version, by the path that it gives itself; None where there is none.

    It is asked: pyenv's shims are there for versions that are not chosen, and fail.
    """
    for path in candidates(version):
        try:
            done = subprocess.run(
                [path, "-I", "-S", "-c", SAY],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
            )
        except OSError:
            continue
        told, _, executable = done.stdout.strip().partition(" ")
        if done.returncode == 0 and told == version:
            return executable
    return None


def found_or_skip(version: str) -> str:
    """The same; skips the test where there is none."""
    python = find_python(version)
    if python is None:
        pytest.skip(f"no Python {version} on PATH or below ~/.pyenv/versions")
    return python
