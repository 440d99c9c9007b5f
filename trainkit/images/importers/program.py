"""Runs the programs that make image files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence

from trainkit.base.errors import Exit, TrainkitError
from trainkit.base.process import die_with_parent_hook
from trainkit.images.builders.options import HINTS
from trainkit.images.contract import Argv, FailureHint
from trainkit.images.programs import TAIL, explained, run_logged


def run_program(
    argv: Argv,
    *,
    env: Mapping[str, str] | None = None,
    missing: str = "",
    hints: Sequence[FailureHint] = (),
) -> None:
    """Run a program to its end.

    Args:
        argv: its words.
        env: set over this process's own.
        missing: what to do where it is not installed.
        hints: what its last lines may mean, before what is known of all.

    Raises TrainkitError (exit 6) where it is missing or fails.
    """
    if shutil.which(argv[0]) is None:
        raise _missing(argv, missing)
    run_logged(argv, (*hints, *HINTS), environment={**os.environ, **(env or {})})


def ask_program(argv: Argv, *, missing: str = "") -> str:
    """What a program prints, without what it says beside that, which goes to the log. Raises
    TrainkitError as `run_program`."""
    if shutil.which(argv[0]) is None:
        raise _missing(argv, missing)
    print(f"+ {' '.join(argv)}", file=sys.stderr, flush=True)
    done = subprocess.run(
        argv,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        preexec_fn=die_with_parent_hook(os.getpid()),
    )
    sys.stderr.write(done.stderr)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()][-TAIL:]
        raise explained(argv, done.returncode, lines, HINTS)
    return done.stdout.strip()


def _missing(argv: Argv, way_out: str) -> TrainkitError:
    return TrainkitError(
        f"{argv[0]} is not installed on this machine, and makes the image's file",
        exit=Exit.STAGE_FAILED,
        hint=way_out or f"install {argv[0]}",
    )
