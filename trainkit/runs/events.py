"""The events of an attempt: one frozen dataclass each, one writer and one reader of
attempts/N/events.jsonl.

A line is {"time": ISO 8601, "event": its name, ...}; the other keys are the dataclass's fields, in
that order. docs/run-folder.md lists them. `EventTail` follows them while a supervisor writes them,
from one attempt to the next.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, NotRequired, TypedDict, TypeVar

from trainkit.base.documents import utc_now
from trainkit.base.lazy_dataclasses import dataclass, field
from trainkit.base.locks import FULL
from trainkit.runs.folder import AttemptFolder, RunFolder

# for the last words of an attempt: a cause holds up to 30 lines of 2,000 bytes
RESERVE_BYTES = 2**17

FailureClass = Literal["success", "user", "infra", "hang", "preempted", "no-progress", "cancelled"]


class SurvivingProcess(TypedDict):
    """A process that outlived its attempt. `host` is in AttemptEnded only, `mark` in HostSwept
    only."""

    pid: int
    argv0: str
    mark: NotRequired[str]
    host: NotRequired[str]


class HostProblem(TypedDict):
    """A host that kept an attempt from starting, and why."""

    host: str
    why: str


# Why an attempt failed; `message` is always there, the other keys as far as they are known. It is
# written as it is given: run/1 and why/1 repeat it key by key.
RootCause = TypedDict(
    "RootCause",
    {
        "message": str,
        "advice": str,
        "class": FailureClass,
        # of the rank, or the host, that it began with
        "rank": int,
        "host": str,
        "code": int,
        "exit": int,
        "signal": str,
        "type": str | None,
        "step": int | None,
        "time": str,
        "log": str,
        "last": list[str],
        # of a start that was refused
        "hosts": list[HostProblem],
        # of ranks that were asked to save and stop
        "saved": bool,
        # of a hang
        "missing": list[int],
        "silent": list[int],
        "states": dict[str, str],
        "stacks": str,
        # of a job that a scheduler ended; `since`: of a supervisor that is silent
        "unit": str,
        "slurm_job": str,
        "slurm_state": str,
        "jobset": str,
        "jobset_state": str,
        "since": str,
    },
    total=False,
)


@dataclass(frozen=True)
class Event:
    """One line of events.jsonl. `time` is set by the reader: ISO 8601, UTC."""

    name: ClassVar[str]
    time: str = field(default="", kw_only=True)

    def to_json(self) -> dict[str, object]:
        """The line's keys besides "time" and "event". A field whose `omit` is set is left out
        while it is None."""
        return {
            _key(each): getattr(self, each.name)
            for each in _keys(type(self))
            if not (each.metadata.get("omit") and getattr(self, each.name) is None)
        }


def _keys(kind: type[Event]) -> list[dataclasses.Field[Any]]:
    return [each for each in dataclasses.fields(kind) if each.name != "time"]


def _key(each: dataclasses.Field[Any]) -> str:
    return str(each.metadata.get("key", each.name))


@dataclass(frozen=True)
class AttemptStarted(Event):
    """A supervisor begins an attempt. `supervisor`: its process, as its identity's to_json()."""

    name = "started"
    run: str = ""
    attempt: int = 0
    supervisor: Mapping[str, Any] = field(default_factory=dict)
    world_size: int = 0


@dataclass(frozen=True)
class AgentJoined(Event):
    """A host's agent is there.

    Args:
        node: its number, from 0; of hosts that stand by too.
        host: its name in the hostfile.
        address: by which other nodes reach it.
        clock_offset: seconds its clock is ahead of the supervisor's.
        proof: how it can prove that nothing is left of a run; None: not at all.
    """

    name = "agent_joined"
    node: int = 0
    host: str = ""
    address: str | None = None
    clock_offset: float = 0.0
    proof: str | None = None


@dataclass(frozen=True)
class RankStarted(Event):
    """A rank's process runs."""

    name = "rank_started"
    rank: int
    host: str
    pid: int


@dataclass(frozen=True)
class AllRanksStarted(Event):
    """Every rank runs: from here on an end is the ranks', before it is the start's."""

    name = "go"


