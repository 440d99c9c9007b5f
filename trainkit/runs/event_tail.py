"""Follows a run's events while its supervisor writes them, from one attempt to the next."""

from __future__ import annotations

from trainkit.runs.events import Event, parse_event
from trainkit.runs.folder import RunFolder


class EventTail:
    """New events of all attempts, in order, by polling.

    Args:
        run: the run.
        skip_existing: leave out what is there already.
    """

    def __init__(self, run: RunFolder, *, skip_existing: bool = False) -> None:
        self.run = run
        self._offsets: dict[int, int] = {}
        if skip_existing:
            self.new()

    def new(self) -> list[tuple[int, Event]]:
        """(attempt, event) of every whole line written since the last call; never waits."""
        found = []
        for attempt in self.run.attempts():
            number = attempt.number
            if number < max(self._offsets, default=0):
                continue  # its supervisor has gone on to the next
            try:
                with open(attempt.events, "rb") as file:
                    file.seek(self._offsets.get(number, 0))
                    lines = file.readlines()
            except FileNotFoundError:
                continue
            whole = [line for line in lines if line.endswith(b"\n")]
            self._offsets[number] = self._offsets.get(number, 0) + sum(map(len, whole))
            found += [(number, event) for line in whole if (event := parse_event(line))]
        return found
