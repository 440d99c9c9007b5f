"""The text of HTML pages, extracted by trafilatura as FineWeb did, in a process of its own: a page
on which it hangs, crashes or takes all memory costs that page alone."""

from __future__ import annotations

import contextlib
import logging
import resource
import signal
import subprocess
import sys
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from trainkit.base.errors import ConfigError, Exit
from trainkit.base.extras import install_command

PAGE_SECONDS = 10  # for a page; datatrove gives it 1, in which a busy machine loses good pages
SEGMENTS = 4096  # texts of a page that are remembered, to leave out what it repeats
MEMORY = 2**32  # bytes of address space that the process may take
NO_TEXT = "HTML without text"
BROKEN = "HTML that cannot be extracted"
SLOW = "HTML that takes too long"


class PageExtractor:
    """Extracts pages one after another. With trafilatura's deduplicate, as FineWeb has it: a long
    paragraph that two former pages of the file had is left out."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection

    def __call__(self, page: bytes) -> tuple[str, str]:
        """The text of a page; or "" and why there is none. The page's bytes say its encoding.

        Raises ConfigError (exit 6): trafilatura cannot be imported.
        """
        process = self._process or self._start()
        try:
            self._pipe.send_bytes(page)
            text, reason = self._pipe.recv()
        except (EOFError, OSError):
            self._process = None
            self._pipe.close()
            return "", SLOW if process.wait() == -signal.SIGPROF else BROKEN
        return text, reason

    def _start(self) -> subprocess.Popen[bytes]:
        self._pipe, theirs = Pipe()
        program = (sys.executable, "-I", "-m", __name__, str(theirs.fileno()), str(PAGE_SECONDS))
        process = subprocess.Popen(
            program, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True
        )
        self._process = process
        theirs.close()
        try:
            self._pipe.recv()
        except EOFError:
            raise ConfigError(
                f"trafilatura cannot be imported (exit {process.wait()}): the log says why",
                exit=Exit.STAGE_FAILED,
                hint=install_command("curate"),
            ) from None
        return process

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._pipe.close()


def _serve(pipe: Connection, seconds: int) -> None:
    """Answer pages until the other side is gone. SIGPROF ends this process, in C code too, after
    so many seconds of its own time: a busy machine leaves out no other pages."""
    from trafilatura import extract
    from trafilatura.deduplication import LRUCache

    logging.disable()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    soft = MEMORY if hard == resource.RLIM_INFINITY else min(MEMORY, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    pipe.send(None)
    while True:
        page = pipe.recv_bytes()
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            # a memory of its own for each page, or the pages before it would decide its text
            seen = LRUCache(SEGMENTS)
            text = extract(page, favor_precision=True, include_comments=False, deduplicate=seen)
            answer = (text.encode(errors="replace").decode(), "") if text else ("", NO_TEXT)
        except Exception:  # whatever a page makes of lxml and trafilatura
            answer = ("", BROKEN)
        signal.setitimer(signal.ITIMER_PROF, 0)
        pipe.send(answer)


if __name__ == "__main__":
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        _serve(Connection(int(sys.argv[1])), int(sys.argv[2]))
