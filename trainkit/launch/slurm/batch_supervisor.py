"""The supervisor inside a batch job: Slurm's signals mean save, and Slurm decides whether and
where the run goes on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Literal

from trainkit.base.errors import Exit, TrainkitError
from trainkit.launch.hosts.hostfile import Host
from trainkit.launch.launchers import supervisor_address
from trainkit.launch.launchers.contract import Launcher
from trainkit.launch.slurm.allocation import SlurmAllocation, hostnames, slurm_output
from trainkit.launch.slurm.batch_script import LIMIT_SHARE, signal_seconds
from trainkit.launch.slurm.sbatch import note_end
from trainkit.launch.slurm.squeue import (
    failed_nodes,
    job_details,
    job_statuses,
    kill_wait,
    requeue,
    usable_nodes,
)
from trainkit.launch.supervise.attempt_context import AttemptResult
from trainkit.launch.supervise.observer import RunObserver
from trainkit.launch.supervise.outcome import Outcome, StopRequest
from trainkit.launch.supervise.queued_supervisor import QueuedSupervisor
from trainkit.launch.supervise.stop_requests import StopRequests
from trainkit.runs.events import (
    EventLog,
    HostExcluded,
    RequeueFailed,
    RootCause,
)
from trainkit.runs.folder import RunFolder
from trainkit.runs.slurm import change_slurm_job, read_slurm_jobs

ASK_AGAIN_SECONDS = 60.0  # a slurmctld that does not answer
LOOK_SECONDS = 0.2  # between two looks at whether Slurm's TERM has come
# before Slurm's KILL, to end ranks that have not left, ask Slurm why, and record it
LAST_WORD_SECONDS = 5.0
Kind = Literal["time-limit", "preemption", "infra", ""]


class BatchStopRequests(StopRequests):
    """USR1 (--signal) and TERM (scancel, preemption, requeue, the time limit itself) ask to
    save; a later one asks for no more: KILL comes by itself."""

    signals = (signal.SIGUSR1, signal.SIGTERM)

    def __init__(self) -> None:
        super().__init__()
        self.signalled: int | None = None  # by which signal Slurm asked first
        self.term_at: float | None = None  # when its last TERM came, by time.monotonic()
        # Slurm's USR1 comes long before it must: the time limit is short, and our own clock will
        # tell
        self.too_early = False

    def handled_signals(self) -> list[int]:
        return list(self.signals)  # ignored so far, by the script's trap

    def _on_signal(self, number: int, frame: object) -> None:
        if number == signal.SIGUSR1 and self.too_early:
            self.too_early = False  # Slurm's own comes once; who sends another means it
            return
        if number == signal.SIGTERM:
            self.term_at = time.monotonic()
        self._asked(number)

    def expect_too_early(self) -> None:
        """Slurm's USR1 counts for nothing, whether it has come or is still to come."""
        if self.signalled == signal.SIGUSR1:
            self.first = self.signalled = None
        else:
            self.too_early = True

    def time_is_near(self) -> None:
        """The job's time is nearly over."""
        self._asked(signal.SIGUSR1)

    def nodes_are_taken(self) -> None:
        """Slurm takes the nodes back, and has said so before anybody listened."""
        self._asked(signal.SIGTERM)

    def kill_is_near(self) -> None:
        """Slurm's KILL will end ranks and supervisor alike."""
        self.immediate = self.killed_soon = True

    def _asked(self, number: int) -> None:
        if self.first is None:
            self.signalled = number
        self.request_save(StopRequest.SAVE)


