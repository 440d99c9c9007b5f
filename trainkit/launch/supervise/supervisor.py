"""The supervisor of a run: one attempt after another until it is done, asked to stop, or out of
budgets. docs/dispatch.md says what dies when."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from trainkit.base.errors import ConfigError, Exit
from trainkit.base.files import write_json
from trainkit.base.process import identity
from trainkit.engines.contract import Command, Engine
from trainkit.engines.registry import ENGINES
from trainkit.jobs.resolved import read_job
from trainkit.jobs.resume_changes import changed_job
from trainkit.launch.hosts.hostfile import Host
from trainkit.launch.hosts.quarantine import quarantine_host
from trainkit.launch.launchers import LAUNCHERS, supervisor_address
from trainkit.launch.launchers.contract import Launcher
from trainkit.launch.protocol.frames import Accepted, CancelRun
from trainkit.launch.protocol.server import Connection, Server
from trainkit.launch.session import SECRETS
from trainkit.launch.supervise.agent_pool import stop_seconds
from trainkit.launch.supervise.attempt import Attempt
from trainkit.launch.supervise.attempt_context import AttemptContext, AttemptResult
from trainkit.launch.supervise.evaluations import EvaluationsBeside
from trainkit.launch.supervise.failure_rules import load_failure_rules
from trainkit.launch.supervise.notifications import Notifier
from trainkit.launch.supervise.observer import GuardedObserver, RunObserver
from trainkit.launch.supervise.orphan_sweep import (
    hosts_left_by_last_attempt,
    sweep_dead_agents,
)
from trainkit.launch.supervise.outcome import Outcome, StopRequest, judge_outcome
from trainkit.launch.supervise.rank_environment import secrets_of_ranks
from trainkit.launch.supervise.retry_policy import HostChoice, RetryBudgets
from trainkit.launch.supervise.root_watch import SIGN_SECONDS, RootWatch
from trainkit.launch.supervise.stop_requests import StopRequests
from trainkit.runs.events import (
    AttemptEnded,
    HostExcluded,
    HostSwept,
    RetryPlanned,
    RootStalled,
    StrangerRefused,
    ViewLost,
)
from trainkit.runs.folder import RunFolder
from trainkit.runs.record import SupervisorStatus, write_supervisor_status

if TYPE_CHECKING:
    from trainkit.plan.planner import Plan

CONTROL_SECONDS = 10.0  # that somebody who has proved itself has to say what it wants
LOOK_SECONDS = 1.0  # between two looks at whether the root answers
# before the tries that follow the first, second and later ones in a row that did not begin
PAUSES = (0.0, 30.0, 300.0)


class Supervisor:
    """All attempts of one run that follow each other without a person.

    Args:
        run: its folder, complete: job.json, launch/hosts.json, code.
        secrets: names and values; only the ranks' environment holds those that are theirs.
        stop_requests: what asks us to end the run.
        observer: how a person follows.
        share: run beside other runs on the same slots.
        launcher: another than the job's.
        engine: another than the job's.
    """

    def __init__(
        self,
        run: RunFolder,
        secrets: Mapping[str, str],
        stop_requests: StopRequests,
        observer: RunObserver,
        *,
        share: bool,
        launcher: Launcher | None = None,
        engine: Engine | None = None,
    ) -> None:
        self.run = run
        self.stop_requests = stop_requests
        self.observer = GuardedObserver(observer, self._note_lost_observer)
        self.share = share
        self.job = read_job(run.job)
        self.secrets = secrets_of_ranks(self.job, secrets)
        self.notifier = Notifier(run, self.job.notify, secrets)
        self.hosts = HostChoice.of_run(run)
        self.launcher = launcher or LAUNCHERS[self.job.cluster.launcher]
        self.engine = engine or ENGINES[self.job.engine]
        self.budgets = RetryBudgets(self.job.retries)
        self.server = Server(self._on_rejected)
        self.root = RootWatch(self._write_sign_of_life)
        self.pen = threading.Lock()  # of our sign: the last word must be written last
        self.attempt: Attempt | None = None
        self.fence_until = 0.0  # by time.monotonic(): ranks of hosts that we lost may live so long
        self.swept: set[str] = set()  # hosts of the last sweep, which may still be under way
        self.sweeping: asyncio.Task[None] | None = None  # of those hosts
        self.false_starts = 0  # attempts in a row whose ranks did not begin
        self.began = self.ended = self.goes_on = False

    async def supervise(self) -> Outcome:
        """Attempt after attempt; the last one's outcome. Never leaves a process behind on a host
        that can be reached."""
        await self.server.listen(self.address())
        self.server.handlers["control"] = self._control
        former = self._left_before()
        self.root.start()
        noting = asyncio.create_task(self._note_stalls())
        self.notifier.open()
        evaluations = EvaluationsBeside(self.run, self.job, self.observer.notice)
        try:
            await self._fence(*former)
            if (outcome := await self._stop_between_attempts(None)) is not None:
                return outcome
            hosts = self._choose_hosts()
            while True:
                end = await self._one_attempt(hosts)
                if not self._starts_again(end):
                    if end.outcome.failure_class == "success":
                        await evaluations.finish(self._wait, self.stop_requests)
                    return end.outcome
                hosts = self._choose_hosts()
                if any(host.name in self.swept for host in hosts):
                    # it would end what comes there now
                    await self._finish_sweep()
                    await self._until_lost_hosts_have_stopped()
                await self._pause(end)
                if (outcome := await self._stop_between_attempts(end)) is not None:
                    return outcome
        finally:
            await evaluations.close()
            noting.cancel()
            ending = [noting] if self.sweeping is None else [noting, self.sweeping]
            await asyncio.gather(*ending, return_exceptions=True)
            if self.attempt is not None:
                await self.attempt.close_pool()
                self.attempt.events.close()
            self.root.close()
            self.ended = True
            # the attempt's last event says how it ended, and that we are gone can be seen
            with contextlib.suppress(OSError):
                self._write_sign_of_life()
            await self.server.close()
            # the record is complete, and nothing of the run is left: only messages wait
            await asyncio.to_thread(self.notifier.close)

    def _left_before(self) -> tuple[list[Host], float]:
        """What `_fence` has to see ended: see `hosts_left_by_last_attempt`."""
        return hosts_left_by_last_attempt(self.run, self.hosts.hosts)

    def address(self) -> str:
        """Where to listen: an address of this machine that all agents reach."""
        if self.launcher.name == "local":
            return "127.0.0.1"
        return supervisor_address(self.job.cluster, self.hosts.hosts)

    async def _fence(self, hosts: Sequence[Host], seen: float) -> None:
        """Let nothing of an earlier attempt write beside the first of ours: ask its hosts; one
        that cannot prove that nothing is left has until its lease and its grace are over."""
        if not hosts:
            return
        number = self.run.attempts()[-1].number
        # who wants us to stop finds the token of that attempt
        with contextlib.suppress(OSError, ValueError):
            self.server.token = bytes.fromhex(
                (self.run.session(number) / "token").read_text().strip()
            )
        self._write_sign_of_life()
        if await self._sweep(hosts) == len(hosts):
            return
        until = min(seen, time.time()) + SIGN_SECONDS + stop_seconds(self.job)
        if until > time.time():
            line = (
                "not every host of the attempt before can be asked: waiting"
                f" {until - time.time():.0f} s, until what it left has stopped by itself"
            )
            self.observer.notice(line)
        await self._wait(until - time.time())

    async def _stop_between_attempts(self, end: AttemptResult | None) -> Outcome | None:
        """The outcome where somebody asks to stop while no attempt is under way; `end`: of the
        one before, whose last word that becomes."""
        if not self.stop_requests.first:
            return None
        outcome = judge_outcome([], 1, self.stop_requests.first)
        if end is not None:
            assert self.attempt is not None
            end.outcome = outcome
            await self.attempt.dismiss(end)
            end.budget = ""
            self._record_end(end)
        return outcome

    async def _pause(self, end: AttemptResult) -> None:
        """Wait before another try where one did not even begin: a switch that reboots takes
        minutes, and the budget is small."""
        self.false_starts = 0 if end.began else self.false_starts + 1
        if self.false_starts:
            await self._wait(PAUSES[min(self.false_starts, len(PAUSES)) - 1])

    async def _wait(self, seconds: float) -> None:
        """Wait, unless somebody asks to stop."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.stop_requests.first:
            self.observer.tick()
            await asyncio.sleep(0.1)

    async def _one_attempt(self, hosts: Sequence[Host]) -> AttemptResult:
        former = self.run.attempts()
        for old in former:  # what a supervisor that was killed could not take away
            (self.run.session(old.number) / SECRETS).unlink(missing_ok=True)
        number = max((a.number for a in former), default=0) + 1
        first = self.attempt is None
        self._shrink(hosts)
        self.engine.before_attempt(self.job, self.run)
        command = self.engine.command(self.job, self.run, number)
        context = AttemptContext(
            self.launcher,
            self.server,
            self.secrets,
            load_failure_rules(self.job.cluster),
            self.share,
            self.stop_requests,
            self.observer,
            self.root,
            self._until_lost_hosts_have_stopped,
        )
        kept = None
        if self.attempt is not None:
            kept = await self.attempt.agents_for_next()
            self.attempt.events.close()
        ready = (*hosts, *self._standbys(hosts, command))
        self.attempt = attempt = Attempt(self.run, number, self.job, ready, command, context, kept)
        attempt.events.on_write = functools.partial(self.notifier.on_event, number)
        attempt.record_start()
        self._write_sign_of_life()
        if first:
            self.observer.begin(self.run)
        try:
            end = await attempt.execute()
        except BaseException as error:
            why = f"the supervisor failed: {type(error).__name__}: {error}"
            end = AttemptResult(Outcome(Exit.BUG, "infra", {"message": why}))
            self._record_end(end)
            attempt.events.close()
            raise
        end = self._judge(end)
        if not end.again:
            await attempt.dismiss(end)
        self._record_end(end)
        if end.uncertain:
            await self._finish_sweep()
            uncertain = [host for host in ready if host.name in end.uncertain]
            before = self.fence_until
            if end.lost_at is not None:
                self.fence_until = max(before, end.lost_at + stop_seconds(self.job))
            self.swept = set(end.uncertain)
            self.sweeping = asyncio.create_task(self._sweep_uncertain(uncertain, before))
            if not end.again:
                await self._finish_sweep()
        return end

    async def _finish_sweep(self) -> None:
        if self.sweeping is not None:
            await self.sweeping

    async def _sweep(self, hosts: Sequence[Host]) -> int:
        """End what dead agents have left: their keepers see to it, but who kills an agent
        may have killed its keeper too. Returns how many hosts have proved that nothing is left."""
        if not hosts:
            return 0
        reports = await sweep_dead_agents(self.run, self.job.cluster, hosts, self.launcher)
        if self.attempt is not None:
            for report in reports:
                self.attempt.events.write(HostSwept(**asdict(report)))
        return sum(report.error is None and not report.left for report in reports)

    async def _sweep_uncertain(self, hosts: Sequence[Host], fence: float) -> None:
        """Once every host has proved that nothing is left, nothing of it need be waited for.
        `fence`: until when there is to be waited all the same."""
        if await self._sweep(hosts) == len(hosts):
            self.fence_until = fence

    def _judge(self, end: AttemptResult) -> AttemptResult:
        """The end with its verdict: whether there will be another attempt."""
        outcome = end.outcome
        if self.stop_requests.first or outcome.failure_class in ("success", "cancelled"):
            return end
        self.began = self.began or end.began
        cause = outcome.root_cause or {}
        whys = {row["host"]: row["why"] for row in cause.get("hosts", ())}
        suspects = {host: str(whys.get(host) or cause.get("message")) for host in outcome.suspects}
        if len(self.hosts.hosts) == 1:
            suspects = {}
        # this machine, its network or the shared root is to blame, not all of them
        if 2 * max(len(suspects), end.lost) > max(2, self.job.nodes):
            suspects = {}
        self.hosts.excluded |= suspects
        if not self.began and not (suspects and len(self.hosts.available()) >= self.job.nodes):
            return end  # a person waits for this start, and no spare can mend it
        # nobody asked us, and nothing came of it
        unsaved = outcome.failure_class == "preempted" and not cause.get("saved", True)
        verdict = self.budgets.decide(end, "infra" if unsaved else "")
        end.again = verdict == "again"
        self.goes_on = end.again
        self._exclude_hosts(suspects)
        if verdict == "no-progress":
            cause = {**cause, "class": "no-progress"}
            cause["message"] = (
                f"failed {self.budgets.same_step} times in the same way at step {end.step}:"
                f" {cause.get('message')}"
            )
            end.outcome = Outcome(Exit.NO_PROGRESS, "no-progress", cause, outcome.suspects)
        return end

    def _exclude_hosts(self, suspects: Mapping[str, str]) -> None:
        """Say which hosts the next attempt will not have, and keep them from other runs for a
        while; but never for what a person who tries to start has still to mend."""
        assert self.attempt is not None
        for host, why in suspects.items():
            # else the `resume` that is advised could not begin
            if self.began and (self.goes_on or len(self.hosts.available()) >= self.job.nodes):
                quarantine_host(
                    self.run.root, host, why, self.run.id, self.job.cluster.quarantine_seconds
                )
            self.attempt.events.write(HostExcluded(host, why))

    def _record_end(self, end: AttemptResult) -> None:
        """Write how the attempt ended."""
        assert self.attempt is not None
        outcome = end.outcome
        self.attempt.events.write(
            AttemptEnded(
                int(outcome.exit),
                outcome.root_cause,
                end.step,
                end.survivors,
                end.unanswered,
                outcome.failure_class,
                # said here and not in a later event: we may be killed between the two
                end.budget or None,
            )
        )

    def _starts_again(self, end: AttemptResult) -> bool:
        """Say what follows, where another attempt does."""
        assert self.attempt is not None
        if not end.again:
            return False
        number = self.attempt.folder.number
        failed = (
            f"attempt {number} failed ({end.outcome.failure_class}):"
            f" {(end.outcome.root_cause or {}).get('message')}"
        )
        left_out = f"; without {', '.join(self.hosts.excluded)}" if self.hosts.excluded else ""
        self.observer.notice(f"{failed}; going on as attempt {number + 1}{left_out}")
        self.attempt.events.write(
            RetryPlanned(
                number + 1,
                left_out=sorted(self.hosts.excluded),
                failure_class=end.outcome.failure_class,
            )
        )
        return True

    def _choose_hosts(self) -> tuple[Host, ...]:
        """Hosts of the next attempt, fewer than it had where the job can do with them."""
        return self.hosts.choose(
            self.job.nodes,
            lambda nodes: self.job.retries.shrink and self._shrunk_plan(nodes) is not None,
            self.attempt.ready_hosts if self.attempt is not None else (),
        )

    def _standbys(self, hosts: Sequence[Host], command: Command) -> Sequence[Host]:
        """Spare hosts whose agents wait with all that ranks need imported, where these are forked
        from that."""
        if command.parent is None:
            return ()
        others = {host.name for host in hosts} | self.swept
        return [host for host in self.hosts.available() if host.name not in others]

    def _shrink(self, hosts: Sequence[Host]) -> None:
        """Change the job where there are fewer hosts than it had."""
        if len(hosts) < self.job.nodes and (plan := self._shrunk_plan(len(hosts))) is not None:
            left = f"{len(hosts)} of {self.job.nodes} hosts are left"
            written, self.job = changed_job(self.run.job, [f"nodes={len(hosts)}"])
            self.observer.notice(f"{left}: going on with {self.job.world_size} ranks")
            write_json(self.run.job, written)
            write_json(self.run.plan, plan.to_json())

    def _shrunk_plan(self, nodes: int) -> Plan | None:
        """The plan on fewer nodes; None where it or the engine objects, which may read a checkpoint
        on as many ranks as wrote it only."""
        from trainkit.plan.planner import make_plan  # few runs do, and all would wait for it

        try:
            _, job = changed_job(self.run.job, [f"nodes={nodes}"])
        except ConfigError:
            return None
        plan = make_plan(job, rules=self.engine.rules)
        if plan.objections or self.engine.problems(job):
            return None
        return None if self.engine.resume_problems(job, self.run) else plan

    async def _until_lost_hosts_have_stopped(self) -> None:
        """Ranks of a host that we lost end when its lease does, if it cannot tell that they
        have; two attempts must never write at the same time."""
        if self.sweeping is not None:
            left = max(0.0, self.fence_until - time.monotonic())
            await asyncio.wait({self.sweeping}, timeout=left)
        if (seconds := self.fence_until - time.monotonic()) > 0:
            await self._wait(seconds)

    def _note_lost_observer(self, reason: str) -> None:
        if self.attempt is not None:
            self.attempt.events.write(ViewLost(reason))

    async def _note_stalls(self) -> None:
        """Say that the root does not answer, and write down for how long it did not."""
        said = False
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if not said and (seconds := self.root.stalled()):
                said = True
                self.observer.notice(
                    f"{self.run.root} has not answered for {seconds:.0f} s: the run waits for it"
                )
            while self.root.stalls:
                said = False
                seconds = self.root.stalls.popleft()
                if self.attempt is not None:
                    with contextlib.suppress(OSError):
                        self.attempt.events.write_soon(
                            RootStalled(str(self.run.root), round(seconds, 1))
                        )

    def _write_sign_of_life(self) -> None:
        """Say where we are and that we live."""
        with self.pen:
            who = identity()
            if self.attempt:
                number = self.attempt.folder.number
            else:
                number = max((a.number for a in self.run.attempts()), default=0)
            status = SupervisorStatus(
                identity=who,
                host=who.host,
                time=time.time(),
                attempt=number,
                address=self.server.address,
                port=self.server.port,
                ended=self.ended,
            )
            write_supervisor_status(self.run, status)

    def _on_rejected(self, peer: str, why: str) -> None:
        if self.attempt is not None:
            with contextlib.suppress(OSError):
                self.attempt.events.write(StrangerRefused(peer, why))

    async def _control(self, connection: Connection, node: int) -> None:
        """Somebody who can read the session's token wants something."""
        async with asyncio.timeout(CONTROL_SECONDS):
            frame = await connection.receive()
        if frame is not None and frame["type"] == CancelRun.TYPE:
            if CancelRun.from_json(frame).save:
                self.stop_requests.request_save(StopRequest.SAVE)
            else:
                self.stop_requests.request_stop()
            connection.send(Accepted())
            await connection.finish()


def supervise(
    run: RunFolder,
    secrets: Mapping[str, str],
    observer: RunObserver,
    *,
    share: bool,
    launcher: Launcher | None = None,
    engine: Engine | None = None,
) -> Outcome:
    """Supervise a run to its end in this process's main thread; arguments as of Supervisor. The
    caller holds the run's lock."""
    with StopRequests().handling_signals() as stop_requests:
        return asyncio.run(
            Supervisor(
                run, secrets, stop_requests, observer, share=share, launcher=launcher, engine=engine
            ).supervise()
        )
