"""What asks a supervisor to end its run: Ctrl-C, TERM, the hang-up of a closed terminal, and
`invoke cancel`."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

from trainkit.launch.supervise.outcome import StopRequest


class StopRequests:
    """What has been asked so far. The first signal asks to save and stop, a second to stop at
    once."""

    signals: tuple[int, ...] = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.first: StopRequest | None = None
        self.immediate = False
        self.killed_soon = False  # we too: ranks are killed at once, so that their end is recorded

    def request_save(self, source: StopRequest) -> None:
        """Save at the end of the step, then stop."""
        self.first = self.first or source

    def request_stop(self) -> None:
        """Stop at once; `invoke cancel` is a last word whatever was asked before."""
        self.first = StopRequest.CANCEL
        self.immediate = True

    def host_leaves(self) -> None:
        """A host is about to end."""
        self.request_save(StopRequest.SAVE)

    def handled_signals(self) -> list[int]:
        """Those to take: not what was ignored before, which is nohup's wish."""
        return [number for number in self.signals if signal.getsignal(number) != signal.SIG_IGN]

    def _on_signal(self, number: int, frame: object) -> None:
        self.immediate = self.first is not None
        self.request_save(StopRequest.INTERRUPT if number == signal.SIGINT else StopRequest.SAVE)

    @contextlib.contextmanager
    def handling_signals(self) -> Iterator[StopRequests]:
        """Take the signals for the block; afterwards they are as before."""
        before = {
            number: signal.signal(number, self._on_signal) for number in self.handled_signals()
        }
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
