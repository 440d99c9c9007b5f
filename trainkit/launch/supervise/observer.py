"""How a person follows a run that is supervised in their own process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trainkit.runs.folder import RunFolder


@dataclass(frozen=True)
class RunObserver:
    """How a person follows an attempt.

    Args:
        begin: called once with the run before its ranks start.
        tick: called some twenty times a second.
        notice: called with one line when something a person should know happens.
    """

    begin: Callable[[RunFolder], None]
    tick: Callable[[], None]
    notice: Callable[[str], None]


def silent_observer() -> RunObserver:
    """A supervisor without a terminal."""
    return RunObserver(lambda run: None, lambda: None, lambda text: None)
