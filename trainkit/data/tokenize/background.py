"""Work that goes on beside other work: an iterator or a sink in a thread of its own, with a
bounded queue between."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")
POLL_SECONDS = 0.2  # how soon a thread that waits sees that nobody wants its work any more


class _End:
    """The last thing in a queue: `error` if the work did not end well."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


class _Channel(Generic[T]):
    """A bounded queue that either side can leave."""

    def __init__(self, depth: int) -> None:
        self._queue: queue.Queue[T | _End] = queue.Queue(depth)
        self.left = threading.Event()

    def put(self, item: T | _End) -> bool:
        """Whether it was taken: False once the reader has left."""
        while not self.left.is_set():
            try:
                self._queue.put(item, timeout=POLL_SECONDS)
                return True
            except queue.Full:
                continue
        return False

    def get(self) -> T | _End:
        return self._queue.get()


@contextmanager
def read_ahead(source: Iterator[T], depth: int = 1) -> Iterator[Iterator[T]]:
    """Run `source` in a thread, at most `depth` items ahead of who iterates over what is given.
    Its exceptions are raised there.

    When the block ends the source has been closed, in its thread.
    """
    channel: _Channel[T] = _Channel(depth)

    def produce() -> None:
        error: BaseException | None = None
        try:
            for item in source:
                if not channel.put(item):
                    break
        except BaseException as caught:
            error = caught
        finally:
            if hasattr(source, "close"):
                source.close()
        channel.put(_End(error))

    def items() -> Iterator[T]:
        while not isinstance(item := channel.get(), _End):
            yield item
        if item.error is not None:
            raise item.error

    thread = threading.Thread(target=produce, name="ahead", daemon=True)
    thread.start()
    try:
        yield items()
    finally:
        channel.left.set()
        thread.join()


@contextmanager
def write_behind(sink: Callable[[T], None], depth: int = 1) -> Iterator[Callable[[T], None]]:
    """Run `sink` in a thread, at most `depth` items behind who calls what is given. Its
    exception is raised by a later call or at the block's end.

    Without an exception, all items have been taken when the block ends; with one in the block,
    the waiting ones are not.
    """
    channel: _Channel[T] = _Channel(depth)
    failed: list[BaseException] = []

    def consume() -> None:
        try:
            while not isinstance(item := channel.get(), _End):
                sink(item)
        except BaseException as caught:
            failed.append(caught)
            channel.left.set()

    def give(item: T) -> None:
        if not channel.put(item):
            raise failed[0]

    thread = threading.Thread(target=consume, name="behind", daemon=True)
    thread.start()
    try:
        yield give
    finally:
        channel.put(_End())
        thread.join()
    if failed:
        raise failed[0]
