"""Whether the shared root answers. A thread writes the supervisor's sign of life there, and while a
file system stalls that waits, no clock of the attempt goes on."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable

SIGN_SECONDS = 5.0  # between signs of life
PATIENCE_SECONDS = 5.0  # that a sign of life may take; more is a stall


class RootWatch:
    """Gives signs of life from `start` to `close`.

    `stalls`: seconds of stalls that are over, until somebody takes them.

    Args:
        sign: writes a sign of life. What it raises as OSError is passed over: a full disk is
            reported by who writes what matters.
    """

    def __init__(self, sign: Callable[[], object]) -> None:
        self._sign = sign
        # (seconds of all stalls that are over, since when a sign is being written): one value,
        # which other threads read at any time
        self._state: tuple[float, float | None] = (0.0, None)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="signs of life", daemon=True)
        self.stalls: deque[float] = deque()

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """End; returns once nothing is being written."""
        self._over.set()
        self._thread.join()

    def clock(self) -> float:
        """As time.monotonic(), but it stands still while the root does not answer: nobody is late
        meanwhile."""
        now = time.monotonic()
        stalled, since = self._state
        return now - stalled - _beyond_patience(since, now)

    def stalled(self) -> float:
        """Seconds that the root has not answered by now; 0.0 while it does."""
        now = time.monotonic()
        _, since = self._state
        if since is not None and _beyond_patience(since, now):
            return now - since
        return 0.0

    def _run(self) -> None:
        while not self._over.wait(SIGN_SECONDS):
            stalled, _ = self._state
            since = time.monotonic()
            self._state = (stalled, since)
            try:
                with contextlib.suppress(OSError):
                    self._sign()
            finally:
                now = time.monotonic()
                beyond = _beyond_patience(since, now)
                self._state = (stalled + beyond, None)
            if beyond:
                self.stalls.append(now - since)


def _beyond_patience(since: float | None, now: float) -> float:
    return 0.0 if since is None else max(0.0, now - since - PATIENCE_SECONDS)
