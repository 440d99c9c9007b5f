"""What ranks were doing when nobody moved: their stacks on disk, and who is missing."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from trainkit.base.errors import Exit
from trainkit.base.files import write_text
from trainkit.launch.protocol.frames import StackReport
from trainkit.launch.supervise.heartbeats import Heartbeats
from trainkit.launch.supervise.outcome import Outcome
from trainkit.runs.events import RootCause
from trainkit.runs.folder import AttemptFolder

STATES = {
    "T": "stopped",
    "t": "traced",
    "D": "in an uninterruptible wait, often for a disk or a driver",
    "Z": "dead",
}
NAMED = 8  # ranks named in one line


class StackDumps:
    """The answers of all agents to "stacks"."""

    seconds = 15.0  # that agents have: 3 for the ranks' own dump, 10 for py-spy

    def __init__(self, attempt: AttemptFolder) -> None:
        self.folder = attempt.path / "stacks"
        self._nodes: set[int] = set()
        self.texts: dict[int, str] = {}
        self.silent: set[int] = set()
        self.states: dict[int, str] = {}

    def take(self, node: int, frame: StackReport) -> None:
        """One agent's answer."""
        self._nodes.add(node)
        self.texts |= {int(key): text for key, text in frame.stacks.items()}
        self.silent |= {int(key) for key in frame.silent}
        self.states |= {int(key): state for key, state in frame.states.items()}

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
            write_text(self.folder / f"{rank}.txt", text.encode("utf-8", "replace").decode())

    def judge(
        self,
        pulse: Heartbeats,
        ranks: Collection[int],
        host_of: Callable[[int], str],
        seconds: float,
    ) -> Outcome:
        """The outcome of a hang: ranks that are behind, or do not run, or did not answer, are
        the missing ones. If they share a host and none of them answers although nobody stopped
        it, that is suspected: code of the job's own that waits for ever answers, and would do so
        anywhere."""
        held = {
            rank: STATES[state]
            for rank, state in self.states.items()
            if state in STATES and rank in ranks
        }
        missing = sorted(held) or pulse.behind(ranks) or sorted(self.silent & set(ranks))
        hosts = sorted({host_of(rank) for rank in missing})
        beats = {rank: pulse.beats.get(rank, {}) for rank in missing[:NAMED]}
        named = [
            f"rank {r} on {host_of(r)} ({_where(beats[r])}{', ' + held[r] if r in held else ''})"
            for r in beats
        ]
        more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
        if missing:
            who = f"missing: {', '.join(named)}{more}"
        else:
            who = "all are at the same step and answered"
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
        return Outcome(
            Exit.HANG,
            "hang",
            cause,
            tuple(hosts) if stuck and len(hosts) == 1 and len(missing) < len(ranks) else (),
        )


def _where(beat: Any) -> str:
    if beat:
        return f"step {beat['step']}, {beat['phase']}"
    return "never said where it is"