@dataclass(frozen=True)
class SaveRequested(Event):
    """Ranks were asked to save at the end of their step and to stop."""

    name = "saving"
    ranks: Sequence[int]


@dataclass(frozen=True)
class HangDetected(Event):
    """No rank moved any more. Keys as in RootCause."""

    name = "hang"
    missing: Sequence[int] = ()
    silent: Sequence[int] = ()
    states: Mapping[str, str] = field(default_factory=dict)
    stacks: str = ""


@dataclass(frozen=True)
class RankEnded(Event):
    """A rank's process ended.

    Args:
        rank: which one.
        code: its exit code, negative for a signal.
        stopped: the supervisor ended it.
        done: it had recorded success.
    """

    name = "rank_ended"
    rank: int
    code: int
    stopped: bool
    done: bool


@dataclass(frozen=True)
class AgentOutput(Event):
    """A line that an agent printed, which it does only where something is wrong."""

    name = "agent_said"
    node: int
    host: str
    text: str | None


@dataclass(frozen=True)
class ContactLost(Event):
    """An agent is heard no more."""

    name = "contact_lost"
    node: int = 0
    host: str = "?"
    why: str = ""


@dataclass(frozen=True)
class RootStalled(Event):
    """The shared root answers again; the run has waited for it.

    Args:
        root: which folder.
        seconds: how long a sign of life took.
    """

    name = "root_stalled"
    root: str
    seconds: float


@dataclass(frozen=True)
class RanksStopped(Event):
    """The supervisor stops the ranks that still run."""

    name = "stopping"
    reason: str
    ranks: Sequence[int]


@dataclass(frozen=True)
class AttemptEnded(Event):
    """How the attempt ended.

    Args:
        exit: the exit code.
        root_cause: None for success.
        step: the furthest step of any rank.
        survivors: processes that outlived everything.
        unanswered: hosts that did not say what is left on them.
        failure_class: the key "class".
        budget: what another attempt has used up; None: no other follows.

    `cancel` writes it for a supervisor that died: then there is no step, and no budget.
    """

    name = "ended"
    exit: int
    root_cause: RootCause | None
    step: int | None = field(default=None, metadata={"omit": True})
    survivors: Sequence[SurvivingProcess] = ()
    unanswered: Sequence[str] = ()
    failure_class: FailureClass = field(default="infra", metadata={"key": "class"})
    budget: str | None = None

    def to_json(self) -> dict[str, object]:
        value = super().to_json()
        if self.step is None:
            del value["budget"]
        return value


@dataclass(frozen=True)
class HostSwept(Event):
    """A host was asked what the attempt had left there. Fields as in SweepReport."""

    name = "swept"
    host: str
    error: str | None
    left: Sequence[SurvivingProcess]
    killed: Sequence[SurvivingProcess]
    proof: str | None


@dataclass(frozen=True)
class HostExcluded(Event):
    """The next attempt will not have this host."""

    name = "host_left_out"
    host: str
    why: str


@dataclass(frozen=True)
class RetryPlanned(Event):
    """Another attempt follows.

    Args:
        next_attempt: its number.
        left_out: hosts that it will not have.
        by: "slurm" or "kubernetes" where a job of theirs goes on with the run, else left out.
        failure_class: the key "class": of the failure, or why they ended the job.
    """

    name = "retry"
    next_attempt: int
    left_out: Sequence[str] = ()
    by: str | None = field(default=None, metadata={"omit": True})
    failure_class: str = field(default="infra", metadata={"key": "class"})


@dataclass(frozen=True)
class RequeueFailed(Event):
    """Slurm did not put the job back into its queue."""

    name = "requeue_failed"
    job: str = ""
    why: str = ""


@dataclass(frozen=True)
class ViewLost(Event):
    """The terminal that followed the run is gone; the run goes on."""

    name = "view_lost"
    reason: str


@dataclass(frozen=True)
class StrangerRefused(Event):
    """Somebody connected without the token."""

    name = "stranger"
    peer: str
    why: str


