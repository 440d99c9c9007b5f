"""What is known of an attempt's ranks, from the frames of their agents: which run, how they ended,
which hosts are lost, what is left."""

from __future__ import annotations

import contextlib
import time

from trainkit.base.files import read_json, write_json
from trainkit.base.redact import Redactor
from trainkit.launch.protocol.frames import (
    Frame,
    HeartbeatReport,
    HostLeaves,
    ProcessEnded,
    ProcessesStopped,
    ProcessOutput,
    ProcessStarted,
    StackReport,
    StartFailed,
)
from trainkit.launch.supervise.agent_pool import AgentLost, AgentPool
from trainkit.launch.supervise.hang import StackDumps
from trainkit.launch.supervise.heartbeats import Heartbeats
from trainkit.launch.supervise.outcome import LostContact, RankExit
from trainkit.runs.events import (
    AgentJoined,
    AgentOutput,
    ContactLost,
    Event,
    EventLog,
    RankEnded,
    RankStarted,
    SurvivingProcess,
)
from trainkit.runs.folder import AttemptFolder


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
        self._noted: set[int] = set()  # agents whose coming was written down
        self.starting: set[int] = set()  # ranks whose start is not confirmed
        self.start_failures: list[tuple[str, str]] = []  # (host, why)
        self.ends: list[RankExit] = []
        self.losses: list[LostContact] = []
        self.leaving = False  # a host is about to end
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
        """Take in one frame of an agent; one that stands by has nothing of our ranks."""
        host = pool.host(node)
        if node not in pool.nodes and not isinstance(frame, ProcessesStopped):
            if isinstance(frame, AgentLost):
                self.note(AgentOutput(node, host, f"stands by no more: {frame.why}"))
            return
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
                self.note(AgentOutput(node, host, frame.text))
            case HostLeaves():
                self.leaving = True
                self.note(AgentOutput(node, host, "its host is about to end"))
            case AgentLost():
                self._agent_lost(node, host, frame)

    def _rank_started(self, rank: int, host: str, pid: int) -> None:
        self.starting.discard(rank)
        self.running.add(rank)
        self.note(RankStarted(rank, host, pid))

    def _rank_ended(self, host: str, clock_offset: float, frame: ProcessEnded) -> None:
        rank = int(frame.key)
        self.starting.discard(rank)
        self.running.discard(rank)
        error = self._redacted_error(rank) if frame.error else None
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
        self.note(RankEnded(rank, end.code, end.stopped, end.done))

    def note(self, event: Event) -> None:
        """Write an event of one rank or agent. What is decided is decided by what is held in
        memory: a full disk loses the line, not the run."""
        with contextlib.suppress(OSError):
            self.events.write_soon(event)

    def note_agents(self, pool: AgentPool) -> None:
        """Write down who is there, of those that stand by too."""
        for number in pool.present:
            if number not in self._noted:
                self._noted.add(number)
                agent = pool.hellos[number]
                self.note(
                    AgentJoined(
                        number,
                        agent.host,
                        agent.facts.address,
                        round(agent.clock_offset, 3),
                        agent.facts.proof,
                    )
                )

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
        return clean if isinstance(clean, dict) else None

    def _agent_lost(self, node: int, host: str, frame: AgentLost) -> None:
        gone = {rank for rank, where in self.node_of.items() if where == node}
        known = any(loss.host == host for loss in self.losses)
        if not known and (node not in self.stopped or gone & self.running):
            heard = time.time() - (time.monotonic() - frame.heard)
            self.losses.append(LostContact(host, frame.why, heard, frame.silent))
            run_out = self.heartbeats.limits.lease if frame.closed else 0.0
            began = frame.heard - run_out  # below 0 where the machine runs for less than a lease
            self.lost_at = began if self.lost_at is None else max(self.lost_at, began)
            # a full disk must not keep us from stopping the others
            with contextlib.suppress(OSError):
                self.events.write(ContactLost(node, host, frame.why))
        self.running -= gone
        self.starting -= gone
