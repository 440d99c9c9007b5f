"""Events of a run in words, for people; and numbers with their units."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trainkit.runs.events import (
    AgentJoined,
    AllRanksStarted,
    AttemptEnded,
    AttemptStarted,
    ContactLost,
    Event,
    HangDetected,
    HostExcluded,
    RankEnded,
    RanksStopped,
    RequeueFailed,
    RetryPlanned,
    RootStalled,
    SaveRequested,
    StrangerRefused,
    ViewLost,
)


def _rank_ended(event: RankEnded) -> str:
    if event.done:
        return f"rank {event.rank} was done"
    how = f"ended with code {event.code}"
    if event.code < 0:
        how = f"was ended by signal {-event.code}"
    if event.stopped:
        how += ", as it was asked"
    return f"rank {event.rank} {how}"


def _ended(event: AttemptEnded) -> str:
    words = f"the attempt ended: {event.failure_class}, exit {event.exit}"
    if event.root_cause and event.root_cause.get("message"):
        words += f": {event.root_cause['message']}"
    return words


def _retry(event: RetryPlanned) -> str:
    words = f"attempt {event.next_attempt} follows ({event.failure_class})"
    if event.left_out:
        words += f", without {', '.join(map(str, event.left_out))}"
    return words


_WORDS: Mapping[type[Event], Callable[[Any], str]] = {
    AttemptStarted: lambda e: f"attempt {e.attempt} began with {e.world_size} ranks",
    AgentJoined: lambda e: (
        f"the agent of {e.host} joined; its clock is {e.clock_offset:+.3f} s ahead"
    ),
    AllRanksStarted: lambda e: "all ranks run",
    SaveRequested: lambda e: "ranks were asked to save and stop",
    HangDetected: lambda e: f"no rank moves any more; missing: {list(e.missing)}",
    RankEnded: _rank_ended,
    ContactLost: lambda e: f"contact to {e.host} was lost: {e.why}",
    RootStalled: lambda e: f"{e.root} did not answer for {e.seconds:.0f} s",
    RanksStopped: lambda e: f"{len(e.ranks)} ranks are stopped: {e.reason}",
    AttemptEnded: _ended,
    HostExcluded: lambda e: f"{e.host} is left out: {e.why}",
    RetryPlanned: _retry,
    RequeueFailed: lambda e: f"Slurm did not take job {e.job} back: {e.why}",
    ViewLost: lambda e: "the terminal that followed the run is gone",
    StrangerRefused: lambda e: f"a stranger at {e.peer} was refused: {e.why}",
}


def event_in_words(event: Event) -> str | None:
    """One event; None for those that only matter to machines. An event whose values are not what
    they should be is known by its name."""
    say = _WORDS.get(type(event))
    try:
        return None if say is None else say(event)
    except (TypeError, ValueError, AttributeError, KeyError):
        return event.name


def duration(seconds: float) -> str:
    """3 d 4 h, 1 h 05 min, 2 min 03 s, 4.2 s."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
    if seconds < 86400:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02d} min"
    return f"{int(seconds // 86400)} d {int(seconds % 86400 // 3600)} h"


def moment(time: str) -> str:
    """A time of ISO 8601 in UTC for people: 2026-11-23 06:48:23; other words as they are."""
    day, letter, rest = time.partition("T")
    return f"{day} {rest[:8]}" if letter and rest.endswith("Z") else time


def short(value: float | None, unit: str = "") -> str:
    """Four digits with a unit; "n/a" for None."""
    if value is None:
        return "n/a"
    if 0 < abs(value) < 0.01:
        digits, exponent = f"{value:.2e}".split("e")
        return f"{float(digits):g}e{int(exponent)} {unit}".rstrip()
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            scale = 1e3 if letter == "k" else size
            return f"{value / scale:.4g} {letter}{unit}".rstrip()
    return f"{value:.4g} {unit}".rstrip()
