"""Following a run whose supervisor is another process, by its folder and by what its scheduler
says."""

from __future__ import annotations

import time
from collections.abc import Callable

from trainkit.launch.scheduler_registry import PLACES, SCHEDULERS, current, scheduler_of
from trainkit.runs.events import (
    AllRanksStarted,
    AttemptStarted,
    ContactLost,
    Event,
    EventTail,
    HangDetected,
    HostExcluded,
    RequeueFailed,
    RetryPlanned,
    RootStalled,
    SaveRequested,
    StrangerRefused,
)
from trainkit.runs.folder import RunFolder
from trainkit.runs.record import RunRecord, read_run_record

GOING = ("queued", "starting", "running")  # states of a run that has not ended
POLL_SECONDS = 0.05
# between looks at the record: on a shared file system each costs several round trips
LOOK_SECONDS = 0.5


class RunFollower:
    """Looks at a run again and again.

    Args:
        run: the run.
        events: `notice` is called with those that it gives.
        notice: is called with one line when something happens that a person should know.
    """

    def __init__(self, run: RunFolder, events: EventTail, notice: Callable[[str], None]) -> None:
        self.run = run
        self.notice = notice
        self._events = events
        self._queue = scheduler_of(run).follower(run)
        self._looked = 0.0

    @property
    def queued(self) -> bool:
        """Whether a scheduler's queue has the run."""
        return self._queue is not None

    def poll(self) -> RunRecord | None:
        """The record, once the run has ended; None while it goes on, or was looked at just now."""
        if time.monotonic() - self._looked < LOOK_SECONDS:
            return None
        record = read_run_record(self.run)
        if self._queue is None:
            record = current(record)  # a root that stalls keeps the supervisor's sign of life back
        else:
            record, line = self._queue.look(record)
            if line:
                self.notice(line)
        for attempt, event in self._events.new():
            if line := describe_event(attempt, event):
                self.notice(line)
        self._looked = time.monotonic()
        return None if record.state in GOING else record


def wait_until_started(run: RunFolder, events: EventTail) -> bool:
    """Wait until the ranks of a run have been started, or a person presses Ctrl-C; False where
    it ended before. The supervisor ends a run that does not start in time."""
    try:
        while True:
            running = current(read_run_record(run)).state in ("starting", "running")
            if any(isinstance(event, AllRanksStarted) for _, event in events.new()):
                return True
            if not running:
                return False
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        return True


def describe_event(attempt: int, event: Event) -> str:
    """One line about an event that a person who follows wants to know; "" for the others."""
    match event:
        case AttemptStarted() if attempt > 1:
            return f"attempt {attempt} begins"
        case ContactLost():
            return f"contact to {event.host} is lost"
        case RootStalled():
            return f"{event.root} did not answer for {event.seconds:.0f} s"
        case HostExcluded():
            return f"{event.host} is left out: {event.why}"
        case HangDetected():
            return (
                f"no rank moves any more: a hang; missing ranks: {_listed(event.missing)};"
                f" all stacks are in attempts/{attempt}/stacks"
            )
        case SaveRequested():
            return "saving at the end of this step, then stopping"
        case StrangerRefused():
            return f"somebody without the token knocked: {event.peer}"
        case RequeueFailed():
            return f"Slurm does not put the job back into the queue: {event.why}"
        case RetryPlanned(by=str(by)) if by in PLACES:
            title = SCHEDULERS[by].title
            return (
                f"attempt {attempt} ended ({event.failure_class}); {title} goes on with the run"
                f" as attempt {event.next_attempt}"
            )
        case RetryPlanned():
            return (
                f"attempt {attempt} failed ({event.failure_class}); going on as attempt"
                f" {event.next_attempt}"
            )
    return ""


def _listed(values: object) -> str:
    if isinstance(values, (list, tuple)) and values:
        return ", ".join(map(str, values))
    return "none"
