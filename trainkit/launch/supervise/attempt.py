"""One attempt of a run: its agents brought together, the ranks started and watched, all stopped
at the first bad exit, the truth judged."""

from __future__ import annotations

import asyncio
import contextlib
import time
import traceback
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainkit.base.errors import Exit, TrainkitError
from trainkit.base.files import read_json, write_json, write_text
from trainkit.base.process import identity
from trainkit.base.redact import Redactor
from trainkit.engines.contract import Command
from trainkit.jobs.schema import Job
from trainkit.launch.containers import node_container, reusable_since
from trainkit.launch.hosts.hostfile import Host
from trainkit.launch.launchers.contract import Launcher
from trainkit.launch.protocol.frames import (
    DumpStacks,
    Frame,
    HeartbeatReport,
    ProcessEnded,
    ProcessesStopped,
    ProcessOutput,
    ProcessSpec,
    ProcessStarted,
    SignalProcesses,
    StackReport,
    StartFailed,
    StartProcesses,
    StopProcesses,
)
from trainkit.launch.protocol.server import Server
from trainkit.launch.session import Session
from trainkit.launch.supervise.agent_pool import AgentLost, AgentPool, JoinedAgent
from trainkit.launch.supervise.failure_rules import FailureRules
from trainkit.launch.supervise.hang_report import StackDumps
from trainkit.launch.supervise.heartbeats import Heartbeats
from trainkit.launch.supervise.observer import GuardedObserver
from trainkit.launch.supervise.outcome import (
    LostContact,
    Outcome,
    RankExit,
    StopRequest,
    judge_outcome,
)
from trainkit.launch.supervise.rank_environment import (
    passed_environment,
    rank_environment,
)
from trainkit.launch.supervise.rendezvous import (
    StartError,
    build_world,
    gather,
    rendezvous,
    reserve,
)
from trainkit.launch.supervise.stop_requests import StopRequests
from trainkit.runs.events import (
    AgentJoined,
    AgentOutput,
    AllRanksStarted,
    AttemptStarted,
    ContactLost,
    Event,
    EventLog,
    HangDetected,
    RankEnded,
    RanksStopped,
    RankStarted,
    SaveRequested,
    SurvivingProcess,
)
from trainkit.runs.folder import RunFolder
from trainkit.runs.world import World, write_world

POLL_SECONDS = 0.05
# how long peers of a failed rank have to write down their own view before they are stopped
ECHO_SECONDS = 0.5
# from the good end of one rank to that of the last: they end at the same step, but rank 0 has
# reports to finish (W&B waits up to 60 s)
TEARDOWN_SECONDS = 90.0
STOP_SECONDS = 8.0  # beyond the grace, for an agent to prove that nothing is left


@dataclass(frozen=True)
class AttemptContext:
    """What all attempts of one supervisor share.

    Args:
        launcher: what starts the agents.
        server: where they knock.
        secrets: names and values that only the ranks' environment holds.
        rules: what failures mean.
        share: run beside other runs on the same slots.
        stop_requests: what asks the supervisor to end the run.
        observer: how a person follows.
    """

    launcher: Launcher
    server: Server
    secrets: Mapping[str, str]
    rules: FailureRules
    share: bool
    stop_requests: StopRequests
    observer: GuardedObserver


@dataclass
class AttemptResult:
    """How an attempt ended, and what the next one must know.

    Args:
        outcome: exit class and root cause. began: all ranks were started. step: the furthest
        step of any rank. survivors: processes that outlived everything, by host. unanswered:
        hosts that did not say what is left on them. doubtful: hosts on which something may still
        run: contact was lost, or they did not say that nothing is left. lost: how many contacts
        were lost. lost_at: since when the last of the doubtful ones hears nothing of us, by
        time.monotonic(); None: there are none, or nothing is left there. again: another attempt
        follows; the supervisor decides. budget: what another attempt, here or later, has used
        up; "": there is to be none.
    """

    outcome: Outcome
    began: bool = False
    step: int = 0
    survivors: list[SurvivingProcess] = field(default_factory=list)
    unanswered: list[str] = field(default_factory=list)
    doubtful: list[str] = field(default_factory=list)
    lost: int = 0
    lost_at: float | None = None
    again: bool = False
    budget: str = ""


class _StopRequested(Exception):
    """Somebody asked to stop before the ranks ran."""


