"""The supervisor inside a pod: Kubernetes' TERM means save, pods that are lost are replaced, and
the run goes on in the same JobSet; without bad nodes it does in another one."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path

from trainkit.base.address import local_address_in
from trainkit.base.errors import Exit, TrainkitError
from trainkit.base.files import write_json
from trainkit.jobs.resolved import read_job
from trainkit.jobs.schema import Job
from trainkit.launch.hosts.hostfile import Host
from trainkit.launch.hosts.selection import HostList
from trainkit.launch.kubernetes.caretaker import CARE_SECONDS
from trainkit.launch.kubernetes.manifest import FINAL_CODES, options_of
from trainkit.launch.kubernetes.own_jobsets import OwnJobSets
from trainkit.launch.kubernetes.pod import KILLED
from trainkit.launch.launchers.kubernetes import host_index, pod_host
from trainkit.launch.protocol.pod_call import (
    CANCELLED,
    JOBSET_VARIABLE,
    STOP,
    PodCall,
    indexes_that_may_run,
    jobset_folder,
    read_note,
    write_call,
)
from trainkit.launch.run_inputs import refuse_other_inputs
from trainkit.launch.supervise.agent_pool import stop_seconds
from trainkit.launch.supervise.attempt_context import AttemptResult
from trainkit.launch.supervise.observer import RunObserver
from trainkit.launch.supervise.outcome import Outcome, StopRequest, judge_outcome
from trainkit.launch.supervise.queued_supervisor import QueuedSupervisor, ended_for_good
from trainkit.launch.supervise.rank_environment import secrets_of
from trainkit.launch.supervise.stop_requests import StopRequests
from trainkit.runs.events import (
    AllRanksStarted,
    EventLog,
    HostExcluded,
    RootCause,
    first_event,
    read_events,
)
from trainkit.runs.folder import RunFolder
from trainkit.runs.kubernetes import (
    SubmittedJobSet,
    add_jobset,
    change_jobset,
    drop_jobset,
    read_jobsets,
)

LOOK_SECONDS = 0.2  # between two looks at what pods have noted
LAST_WORD_SECONDS = 15.0  # before KILL, to end ranks that have not saved, and record it
HEAR_SECONDS = 0.5  # between two looks at whether a person wants something
EXIT_SECONDS = 3.0  # for pods to note the ends of agents


def supervise_in_pod(run: RunFolder, environment: Mapping[str, str]) -> Outcome:
    """Supervise a run in the pod that the environment tells of. The caller holds the run's lock."""
    stop_requests = PodStopRequests()
    with stop_requests.handling_signals():
        job = read_job(run.job)
        entry = _noted(run, environment[JOBSET_VARIABLE])
        folder = jobset_folder(run.path, entry.name)
        write_call(folder, PodCall())  # what a supervisor that was killed has called for
        newest = max((attempt.number for attempt in run.attempts()), default=0)
        if entry != read_jobsets(run)[-1]:  # a later one has the run
            write_call(folder, PodCall(exit=int(Exit.CANCELLED)))
            return Outcome(Exit.PREEMPTED, "preempted", {"message": "another JobSet has the run"})
        ended = ended_for_good(run) if newest >= entry.first_attempt else None
        if ended is None:
            try:
                ended, goes_on = _supervise(run, job, entry, stop_requests, environment)
            except TrainkitError as error:
                _note_refusal(run, entry.name, error)
                raise
            if goes_on:
                return ended
        write_call(folder, PodCall(exit=exit_of_pods(ended)))
        return ended


def exit_of_pods(outcome: Outcome) -> int:
    """The code that pods of a run end with which does not go on in them. That of a pod which was
    only ended is another: Kubernetes replaces it."""
    if outcome.exit in (Exit.PREEMPTED, Exit.DONE):
        return int(Exit.CANCELLED if outcome.exit else Exit.DONE)
    return int(outcome.exit if outcome.exit in FINAL_CODES else Exit.RANK_INFRA)


def _supervise(
    run: RunFolder,
    job: Job,
    entry: SubmittedJobSet,
    stop_requests: PodStopRequests,
    environment: Mapping[str, str],
) -> tuple[Outcome, bool]:
    """How the run ended, and whether it goes on in pods of the same JobSet."""
    slots = tuple(range(job.ranks_per_node))
    hosts = tuple(Host(pod_host(entry.name, index), slots=slots) for index in range(job.nodes))
    write_json(run.hosts, HostList(hosts, job.nodes).to_json())
    refuse_other_inputs(run)
    observer = RunObserver(
        lambda run: print(f"run {run.id} in JobSet {entry.name}", flush=True),
        lambda: None,
        lambda text: print(text, flush=True),
    )
    secrets = secrets_of(job, environment)
    supervisor = PodSupervisor(run, secrets, stop_requests, observer, entry)
    supervisor.replay(entry.first_attempt)
    outcome = asyncio.run(supervisor.supervise())
    return outcome, bool(supervisor.continue_kind) and not supervisor.bad_nodes


