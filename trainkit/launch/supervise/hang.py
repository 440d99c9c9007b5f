"""Who keeps the others waiting when no rank moves: by the kernel's states, by stacks, and by the
collectives in which ranks wait."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from trainkit.base.errors import Exit
from trainkit.base.files import write_text
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.launch.protocol.frames import StackReport
from trainkit.launch.supervise.heartbeats import Heartbeats
from trainkit.launch.supervise.outcome import Outcome
from trainkit.runs.events import HangDetected, RootCause
from trainkit.runs.folder import AttemptFolder

STATES = {
    "T": "stopped",
    "t": "traced",
    "D": "in an uninterruptible wait, often for a disk or a driver",
    "Z": "dead",
}
NAMED = 8  # ranks named in one line


MAIN_FRAME = re.compile(r'  File "(.+)", line (\d+) in (\S+)')


@dataclass(frozen=True)
class Wait:
    """A collective that a rank has entered and not left."""

    operation: str
    number: int
    group: str
    about: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.operation} #{self.number} of group {self.group} ({self.about})"


@dataclass(frozen=True)
class Collectives:
    """What one rank has said of its own. `entered`: the last number in each group."""

    entered: Mapping[str, int]
    waits: Sequence[Wait]

    @classmethod
    def read(cls, text: str) -> Collectives | None:
        """Of a rank's answer; None of one that cannot be read: it may have been too long."""
        try:
            value = json.loads(text)
            return cls(
                {str(group): int(number) for group, number in value["entered"].items()},
                [
                    Wait(**{**wait, "ranks": tuple(map(int, wait["ranks"]))})
                    for wait in value["waits"]
                ],
            )
        except (ValueError, TypeError, KeyError, AttributeError):
            return None


def absent_ranks(known: Mapping[int, Collectives]) -> list[int]:
    """Of the ranks that answered, those that have not entered a collective in which another waits.
    Who waits in one itself is not among them, unless all of them do: then each waits for
    another."""
    absent = {
        rank
        for waiting in known.values()
        for wait in waiting.waits
        for rank in wait.ranks
        if rank in known and known[rank].entered.get(wait.group, 0) < wait.number
    }
    return sorted({rank for rank in absent if not known[rank].waits} or absent)