class Attempt:
    """One attempt.

    Args:
        run: the run.
        number: the attempt's number; its folders do not exist yet.
        job: as the attempt runs it; `job.nodes` is the number of hosts.
        hosts: nodes in order of ranks.
        command: what the ranks run.
        context: of the supervisor.
    """

    def __init__(
        self,
        run: RunFolder,
        number: int,
        job: Job,
        hosts: Sequence[Host],
        command: Command,
        context: AttemptContext,
    ) -> None:
        self.run = run
        self.job = job
        self.command = command
        self.context = context
        self.folder = run.attempt(number)
        code = run.root / "code" / run.code.resolve().name
        logs = self.folder.path / "launch"
        folder = run.session(number)
        self.session: Session = Session(
            folder,
            run.id,
            number,
            hosts,
            job.cluster,
            code,
            logs,
            passed_environment(),
            node_container(job, folder, run.id, number, reusable_since(run)),
        )
        self.events = EventLog(self.folder)
        self.heartbeats = Heartbeats(self.folder, job.cluster.watch)
        self.stacks = StackDumps(self.folder)
        self.redactor = Redactor(context.secrets.values())
        self.world: World | None = None  # once the agents have come together
        self.node_of: dict[int, int] = {}
        self.running: set[int] = set()
        self.waiting: set[int] = set()  # ranks whose start is not confirmed
        self.ends: list[RankExit] = []
        self.losses: list[LostContact] = []
        # what is left, by the nodes that have said so
        self.stopped: dict[int, list[SurvivingProcess]] = {}
        self.not_started: list[tuple[str, str]] = []
        self.lost_at: float | None = None
        self.save_announced = self.save_requested = self.began = False

    def record_start(self) -> None:
        """Write the first event: from now on the run's state hangs on this process's life."""
        self.events.write(
            AttemptStarted(
                self.run.id, self.folder.number, identity().to_json(), self.job.world_size
            )
        )

    async def execute(self) -> AttemptResult:
        """Start the ranks, follow them to their end, judge it. Leaves nothing running on any
        host that can be reached. Writes no "ended"."""
        survivors: list[SurvivingProcess] = []
        outcome: Outcome | None = None
        try:
            server = self.context.server
            self.session.write(self.run.root, server.address, server.port, self.context.secrets)
            async with AgentPool(self.session, self.context.launcher, server) as pool:
                try:
                    outcome = await self._guarded(pool)
                finally:
                    survivors = await self._stop_all(pool, "the supervisor ends")
        except StartError as error:
            outcome = error.outcome
        except TrainkitError as error:
            outcome = Outcome(
                error.exit,
                "user" if error.exit == Exit.CONFIG else "infra",
                {"message": error.message, "advice": error.hint},
            )
        except OSError as error:
            outcome = Outcome(
                Exit.RANK_INFRA, "infra", {"message": f"the supervisor cannot go on: {error}"}
            )
        except Exception as error:
            # ours, or what a host said that nobody foresaw: what is left on the hosts is still to
            # be told
            traceback.print_exc()
            outcome = Outcome(
                Exit.BUG,
                "infra",
                {"message": f"the supervisor failed: {type(error).__name__}: {error}"},
            )
        finally:
            self.session.forget_secrets()
        outcome = outcome or judge_outcome(
            self.ends,
            len(self.node_of),
            self.context.stop_requests.first,
            self.losses,
            self.context.rules,
        )
        if self.node_of:
            unanswered = [
                host.name
                for node, host in enumerate(self.session.hosts)
                if node not in self.stopped
            ]
        else:
            unanswered = []
        doubtful = {
            *unanswered,
            *(lost.host for lost in self.losses),
            *(each["host"] for each in survivors),
        }
        if doubtful and self.lost_at is None:
            self.lost_at = time.monotonic()
        return AttemptResult(
            self._clean(outcome),
            began=self.began,
            step=self.heartbeats.step(),
            survivors=survivors,
            unanswered=unanswered,
            doubtful=sorted(doubtful),
            lost=len(self.losses),
            lost_at=self.lost_at,
        )

    async def _guarded(self, pool: AgentPool) -> Outcome | None:
        """The attempt up to the point where everything has ended or has to be stopped; the
        outcome where it is known without judging ends."""
        try:
            await self._interruptible(self._come_together(pool))
            await self._start(pool)
            return await self._watch(pool)
        except StartError as error:
            return error.outcome
        except _StopRequested:
            return judge_outcome([], 1, self.context.stop_requests.first)

    def _clean(self, outcome: Outcome) -> Outcome:
        return Outcome(
            outcome.exit,
            outcome.failure_class,
            self.redactor.value(outcome.root_cause),
            outcome.suspects,
        )

    async def _interruptible(self, work: Coroutine[Any, Any, None]) -> None:
        """Do the work unless somebody asks to stop meanwhile."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=POLL_SECONDS)
                self.context.observer.tick()
                if self.context.stop_requests.first and not task.done():
                    raise _StopRequested
            task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _come_together(self, pool: AgentPool) -> None:
        if self.job.cluster.device_type == "cuda":
            gpus = self.job.ranks_per_node
        else:
            gpus = 0
        await gather(pool, gpus=gpus, joined=self._joined)
        await reserve(pool, self.job, share=self.context.share)
        address, port = await rendezvous(pool, self.job)
        self.world = build_world(pool, self.job, self.command, address, port)
        write_world(self.run, self.world)
        for name, text in self.command.files.items():
            write_text(self.run.path / name, text)

    def _joined(self, hello: JoinedAgent) -> None:
        self.events.write_soon(
            AgentJoined(
                hello.node,
                hello.host,
                hello.facts.address,
                round(hello.clock_offset, 3),
                hello.facts.proof,
            )
        )

    async def _start(self, pool: AgentPool) -> None:
        """Start every rank. Raises StartError (8) with all that could not be started."""
        for folder in (
            self.folder.log(0).parent,
            self.folder.error(0).parent,
            self.folder.heartbeat(0).parent,
        ):
            folder.mkdir(parents=True, exist_ok=True)
        # a program that starts the node's ranks itself goes by the first of them
        if self.command.spawn == "per_rank":
            a_node = None
        else:
            a_node = 1
        assert self.world is not None
        for node, entry in enumerate(self.world.nodes):
            self.node_of |= dict.fromkeys(entry.ranks[:a_node], node)
        self.waiting = set(self.node_of)
        for node, entry in enumerate(self.world.nodes):
            processes = [
                self._process(self.world, node, local_rank, rank)
                for local_rank, rank in enumerate(entry.ranks[:a_node])
            ]
            pool.send(
                node,
                StartProcesses(tuple(processes), tuple(self.context.secrets)),
            )
        deadline = time.monotonic() + self.session.connect
        while self.waiting and not self.losses:
            if time.monotonic() > deadline:
                hosts = sorted({pool.host(self.node_of[rank]) for rank in self.waiting})
                raise StartError(
                    Exit.START,
                    "could not start all ranks",
                    [(host, "hung while starting its ranks") for host in hosts],
                    suspects=hosts,
                )
            await self._take_next(pool)
        if self.not_started:
            raise StartError(Exit.START, "could not start all ranks", self.not_started)
        self.session.forget_secrets()  # every agent has read them
        self.events.write(AllRanksStarted())
        self.began = True
        self.heartbeats.begin()

    def _process(self, world: World, node: int, local_rank: int, rank: int) -> ProcessSpec:
        return ProcessSpec(
            key=str(rank),
            argv=tuple(self.command.argv),
            env=rank_environment(world, node, local_rank, self.folder),
            cwd=str(self.command.cwd),
            log=str(self.folder.log(rank)),
            error=str(self.folder.error(rank)),
            heartbeat=True,
            output=False,
        )

    async def _watch(self, pool: AgentPool) -> Outcome | None:
        """Follow the ranks until none runs or all must be stopped; an outcome only for a hang."""
        deadline = float("inf")  # when ranks that still run are stopped
        seen = 0
        while self.running:
            await self._take_next(pool)
            for end in self.ends[seen:]:
                well = (
                    end.done
                    or end.code == Exit.PREEMPTED
                    or (end.code == Exit.DONE and self.context.stop_requests.first is not None)
                )
                if end.code == Exit.PREEMPTED and not self.heartbeats.stepping:
                    # whoever told that one did not tell its peers; ranks that make steps agree on
                    # it by themselves
                    self._request_save(pool)
                deadline = min(
                    deadline, time.monotonic() + (TEARDOWN_SECONDS if well else ECHO_SECONDS)
                )
            seen = len(self.ends)
            if self.losses:
                deadline = min(deadline, time.monotonic() + ECHO_SECONDS)
            if time.monotonic() > deadline:
                await self._stop_all(
                    pool,
                    (
                        "a rank has ended and its peers go on"
                        if not self.losses
                        else "contact with a host was lost"
                    ),
                )
                return None
            if await self._obey_stop_requests(pool):
                return None
            if deadline == float("inf") and (seconds := self.heartbeats.stalled()):
                return await self._hang(pool, seconds)
        return None

    async def _obey_stop_requests(self, pool: AgentPool) -> bool:
        """Do what was asked since last time; whether everything was stopped."""
        requests = self.context.stop_requests
        if requests.immediate:
            await self._stop_all(pool, "it was asked to stop at once")
            return True
        if requests.first and not self.save_announced:
            self.save_announced = True
            if requests.first == StopRequest.INTERRUPT:
                how = "Ctrl-C again stops at once"
            else:
                how = "a second signal stops at once"
            self.context.observer.notice(f"saving at the end of this step, then stopping; {how}")
            self._request_save(pool)
        return False

    def _request_save(self, pool: AgentPool) -> None:
        """Have all ranks save at the end of their step and leave; once."""
        if self.save_requested:
            return
        self.save_requested = True
        self.events.write(SaveRequested(sorted(self.running)))
        for node in pool.present:
            pool.send(node, SignalProcesses("USR1"))

    async def _hang(self, pool: AgentPool, seconds: float) -> Outcome:
        """Nobody moves: have all stacks written, name who is missing, stop."""
        self.context.observer.notice(
            f"no rank has moved for {seconds:.0f} s: looking at their stacks, then stopping"
        )
        nodes = pool.present
        for node in nodes:
            pool.send(node, DumpStacks(py_spy=True))
        deadline = time.monotonic() + self.stacks.seconds
        while time.monotonic() < deadline and not self.losses and not self.stacks.complete(nodes):
            await self._take_next(pool)
        self.stacks.write()
        hang = self.stacks.judge(
            self.heartbeats, self.running, lambda rank: pool.host(self.node_of[rank]), seconds
        )
        cause = hang.root_cause
        assert cause is not None
        self.events.write(
            HangDetected(cause["missing"], cause["silent"], cause["states"], cause["stacks"])
        )
        await self._stop_all(pool, "it hangs")
        return hang

    async def _take_next(self, pool: AgentPool) -> None:
        """Take in what has come, waiting a little for it; then let the view look."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(POLL_SECONDS):
                self._take(pool, *await pool.received.get())
        while not pool.received.empty():
            self._take(pool, *pool.received.get_nowait())
        self.context.observer.tick()

    def _take(self, pool: AgentPool, node: int, frame: Frame) -> None:
        host = pool.host(node)
        match frame:
            case HeartbeatReport():
                for key, beat in frame.beats.items():
                    self.heartbeats.take(int(key), beat)
            case ProcessStarted():
                self._started(int(frame.key), host, frame.pid)
            case StartFailed():
                self.waiting.discard(int(frame.key))
                self.not_started.append((host, f"rank {frame.key}: {frame.error}"))
            case ProcessEnded():
                self._ended(pool, node, frame)
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
                self._lost(pool, node, frame)

    def _started(self, rank: int, host: str, pid: int) -> None:
        self.waiting.discard(rank)
        self.running.add(rank)
        self._note(RankStarted(rank, host, pid))

    def _ended(self, pool: AgentPool, node: int, frame: ProcessEnded) -> None:
        rank = int(frame.key)
        self.waiting.discard(rank)
        self.running.discard(rank)
        time_here = frame.time - pool.hellos[node].clock_offset
        if frame.error:
            error = self._redacted_error(rank)
        else:
            error = None
        end = RankExit(
            rank=rank,
            host=pool.host(node),
            code=frame.code,
            time=time_here,
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
        """Tell of one rank. What is decided is decided by what we hold in memory: a full disk
        loses the line, not the run."""
        with contextlib.suppress(OSError):
            self.events.write_soon(event)

    def _redacted_error(self, rank: int) -> dict[str, Any] | None:
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

    def _lost(self, pool: AgentPool, node: int, frame: AgentLost) -> None:
        gone = {rank for rank, where in self.node_of.items() if where == node}
        if node not in self.stopped or gone & self.running:
            self.losses.append(
                LostContact(pool.host(node), frame.why, time.time() - frame.ago, frame.silent)
            )
            self.lost_at = max(self.lost_at or 0.0, time.monotonic() - frame.ago)
            # a full disk must not keep us from stopping the others
            with contextlib.suppress(OSError):
                self.events.write(ContactLost(node, pool.host(node), frame.why))
        self.running -= gone
        self.waiting -= gone

    async def _stop_all(self, pool: AgentPool, reason: str) -> list[SurvivingProcess]:
        """TERM, KILL after the grace, on every host; returns what outlived that, from those that
        answered."""
        grace = self.job.cluster.watch.grace
        if self.node_of:
            nodes = [node for node in pool.present if node not in self.stopped]
        else:
            nodes = []
        if nodes:
            for node in nodes:
                pool.send(node, StopProcesses(grace))
            if self.running:
                with contextlib.suppress(OSError):
                    self.events.write(RanksStopped(reason, sorted(self.running)))
            deadline = time.monotonic() + grace + STOP_SECONDS
            while time.monotonic() < deadline and any(
                node not in self.stopped and node not in pool.lost for node in nodes
            ):
                await self._take_next(pool)
        return [left for found in self.stopped.values() for left in found]
