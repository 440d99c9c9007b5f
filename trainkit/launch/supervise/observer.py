"""How a person follows a run that is supervised in their own process."""

from __future__ import annotations

from collections.abc import Callable

from trainkit.base.lazy_dataclasses import dataclass
from trainkit.runs.folder import RunFolder


@dataclass(frozen=True)
class RunObserver:
    """What a person who follows a run is shown.

    Args:
        on_begin: called once with the run before its ranks start.
        on_tick: called some twenty times a second.
        on_notice: called with one line when something a person should know happens.
    """

    on_begin: Callable[[RunFolder], None]
    on_tick: Callable[[], None]
    on_notice: Callable[[str], None]


def silent_observer() -> RunObserver:
    """A supervisor without a terminal."""
    return RunObserver(lambda run: None, lambda: None, lambda text: None)


class GuardedObserver:
    """Calls an observer that may fail: a terminal is closed, a reader of a pipe is gone. After
    its first failure it is called no more, and the run goes on.

    Args:
        observer: what is called.
        on_failure: called once, with the reason.
    """

    def __init__(self, observer: RunObserver, on_failure: Callable[[str], None]) -> None:
        self._observer = observer
        self._on_failure = on_failure
        self._failed = False

    def begin(self, run: RunFolder) -> None:
        """The first attempt's ranks are about to be started."""
        self._call(lambda: self._observer.on_begin(run))

    def tick(self) -> None:
        """Some time has passed."""
        self._call(self._observer.on_tick)

    def notice(self, line: str) -> None:
        """Something has happened that a person should know."""
        self._call(lambda: self._observer.on_notice(line))

    def _call(self, view: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            view()
        except (Exception, SystemExit) as error:  # rich raises SystemExit where the pipe is closed
            self._failed = True
            self._on_failure(f"{type(error).__name__}: {error}")