class StackDumps:
    """The answers of all agents to "stacks"."""

    seconds = 15.0  # that agents have: 3 for the ranks' own dump, 10 for py-spy

    def __init__(self, attempt: AttemptFolder) -> None:
        self.folder = attempt.path / "stacks"
        self._nodes: set[int] = set()
        self.texts: dict[int, str] = {}
        self.silent: set[int] = set()
        self.states: dict[int, str] = {}
        self.known: dict[int, Collectives] = {}
        self.mute: set[int] = set()  # ranks whose interpreter has not answered

    def take(self, node: int, frame: StackReport) -> None:
        """One agent's answer."""
        self._nodes.add(node)
        self.texts |= {int(key): text for key, text in frame.stacks.items()}
        self.silent |= {int(key) for key in frame.silent}
        self.states |= {int(key): state for key, state in frame.states.items()}
        for key, text in frame.waits.items():
            if not text:
                self.mute.add(int(key))
            elif (known := Collectives.read(text)) is not None:
                self.known[int(key)] = known

    def complete(self, nodes: Collection[int]) -> bool:
        """Whether all of them have answered."""
        return self._nodes >= set(nodes)

    def write(self) -> None:
        """One file a rank: attempts/N/stacks/RANK.txt."""
        for rank in sorted({*self.texts, *self.silent}):
            text = (
                self.texts.get(rank)
                or f"it did not answer (state {self.states.get(rank, 'unknown')})\n"
            )
            for wait in self._waits(rank):
                text += f"\nwaits in {wait} of ranks {_list(wait.ranks)}\n"
            write_text(self.folder / f"{rank}.txt", text.encode("utf-8", "replace").decode())

    @property
    def may_pass(self) -> bool:
        """Whether something waits for a disk or a driver, or is looked at by a debugger: then it
        may go on without us."""
        return any(
            state[:1] in ("D", "t") or ", a thread " in state for state in self.states.values()
        )

    def _waits(self, rank: int) -> Sequence[Wait]:
        return self.known[rank].waits if rank in self.known else ()

    def judge(
        self,
        pulse: Heartbeats,
        ranks: Collection[int],
        host_of: Callable[[int], str],
        seconds: float,
    ) -> Outcome:
        """The outcome of a hang: ranks that do not run, whose interpreter does not answer, that
        have not entered a collective in which others wait, that are behind, or did not answer at
        all, are the missing ones. If they share a host and none of them answers although nobody
        stopped it, that is suspected: code of the job's own that waits without end answers, and
        would do so anywhere."""
        missing = self._missing(pulse, ranks)
        who = self._described(pulse, missing, host_of)
        cause: RootCause = {
            "message": f"no rank has moved for {seconds:.0f} s (step {pulse.step()}); {who}",
            "class": "hang",
            "step": pulse.step(),
            "missing": missing,
            "silent": sorted(self.silent),
            "states": {str(rank): state for rank, state in self.states.items()},
            "stacks": str(self.folder),
            "advice": (
                f"{self.folder} has what every rank was doing; a rank that waits in a collective"
                " waits for the missing ones"
            ),
        }
        if missing:
            cause |= {"rank": missing[0], "host": host_of(missing[0])}
        stuck = all(
            rank in self.silent and self.states.get(rank) not in ("T", "t") for rank in missing
        )
        hosts = tuple({host_of(rank) for rank in missing})
        suspected = hosts if stuck and len(hosts) == 1 and len(missing) < len(ranks) else ()
        return Outcome(Exit.HANG, "hang", cause, suspected)

    def _missing(self, pulse: Heartbeats, ranks: Collection[int]) -> list[int]:
        """The ranks that the others wait for; none where all are at the same step and answered."""
        held = {rank for rank, state in self.states.items() if state[:1] in STATES}
        return (
            sorted(held & set(ranks))
            or sorted(self.mute & set(ranks))
            or absent_ranks({rank: self.known[rank] for rank in ranks if rank in self.known})
            or pulse.behind(ranks)
            or sorted(self.silent & set(ranks))
        )

    def _described(
        self, pulse: Heartbeats, missing: Sequence[int], host_of: Callable[[int], str]
    ) -> str:
        """The missing ranks: where they are, and why they do not go on."""
        if not missing:
            return "all are at the same step and answered"
        named = []
        for rank in missing[:NAMED]:
            reasons = [_where(pulse.beats.get(rank, {})), *self._reasons(rank)]
            named.append(f"rank {rank} on {host_of(rank)} ({', '.join(reasons)})")
        return f"missing: {', '.join(named)}{_more(missing)}{self._others(missing)}"

    def _reasons(self, rank: int) -> Iterator[str]:
        """What is known of why a rank does not go on."""
        state = self.states.get(rank, "")
        if state[:1] in STATES:
            yield STATES[state[:1]]
            return
        frame = _main_frame(self.texts.get(rank, ""))
        if rank in self.mute and frame:
            yield "holds the interpreter's lock"
        elif rank in self.mute or rank in self.silent:
            yield "does not answer"
        if waits := self._waits(rank):
            yield f"waits in {waits[0]}"
        elif frame:
            yield f"{'runs' if state.endswith('of the time') else 'is'} at {frame}"

    def _others(self, missing: Collection[int]) -> str:
        """In which collective others wait for the missing ones."""
        waiting: dict[Wait, list[int]] = {}
        for rank in sorted(self.known):
            for wait in self._waits(rank):
                if rank not in missing and set(wait.ranks) & set(missing):
                    waiting.setdefault(wait, []).append(rank)
        if not waiting:
            return ""
        wait, ranks = max(waiting.items(), key=lambda each: len(each[1]))
        many = "ranks" if len(ranks) > 1 else "rank"
        return f"; {many} {_list(ranks)} {'wait' if len(ranks) > 1 else 'waits'} in {wait}"


def hang_event(hang: Outcome) -> HangDetected:
    """What `judge` has found, for the attempt's events."""
    assert hang.root_cause is not None
    found = hang.root_cause
    return HangDetected(found["missing"], found["silent"], found["states"], found["stacks"])


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:NAMED])) + _more(ranks)


def _more(ranks: Sequence[int]) -> str:
    return f" and {len(ranks) - NAMED} more" if len(ranks) > NAMED else ""


def _main_frame(text: str) -> str:
    """Where the main thread is, which faulthandler writes last; "" where it is not there."""
    stacks = text.partition("\npy-spy:")[0]
    found = MAIN_FRAME.search(stacks, max(0, stacks.rfind("hread 0x")))
    return f"{found[1]}:{found[2]} ({found[3]})" if found else ""


def _where(beat: Any) -> str:
    if beat:
        return f"step {beat['step']}, {beat['phase']}"
    return "never said where it is"
