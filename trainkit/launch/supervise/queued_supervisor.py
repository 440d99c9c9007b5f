"""A supervisor on hosts that a scheduler with a queue has given to its run, and may take back:
it goes on from what earlier starts of the same submission have left of the retry budgets."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence

from trainkit.base.errors import Exit, TrainkitError
from trainkit.launch.hosts.hostfile import Host
from trainkit.launch.launchers.contract import Launcher
from trainkit.launch.supervise.attempt_context import AttemptResult
from trainkit.launch.supervise.observer import RunObserver
from trainkit.launch.supervise.outcome import Outcome
from trainkit.launch.supervise.retry_policy import RetryBudgets
from trainkit.launch.supervise.stop_requests import StopRequests
from trainkit.launch.supervise.supervisor import Supervisor
from trainkit.runs.events import (
    AllRanksStarted,
    AttemptEnded,
    Event,
    EventLog,
    RequeueFailed,
    RetryPlanned,
    RootCause,
    first_event,
    last_event,
    read_events,
)
from trainkit.runs.folder import RunFolder
from trainkit.runs.record import last_step


class QueuedSupervisor(Supervisor):
    """As Supervisor. Who may be on a host is the scheduler's affair, so there are no slots, and no
    quarantine."""

    def __init__(
        self,
        run: RunFolder,
        secrets: Mapping[str, str],
        stop_requests: StopRequests,
        observer: RunObserver,
        launcher: Launcher | None = None,
    ) -> None:
        super().__init__(run, secrets, stop_requests, observer, share=True, launcher=launcher)
        # why another start of the scheduler's goes on with the run, as a budget; "": none does
        self.continue_kind = ""
        # nodes that the run shall not be given again, with the reason
        self.bad_nodes: dict[str, str] = {}
        self.start_noted = False

    def _beside(self) -> Sequence[Coroutine[object, object, None]]:
        """What goes on for as long as the run is supervised."""
        raise NotImplementedError

    async def supervise(self) -> Outcome:
        tasks = [asyncio.create_task(each) for each in self._beside()]
        try:
            return await super().supervise()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _continue_later(self, events: EventLog) -> None:
        """Have another start of the scheduler's go on with the run, and say so in the record."""
        raise NotImplementedError

    def _starts_again(self, end: AttemptResult) -> bool:
        if self.continue_kind:
            assert self.attempt is not None
            self._continue_later(self.attempt.events)
        return super()._starts_again(end)

    def _note_continuation(self, events: EventLog, by: str) -> None:
        """Write that another start goes on, without the bad nodes."""
        assert self.attempt is not None
        number = self.attempt.folder.number + 1
        bad = sorted(self.bad_nodes)
        events.write(RetryPlanned(number, left_out=bad, by=by, failure_class=self.continue_kind))

    def _note_end(self, ended: dict[str, object]) -> None:
        """Write into the record of the run's submissions how this one ended."""
        raise NotImplementedError

    def _note_began(self, attempt: int) -> None:
        """Write into the record of the run's submissions that this one has begun."""
        raise NotImplementedError

    def replay(self, first_attempt: int) -> None:
        """Use up budgets for attempts that ended before this job began, or began again. Raises
        TrainkitError where nothing is left of them."""
        for attempt in self.run.attempts():
            if attempt.number < first_attempt:
                continue
            events = read_events(attempt)
            ended = last_event(events, AttemptEnded)
            budget = used_budget(events)
            began = first_event(events, AllRanksStarted) is not None
            if ended is not None and not budget and ended.failure_class != "preempted":
                # it was the end; that the job runs again is a person's word: scontrol requeue
                self.budgets = RetryBudgets(self.job.retries)
                continue
            if ended is None:
                kind: str = "infra"  # its node, or KILL without a word
                end = AttemptResult(
                    Outcome(
                        Exit.RANK_INFRA,
                        "infra",
                        {"message": "its supervisor was gone without a word"},
                    ),
                    began,
                    last_step(self.run),
                )
            else:
                outcome = Outcome(Exit(ended.exit), ended.failure_class, ended.root_cause)
                end = AttemptResult(outcome, began, ended.step or 0)
                kind = budget or "preemption"
            if (verdict := self.budgets.decide(end, kind)) != "again":
                self._give_up(attempt.number, kind, verdict, end)

    def _give_up(self, number: int, kind: str, verdict: str, end: AttemptResult) -> None:
        """Raise TrainkitError, once the record says why there is no further attempt."""
        message = f"attempt {number} ended ({kind}), and " + (
            f"{self.budgets.same_step} times in the same way at step {end.step}"
            if verdict == "no-progress"
            else f"the budget retry.{kind.replace('-', '_')} is used up"
        )
        exit = Exit.NO_PROGRESS if verdict == "no-progress" else end.outcome.exit
        self._note_end({"state": "GIVEN UP", "message": message, "exit": int(exit)})
        raise TrainkitError(
            message,
            exit=exit,
            hint=f"invoke why {self.run.id}; invoke resume {self.run.id} begins with new budgets",
        )

    def _write_sign_of_life(self) -> None:
        super()._write_sign_of_life()
        if (
            not self.start_noted
        ):  # from here on the sign of life says how the run is, no longer the queue
            self.start_noted = True
            self._note_began(self.attempt.folder.number if self.attempt else 0)

    def _choose_hosts(self) -> tuple[Host, ...]:
        # all that the job was given; a job never shrinks here, Slurm gives it other nodes
        return self.hosts.hosts

    def _exclude_hosts(self, suspects: Mapping[str, str]) -> None:
        """No quarantine: which nodes are good is for Slurm to say."""

    async def _stop_between_attempts(self, end: AttemptResult | None) -> Outcome | None:
        """None: who ends the job, and whether it goes on, is judged at an attempt's end; one
        that begins now ends at once."""
        return None

    def judge_taken(self, end: AttemptResult, kind: str, why: str) -> AttemptResult:
        """The end of an attempt whose hosts are taken, or are bad, with its verdict:
        whether the run goes on with others.

        Args:
            end: the attempt's.
            kind: the budget that this uses up; "": the run shall not go on.
            why: in words.
        """
        cause: RootCause = {**(end.outcome.root_cause or {})}
        if kind != "infra" or end.outcome.failure_class == "preempted":
            saved = cause.get("saved") is True
            if saved:
                done = "saved"
            elif end.began:
                done = "not all of its ranks had saved"
            else:
                done = "its ranks had not begun"
            cause |= {"message": f"{why}: {done}", "saved": saved}
            end.outcome = Outcome(
                Exit.PREEMPTED, "preempted", {"message": cause["message"], "saved": saved}
            )
        if not kind or self.job.resume == "never":
            return end
        verdict = self.budgets.decide(end, kind)
        if verdict == "again":
            self.continue_kind = kind
        elif verdict == "no-progress":
            cause["message"] = (
                f"ended {self.budgets.same_step} times ({kind}) at step {end.step}, without a step"
                " between them"
            )
            end.outcome = Outcome(Exit.NO_PROGRESS, "no-progress", cause)
        return end


def used_budget(events: Sequence[Event]) -> str:
    """What an attempt has used up for another one to follow; "" where none was to follow, or
    the scheduler would not put the run back."""
    last = next(
        (event for event in reversed(events) if isinstance(event, AttemptEnded | RequeueFailed)),
        None,
    )
    return (last.budget or "") if isinstance(last, AttemptEnded) else ""


def ended_for_good(run: RunFolder) -> Outcome | None:
    """How the run ended where it did: who comes later has nothing to do. None: the newest attempt
    wants another, or left no word."""
    events = [event for attempt in run.attempts()[-1:] for event in read_events(attempt)]
    ended = last_event(events, AttemptEnded)
    if ended is None or used_budget(events):
        return None
    return Outcome(Exit(ended.exit), ended.failure_class, ended.root_cause)
