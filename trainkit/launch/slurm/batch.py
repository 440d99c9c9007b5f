"""The supervisor inside a batch job: Slurm's signals mean save, and Slurm decides whether and where the run goes on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from trainkit.base.errors import Exit, TrainkitError
from trainkit.jobs.resolved import read_job
from trainkit.launch.asks import Asks
from trainkit.launch.attempt import AttemptEnd
from trainkit.launch.hostfile import Host
from trainkit.launch.hosts import write_hosts
from trainkit.launch.launchers import head_address
from trainkit.launch.outcome import Ask, Outcome
from trainkit.launch.retries import Budgets
from trainkit.launch.slurm.allocation import Granted, ask, granted, hosts_of
from trainkit.launch.slurm.graph import stages_of, still_to_be_made
from trainkit.launch.slurm.queue import failed_nodes, look, put_back
from trainkit.launch.slurm.script import seconds_before_limit
from trainkit.launch.slurm.submit import forget_secrets, note_end, read_secrets, submit, write_script
from trainkit.launch.start import refuse_other_inputs
from trainkit.launch.supervisor import Supervisor
from trainkit.launch.watch import Watch
from trainkit.runs.folder import RunFolder
from trainkit.runs.record import last_step, read_events
from trainkit.runs.slurm import SlurmJob, add_slurm_job, change_slurm_job, drop_slurm_job, read_slurm_jobs

Kind = Literal["time-limit", "preemption", "infra", ""]


class BatchAsks(Asks):
    """USR1 (--signal) and TERM (scancel, preemption, requeue, the time limit itself) ask to save; a later one asks for no more: KILL comes by itself."""

    signals = (signal.SIGUSR1, signal.SIGTERM)

    def __init__(self) -> None:
        super().__init__()
        self.signalled: int | None = None  # by which signal Slurm asked first

    def heeded(self) -> list[int]:
        return list(self.signals)  # ignored so far, by the script's trap

    def _heard(self, number: int, frame: object) -> None:
        if self.first is None:
            self.signalled = number
        self.save(Ask.SAVE)


class BatchSupervisor(Supervisor):
    """As Supervisor, for the allocation `granted`."""

    def __init__(self, run: RunFolder, secrets: Mapping[str, str], asks: BatchAsks, watch: Watch, granted: Granted) -> None:
        super().__init__(run, secrets, asks, watch, share=True)  # who may be on a node is Slurm's affair
        self.told, self.granted = asks, granted
        self.later: Kind = ""
        self.noted = False
        self.failed: list[str] = []  # nodes
        self.by_slurm = False  # Slurm has put the job back by itself

    def address(self) -> str:
        """Reached from the other nodes, and from where the job was submitted: `cancel` is typed there."""
        address = head_address(self.job.cluster, self.hosts.hosts)
        if address == "127.0.0.1":
            with contextlib.suppress(TrainkitError):
                return head_address(self.job.cluster, [Host(os.environ.get("SLURM_SUBMIT_HOST") or "localhost")])
        return address

    def replay(self, first_attempt: int) -> None:
        """Use up budgets for attempts that ended before this job began, or began again. Raises TrainkitError where nothing is left of them."""
        for attempt in self.run.attempts():
            if attempt.number < first_attempt:
                continue
            events = read_events(attempt)
            ended = next((event for event in reversed(events) if event["event"] == "ended"), None)
            retry: dict[str, Any] = next((event for event in reversed(events) if event["event"] == "retry"), {})
            began = any(event["event"] == "go" for event in events)
            if ended is not None and not retry and ended["class"] != "preempted":
                self.budgets = Budgets(self.job.retries)  # it was the end; that the job runs again is a person's word: scontrol requeue
                continue
            if ended is None:
                kind: str = "infra"  # its node, or KILL without a word
                end = AttemptEnd(Outcome(Exit.RANK_INFRA, "infra", {"message": "its supervisor was gone without a word"}), began, last_step(self.run))
            else:
                outcome = Outcome(Exit(ended["exit"]), ended["class"], ended["root_cause"])
                end = AttemptEnd(outcome, began, ended.get("step", 0))
                kind = retry.get("class") or ("preemption" if ended["class"] == "preempted" else ended["class"])
            if (verdict := self.budgets.after(end, kind)) != "again":
                self._give_up(attempt.number, kind, verdict, end)

    def _give_up(self, number: int, kind: str, verdict: str, end: AttemptEnd) -> None:
        """Raise TrainkitError, once the record says why there is no further attempt."""
        message = f"attempt {number} ended ({kind}), and " + (
            f"{self.budgets.same_step} times in the same way at step {end.step}"
            if verdict == "no-progress"
            else f"the budget retry.{kind.replace('-', '_')} is used up"
        )
        exit = Exit.NO_PROGRESS if verdict == "no-progress" else end.outcome.exit
        note_end(self.run, self.granted.job, {"state": "GIVEN UP", "message": message, "exit": int(exit)})
        raise TrainkitError(message, exit=exit, hint=f"invoke why {self.run.id}; invoke resume {self.run.id} begins with new budgets")

    def _sign(self) -> None:
        super()._sign()
        if not self.noted:  # from here on the sign of life says how the run is, no longer the queue
            self.noted = True
            change_slurm_job(self.run, self.granted.job, began=self.attempt.folder.number if self.attempt else 0)

    def _choose(self) -> tuple[Host, ...]:
        return self.hosts.hosts  # all that the job was given; a job never shrinks here, Slurm gives it other nodes

    def _leave_out(self, suspects: Mapping[str, str]) -> None:
        """No quarantine: which nodes are good is for Slurm to say."""

    async def _sweep(self, hosts: Sequence[Host]) -> int:
        """Where another job goes on, Slurm has ended this one's processes before; a dead node could not be asked anyway."""
        return 0 if self.later else await super()._sweep(hosts)

    def _judged(self, end: AttemptEnd) -> AttemptEnd:
        """The end with its verdict: again in this allocation, later in another, or not at all."""
        if self.told.signalled is not None and end.outcome.failure_class in ("preempted", "infra"):
            return self._judged_by_signal(end)
        end = super()._judged(end)
        if end.again and self.hosts.left_out:
            end.again = False
            self.later = "infra" if self.job.resume != "never" else ""
        return end

    def _judged_by_signal(self, end: AttemptEnd) -> AttemptEnd:
        kind, cause = self._why_signalled(), dict(end.outcome.root_cause or {})
        if end.outcome.failure_class == "infra":
            kind = "infra" if kind else ""  # a lost node: Slurm tells those that are left
        else:
            cause["message"] = _why(kind, self.failed)
            end.outcome = Outcome(end.outcome.exit, end.outcome.failure_class, cause)
        if not kind or self.job.resume == "never":
            return end
        verdict = self.budgets.after(end, kind)
        if verdict == "again":
            self.later = kind
        elif verdict == "no-progress":
            cause["message"] = f"ended {self.budgets.same_step} times ({kind}) at step {end.step}, without a step between them"
            end.outcome = Outcome(Exit.NO_PROGRESS, "no-progress", cause)
        return end

    def _why_signalled(self) -> Kind:
        """Why Slurm wants us to go; "" where the job shall not go on."""
        if self.told.signalled == signal.SIGUSR1:
            return "time-limit"
        try:
            state = look([self.granted.job]).get(self.granted.job)
            self.by_slurm, preempted = put_back(self.granted.job, self.granted.restarts)
            self.failed = failed_nodes(self.granted.hosts) if self.by_slurm or self.job.resume == "chain" else []
        except TrainkitError as error:
            self.watch.notice(f"cannot ask Slurm why it ends the job: {error}")
            return ""
        if self.failed:
            return "infra"
        in_grace = state is not None and state.state == "RUNNING"
        return "preemption" if self.by_slurm or preempted or in_grace else ""

    def _goes_on(self, end: AttemptEnd) -> bool:
        if self.later:
            self._hand_over()
        return super()._goes_on(end)

    def _hand_over(self) -> None:
        """Let Slurm go on with the run later, and say so in the record."""
        assert self.attempt is not None
        id, events = self.granted.job, self.attempt.events
        try:
            if self.job.resume == "requeue" and not self.by_slurm:
                ask(["scontrol", "requeue", id])
        except TrainkitError as error:
            events.write("requeue_failed", job=id, why=error.message)
            self.watch.notice(f'{error.message}; `resume = "chain"` does without requeue, invoke resume {self.run.id} goes on by hand')
            self.later = ""
            return
        events.write("retry", next_attempt=self.attempt.folder.number + 1, left_out=[], by="slurm", **{"class": self.later})
        if self.job.resume == "requeue":
            change_slurm_job(self.run, id, began=None)


