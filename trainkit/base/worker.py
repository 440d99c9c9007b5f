"""What a stage's worker process is: `python -m MODULE SPEC.json ...`, JSON lines on stdout, an
exit code.

Lines a unit prints: {"progress": done, "total": all} while it works, then {"result": {...}} or
{"error": {...}}. A unit that writes tokens adds {"tokens": ids written so far, "text_bytes":
bytes of text they stand for} to the former. Its log (stderr) is for people.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, Callable, Mapping

from trainkit.base.errors import ConfigError, Exit, Problem, SourceLocation, TrainkitError
from trainkit.base.files import read_json
from trainkit.base.interrupts import keep_interrupts, raise_interrupt
from trainkit.base.old_python import without_suffix
from trainkit.base.process import die_with_parent, raise_open_file_limit

DISK_HINTS = {
    errno.ENOSPC: "make room: what is finished is kept, and the same call goes on from there",
    errno.EDQUOT: (
        "your quota is used up: what is finished is kept, and the same call goes on from there"
    ),
    errno.EROFS: "that file system is read-only: set clusters.X.root to a folder you can write to",
    errno.EACCES: "you may not write there: set clusters.X.root to a folder you can write to",
    errno.EPERM: "you may not write there: set clusters.X.root to a folder you can write to",
}
ProgressCallback = Callable[..., None]  # (done, total, **counts): see above
PARENT_VARIABLE = "TRAINKIT_PARENT_PID"  # the process whose death ends this one


def _say(**line: Any) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


class _Throttle:
    """Passes progress on at most ten times a second."""

    def __init__(self) -> None:
        self.last = 0.0

    def __call__(self, done: int, total: int, **counts: int) -> None:
        now = time.monotonic()
        if now - self.last >= 0.1 or done >= total:
            self.last = now
            _say(progress=done, total=total, **counts)


def run_unit(work: Callable[[Any, ProgressCallback], Mapping[str, object]]) -> None:
    """Read the specs named on the command line and do the work of each in turn; report, exit.
    The first failure ends it.

    The first logs where the caller says; of every further one, X.spec.json, the log is X.log
    beside it.
    """
    raise_open_file_limit()
    if PARENT_VARIABLE in os.environ:
        die_with_parent(int(os.environ[PARENT_VARIABLE]))
    # so that what the work has begun is undone
    signal.signal(signal.SIGTERM, raise_interrupt)
    try:
        with keep_interrupts():
            for number, path in enumerate(map(Path, sys.argv[1:])):
                if number:
                    _log_to(path.with_name(without_suffix(path.name, ".spec.json") + ".log"))
                _say(result=work(read_json(path), _Throttle()))
    except KeyboardInterrupt:
        sys.exit(int(Exit.INTERRUPTED))
    except TrainkitError as error:
        _say(error={"problems": error.problems(), "exit": int(error.exit)})
        sys.exit(int(error.exit))
    except OSError as error:
        what = error.strerror or str(error)
        where = f" {error.filename}" if error.filename else ""
        _say(
            error={
                "problems": [
                    {
                        "message": f"{what}:{where or ' while reading or writing'}",
                        "hint": DISK_HINTS.get(error.errno or 0, ""),
                    }
                ],
                "exit": int(Exit.STAGE_FAILED),
            }
        )
        sys.exit(int(Exit.STAGE_FAILED))


def said_by_worker(output: bytes) -> list[dict[str, Any]]:
    """The objects among the lines of a worker's output, in order: what else stands there is some
    library's print."""
    found = []
    for line in output.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            found.append(value)
    return found


def how_it_ended(code: int) -> str:
    """How a worker ended that wrote no error: its exit code, negative for a signal, in words."""
    how = f"was ended by signal {-code}" if code < 0 else f"exited with {code}"
    if code == -signal.SIGKILL:
        how += ", as the kernel does when memory runs out (dmesg tells)"
    return how


def error_from_report(report: Mapping[str, Any], prefix: str = "") -> TrainkitError:
    """The error of a unit's line {"error": report}, to be raised by the process that started the
    unit; every message begins with `prefix`."""
    problems = [
        Problem(
            prefix + p["message"],
            SourceLocation(p["file"], p["line"]) if p.get("file") else None,
            p.get("hint", ""),
        )
        for p in report["problems"]
    ]
    return ConfigError(problems, exit=Exit(report["exit"]))


def _log_to(path: Path) -> None:
    """Send stderr, of libraries in C too, to a file."""
    sys.stderr.flush()
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    os.dup2(handle, 2)
    os.close(handle)
