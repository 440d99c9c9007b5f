"""What is known of an attempt's ranks, from the frames of their agents: which run, how they ended,
which hosts are lost, what is left; what ranks were doing when none of them moved."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection
from typing import Any

from trainkit.base.errors import Exit
from trainkit.base.files import read_json, write_json, write_text
from trainkit.base.redact import Redactor
from trainkit.launch.protocol.frames import (
    Frame,
    HeartbeatReport,
    ProcessEnded,
    ProcessesStopped,
    ProcessOutput,
    ProcessStarted,
    StackReport,
    StartFailed,
)
from trainkit.launch.supervise.agent_pool import AgentLost, AgentPool
from trainkit.launch.supervise.heartbeats import Heartbeats
from trainkit.launch.supervise.outcome import LostContact, Outcome, RankExit
from trainkit.runs.events import (
    AgentOutput,
    ContactLost,
    Event,
    EventLog,
    RankEnded,
    RankStarted,
    RootCause,
    SurvivingProcess,
)
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
        it, that is suspected: code of the job's own that waits without end answers, and would do so
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


class RankTracker:
    """Takes in what agents report.

    Args:
        folder: of the attempt.
        events: where starts, ends and losses are written.
        redactor: takes secrets out of what ranks said of their end.
        heartbeats: of its ranks.
    """

    def __init__(
        self,
        folder: AttemptFolder,
        events: EventLog,
        redactor: Redactor,
        heartbeats: Heartbeats,
    ) -> None:
        self.folder = folder
        self.events = events
        self.redactor = redactor
        self.heartbeats = heartbeats
        self.stacks = StackDumps(folder)
        self.node_of: dict[int, int] = {}  # by rank; empty until the ranks are started
        self.running: set[int] = set()
        self.starting: set[int] = set()  # ranks whose start is not confirmed
        self.start_failures: list[tuple[str, str]] = []  # (host, why)
        self.ends: list[RankExit] = []
        self.losses: list[LostContact] = []
        # what is left, by the nodes that have said so
        self.stopped: dict[int, list[SurvivingProcess]] = {}
        # when the lease of the last lost host began to run out, by time.monotonic(); of one whose
        # agent has ended it is over
        self.lost_at: float | None = None

    def expect(self, node_of: dict[int, int]) -> None:
        """These ranks are about to be started, on these nodes."""
        self.node_of = node_of
        self.starting = set(node_of)

    @property
    def survivors(self) -> list[SurvivingProcess]:
        """What outlived everything, of the hosts that have said so."""
        return [left for found in self.stopped.values() for left in found]

    def handle(self, pool: AgentPool, node: int, frame: Frame) -> None:
        """Take in one frame of a node's agent."""
        host = pool.host(node)
        match frame:
            case HeartbeatReport():
                for key, beat in frame.beats.items():
                    self.heartbeats.take(int(key), beat)
            case ProcessStarted():
                self._rank_started(int(frame.key), host, frame.pid)
            case StartFailed():
                self.starting.discard(int(frame.key))
                self.start_failures.append((host, f"rank {frame.key}: {frame.error}"))
            case ProcessEnded():
                self._rank_ended(host, pool.hellos[node].clock_offset, frame)
            case ProcessesStopped():
                self.stopped[node] = [
                    SurvivingProcess(host=host, pid=left.pid, argv0=left.argv0)
                    for left in frame.left
                ]
            case StackReport():
                self.stacks.take(node, frame)
            case ProcessOutput():
                self._note(AgentOutput(node, host, frame.text))
            case AgentLost():
                self._agent_lost(node, host, frame)

    def _rank_started(self, rank: int, host: str, pid: int) -> None:
        self.starting.discard(rank)
        self.running.add(rank)
        self._note(RankStarted(rank, host, pid))

    def _rank_ended(self, host: str, clock_offset: float, frame: ProcessEnded) -> None:
        rank = int(frame.key)
        self.starting.discard(rank)
        self.running.discard(rank)
        error = None
        if frame.error:
            error = self._redacted_error(rank)
        end = RankExit(
            rank=rank,
            host=host,
            code=frame.code,
            time=frame.time - clock_offset,
            stopped=frame.stopped,
            done=frame.done,
            error=error,
            last=[self.redactor.text(line) for line in frame.last],
            oom=frame.oom,
            log=str(self.folder.log(rank)),
        )
        self.ends.append(end)
        self._note(RankEnded(rank, end.code, end.stopped, end.done))

    def _note(self, event: Event) -> None:
        """Write an event of one rank. What is decided is decided by what is held in memory: a
        full disk loses the line, not the run."""
        with contextlib.suppress(OSError):
            self.events.write_soon(event)

    def _redacted_error(self, rank: int) -> dict[str, object] | None:
        """What the rank wrote down about its failure, with secrets taken out, of the file too."""
        path = self.folder.error(rank)
        try:
            value = read_json(path)
            clean = self.redactor.value(value)
            if clean != value:
                write_json(path, clean)
        except (OSError, ValueError):
            return None
        if isinstance(clean, dict):
            return clean
        return None

    def _agent_lost(self, node: int, host: str, frame: AgentLost) -> None:
        gone = {rank for rank, where in self.node_of.items() if where == node}
        if node not in self.stopped or gone & self.running:
            heard = time.time() - (time.monotonic() - frame.heard)
            self.losses.append(LostContact(host, frame.why, heard, frame.silent))
            run_out = self.heartbeats.limits.lease if frame.closed else 0.0
            self.lost_at = max(self.lost_at or 0.0, frame.heard - run_out)
            # a full disk must not keep us from stopping the others
            with contextlib.suppress(OSError):
                self.events.write(ContactLost(node, host, frame.why))
        self.running -= gone
        self.starting -= gone
