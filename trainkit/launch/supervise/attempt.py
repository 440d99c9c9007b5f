"""One attempt of a run: its agents brought together, the ranks started and watched, all stopped
at the first bad exit, the truth judged."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Collection, Coroutine, Sequence
from dataclasses import replace

from trainkit.base.errors import Exit
from trainkit.base.files import write_text
from trainkit.base.process import identity
from trainkit.base.redact import Redactor
from trainkit.engines.contract import Command
from trainkit.jobs.schema import Job
from trainkit.launch.hosts.hostfile import Host
from trainkit.launch.protocol.frames import (
    DumpStacks,
    ProcessSpec,
    SignalProcesses,
    StartProcesses,
    StopProcesses,
)
from trainkit.launch.supervise.agent_pool import AgentPool
from trainkit.launch.supervise.attempt_context import (
    AttemptContext,
    AttemptResult,
    new_session,
    outcome_of_error,
)
from trainkit.launch.supervise.hang import StackDumps, hang_event
from trainkit.launch.supervise.heartbeats import Heartbeats
from trainkit.launch.supervise.outcome import (
    Outcome,
    RankExit,
    StopRequest,
    judge_outcome,
)
from trainkit.launch.supervise.rank_environment import (
    parent_frame,
    rank_environment,
    started_ranks,
)
from trainkit.launch.supervise.rank_tracker import RankTracker
from trainkit.launch.supervise.rendezvous import (
    StartError,
    build_world,
    gather,
    rendezvous,
    reserve,
)
from trainkit.runs.events import (
    AllRanksStarted,
    AttemptStarted,
    EventLog,
    RanksStopped,
    SaveRequested,
)
from trainkit.runs.folder import RunFolder
from trainkit.runs.world import HOSTFILE, RunWorld, write_world

POLL_SECONDS = 0.05
# how long peers of a failed rank have to write down their own view before they are stopped
ECHO_SECONDS = 0.5
# from the good end of one rank to that of the last: they end at the same step, but rank 0 has
# reports to finish (W&B waits up to 60 s)
TEARDOWN_SECONDS = 90.0
STOP_SECONDS = 8.0  # beyond the grace, for an agent to prove that nothing is left


class _StopRequested(Exception):
    """Somebody asked to stop before the ranks ran."""


class Attempt:
    """One attempt.

    Args:
        run: the run.
        number: the attempt's number; its folders do not exist yet.
        job: as the attempt runs it; `job.nodes` is the number of hosts.
        hosts: nodes in order of ranks, then those that stand by.
        command: what the ranks run.
        context: of the supervisor.
        kept: the agents of the attempt before, those that are left of them; None: new ones.
    """

    def __init__(
        self,
        run: RunFolder,
        number: int,
        job: Job,
        hosts: Sequence[Host],
        command: Command,
        context: AttemptContext,
        kept: AgentPool | None = None,
    ) -> None:
        self.run = run
        self.job = job
        self.command = command
        self.context = context
        self.folder = run.attempt(number)
        self.kept = kept
        self.pool: AgentPool | None = kept  # whose agents are there
        self.session = kept.session if kept is not None else new_session(run, number, job, hosts)
        self.hosts = hosts[: job.nodes]
        self.agents: Sequence[int] = range(job.nodes)  # of these hosts, by their numbers
        self.new_agents: Sequence[int] = self.agents  # those of them that have no slots yet
        self.events = EventLog(self.folder)
        self.redactor = Redactor(context.secrets.values())
        self.clock = context.root.clock
        heartbeats = Heartbeats(self.folder, job.cluster.watch, self.clock)
        self.ranks = RankTracker(self.folder, self.events, self.redactor, heartbeats)
        self.world: RunWorld | None = None  # once the agents have come together
        self.save_announced = False
        self.save_requested = False
        self.began = False
        self.asked: set[int] = set()  # nodes that were asked to stop what runs there
        self.asked_again = False  # one of them is slow: its answers may come in the next attempt

    def record_start(self) -> None:
        """Write the first event: from now on the run's state hangs on this process's life."""
        self.events.write(
            AttemptStarted(
                self.run.id, self.folder.number, identity().to_json(), self.job.world_size
            )
        )

    async def execute(self) -> AttemptResult:
        """Start the ranks, follow them to their end, judge it. Leaves no rank on any host that can
        be reached; where the agents `can_go_on`, they wait for the next attempt or `dismiss`.
        Writes no AttemptEnded."""
        try:
            pool = await self._open_pool()
            try:
                outcome = await self._run_ranks(pool)
            finally:
                await self._stop_all(pool, "the supervisor ends")
            outcome = outcome or self._judge()
            pool.run_ends = outcome.is_settled
        except Exception as error:
            outcome = outcome_of_error(error)
        finally:
            self.session.forget_secrets()
            if not self.can_go_on:
                await self.close_pool()
        return self._result(outcome)

    def _judge(self) -> Outcome:
        ranks = self.ranks
        first = self.context.stop_requests.first
        return judge_outcome(
            ranks.ends, len(ranks.node_of), first, ranks.losses, self.context.rules
        )

    async def _open_pool(self) -> AgentPool:
        """New agents on their way, beside those that are left of the attempt before."""
        context = self.context
        parent = parent_frame(self.command, self.job.cluster.watch.start)
        if self.kept is not None:
            self.kept.session.write_secrets(context.secrets)
            # who looks for this attempt's session finds that of the agents
            self.run.session(self.folder.number).symlink_to(self.kept.session.folder.name)
            self.folder.transports.symlink_to(f"../{self.kept.session.attempt}/launch")
            self.new_agents = self.kept.use(self.hosts)
            self.agents = self.kept.nodes
            self.kept.start_parents(parent)
            return self.kept
        server = context.server
        self.session.write(self.run.root, server.address, server.port, context.secrets)
        standbys = len(self.session.hosts) - len(self.hosts)
        pool = AgentPool(self.session, context.launcher, server, self.clock, standbys)
        pool.start_parents(parent)
        self.pool = pool
        await pool.open()
        return pool

    async def close_pool(self) -> None:
        """Let the agents end, if there are any."""
        if self.pool is not None:
            pool = self.pool
            self.pool = None
            await pool.close()

    @property
    def ready_hosts(self) -> Collection[str]:
        """Where agents are that another attempt may have."""
        pool = self.pool
        return {pool.host(node) for node in pool.present} if pool is not None else ()

    async def agents_for_next(self) -> AgentPool | None:
        """The agents, if they can start the ranks of another attempt; else they end."""
        if self.can_go_on:
            return self.pool
        await self.close_pool()
        return None

    @property
    def can_go_on(self) -> bool:
        """Whether the agents can start the ranks of another attempt: some are there, if only those
        that stand by, and of those in use all have said that nothing is left of the ranks of this
        one."""
        ranks = self.ranks
        return (
            self.keeps_agents
            and self.pool is not None
            and self.began
            and not ranks.starting
            and not ranks.survivors
            and not self.asked_again
            and bool(self.pool.present)
            and ranks.stopped.keys() >= {*self.pool.at_work}
        )

    @property
    def keeps_agents(self) -> bool:
        """Whether the rank parent stays where all else is stopped: another attempt may follow."""
        done = sum(end.done for end in self.ranks.ends)
        return (
            self.command.parent is not None
            and self.context.stop_requests.first is None
            and done < len(self.ranks.node_of)
        )

    async def dismiss(self, end: AttemptResult) -> None:
        """No attempt follows on these agents: stop all that they have started, and let them end.
        `end` says then what is left."""
        if self.pool is None:
            return
        self.ranks.stopped.clear()
        self.pool.run_ends = end.outcome.is_settled
        try:
            await self._stop_all(self.pool, "no attempt follows", everything=True)
        finally:
            await self.close_pool()
        self._tell_left(end)

    def _result(self, outcome: Outcome) -> AttemptResult:
        clean = replace(outcome, root_cause=self.redactor.value(outcome.root_cause))
        end = AttemptResult(clean, began=self.began, step=self.ranks.heartbeats.step())
        self._tell_left(end)
        return end

    def _tell_left(self, end: AttemptResult) -> None:
        """What hosts have said so far of what is left on them."""
        ranks = self.ranks
        lost = {each.host for each in ranks.losses}
        agents = sorted({*self.agents, *self.asked} - ranks.stopped.keys()) if ranks.node_of else ()
        end.survivors = ranks.survivors
        end.unanswered = [self.session.hosts[agent].name for agent in agents]
        uncertain = {*end.unanswered, *lost, *(each["host"] for each in ranks.survivors)}
        if uncertain - lost:
            ranks.lost_at = time.monotonic()
        end.uncertain = sorted(uncertain)
        end.lost = len(ranks.losses)
        end.lost_at = ranks.lost_at

    async def _run_ranks(self, pool: AgentPool) -> Outcome | None:
        """The attempt up to the point where everything has ended or has to be stopped; the
        outcome where it is known without judging ends."""
        try:
            await self._interruptible(self._prepare_hosts(pool))
            await self._start(pool)
            return await self._watch(pool)
        except StartError as error:
            return error.outcome
        except _StopRequested:
            return judge_outcome([], 1, self.context.stop_requests.first)

    async def _interruptible(self, work: Coroutine[object, object, None]) -> None:
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

    async def _prepare_hosts(self, pool: AgentPool) -> None:
        """Agents there and alike, slots held, rank 0's port proved, world.json written."""
        gpus = 0
        if self.job.cluster.device_type == "cuda":
            gpus = self.job.ranks_per_node
        try:
            await gather(pool, self.new_agents, own_code=self.command.own_code, gpus=gpus)
        finally:
            self.ranks.note_agents(pool)
        await reserve(pool, self.new_agents, self.job, share=self.context.share)
        address, port = await rendezvous(pool, self.command.port)
        number = self.folder.number
        self.world = build_world(pool, number, self.job, self.command, address, port)
        await self.context.fence()
        write_world(self.run, self.world)
        for name, text in self.command.files.items():
            write_text(self.run.path / name, text)
        if self.command.spawn == "per_run":
            write_text(self.run.path / HOSTFILE, self.world.hostfile)

    async def _start(self, pool: AgentPool) -> None:
        """Start every rank, once its rank parent has imported what it needs. Raises StartError (8)
        with all that could not be started, and _StopRequested."""
        for path in (self.folder.log(0), self.folder.error(0), self.folder.heartbeat(0)):
            path.parent.mkdir(parents=True, exist_ok=True)
        self._send_processes(pool)
        for node, gone in list(pool.lost.items()):  # while others were asked
            self.ranks.handle(pool, node, gone)
        deadline = self.clock() + self.session.connect
        if self.command.parent is not None:
            deadline += self.job.cluster.watch.start
        while self.ranks.starting and not self.ranks.losses:
            if self.context.stop_requests.first:
                raise _StopRequested
            if self.clock() > deadline:
                hosts = sorted({self._host_of(pool, rank) for rank in self.ranks.starting})
                raise StartError(
                    Exit.START,
                    "could not start all ranks",
                    [(host, "hung while starting its ranks") for host in hosts],
                    suspects=hosts,
                )
            await self._handle_frames(pool)
        if self.ranks.start_failures:
            raise StartError(Exit.START, "could not start all ranks", self.ranks.start_failures)
        self.session.forget_secrets()  # every agent has read them
        self.events.write(AllRanksStarted())
        self.began = True
        self.ranks.heartbeats.begin()

    def _send_processes(self, pool: AgentPool) -> None:
        """Have each agent start its ranks. A program that starts the node's ranks itself goes by
        the first of them."""
        assert self.world is not None
        started = started_ranks(self.world, self.command.spawn)
        by_agent = list(zip(pool.nodes, started, strict=True))
        self.ranks.expect({rank: agent for agent, ranks in by_agent for rank in ranks})
        for node, (agent, ranks) in enumerate(by_agent):
            processes = tuple(
                self._process(self.world, node, local_rank, rank)
                for local_rank, rank in enumerate(ranks)
            )
            pool.send(agent, StartProcesses(processes, tuple(self.context.secrets)))

    def _process(self, world: RunWorld, node: int, local_rank: int, rank: int) -> ProcessSpec:
        return ProcessSpec(
            key=str(rank),
            argv=tuple(self.command.argv),
            env=rank_environment(world, node, local_rank, self.folder),
            cwd=str(self.command.cwd),
            log=str(self.folder.log(rank)),
            error=str(self.folder.error(rank)),
            heartbeat=True,
            output=False,
            forked=self.command.parent is not None,
            memory=self.job.checkpoint.memory_interval is not None,
        )

    def _host_of(self, pool: AgentPool, rank: int) -> str:
        return pool.host(self.ranks.node_of[rank])

    async def _watch(self, pool: AgentPool) -> Outcome | None:
        """Follow the ranks until none runs or all must be stopped; an outcome only for a hang."""
        deadline = float("inf")  # when ranks that still run are stopped
        seen = 0
        while self.ranks.running:
            await self._handle_frames(pool)
            for end in self.ranks.ends[seen:]:
                deadline = min(deadline, self.clock() + self._peers_have(pool, end))
            seen = len(self.ranks.ends)
            if self.ranks.losses:
                deadline = min(deadline, self.clock() + ECHO_SECONDS)
            if self.clock() > deadline:
                reason = "a rank has ended and its peers go on"
                if self.ranks.losses:
                    reason = "contact with a host was lost"
                await self._stop_all(pool, reason)
                return None
            if await self._obey_stop_requests(pool):
                return None
            if deadline == float("inf") and (hang := await self._find_hang(pool)):
                return hang
        return None

    def _peers_have(self, pool: AgentPool, end: RankExit) -> float:
        """Seconds that the peers of a rank that ended have until they are stopped."""
        if end.code == Exit.PREEMPTED and not self.ranks.heartbeats.stepping:
            # somebody asked that one rank to save, and not its peers; ranks that make steps agree
            # on it by themselves
            self._request_save(pool)
        as_asked = end.code == Exit.DONE and self.context.stop_requests.first is not None
        if end.done or end.code == Exit.PREEMPTED or as_asked:
            return TEARDOWN_SECONDS
        return ECHO_SECONDS

    async def _obey_stop_requests(self, pool: AgentPool) -> bool:
        """Do what was asked since last time; whether everything was stopped."""
        requests = self.context.stop_requests
        if self.ranks.leaving:
            requests.host_leaves()
        if requests.immediate:
            await self._stop_all(pool, "it was asked to stop at once")
            return True
        if requests.first and not self.save_announced:
            self.save_announced = True
            how = "a second signal stops at once"
            if requests.first == StopRequest.INTERRUPT:
                how = "Ctrl-C again stops at once"
            self.context.observer.notice(f"saving at the end of this step, then stopping; {how}")
            self._request_save(pool)
        return False

    def _request_save(self, pool: AgentPool) -> None:
        """Have all ranks save at the end of their step and leave; once."""
        if self.save_requested:
            return
        self.save_requested = True
        self.events.write(SaveRequested(sorted(self.ranks.running)))
        for node in pool.at_work:
            pool.send(node, SignalProcesses("USR1"))

    async def _find_hang(self, pool: AgentPool) -> Outcome | None:
        """Where nobody moves: have all stacks written, name who is missing, stop."""
        ranks = self.ranks
        if not (seconds := ranks.heartbeats.stalled()):
            return None
        notice = self.context.observer.notice
        notice(f"no rank has moved for {seconds:.0f} s: looking at their stacks")
        ranks.stacks = StackDumps(self.folder)
        nodes = pool.at_work
        for node in nodes:
            pool.send(node, DumpStacks(py_spy=True))
        deadline = time.monotonic() + ranks.stacks.seconds
        while time.monotonic() < deadline and not ranks.losses and not ranks.stacks.complete(nodes):
            await self._handle_frames(pool)
        ranks.stacks.write()
        if ranks.stacks.may_pass and ranks.heartbeats.bear(seconds):
            return None
        hang = ranks.stacks.judge(
            ranks.heartbeats, ranks.running, lambda rank: self._host_of(pool, rank), seconds
        )
        self.events.write(hang_event(hang))
        await self._stop_all(pool, "it hangs")
        return hang

    async def _handle_frames(self, pool: AgentPool) -> None:
        """Take in what has come, waiting a little for it; then let the view look."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(POLL_SECONDS):
                self.ranks.handle(pool, *await pool.received.get())
        while not pool.received.empty():
            self.ranks.handle(pool, *pool.received.get_nowait())
        self.ranks.note_agents(pool)
        self.context.observer.tick()

    async def _stop_all(self, pool: AgentPool, reason: str, *, everything: bool = False) -> None:
        """TERM, KILL after the grace, on every host that has not said yet what is left on it: to
        all that runs there, but the rank parent where the agents may go on and not `everything`
        is to end."""
        if not self.ranks.node_of:
            return
        stopped = self.ranks.stopped
        asked = pool.present if everything else pool.at_work
        nodes = [node for node in asked if node not in stopped]
        if not nodes:
            return
        grace = self.job.stop_grace
        keep_parent = self.keeps_agents and not everything
        if self.context.stop_requests.killed_soon:
            grace = 0.0
        for node in nodes:
            pool.send(node, StopProcesses(grace, keep_parent=keep_parent))
        self.asked_again = self.asked_again or not self.asked.isdisjoint(nodes)
        self.asked.update(nodes)
        if self.ranks.running:
            with contextlib.suppress(OSError):
                self.events.write(RanksStopped(reason, sorted(self.ranks.running)))
        deadline = time.monotonic() + grace + STOP_SECONDS
        while time.monotonic() < deadline and any(
            node not in stopped and node not in pool.lost for node in nodes
        ):
            await self._handle_frames(pool)
