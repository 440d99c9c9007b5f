"""The program of one rank: python -I <snapshot>/trainkit/train/main.py RUN_FOLDER --attempt N.

Who it is comes in torch's standard variables; TORCHELASTIC_ERROR_FILE and
TRAINKIT_HEARTBEAT_FILE say where to report. Exit codes: 0; 12 asked to stop, and saved; a
TrainkitError's own; 10 for a full or failing disk and the like; 9 for any other exception.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import faulthandler
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainkit.runs.folder import AttemptFolder
    from trainkit.train.trainer import Trainer

MACHINE_FAULTS = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EIO,
    errno.EROFS,
    errno.ESTALE,
    errno.EADDRINUSE,
    errno.ENOMEM,
}
STOP_SIGNALS = {signal.SIGTERM, signal.SIGUSR1}


# seconds that a rank without anything to save waits before it leaves: the others must have been
# asked as well
LEAVE_SECONDS = 2.0


def answer_waits() -> None:
    """Write down which collectives this process waits in, beside its heartbeat. Nothing is imported
    here: the main thread may hang in an import."""
    from trainkit.base.files import write_beat
    from trainkit.base.process import waits_path

    collectives = sys.modules.get("trainkit.train.metrics.collectives")
    if heartbeat := os.environ.get("TRAINKIT_HEARTBEAT_FILE"):
        text = json.dumps(collectives.known_collectives() if collectives else {})
        write_beat(waits_path(Path(heartbeat)), text, durable=False)


def listen(stop: threading.Event, leaves: Callable[[], bool] = lambda: False) -> None:
    """Take TERM and USR1 in a thread of their own. Must run before torch starts threads: they
    inherit the blocked signals.

    TERM from our parent, which knows what it does, ends the process at once. Any other TERM (a
    scheduler's) and USR1 ask for a checkpoint at the end of the step. While there is nothing new
    to save (starting, loading, compiling the first step, which may take longer than anyone's
    grace) the process leaves. USR2 prints all threads' stacks on stderr, from C: where Python
    hangs in a library it still answers. URG asks for the collectives that are waited in.
    """
    from trainkit.base.process import WAITS_SIGNAL

    signal.pthread_sigmask(signal.SIG_BLOCK, {*STOP_SIGNALS, WAITS_SIGNAL})
    faulthandler.register(signal.SIGUSR2, all_threads=True)

    def wait() -> None:
        leaving = False
        while True:
            seconds = LEAVE_SECONDS if stop.is_set() else 3600.0
            info = signal.sigtimedwait({*STOP_SIGNALS, WAITS_SIGNAL}, seconds)
            if info is None:
                if leaving and leaves():
                    os._exit(12)
            elif info.si_signo == WAITS_SIGNAL:
                with contextlib.suppress(Exception):  # TERM must still be heard
                    answer_waits()
            elif info.si_signo == signal.SIGTERM and info.si_pid == os.getppid():
                os._exit(128 + signal.SIGTERM)
            else:
                stop.set()
            leaving = stop.is_set() and leaves()

    threading.Thread(target=wait, daemon=True, name="signals").start()


def record_error(error: BaseException, code: int, step: int) -> None:
    """Write why this rank fails, where its starter asked for it. torchelastic reads `message`
    and `timestamp` of the same file."""
    from trainkit.base.documents import document, utc_now
    from trainkit.base.files import write_json

    description = {
        "type": type(error).__name__,
        "message": str(error),
        "traceback": "".join(traceback.format_exception(error)),
    }
    where = {"rank": int(os.environ.get("RANK", "0")), "host": os.uname().nodename, "step": step}
    if not (path := os.environ.get("TORCHELASTIC_ERROR_FILE")):
        return
    # a full disk must not hide the error itself, which is on stderr
    with contextlib.suppress(OSError):
        write_json(
            Path(path),
            document(
                "rank-error/1",
                **where,
                time=utc_now(),
                timestamp=int(time.time()),
                exit=code,
                **description,
            ),
        )


def record_beginning(trainer: Trainer, attempt: AttemptFolder) -> None:
    """Say and write down, on rank 0, what is computed with and what training goes on from."""
    from trainkit.base.files import write_json

    print(f" {trainer.chosen}", flush=True)
    restored = trainer.checkpoints.restored
    if restored:
        where = f"step {restored.step} from {restored.source}"
        print(f" goes on with {where}; newest checkpoint: {restored.disk_step}", flush=True)
    try:
        write_json(attempt.kernels, trainer.chosen.document(trainer.job.kernels))
        if restored:
            write_json(attempt.restored, restored.to_json())
    except OSError as error:  # costs the records, no more
        print(f"WARNING: no record of the beginning: {error}", file=sys.stderr, flush=True)


def run_rank(run_folder: Path, attempt: int = 1) -> int:
    """Train as this rank; returns the exit code. A failure is on stderr and in the error file by
    then."""
    from trainkit.base.errors import Exit, TrainkitError
    from trainkit.base.process import no_garbage_collection
    from trainkit.runs.folder import RunFolder
    from trainkit.runs.phases import PhaseLog, phases_path
    from trainkit.train.metrics.heartbeat import Heartbeat

    watched = os.environ.get("TRAINKIT_HEARTBEAT_FILE")
    heartbeat = Heartbeat(Path(watched) if watched else None, int(os.environ["RANK"]))
    run = RunFolder(run_folder)
    if heartbeat.rank == 0:
        heartbeat.phases = PhaseLog(phases_path(run.attempt(attempt)))
    stop = threading.Event()
    listen(stop, lambda: heartbeat.may_leave)
    try:
        heartbeat.beat("start", 0)
        with no_garbage_collection():
            import trainkit.train.metrics.collectives  # noqa: F401  for `answer_waits`
            from trainkit.jobs.resolved import read_job
            from trainkit.train.compiled_graphs import agree_on_graphs, prepare_to_compile
            from trainkit.train.parallel.data_parallel import World
            from trainkit.train.trainer import Trainer

        job = read_job(run.job)
        graphs = prepare_to_compile(job)
        trainer = Trainer(job, run, World.from_environment(), heartbeat, stop, graphs)
        if job.precompile:
            agree_on_graphs(trainer.graphs)
        if heartbeat.rank == 0:
            record_beginning(trainer, run.attempt(attempt))
        ended = trainer.train()
        if ended == Exit.DONE:
            heartbeat.beat("done", trainer.step)
        return int(ended)
    except TrainkitError as error:
        print(f"ERROR: {error}", file=sys.stderr)
        record_error(error, int(error.exit), heartbeat.step)
        return int(error.exit)
    except BaseException as error:  # torch's CheckpointException is not an Exception
        traceback.print_exc()
        if (
            stop.is_set() and heartbeat.nothing_new
        ):  # a peer that was asked as well has left already
            return int(Exit.PREEMPTED)
        if isinstance(error, OSError) and error.errno in MACHINE_FAULTS:
            code = Exit.RANK_INFRA
        else:
            code = Exit.RANK_USER
        record_error(error, int(code), heartbeat.step)
        return int(code)


def leave(code: int) -> None:
    """End the process. Gloo's threads may abort a finalizing interpreter after all work is done,
    so the interpreter is not finalized."""
    if code in (0, 12):
        import torch.distributed as dist

        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    # the snapshot this file is part of
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from trainkit.base.process import die_with_parent, raise_open_file_limit
    from trainkit.base.worker import PARENT_VARIABLE

    if parent := os.environ.get(PARENT_VARIABLE):
        die_with_parent(int(parent))
    raise_open_file_limit()
    parser = argparse.ArgumentParser(description="One rank of the native engine.")
    parser.add_argument("run_folder", type=Path)
    parser.add_argument("--attempt", type=int, required=True)
    given = parser.parse_args()
    leave(run_rank(given.run_folder, given.attempt))


if __name__ == "__main__":
    main()
