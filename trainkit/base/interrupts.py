"""Signals that end a program by KeyboardInterrupt, none of which is lost."""

from __future__ import annotations

import _thread
import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

AGAIN_SECONDS = 0.05


def raise_interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """A handler: the signal does what Ctrl-C does; its number is the exception's argument."""
    raise KeyboardInterrupt(number)


@contextlib.contextmanager
def keep_interrupts() -> Iterator[None]:
    """Within the block no interrupt is lost, nor a SystemExit(128 + number) that a handler raises:
    it may run within a `__del__` or a callback of the garbage collector, where Python ignores what
    is raised (sys.unraisablehook). Such a signal is sent again."""
    former = sys.unraisablehook
    main = threading.main_thread().ident or 0

    def send_again(number: int) -> None:
        time.sleep(AGAIN_SECONDS)
        signal.pthread_kill(main, number)

    def hook(ignored: UnraisableHookArgs) -> None:
        ended = ignored.exc_value
        number = 0
        if isinstance(ended, KeyboardInterrupt):
            number = (*ended.args, signal.SIGINT)[0]
        elif isinstance(ended, SystemExit) and isinstance(ended.code, int):
            number = ended.code - 128
        if number > 0:
            # not a threading.Thread: the code that was interrupted may hold the lock it asks for
            _thread.start_new_thread(send_again, (number,))
        else:
            former(ignored)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = former
