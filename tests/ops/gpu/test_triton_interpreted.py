"""All kernels under Triton's interpreter: numbers, and every byte counted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="GPU kernels need the extra [triton]")

CHECKS = Path(__file__).with_name("check_interpreted.py")


def test_kernels_are_right_and_move_what_they_must() -> None:
    """In a process of its own: interpreted kernels cannot be compiled, nor the others
    interpreted."""
    argv = [sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*argv, str(CHECKS)],
        cwd=CHECKS.parents[3],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