def _noted(run: RunFolder, name: str) -> SubmittedJobSet:
    """The entry of this JobSet in launch/kubernetes.json."""
    if all(each.name != name for each in read_jobsets(run)):  # applied by hand
        first = max((attempt.number for attempt in run.attempts()), default=0) + 1
        add_jobset(run, name, first_attempt=first)
    change_jobset(run, name, ended=None)
    return next(each for each in read_jobsets(run) if each.name == name)


def _note_refusal(run: RunFolder, name: str, error: TrainkitError) -> None:
    """Have the record say why the run does not begin, where nothing has said it yet."""
    if next(each for each in read_jobsets(run) if each.name == name).ended is None:
        said = {"message": error.message, "advice": error.hint, "exit": int(error.exit)}
        change_jobset(run, name, ended={"state": "REFUSED", "class": "user", **said})


def _taken(path: Path) -> str | None:
    """What a file says, which is removed; None where there is none."""
    try:
        text = path.read_text()
        path.unlink()
    except OSError:
        return None
    return text


class PodStopRequests(StopRequests):
    """TERM asks to save, whatever ends the pod; a later one asks for no more: KILL comes by
    itself."""

    signals = (signal.SIGTERM,)

    def __init__(self) -> None:
        super().__init__()
        self.terminated_at: float | None = None  # by time.monotonic()
        self.pod_ends = False  # another one
        self.by_person = False

    @property
    def terminated(self) -> bool:
        """Whether our own pod is to end."""
        return self.terminated_at is not None

    def person_asks(self, *, save: bool) -> None:
        """A person wants the run to stop, whatever becomes of the pods."""
        self.by_person = True
        if save:
            self.request_save(StopRequest.SAVE)
        else:
            self.request_stop()

    def kill_before(self, grace: float) -> None:
        """End everything when the pod's grace is nearly over."""
        spare = min(LAST_WORD_SECONDS, grace / 2)
        if self.terminated_at is not None:
            late = time.monotonic() - self.terminated_at > grace - spare
            self.immediate = self.killed_soon = self.immediate or late

    def host_leaves(self) -> None:
        """Nobody wants the run to stop: another pod takes the place."""
        self.pod_ends = self.pod_ends or self.first is None
        super().host_leaves()

    def pod_is_over(self) -> None:
        """It has saved; what was asked since then counts."""
        self.pod_ends = False
        if not (self.terminated or self.by_person):
            self.first = None

    def _on_signal(self, number: int, frame: object) -> None:
        self.terminated_at = self.terminated_at or time.monotonic()
        self.request_save(StopRequest.SAVE)


