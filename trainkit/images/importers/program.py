"""Runs a program of others that makes an image file: its words go to the log, the last of them
into the error."""

from __future__ import annotations

import collections
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence

from trainkit.base.errors import Exit, TrainkitError
from trainkit.base.git import without_passwords
from trainkit.base.process import die_with_parent_hook
from trainkit.images.contract import FailureHint

TAIL = 12  # lines that an error shows
FULL = "No space left on device"
# what such programs say, and what helps; the first that is found
HINTS = (
    FailureHint(
        f"{FULL}|disk quota exceeded",
        "the disk is full",
        "make room: nothing half made was left behind",
    ),
    FailureHint(
        "cannot connect to the docker daemon",
        "docker's daemon does not run",
        "start dockerd, or name another builder: podman and buildah need no daemon",
    ),
    FailureHint(
        "permission denied",
        "this user may not do that",
        "ask for the builder's group, or name a builder that needs no daemon",
    ),
    FailureHint(
        r"\b401\b|\b403\b|unauthorized|requested access to the resource is denied"
        "|authentication required",
        "the registry wants to know who asks",
        "log in where the program keeps its credentials: docker login, podman login, buildah login,"
        " apptainer registry login, or ~/.config/enroot/.credentials",
    ),
    FailureHint(
        r"\b404\b|manifest unknown|no such image|image not known",
        "there is no such image",
        "look at base, source and tag",
    ),
    FailureHint(
        "could not resolve host|name resolution|network is unreach|no such host",
        "the registry cannot be reached from this machine",
        "run it where it can be reached",
    ),
)


def run_program(
    argv: Sequence[str],
    doing: str,
    *,
    env: Mapping[str, str] | None = None,
    missing: str = "",
    hints: Sequence[FailureHint] = (),
) -> None:
    """Run a program to its end.

    Args:
        argv: its words.
        doing: what it is to do, as the error begins: "X could not be imported".
        env: set over this process's own.
        missing: what to do where it is not installed.
        hints: looked through before HINTS.

    Raises TrainkitError (exit 6) where it is missing or fails.
    """
    tail: collections.deque[str] = collections.deque(maxlen=TAIL)
    print(f"+ {' '.join(argv)}", file=sys.stderr)
    try:
        child = subprocess.Popen(
            list(argv),
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            preexec_fn=die_with_parent_hook(os.getpid()),  # noqa: PLW1509
        )
    except OSError as error:
        raise _not_there(argv, doing, error, missing) from None
    with child:
        assert child.stdout is not None
        for line in child.stdout:
            clean = without_passwords(line)
            sys.stderr.write(clean)
            if clean.strip():
                tail.append(clean.rstrip())
    if child.returncode:
        raise _failure(argv, doing, child.returncode, list(tail), hints)


def ask_program(argv: Sequence[str], doing: str, *, missing: str = "") -> str:
    """What a program prints, without what it says beside that (which goes to the log). Raises
    TrainkitError as `run_program`."""
    print(f"+ {' '.join(argv)}", file=sys.stderr)
    try:
        done = subprocess.run(
            list(argv),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            preexec_fn=die_with_parent_hook(os.getpid()),
        )
    except OSError as error:
        raise _not_there(argv, doing, error, missing) from None
    said = without_passwords(done.stderr)
    sys.stderr.write(said)
    if done.returncode:
        tail = [line.rstrip() for line in said.splitlines() if line.strip()][-TAIL:]
        raise _failure(argv, doing, done.returncode, tail, ())
    return done.stdout.strip()


def _not_there(argv: Sequence[str], doing: str, error: OSError, missing: str) -> TrainkitError:
    return TrainkitError(
        f"{doing}: {argv[0]} cannot be run: {error.strerror}",
        exit=Exit.STAGE_FAILED,
        hint=missing or f"install {argv[0]} on this machine",
    )


def _failure(
    argv: Sequence[str],
    doing: str,
    code: int,
    tail: list[str],
    hints: Sequence[FailureHint],
) -> TrainkitError:
    """The error of a program that ended with `code`."""
    text = "\n".join(tail)
    known = (each for each in (*hints, *HINTS) if re.search(each.pattern, text, re.IGNORECASE))
    found = next(known, FailureHint("", "", "the whole of it is in the unit's log"))
    if found.pattern:
        said = [line for line in tail if re.search(found.pattern, line, re.IGNORECASE)]
    else:
        said = [line for line in tail if "error" in line.lower()]
    last = (said or tail[-1:] or ["without a word"])[0].strip()
    meaning = f" ({found.meaning})" if found.meaning else ""
    return TrainkitError(
        f"{doing}: {argv[0]} ended with {code}{meaning}: {last}",
        exit=Exit.STAGE_FAILED,
        hint="\n  ".join([found.way_out, *tail]),
    )
