"""Work on files of the shared root, beside the agent's loop: a file system that does not answer
holds up what asked for it, and no sign of life."""

from __future__ import annotations

import threading
from typing import Callable, Generic, TypeVar

T = TypeVar("T")


class FileWork(Generic[T]):
    """Work that has begun, in a thread of its own.

    `done`: whether it has ended.

    Args:
        work: what is done.
        on_done: called in the thread at its end.
    """

    def __init__(self, work: Callable[[], T], on_done: Callable[[], None] = lambda: None) -> None:
        self._work = work
        self._on_done = on_done
        self._error: Exception | None = None
        self.done = False
        threading.Thread(target=self._run, name="files", daemon=True).start()

    def _run(self) -> None:
        try:
            self._result = self._work()
        except Exception as error:
            self._error = error
        self.done = True
        self._on_done()

    def result(self) -> T:
        """What came of it, once it is done. Raises what the work raised."""
        if self._error is not None:
            raise self._error
        return self._result