def _why(kind: Kind, failed: Sequence[str]) -> str:
    """Why Slurm wanted a run to stop, which then has saved."""
    return {
        "time-limit": "its time limit comes near: saved",
        "preemption": "Slurm takes its nodes back: saved",
        "infra": f"{', '.join(failed)} failed: the others saved",
    }.get(kind, "Slurm ended the job (scancel, or its time limit): saved")


def supervise_batch(run: RunFolder, environment: Mapping[str, str]) -> Outcome:
    """Supervise a run in the batch job that the environment tells of. The caller holds the run's lock."""
    where = granted(environment)
    job = read_job(run.job)
    if still_to_be_made(run):
        message = f"the stages of run {run.id} are not made: the jobs in {stages_of(run)} come before this one"
        raise TrainkitError(message, exit=Exit.STAGE_STALE, hint=f"invoke why {run.id}; invoke train {job.name} makes what is missing")
    write_hosts(run, hosts_of(job, where))
    entry = _noted(run, where)
    _refuse_other_inputs(run, entry)
    watch = Watch(lambda run: print(f"run {run.id} on {', '.join(where.hosts)}", flush=True), lambda: None, lambda text: print(text, flush=True))
    asks = BatchAsks()
    supervisor = BatchSupervisor(run, read_secrets(run), asks, watch, where)
    supervisor.replay(entry.first_attempt)
    with _successor(run, supervisor, entry), asks.listening():
        return asyncio.run(supervisor.supervise())


