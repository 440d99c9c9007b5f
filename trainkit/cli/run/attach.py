"""Following a run whose supervisor is another process: what `train` does over a hostfile, and
the task `attach`."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator

from trainkit.base.errors import Exit, TrainkitError
from trainkit.cli.config.jobs import load_jobs
from trainkit.cli.run.progress import TrainingView
from trainkit.cli.run.summary import print_ending
from trainkit.cli.wrapper import TaskContext, TaskResult
from trainkit.jobs.resolved import read_job
from trainkit.launch.protocol.client import ask_supervisor
from trainkit.launch.protocol.frames import CancelRun
from trainkit.launch.slurm.reconcile import Queue, settled
from trainkit.runs.event_tail import EventTail
from trainkit.runs.events import (
    AllRanksStarted,
    AttemptStarted,
    ContactLost,
    Event,
    HangDetected,
    HostExcluded,
    RequeueFailed,
    RetryPlanned,
    SaveRequested,
    StrangerRefused,
)
from trainkit.runs.find import find_run
from trainkit.runs.folder import RunFolder
from trainkit.runs.record import RunRecord, read_run_record
from trainkit.runs.slurm import read_slurm_jobs

POLL_SECONDS = 0.05
# between looks at the record: on a shared file system each costs several round trips
LOOK_SECONDS = 0.5
GOING = ("queued", "starting", "running")
CONFIRM_SECONDS = 5.0  # that a second Ctrl-C has to stop the run


def attach(task: TaskContext, words: str) -> TaskResult:
    """The task `attach`."""
    run = find_run(load_jobs(task).roots(), words)
    return follow_run(task, run, EventTail(run, skip_existing=True), attached=True)


def started(run: RunFolder, events: EventTail) -> bool:
    """Wait until the ranks of a run have been started, or a person presses Ctrl-C; False where
    it ended before. The supervisor bounds the time."""
    try:
        while True:
            running = read_run_record(run).state in ("starting", "running")
            if any(isinstance(event, AllRanksStarted) for _, event in events.new()):
                return True
            if not running:
                return False
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        return True


def follow_run(
    task: TaskContext, run: RunFolder, events: EventTail, *, attached: bool = False
) -> TaskResult:
    """Show how a run goes on until it ends; the exit code is the run's. Ctrl-C twice saves and
    stops the run; once only ends the following (130). A run of Slurm's is followed through the
    queue too, and Ctrl-C does nothing to it.

    Args:
        events: those that it gives are said. attached: by `attach`, perhaps long after its end:
        then the model is not loaded for a sample, which a login node may not bear.
    """
    job = read_job(run.job)
    record: RunRecord | None = settled(read_run_record(run))
    going = record is not None and record.state in GOING
    if record is not None and record.state in GOING:
        view = TrainingView(task.console, job.training.train_iters)
        try:
            with _presses() as presses:
                view.begin(run)
                record = _Follower(
                    run, view, events, presses, Queue(run) if read_slurm_jobs(run) else None
                ).follow()
        finally:
            view.end()
    if record is None:
        task.say(
            f"run {run.id} goes on; {task.command} attach {run.id} follows it again, {task.command}"
            f" cancel {run.id} stops it"
        )
        return TaskResult(read_run_record(run).to_json(), Exit.INTERRUPTED)
    # a terminal that is gone does not change how the run ended
    with contextlib.suppress(OSError, SystemExit):
        print_ending(task, run, job, record, sample=going or not attached)
    return TaskResult(record.to_json(), Exit(record.exit or 0))


@contextlib.contextmanager
def _presses() -> Iterator[list[float]]:
    """Times at which Ctrl-C was pressed in the block: an exception at any place would leave a
    bar half drawn."""
    times: list[float] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: times.append(time.monotonic()))
    try:
        yield times
    finally:
        signal.signal(signal.SIGINT, before)


class _Follower:
    """Looks at the run folder until the run has ended, and heeds Ctrl-C."""

    def __init__(
        self,
        run: RunFolder,
        view: TrainingView,
        events: EventTail,
        presses: list[float],
        queue: Queue | None,
    ) -> None:
        self.run = run
        self.view = view
        self.events = events
        self.presses = presses
        self.queue = queue
        self.heeded = 0

    def follow(self) -> RunRecord | None:
        """The record once the run has ended; None where the person wants to follow no more."""
        looked = 0.0
        while True:
            self.view.tick()
            if self.queue is not None and self.presses:
                return None
            while self.heeded < len(self.presses):
                self.heeded += 1
                self._heed(self.heeded)
            if self.heeded == 1 and time.monotonic() - self.presses[0] > CONFIRM_SECONDS:
                return None
            if time.monotonic() - looked >= LOOK_SECONDS:
                record = read_run_record(self.run)
                said = ""
                if self.queue is not None:
                    record, said = self.queue.look(record)
                if said:
                    self.view.notice(said)
                for attempt, event in self.events.new():
                    if said := told(attempt, event):
                        self.view.notice(said)
                if record.state not in GOING:
                    return record
                looked = time.monotonic()
            time.sleep(POLL_SECONDS)

    def _heed(self, times: int) -> None:
        if times == 1:
            self.view.notice(
                f"Ctrl-C again within {CONFIRM_SECONDS:g} s saves and stops the run; otherwise only"
                " following ends, and the run goes on"
            )
            return
        try:
            answered = ask_supervisor(self.run, CancelRun(save=times == 2))
        except TrainkitError as error:
            self.view.notice(str(error))
            return
        saving = (
            "saving at the end of this step, then stopping the run; Ctrl-C again stops it at once"
        )
        self.view.notice(
            "its supervisor is gone"
            if not answered
            else saving
            if times == 2
            else "stopping the run"
        )


def told(attempt: int, event: Event) -> str:
    """One line about an event that a person who follows wants to know; "" for the others."""
    match event:
        case AttemptStarted() if attempt > 1:
            return f"attempt {attempt} begins"
        case ContactLost():
            return f"contact to {event.host} is lost"
        case HostExcluded():
            return f"{event.host} is left out: {event.why}"
        case HangDetected():
            return (
                f"no rank moves any more: a hang; missing ranks: {_listed(event.missing)};"
                f" all stacks are in attempts/{attempt}/stacks"
            )
        case SaveRequested():
            return "saving at the end of this step, then stopping"
        case StrangerRefused():
            return f"somebody without the token knocked: {event.peer}"
        case RequeueFailed():
            return f"Slurm does not put the job back into the queue: {event.why}"
        case RetryPlanned(by="slurm"):
            return (
                f"attempt {attempt} ended ({event.failure_class}); Slurm goes on with the run"
                f" as attempt {event.next_attempt}"
            )
        case RetryPlanned():
            return (
                f"attempt {attempt} failed ({event.failure_class}); going on as attempt"
                f" {event.next_attempt}"
            )
    return ""


def _listed(values: object) -> str:
    if isinstance(values, (list, tuple)) and values:
        return ", ".join(map(str, values))
    return "none"
