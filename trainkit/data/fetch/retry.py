"""How often and how patiently a server is asked again, and what a remote file is known by."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Generator, Iterator
from typing import Protocol

from trainkit.base.errors import Exit, TrainkitError
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.base.records import Record


@dataclass(frozen=True)
class FetchRetryPolicy:
    """When to give a server up.

    Args:
        attempts: failures in a row, without a byte in between, that end it.
        first: seconds before the second attempt; they double with each.
        longest: seconds between two attempts at most.
        longest_asked: seconds that a Retry-After may ask for; beyond, the task ends and says so.
        timeout: seconds without a byte, or until a connection stands.
    """

    attempts: int = 8
    first: float = 1.0
    longest: float = 60.0
    longest_asked: float = 900.0
    timeout: float = 60.0


DEFAULT_RETRY = FetchRetryPolicy()


class Unreachable(TrainkitError):
    """A server gave no answer that says anything (exit 6)."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message, exit=Exit.STAGE_FAILED, hint=hint)


class TransientError(Exception):
    """A failure that may pass. `after`: seconds the server asked for (Retry-After)."""

    def __init__(self, why: str, after: float | None = None) -> None:
        super().__init__(why)
        self.why = why
        self.after = after


class RemoteFileChanged(Exception):
    """What is served is not the file that was listed; the message says in what it differs."""


class ServerGate:
    """Holds all who ask one server back while it wants to be left alone; `close` sends them
    home."""

    def __init__(self) -> None:
        self._until = 0.0
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def hold(self, seconds: float) -> None:
        """Let nobody through for that long."""
        with self._lock:
            self._until = max(self._until, time.monotonic() + seconds)

    def wait(self) -> None:
        """Pass, when one may. Raises TrainkitError once it is closed."""
        while (left := self._until - time.monotonic()) > 0 and not self._closed.wait(left):
            pass
        if self._closed.is_set():
            raise TrainkitError(
                "given up: another file of the same dataset failed", exit=Exit.STAGE_FAILED
            )

    def close(self) -> None:
        self._closed.set()


class RetryCounter:
    """Counts the failures of one file in a row, and waits between them, longer each time."""

    def __init__(self, shown: str, retry: FetchRetryPolicy, gate: ServerGate | None = None) -> None:
        self.shown = shown
        self.retry = retry
        self.gate = gate or ServerGate()
        self.failures = 0

    def progressed(self) -> None:
        """A byte came: the server is alive."""
        self.failures = 0

    def failed(self, error: TransientError) -> None:
        """Wait before the next attempt. Raises TrainkitError (exit 6) where there is to be none."""
        self.failures += 1
        asked = error.after or 0.0
        if self.failures >= self.retry.attempts or asked > self.retry.longest_asked:
            if asked > self.retry.longest_asked:
                wants = f", and wants to be asked again in {asked:,.0f} s"
            else:
                wants = ""
            raise Unreachable(
                f"{self.shown}: {error.why}{wants} (attempt {self.failures} in a row)",
                "is the address right, is the server up, is a proxy needed? What has come is kept:"
                " the same call goes on from there",
            ) from None
        pause = min(
            self.retry.longest, self.retry.first * 2 ** (self.failures - 1)
        ) * random.uniform(0.75, 1.25)
        print(
            f"{self.shown}: {error.why}; attempt {self.failures} of {self.retry.attempts}, again"
            f" in {max(asked, pause):.0f} s",
            file=sys.stderr,
            flush=True,
        )
        self.gate.hold(max(asked, pause))
        self.gate.wait()


@dataclass(frozen=True)
class RemoteFileInfo(Record):
    """What a server says of a file without sending it; None: it does not say.

    Args:
        size: bytes.
        etag: its version as the server names it.
        modified: time of its last change, the HTTP header or an ISO date.
        sha256: of its bytes, in hex.
    """

    size: int | None = None
    etag: str | None = None
    modified: str | None = None
    sha256: str | None = None

    @property
    def identifiable(self) -> bool:
        """Whether another version of the file would look different, whatever its size."""
        return bool(self.etag or self.modified or self.sha256)

    def difference(self, other: RemoteFileInfo) -> str | None:
        """In what `other` is surely another file, or None. Mirrors behind one name give other
        ETags: an equal date outweighs them."""
        if None not in (self.size, other.size) and self.size != other.size:
            return f"{other.size:,} bytes instead of {self.size:,}"
        if None not in (self.modified, other.modified):
            if self.modified != other.modified:
                return f"last changed {other.modified} instead of {self.modified}"
            return None
        if None not in (self.etag, other.etag) and self.etag != other.etag:
            return f"ETag {other.etag} instead of {self.etag}"
        return None


class RemoteFile(Protocol):
    """One file elsewhere. Both methods are one attempt: they raise Transient for what may pass,
    and TrainkitError (exit 6) for what will not."""

    shown: str

    def look(self) -> RemoteFileInfo | None:
        """What is known of it; None where the server says there is no such file."""

    def blocks(self, start: int, known: RemoteFileInfo) -> Iterator[bytes]:
        """Its bytes from `start` on. Raises Changed where they are not those of `known`."""


def look(
    remote: RemoteFile, retry: FetchRetryPolicy, gate: ServerGate | None = None
) -> RemoteFileInfo | None:
    """`remote.look`, as often as it takes."""
    tries = RetryCounter(remote.shown, retry, gate)
    while True:
        tries.gate.wait()
        try:
            return remote.look()
        except TransientError as error:
            tries.failed(error)


def read_with_retries(
    remote: RemoteFile, start: int, known: RemoteFileInfo, retry: FetchRetryPolicy
) -> Generator[bytes, None, None]:
    """All bytes of a file from `start`, connecting again where it breaks.

    Raises:
        TrainkitError: exit 6, the server was given up, or sends more than it said.
        Changed: it became another file meanwhile.
    """
    tries = RetryCounter(remote.shown, retry)
    at = start
    while known.size is None or at < known.size:
        try:
            for block in remote.blocks(at, known):
                at += len(block)
                if known.size is not None and at > known.size:
                    raise RemoteFileChanged(f"more than {known.size:,} bytes")
                tries.progressed()
                yield block
            if known.size is None or at >= known.size:
                return
            raise TransientError(f"the connection ended after {at:,} of {known.size:,} bytes")
        except TransientError as error:
            tries.failed(error)