class BatchSupervisor(QueuedSupervisor):
    """As QueuedSupervisor, for the allocation `current_allocation`."""

    def __init__(
        self,
        run: RunFolder,
        secrets: Mapping[str, str],
        stop_requests: BatchStopRequests,
        observer: RunObserver,
        granted: SlurmAllocation,
        launcher: Launcher | None = None,
    ) -> None:
        super().__init__(run, secrets, stop_requests, observer, launcher)
        self.batch_requests = stop_requests
        self.granted = granted
        self.failed_nodes: list[str] = []  # nodes

        self.requeued_by_slurm = False  # Slurm has put the job back by itself

    def address(self) -> str:
        """Reached from the other nodes, and from where the job was submitted: `cancel` is typed
        there."""
        address = supervisor_address(self.job.cluster, self.hosts.hosts)
        if address == "127.0.0.1":
            with contextlib.suppress(TrainkitError):
                return supervisor_address(
                    self.job.cluster, [Host(os.environ.get("SLURM_SUBMIT_HOST") or "localhost")]
                )
        return address

    def _note_end(self, ended: dict[str, object]) -> None:
        note_end(self.run, self.granted.job, ended)

    def _note_began(self, attempt: int) -> None:
        change_slurm_job(self.run, self.granted.job, began=attempt)

    def _left_before(self) -> tuple[list[Host], float]:
        return [], 0.0  # Slurm ends what its jobs leave

    async def _sweep(self, hosts: Sequence[Host]) -> int:
        """Where another job goes on, Slurm has ended this one's processes before; a dead node
        could not be asked anyway."""
        return 0 if self.continue_kind else await super()._sweep(hosts)

    def _beside(self) -> Sequence[Coroutine[object, object, None]]:
        return self._watch_time(), self._watch_kill()

    async def _watch_time(self) -> None:
        """Save in time before the job's time is over, whatever has become of Slurm's own signal:
        the script ignores what comes before us. Whether the end has been moved is asked again
        before it counts."""
        while (wait := await asyncio.to_thread(self._until_saving)) is not None:
            if wait <= 0:
                self.batch_requests.time_is_near()
                return
            await asyncio.sleep(wait)

    async def _watch_kill(self) -> None:
        """KILL follows TERM after KillWait: ranks that have not left by then are ended before it,
        so that the record says why, and a run that is to go on is put back into the queue. A TERM
        that only warns (slurm.signal, preemption with a grace time) leaves the job running, and
        another one follows."""
        term_at = None
        try:
            while True:
                while self.batch_requests.term_at == term_at:
                    await asyncio.sleep(LOOK_SECONDS)
                term_at = self.batch_requests.term_at
                if not await asyncio.to_thread(self._runs_on):
                    break
            wait = await asyncio.to_thread(kill_wait)
        except TrainkitError as error:
            self.observer.notice(f"Slurm's KILL may come before our last word: {error.message}")
            return
        assert term_at is not None
        spare = min(LAST_WORD_SECONDS, wait / 2)
        await asyncio.sleep(term_at + wait - spare - time.monotonic())
        self.batch_requests.kill_is_near()

    def _runs_on(self) -> bool:
        """Whether Slurm has not begun to end the job. Raises TrainkitError where it cannot be
        asked."""
        status = job_statuses([self.granted.job]).get(self.granted.job)
        return status is not None and status.state == "RUNNING"

    def _until_saving(self) -> float | None:
        """Seconds until the ranks must be asked to save, or until it is worth asking again; None:
        never."""
        try:
            now = job_details(self.granted.job)
        except TrainkitError:
            return ASK_AGAIN_SECONDS
        if now.end is None or now.limit is None:
            return None
        return now.end - self._ahead(now.limit) - time.time()

    def _ahead(self, limit: float) -> float:
        """How many seconds before its end a job of `limit` seconds is to save: as Slurm was
        asked, unless that leaves no time to train. When a job is submitted nobody knows the time
        limit that a partition has by default."""
        asked = signal_seconds(self.run)
        fits = asked < limit if "signal" in self.job.sbatch_options else asked <= limit / 2
        return asked if fits else limit / LIMIT_SHARE

    def check_before_start(self) -> None:
        """Follow what Slurm wanted before we listened: its signals are ignored until then, and
        those of a GraceTime go to steps only."""
        with contextlib.suppress(TrainkitError):
            now = job_details(self.granted.job)
            if now.limit is not None and self._ahead(now.limit) < signal_seconds(self.run):
                self.batch_requests.expect_too_early()
            if now.preempted or now.restarts > self.granted.restarts or not now.ours:
                self.batch_requests.nodes_are_taken()

    def _judge(self, end: AttemptResult) -> AttemptResult:
        """The end with its verdict: again in this allocation, later in another, or not at all.
        Slurm's word comes before what its TERM has brought about."""
        if (
            end.outcome.failure_class in ("preempted", "infra")
            and (kind := self._slurm_reason()) is not None
        ):
            why = {
                "time-limit": "its time limit comes near",
                "preemption": "Slurm takes its nodes back",
                "infra": f"{', '.join(self.failed_nodes)} failed",
            }.get(kind, "Slurm ended the job (scancel, or its time limit)")
            return self.judge_taken(end, kind, why)
        end = super()._judge(end)
        if self.hosts.excluded and self.job.resume != "never":
            self._judge_bad_nodes(end)
        return end

    def _judge_bad_nodes(self, end: AttemptResult) -> None:
        """Nodes that are to blame: Slurm gives others. At the start too: nobody waits for a job
        that was in the queue for days."""
        if (
            not end.again
            and not self.began
            and end.outcome.failure_class == "infra"
            and end.outcome.exit in (Exit.START, Exit.HEALTH)
        ):
            cause: RootCause = {
                **(end.outcome.root_cause or {}),
                "host": ", ".join(sorted(self.hosts.excluded)),
            }
            end.outcome = Outcome(end.outcome.exit, "infra", cause, end.outcome.suspects)
            end.again = self.budgets.decide(end) == "again"
        if end.again:
            end.again = False
            self.continue_kind = "infra"
            self.bad_nodes = dict(self.hosts.excluded)

    def _slurm_reason(self) -> Kind | None:
        """Why Slurm ends the job, or takes its nodes; "" where the job shall not go on; None: it
        does neither."""
        if self.batch_requests.signalled == signal.SIGUSR1:
            return "time-limit"
        if self.stop_requests.first and self.batch_requests.signalled is None:
            return None  # a person's word
        try:
            now = job_details(self.granted.job)
            self.requeued_by_slurm = now.restarts > self.granted.restarts
            self.failed_nodes = failed_nodes(self.granted.hosts)
        except TrainkitError as error:
            self.observer.notice(f"cannot ask Slurm why it ends the job: {error}")
            if self.batch_requests.signalled is None:
                return None
            return ""
        if self.failed_nodes:
            return "infra"
        if (
            self.requeued_by_slurm
            or now.preempted
            or (now.ours and self.batch_requests.signalled is not None)
        ):
            return "preemption"
        if self.batch_requests.signalled is not None or not now.ours:
            return ""
        return None

    def _continue_later(self, events: EventLog) -> None:
        id = self.granted.job
        try:
            if self.job.resume == "requeue" and not self.requeued_by_slurm:
                requeue(id, self.granted.restarts)
        except TrainkitError as error:
            events.write(RequeueFailed(id, error.message))
            self.observer.notice(
                f'{error.message}; `resume = "chain"` does without requeue, invoke resume'
                f" {self.run.id} goes on by hand"
            )
            self.continue_kind = ""
            return
        self._note_continuation(events, "slurm")
        if self.job.resume == "requeue":
            change_slurm_job(self.run, id, began=None)
        if self.bad_nodes:  # last: Slurm's KILL comes soon
            self._exclude(self.bad_nodes, events)

    def _exclude(self, bad: Mapping[str, str], events: EventLog) -> None:
        """Have Slurm start the run on other nodes, unless it asks for nodes by name, or too few
        others are left."""
        next_job = next(
            (job.id for job in read_slurm_jobs(self.run) if job.follows == self.granted.job),
            self.granted.job,
        )
        try:
            now = job_details(next_job)
            names = sorted({*hostnames(now.excluded), *bad} if now.excluded else bad)
            if (
                "nodelist" in self.job.sbatch_options
                or len(set(usable_nodes(now.partition)) - set(names)) < self.job.nodes
            ):
                self.observer.notice(
                    f"Slurm may give the run {', '.join(bad)} again: there are no others for it"
                )
                return
            slurm_output(
                ["scontrol", "update", f"JobId={next_job}", f"ExcNodeList={','.join(names)}"]
            )
        except TrainkitError as error:
            self.observer.notice(f"Slurm may give the run {', '.join(bad)} again: {error.message}")
            return
        for host, why in bad.items():
            events.write(HostExcluded(host, why))