def _refuse_other_inputs(run: RunFolder, entry: SlurmJob) -> None:
    """As `resume` does: between the person's word and now, or between two allocations, somebody may have made the data anew."""
    try:
        refuse_other_inputs(run)
    except TrainkitError as error:
        note_end(run, entry.id, {"state": "REFUSED", "class": "user", "message": error.message, "advice": error.hint, "exit": int(error.exit)})
        raise


def _noted(run: RunFolder, where: Granted) -> SlurmJob:
    """This job's entry in launch/slurm.json."""
    if all(job.id != where.job for job in read_slurm_jobs(run)):  # submitted by hand
        add_slurm_job(run, where.job, first_attempt=max((attempt.number for attempt in run.attempts()), default=0) + 1)
    change_slurm_job(run, where.job, ended=None)
    return next(job for job in read_slurm_jobs(run) if job.id == where.job)


@contextlib.contextmanager
def _successor(run: RunFolder, supervisor: BatchSupervisor, entry: SlurmJob) -> Iterator[None]:
    """With resume = "chain" a successor waits for our end, whatever that is; it is taken back where it will not be needed. So are secrets."""
    waiting = next((job.id for job in read_slurm_jobs(run) if job.follows == entry.id), None)
    if supervisor.job.resume == "chain" and waiting is None:
        write_script(run, supervisor.job, {}, seconds=seconds_before_limit(run, supervisor.job))
        waiting = submit(run, first_attempt=entry.first_attempt, follows=entry.id)
    try:
        yield
    finally:
        if not supervisor.later:
            forget_secrets(run)
            if waiting is not None:
                with contextlib.suppress(TrainkitError):
                    ask(["scancel", waiting])
                drop_slurm_job(run, waiting)