EVENTS: dict[str, type[Event]] = {
    kind.name: kind
    for kind in (
        AttemptStarted,
        AgentJoined,
        RankStarted,
        AllRanksStarted,
        SaveRequested,
        HangDetected,
        RankEnded,
        AgentOutput,
        ContactLost,
        RootStalled,
        RanksStopped,
        AttemptEnded,
        HostSwept,
        HostExcluded,
        RetryPlanned,
        RequeueFailed,
        ViewLost,
        StrangerRefused,
    )
}
Kind = TypeVar("Kind", bound=Event)


class EventLog:
    """Appends events to attempts/N/events.jsonl. A file beside it takes room on the disk, which
    the attempt's last word gets where there is no other."""

    def __init__(self, attempt: AttemptFolder) -> None:
        attempt.path.mkdir(parents=True, exist_ok=True)
        self._path = attempt.events
        self._reserve = attempt.events.with_suffix(".reserve")
        with contextlib.suppress(OSError):
            self._reserve.write_bytes(bytes(RESERVE_BYTES))
        self._handle = os.open(
            attempt.events, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666
        )
        size = os.fstat(self._handle).st_size
        # is called with what was written
        self.on_write: Callable[[Event], None] = lambda event: None
        # by who wrote here before, and died or had no room
        self._torn = size > 0 and os.pread(self._handle, 1, size - 1) != b"\n"

    def write(self, event: Event) -> None:
        """Append an event; it and all before it are durable before the call returns. Raises
        OSError as the disk does."""
        try:
            self.write_soon(event)
        except OSError as error:
            if not isinstance(event, AttemptEnded) or error.errno not in FULL:
                raise
            self._reserve.unlink(missing_ok=True)
            self.write_soon(event)
        if self._handle >= 0:
            os.fsync(self._handle)

    def write_soon(self, event: Event) -> None:
        """Append an event that is one of many of its kind: durable with the next one written."""
        if self._handle < 0:
            return
        line = {"time": utc_now(), "event": event.name, **event.to_json()}
        rest = json.dumps(line).encode() + b"\n"
        if self._torn:  # half a line must not take this one with it
            rest = b"\n" + rest
        self._torn = True
        try:
            while rest:
                rest = rest[os.write(self._handle, rest) :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from None
        self._torn = False
        self.on_write(event)

    def close(self) -> None:
        """End the log; what comes later goes nowhere, and never to another file that has its
        number by then."""
        handle = self._handle
        self._handle = -1
        if handle >= 0:
            os.close(handle)
            self._reserve.unlink(missing_ok=True)


def parse_event(line: str | bytes) -> Event | None:
    """The event of one line; None for a torn line, and for an event that this version does not
    know. Keys that it does not know are passed over: a later version may write more."""
    try:
        value = json.loads(line)
    except ValueError:
        return None
    if not isinstance(value, dict) or str(value.get("event")) not in EVENTS:
        return None
    kind = EVENTS[str(value["event"])]
    fields = {each.name: value[_key(each)] for each in _keys(kind) if _key(each) in value}
    try:
        return kind(**fields, time=str(value.get("time", "")))
    except TypeError:  # a key without which the event says nothing is missing
        return None


def read_events(attempt: AttemptFolder) -> list[Event]:
    """All whole events of an attempt, in order; a torn line is left out."""
    try:
        text = attempt.events.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    return [event for line in text.split("\n")[:-1] if (event := parse_event(line)) is not None]


def events_of(events: Iterable[Event], kind: type[Kind]) -> Iterator[Kind]:
    """Those of one kind, in order."""
    return (event for event in events if isinstance(event, kind))


def first_event(events: Iterable[Event], kind: type[Kind]) -> Kind | None:
    """The first of one kind; None where there is none."""
    return next(events_of(events, kind), None)


def last_event(events: Sequence[Event], kind: type[Kind]) -> Kind | None:
    """The last of one kind; None where there is none."""
    return next(events_of(reversed(events), kind), None)


def newest_end(run: RunFolder) -> AttemptEnded | None:
    """How the newest attempt ended; None before the first, and where no supervisor wrote it."""
    attempts = run.attempts()
    return last_event(read_events(attempts[-1]), AttemptEnded) if attempts else None


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
