"""A program's output, line by line, as it comes."""

from __future__ import annotations

import os
import select
import subprocess
import tempfile
from collections.abc import Generator, Sequence


def stream_lines(argv: Sequence[str], tick: float) -> Generator[str | None, None, tuple[int, str]]:
    """Every whole line that a program prints; None after each `tick` seconds without one. Returns
    its exit code and what it said on standard error. It is ended where the reader goes away.

    Raises OSError where it cannot be started.
    """
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors
        ) as process,
    ):
        assert process.stdout is not None
        output = process.stdout.fileno()
        rest = b""
        try:
            while True:
                if not select.select([output], [], [], tick)[0]:
                    yield None
                    continue
                read = os.read(output, 1 << 16)
                if not read:
                    break
                *lines, rest = (rest + read).split(b"\n")
                for line in lines:
                    yield line.decode(errors="replace")
            code = process.wait()
        finally:
            process.kill()
        errors.seek(0)
        return code, errors.read().decode(errors="replace")