class PodSupervisor(QueuedSupervisor):
    """As QueuedSupervisor, for the pods of one JobSet."""

    def __init__(
        self,
        run: RunFolder,
        secrets: Mapping[str, str],
        stop_requests: PodStopRequests,
        observer: RunObserver,
        entry: SubmittedJobSet,
    ) -> None:
        super().__init__(run, secrets, stop_requests, observer)
        self.pod_requests = stop_requests
        self.entry = entry
        self.folder = jobset_folder(run.path, entry.name)

        # None: pods have no right to ask for anything
        self.own = OwnJobSets.in_pod(self.job, run)
        options = options_of(self.job)
        self.in_first = options.supervisor == "first"
        self.grace = float(options.grace)

    def address(self) -> str:
        if self.job.cluster.interface:
            return local_address_in(self.job.cluster.interface)
        return os.environ["TRAINKIT_POD_IP"]

    def _note_end(self, ended: dict[str, object]) -> None:
        change_jobset(self.run, self.entry.name, ended=ended)

    def _note_began(self, attempt: int) -> None:
        change_jobset(self.run, self.entry.name, began=attempt)

    def _beside(self) -> Sequence[Coroutine[object, object, None]]:
        return self._care_for_pods(), self._hear()

    async def _hear(self) -> None:
        """Do what `cancel` asks for, by a file: pods have addresses of their own. And end ranks
        that have not saved before Kubernetes' KILL takes us along, so that the record says why."""
        path = self.folder / STOP
        while True:
            await asyncio.sleep(HEAR_SECONDS)
            if (asked := await asyncio.to_thread(_taken, path)) is not None:
                self.pod_requests.person_asks(save=asked == "save")
            self.pod_requests.kill_before(self.grace)

    async def _care_for_pods(self) -> None:
        """Where we may: earlier JobSets of the run are removed, and pods of nodes that have been
        gone for so long that what ran there has stopped by itself; else Kubernetes would not
        replace them."""
        if self.own is None:
            return
        await asyncio.to_thread(self.own.remove_others, self.entry.name, self.observer.notice)
        look = partial(self.own.replace_lost, self.entry.name, self.observer.notice)
        while True:
            await asyncio.sleep(CARE_SECONDS)
            await asyncio.to_thread(look, self._heard())

    def _heard(self) -> set[int]:
        """Indexes of pods that surely live: those of agents that are heard, and our own."""
        own = {int(os.environ["JOB_COMPLETION_INDEX"])} if self.in_first else set()
        ready = self.attempt.ready_hosts if self.attempt is not None else ()
        return own | {host_index(host) for host in ready}

    async def _one_attempt(self, hosts: Sequence[Host]) -> AttemptResult:
        if self.pod_requests.pod_ends and self.attempt is not None:
            await self.attempt.close_pool()  # the agent of that pod is not for another attempt
            self.pod_requests.pod_is_over()
        return await super()._one_attempt(hosts)

    async def _sweep(self, hosts: Sequence[Host]) -> int:
        """Nothing is asked: how many hosts have shown within the time of a lease that nothing is
        left, by the end of their agent or by a pod that has taken its place."""
        wanted = {host_index(host.name) for host in hosts}
        until = time.monotonic() + stop_seconds(self.job)
        while True:
            left = wanted & await asyncio.to_thread(self._may_run)
            if not left or time.monotonic() > until or self.stop_requests.immediate:
                return len(wanted - left)
            await asyncio.sleep(LOOK_SECONDS)

    def _may_run(self) -> set[int]:
        """Indexes whose pods may run something of the last attempt that had ranks, or of one
        after it."""
        found: set[int] = set()
        for attempt in reversed(self.run.attempts()):
            found |= indexes_that_may_run(self.folder.parent, attempt.transports)
            if first_event(read_events(attempt), AllRanksStarted) is not None:
                break
        return found

    def _judge(self, end: AttemptResult) -> AttemptResult:
        """The end with its verdict: again in these pods, in others, or not at all."""
        if self.pod_requests.by_person:
            return super()._judge(end)
        taken = end.outcome.failure_class in ("preempted", "infra")  # what TERM can bring about
        if self.pod_requests.terminated and taken:
            if (self.folder / CANCELLED).exists():
                end.outcome = judge_outcome([], 1, StopRequest.CANCEL)
                return end
            return self.judge_taken(end, "preemption", "Kubernetes takes the pod back")
        if self.pod_requests.pod_ends and end.outcome.failure_class == "preempted":
            saved = (end.outcome.root_cause or {}).get("saved") is True
            said = "saved" if saved else "not all of its ranks had saved"
            cause: RootCause = {"message": f"one of the pods is to end: {said}", "saved": saved}
            end.outcome = Outcome(Exit.PREEMPTED, "preempted", cause)
            end.again = (
                self.job.resume != "never" and self.budgets.decide(end, "preemption") == "again"
            )
            return end
        went = end.outcome.exit == Exit.START and self._pod_went()
        if end.lost or self.pod_requests.pod_ends or went:
            self.began = True  # a pod that is lost while the run starts is no reason to give it up
        end = super()._judge(end)
        # of a node that is gone Kubernetes knows: another pod takes the place of that on it
        if end.again and self.hosts.excluded and self.own is not None and not end.lost:
            self._leave_bad_nodes(end, self.own)
        self.hosts.excluded.clear()
        return end

    def _pod_went(self) -> bool:
        """Whether an agent of the attempt that just ended was asked to end, or its pod has left no
        word of its end, which takes a moment: all agents were dismissed."""
        assert self.attempt is not None
        logs = self.attempt.folder.transports
        until = time.monotonic() + EXIT_SECONDS
        while True:
            claims = list(logs.glob("*.claim"))
            ends = [claim.with_suffix(".exit") for claim in claims]
            silent = [path for path in ends if not path.is_file()]
            if not silent or time.monotonic() > until:
                break
            time.sleep(LOOK_SECONDS)
        codes = {path.read_text().strip() for path in ends if path not in silent}
        return bool(silent) or bool({str(int(Exit.CANCELLED)), str(KILLED)} & codes)

    def _leave_bad_nodes(self, end: AttemptResult, own: OwnJobSets) -> None:
        """Go on in another JobSet, which leaves out the nodes that are to blame; in these pods
        where it cannot be made."""
        bad = {
            note.node: why
            for host, why in self.hosts.excluded.items()
            if (note := read_note(self.folder, host_index(host))) is not None
        }
        left_out = sorted({*self.entry.left_out, *bad})
        try:
            if bad:
                own.submit(first_attempt=self.entry.first_attempt, left_out=left_out)
                self.bad_nodes = bad
                self.continue_kind = "infra"
                end.again = False
        except TrainkitError as error:
            # If it was made all the same, its supervisor notes it, and waits for the run's lock.
            if (newest := read_jobsets(self.run)[-1].name) != self.entry.name:
                drop_jobset(self.run, newest)
            self.observer.notice(f"{error.message}; going on with {', '.join(bad)}")

    def _continue_later(self, events: EventLog) -> None:
        """By pods of this JobSet, some time, or of another one."""
        if not self.bad_nodes:
            change_jobset(self.run, self.entry.name, began=None)
        for node, why in self.bad_nodes.items():
            events.write(HostExcluded(node, why))
        self._note_continuation(events, "kubernetes")
