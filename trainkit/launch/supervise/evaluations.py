"""A run's evaluations, made beside training of checkpoints that are saved: one after another, each
by a process of its own on the supervisor's host, or elsewhere through a command. No rank waits for
them, and whatever becomes of them, the run goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Collection, Iterator

from trainkit.base.errors import TrainkitError
from trainkit.base.locks import LockBusy, locked
from trainkit.base.process import is_running, reap_child, start_child, stop_children
from trainkit.base.worker import PARENT_VARIABLE
from trainkit.jobs.schema import EvaluationSettings, Job
from trainkit.launch.supervise.stop_requests import StopRequests
from trainkit.runs.checkpoints import LOCK
from trainkit.runs.evaluations import (
    EvaluationRecord,
    add_evaluation,
    due_evaluations,
    evaluation_folder,
)
from trainkit.runs.folder import RunFolder
from trainkit.runs.retention import prune

LOOK_SECONDS = 2.0  # between looks for a new checkpoint
POLL_SECONDS = 0.1
GRACE_SECONDS = 1.0  # for one that is stopped: nothing of it is kept
Say = Callable[[str], None]


async def evaluate_checkpoints(
    run: RunFolder, job: Job, training_is_over: Callable[[], bool], say: Say
) -> None:
    """Make what is due, until training is over and nothing is left. One that failed is tried
    once; cancelled, this leaves no process behind, and no line of the one under way.

    Args:
        run: the run.
        job: its job.
        training_is_over: whether no further checkpoint will come.
        say: called with a line for what a person should know.

    Raises LockBusy: another process makes them.
    """
    tried = set[tuple[int, str]]()
    newest = 0  # that was read
    with _alone(run):
        while True:
            over = training_is_over()  # before the look, which then sees the last checkpoint
            found = await asyncio.to_thread(_next_due, run, job, tried)
            if found is not None:
                tried.add((found[0], found[1].name))
                newest = found[0] if await _make(run, *found, say) else newest
            elif over:
                await asyncio.to_thread(_delete_older, run, job, newest, say)
                return
            else:
                await asyncio.sleep(LOOK_SECONDS)


def _delete_older(run: RunFolder, job: Job, newest: int, say: Say) -> None:
    """Delete checkpoints that stayed to be evaluated only: no save that follows does. Of those up
    to step `newest`, which an evaluation has just read: a later one may be damaged."""
    writers = locked(run.checkpoints / LOCK, {"host": os.uname().nodename}, wait=False)
    try:
        prune(run.checkpoints, job.checkpoint, newest, writers)
    except LockBusy:
        return  # one is saved, and others go after that
    except (OSError, TrainkitError) as error:
        say(f"a checkpoint that was evaluated could not be deleted: {error}")


@contextlib.contextmanager
def _alone(run: RunFolder) -> Iterator[None]:
    path = run.path / "evaluations" / "lock"
    with locked(path, {"host": os.uname().nodename, "task": "evaluate"}, wait=False):
        yield


def _next_due(
    run: RunFolder, job: Job, tried: Collection[tuple[int, str]]
) -> tuple[int, EvaluationSettings] | None:
    """The oldest that has no scores and was not tried; None: there is none."""
    for step, settings, record in due_evaluations(run, job):
        if (step, settings.name) not in tried and (record is None or record.error):
            return step, settings
    return None


async def _make(run: RunFolder, step: int, settings: EvaluationSettings, say: Say) -> bool:
    """Make one; whether it has scores. Where it fails, its line says why, and its checkpoint may
    go: else those of a host with too little memory would fill the disk. One that a signal that asks
    ended is made again when somebody looks next."""
    log = evaluation_folder(run, step, settings.name).with_suffix(".log")
    with open(log, "wb") as output:
        child = start_child(
            _command(run, step, settings),
            env=_environment(settings),
            cwd=run.path,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        while is_running(child):
            await asyncio.sleep(POLL_SECONDS)
    except asyncio.CancelledError:
        stop_children([child], GRACE_SECONDS)
        raise
    if not (code := reap_child(child)):
        return True
    lines = log.read_text(errors="replace").split("\n")
    last = next((line for line in reversed(lines) if line.strip()), f"exit code {code}")
    if code == -signal.SIGKILL:
        shutil.rmtree(log.with_suffix(""), ignore_errors=True)  # its export
        last = "it was killed, perhaps for want of memory on the host"
    if code > 0 or code == -signal.SIGKILL:
        add_evaluation(run, EvaluationRecord(step, settings.name, error=last))
    say(f"evaluation {settings.name} of step {step} ended with {code}, see {log}: {last}")
    return False


def _command(run: RunFolder, step: int, settings: EvaluationSettings) -> list[str]:
    program = run.code / "trainkit" / "train" / "inference" / "evaluation_worker.py"
    words = [sys.executable, "-I", str(program), str(run.path), str(step), settings.name]
    return [*settings.through, shlex.join(words)] if settings.through else words


def _environment(settings: EvaluationSettings) -> dict[str, str]:
    """Of a process that ends with this one; or of a command that asks Slurm for a job of its own,
    which in an allocation would become a step of that."""
    if not settings.through:
        return {**os.environ, PARENT_VARIABLE: str(os.getpid())}
    return {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", PARENT_VARIABLE))}


class EvaluationsBeside:
    """Makes the evaluations of a run while its attempts go on.

    Args:
        run: the run.
        job: its job; one without evaluations makes none.
        say: called with a line for what a person should know.
    """

    def __init__(self, run: RunFolder, job: Job, say: Say) -> None:
        self._say = say
        self._over = False
        self._task: asyncio.Task[None] | None = None
        if job.evaluations:
            self._task = asyncio.create_task(self._evaluate(run, job))

    async def _evaluate(self, run: RunFolder, job: Job) -> None:
        """Raises LockBusy: training is over, and another process makes what is left. Until then
        it is waited for: it makes what is due now, and nobody else what comes."""
        while True:
            try:
                return await evaluate_checkpoints(run, job, lambda: self._over, self._say)
            except LockBusy:
                if self._over:
                    raise
            except (OSError, TrainkitError) as error:  # checkpoints that are due pile up
                self._say(f"no evaluations beside training: {error}")
                return None
            await asyncio.sleep(LOOK_SECONDS)

    async def finish(
        self, wait: Callable[[float], Awaitable[None]], stop_requests: StopRequests
    ) -> None:
        """Training has succeeded: wait for what is still to be made, unless somebody asks to stop.

        Args:
            wait: waits for so many seconds.
            stop_requests: what asks.
        """
        self._over = True
        if self._task is not None and not self._task.done():
            self._say("training is over; its evaluations go on (Ctrl-C leaves them for later)")
        while self._task is not None and not self._task.done() and not stop_requests.first:
            await wait(POLL_SECONDS)

    async def close(self) -> None:
        """Stop what is under way. Raises nothing: what went wrong is said."""
        if self._task is None:
            return
        self._task.cancel()
        (how,) = await asyncio.gather(self._task, return_exceptions=True)
        if isinstance(how, LockBusy):
            self._say(f"no evaluations beside training: {how}")
        elif isinstance(how, Exception):
            self._say(f"evaluations ended: {type(how).__name__}: {how}")
