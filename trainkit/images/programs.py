"""Running builders and importers: what they say is kept, read for progress, and explained where
they fail."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from trainkit.base.errors import Exit, TrainkitError
from trainkit.base.git import without_passwords
from trainkit.base.process import die_with_parent_hook
from trainkit.images.builders.options import HINTS
from trainkit.images.contract import Argv, FailureHint, OnStep

QUESTION_SECONDS = 60.0  # that a program on this machine may take for an answer
TAIL = 12  # last lines of a program that failed
# "STEP 3/12: RUN ..." of buildah and podman, "Step 3/12 : RUN ..." of docker's classic builder,
# "#7 [2/5] RUN ..." of BuildKit, and of several stages "#7 [build 2/5] RUN ..."
_STEP = re.compile(r"(?:\[\d+/\d+\] )?STEP (\d+)/(\d+)|^#\d+ \[(?:\S+ +)?(\d+)/(\d+)\]", re.I)
# how buildah and podman, docker's classic builder and BuildKit say that a RUN failed
_STEP_FAILED = re.compile(
    r"building at STEP .*: exit status \d+$|returned a non-zero code: \d+"
    r"|did not complete successfully: exit code: \d+",
    re.IGNORECASE | re.MULTILINE,
)

OnLine = Callable[[str], None]


def print_line(text: str) -> None:
    """One line of the unit's log."""
    print(text, file=sys.stderr, flush=True)


def ask(argv: Argv) -> str | None:
    """What a program prints; None where it fails, or is not there."""
    return ask_all([argv])[0]


def ask_all(questions: Sequence[Argv]) -> list[str | None]:
    """The same for several programs, at once: most of the time is their start."""
    children: list[subprocess.Popen[bytes] | None] = []
    for argv in questions:
        try:
            children.append(
                subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                )
            )
        except OSError:
            children.append(None)
    return [None if child is None else _answer(child) for child in children]


def _answer(child: subprocess.Popen[bytes]) -> str | None:
    try:
        printed, _ = child.communicate(timeout=QUESTION_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()
        return None
    if child.returncode != 0:
        return None
    return printed.decode(errors="replace").strip()


def run_program(
    argv: Argv,
    *,
    hints: Sequence[FailureHint] = (),
    on_line: OnLine = lambda line: None,
    variables: Mapping[str, str] | None = None,
    missing: str = "",
) -> None:
    """Run a program; its output goes to stderr, which is the unit's log, below its command line.

    It ends with this process, however that ends, and asks nobody anything.

    Args:
        argv: the command.
        hints: what its last lines may mean, before what is known of all (HINTS).
        on_line: is called with each line.
        variables: set over this process's own.
        missing: what to do where it is not installed.

    Raises:
        TrainkitError: exit 6: it is missing, or fails: with its last lines and what they mean.
    """
    last: deque[str] = deque(maxlen=TAIL)
    child = _start(argv, subprocess.STDOUT, missing, variables)
    assert child.stdout is not None
    with _ended(child):
        for raw in child.stdout:
            line = without_passwords(raw.decode(errors="replace").rstrip("\r\n"))
            print_line(line)
            if line.strip():
                last.append(line)
            on_line(line)
        child.wait()
    if child.returncode != 0:
        raise explained(argv, child.returncode, list(last), hints)


def read_program(argv: Argv) -> str:
    """What a program prints, without what it says beside that, which goes to the log. Raises
    TrainkitError as `run_program`."""
    child = _start(argv, subprocess.PIPE, "", None)
    with _ended(child):
        printed, beside = child.communicate()
    lines = without_passwords(beside.decode(errors="replace")).splitlines()
    for line in lines:
        print_line(line)
    if child.returncode != 0:
        said = [line for line in lines if line.strip()][-TAIL:]
        raise explained(argv, child.returncode, said, ())
    return printed.decode(errors="replace").strip()


def _start(
    argv: Argv, stderr: int, missing: str, variables: Mapping[str, str] | None
) -> subprocess.Popen[bytes]:
    """Start a program that ends with this process, and note its command line."""
    print_line(f"+ {without_passwords(shlex.join(argv))}")
    try:
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env={**os.environ, **(variables or {})},
            preexec_fn=die_with_parent_hook(os.getpid()),  # noqa: PLW1509
        )
    except FileNotFoundError:
        raise TrainkitError(
            f"{argv[0]} is not installed on this machine",
            exit=Exit.STAGE_FAILED,
            hint=missing or f"install {argv[0]}",
        ) from None
    except OSError as error:
        raise TrainkitError(
            f"{argv[0]} cannot be started: {error.strerror}", exit=Exit.STAGE_FAILED
        ) from None


@contextlib.contextmanager
def _ended(child: subprocess.Popen[bytes]) -> Iterator[None]:
    """End a program where this process is asked to end meanwhile."""
    try:
        yield
    except BaseException:
        child.terminate()
        child.wait()
        raise


def explained(
    argv: Argv, code: int, lines: Sequence[str], hints: Sequence[FailureHint]
) -> TrainkitError:
    """The error of a program that failed: its last line, what that means, what helps.

    Args:
        argv: the command.
        code: its exit code; negative: a signal.
        lines: its last lines.
        hints: what they may mean, before HINTS; the first that is found counts.
    """
    verb = " ".join(argv[:2])
    how = f"was ended by signal {-code}" if code < 0 else f"exited with {code}"
    text = "\n".join(lines)
    said = lines[-1].strip() if lines else "it said nothing"
    known = (*hints, *HINTS)
    if _STEP_FAILED.search(text):
        known = tuple(hint for hint in known if hint.of_steps)
    for hint in known:
        if found := re.search(hint.pattern, text, re.IGNORECASE | re.MULTILINE):
            at = text.count("\n", 0, found.start())
            return TrainkitError(
                f"`{verb}` {how}: {hint.meaning}: {lines[at].strip()}",
                exit=Exit.STAGE_FAILED,
                hint=hint.way_out,
            )
    return TrainkitError(
        f"`{verb}` {how}: {said}", exit=Exit.STAGE_FAILED, hint="\n  ".join(lines[:-1])
    )


def step_reader(on_step: OnStep) -> OnLine:
    """Reads a builder's lines for the steps that it has begun; never goes back, however many
    stages count for themselves."""
    furthest = 0.0

    def read(line: str) -> None:
        nonlocal furthest
        found = _STEP.search(line)
        if found is None:
            return
        done = int(found[1] or found[3]) - 1
        total = int(found[2] or found[4])
        if total and done / total > furthest:
            furthest = done / total
            on_step(done, total)

    return read
