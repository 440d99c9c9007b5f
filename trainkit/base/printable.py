"""Text of others for a terminal: what a program printed may hold commands to the terminal that
shows it."""

from __future__ import annotations

import contextlib
import errno
import re
import sys
from collections.abc import Iterator
from typing import IO, cast

_COLOURS = re.compile(r"\x1b\[[0-9;:]*m")
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    r"""The text without colours, and with every other control character but tab and newline
    written out, such as \x1b."""
    return _CONTROLS.sub(
        lambda match: f"\\x{ord(match[0]):02x}", _COLOURS.sub("", text.replace("\r\n", "\n"))
    )


def warn(text: str) -> None:
    """A line on stderr that work goes on after."""
    print(f"WARNING: {text}", file=sys.stderr, flush=True)


class OutputClosed(BrokenPipeError):
    """Nobody reads what is printed any more, as in `invoke runs | head`."""


class PrintableStream:
    """An output whose text goes through `printable`. Everything else is that of the stream below
    it, `raw`. Writing raises OutputClosed."""

    def __init__(self, raw: IO[str]) -> None:
        self.raw = raw

    def __getattr__(self, name: str) -> object:
        return getattr(self.raw, name)

    def write(self, text: str) -> int:
        try:
            self.raw.write(printable(text))
        except BrokenPipeError:
            raise OutputClosed from None
        return len(text)

    def flush(self) -> None:
        flush(self.raw)


def flush(stream: IO[str]) -> None:
    """Flush an output. Nothing where it was a terminal that is gone: what is done counts. Raises
    OutputClosed."""
    try:
        stream.flush()
    except BrokenPipeError:
        raise OutputClosed from None
    except OSError as error:
        if error.errno != errno.EIO:
            raise


@contextlib.contextmanager
def printable_output() -> Iterator[None]:
    """Whatever is printed inside of it goes through `printable`. Raises OutputClosed."""
    out = cast("IO[str]", PrintableStream(sys.stdout))
    err = cast("IO[str]", PrintableStream(sys.stderr))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield
        out.flush()
