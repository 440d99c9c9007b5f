"""Following a run whose supervisor is another process: what `train` does over a hostfile, and
the task `attach`; and `cancel`, which ends it and asks every node what is left of it."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator, Sequence

from rich.markup import escape

from trainkit.base.documents import document
from trainkit.base.errors import Exit, TrainkitError
from trainkit.cli.config.jobs import load_jobs
from trainkit.cli.run.progress import TrainingView
from trainkit.cli.run.summary import print_ending
from trainkit.cli.tables import Listing, Page
from trainkit.cli.wrapper import TaskContext, TaskResult
from trainkit.experiment.cancel import Cancellation, HostLeftovers, cancel_run
from trainkit.experiment.follow import GOING, POLL_SECONDS, RunFollower
from trainkit.jobs.resolved import read_job
from trainkit.launch.protocol.client import ask_supervisor
from trainkit.launch.protocol.frames import CancelRun
from trainkit.launch.scheduler_registry import current
from trainkit.runs.events import EventTail
from trainkit.runs.find import find_run
from trainkit.runs.folder import RunFolder
from trainkit.runs.record import RunRecord, read_run_record


def cancel(task: TaskContext, text: str, *, save: bool, force: bool = False) -> TaskResult:
    """The task `cancel`.

    Args:
        task: how the task speaks.
        text: which run.
        save: first save at the end of the step.
        force: hosts that do not answer count as gone; a supervisor here that does not is killed.
    """
    run = find_run(load_jobs(task).roots(), text)
    cancelled = cancel_run(run, save=save, force=force, say=task.say)
    record = cancelled.record
    values = document(
        "cancel/1",
        run=run.id,
        job=run.job_name,
        state=record.state,
        exit=record.exit,
        **{"class": record.failure_class},
        hosts=[host.to_json() for host in cancelled.hosts or ()],
    )
    page = () if cancelled.hosts is None else _cancelled_page(task, cancelled, cancelled.hosts)
    return TaskResult(values, cancelled.exit, page)


def _cancelled_page(
    task: TaskContext, cancelled: Cancellation, hosts: Sequence[HostLeftovers]
) -> Page:
    record = cancelled.record
    cells = ((escape(host.host), escape(leftovers_line(host))) for host in hosts)
    yield Listing("host", "left", rows=cells)
    if cancelled.exit == Exit.PREEMPTED:
        yield f"saved at step {record.step}; {task.command} resume {record.run.id} goes on"
    elif record.state == "preempted":
        yield "stopped before it had saved: it would go on from an older checkpoint"


def leftovers_line(host: HostLeftovers) -> str:
    """What is left on a host, for people; "nothing" only as far as that is proved."""
    if not host.answered:
        why = f": {host.error}" if host.error else "; what is left there is not known"
        return f"did not answer{why}"
    processes = ", ".join(
        f"pid {each['pid']} {each.get('argv0', '')}".rstrip() for each in host.left
    )
    if processes:
        return processes
    unproved = " that can be seen (no cgroup there: see `doctor`)" if host.proof is None else ""
    killed = f" ({host.killed} ended just now)" if host.killed else ""
    return f"nothing{unproved}{killed}"


CONFIRM_SECONDS = 5.0  # that a second Ctrl-C has to stop the run


def attach(task: TaskContext, text: str) -> TaskResult:
    """The task `attach`."""
    run = find_run(load_jobs(task).roots(), text)
    return follow_run(task, run, EventTail(run, skip_existing=True), attached=True)


def follow_run(
    task: TaskContext, run: RunFolder, events: EventTail, *, attached: bool = False
) -> TaskResult:
    """Show how a run goes on until it ends; the exit code is the run's. Ctrl-C twice saves and
    stops the run; once only ends the following (130). A run that waits in a queue is followed
    there too, and Ctrl-C does nothing to it.

    Args:
        task: how the task speaks.
        run: the run.
        events: those that it gives are said.
        attached: by `attach`, perhaps long after its end: then the model is not loaded for a
            sample, which may be too much for a login node.
    """
    job = read_job(run.job)
    record: RunRecord | None = current(read_run_record(run))
    going = record is not None and record.state in GOING
    if record is not None and record.state in GOING:
        view = TrainingView(task.console, job.training.train_iters)
        try:
            with _presses() as presses:
                view.begin(run)
                record = _Follower(run, view, events, presses).follow()
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
    """Follows a run until it has ended, and acts on Ctrl-C."""

    def __init__(
        self, run: RunFolder, view: TrainingView, events: EventTail, presses: list[float]
    ) -> None:
        self.run = run
        self.view = view
        self.presses = presses
        self.follower = RunFollower(run, events, view.notice)
        self.handled = 0

    def follow(self) -> RunRecord | None:
        """The record once the run has ended; None where the person wants to follow no more."""
        while True:
            self.view.tick()
            if self.follower.queued and self.presses:
                return None
            while self.handled < len(self.presses):
                self.handled += 1
                self._handle_press(self.handled)
            if self.handled == 1 and time.monotonic() - self.presses[0] > CONFIRM_SECONDS:
                return None
            record = self.follower.poll()
            if record is not None:
                return record
            time.sleep(POLL_SECONDS)

    def _handle_press(self, times: int) -> None:
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
        if not answered:
            self.view.notice("its supervisor is gone")
        elif times == 2:
            self.view.notice(
                "saving at the end of this step, then stopping the run; Ctrl-C again stops it at"
                " once"
            )
        else:
            self.view.notice("stopping the run")
