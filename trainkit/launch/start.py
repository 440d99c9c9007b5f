"""From a start to a run: its folder, its code, its hosts, and a supervisor."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import trainkit
from trainkit.base.documents import utc_now
from trainkit.base.errors import Exit, TrainkitError
from trainkit.base.files import write_json
from trainkit.engines.sources import engine_tree
from trainkit.launch.programs import program_path
from trainkit.launch.run_inputs import write_inputs
from trainkit.launch.scheduler_contract import Start
from trainkit.launch.supervise.code_snapshot import link_code, take_snapshot
from trainkit.launch.supervise.outcome import Outcome, signal_name
from trainkit.launch.supervise.rank_environment import secrets_of
from trainkit.launch.supervise.run_lock import locked_run
from trainkit.runs.events import AllRanksStarted, first_event, read_events
from trainkit.runs.folder import RunFolder, new_run_folder
from trainkit.runs.origin import write_origin
from trainkit.runs.record import read_supervisor_status, write_starter
from trainkit.stages.build_container import made_image

# a shared file system that stalls may take that long to give Python its modules
SPAWN_SECONDS = 600.0
PACKAGE = Path(trainkit.__file__).parent


def start_run(start: Start) -> tuple[RunFolder, Outcome | None]:
    """Make a run, or take one that goes on, and supervise it to its end, or have a process of its
    own do that; the outcome is None then.

    Raises TrainkitError: 17 if the slots are taken, or if another process goes on with the run; 3
    if a secret is missing. Then nothing is left of a new run, or of the attempt.
    """
    secrets = secrets_of(start.job, os.environ)
    run = start.run or new_run_folder(start.root, start.job.name)
    with locked_run(run):
        try:
            fill_run(run, start, secrets)
            write_json(run.hosts, start.hosts.to_json())
        except BaseException:
            if start.run is None:
                shutil.rmtree(run.path, ignore_errors=True)
            raise
        if start.run is not None:
            write_starter(run)
        if not start.background:
            from trainkit.launch.supervise.supervisor import supervise

            before = len(run.attempts())
            outcome = supervise(run, secrets, start.watch, share=start.share)
            _refuse_taken_slots(run, start, before, outcome)
            return run, outcome
    spawn_supervisor(run, share=start.share)
    return run, None


def fill_run(run: RunFolder, start: Start, secrets: Mapping[str, str]) -> None:
    """Write what a start says into the run's folder. The caller holds the run's lock.

    Of a new run: code, plan, origin, inputs, and last job.json, which makes the folder a run.
    There are no inputs while the stages are still to be made. Of one that goes on: its job and,
    where that is asked for, new code.
    """
    started = utc_now()  # the code, which is copied first, may take its time
    if start.run is None or start.new_code:
        snapshot = take_snapshot(PACKAGE, run.root / "code", start.project)
        link_code(snapshot.folder, run.code)
    if start.run is None:
        write_json(run.plan, start.plan.to_json())
        left_out = [vars(each) for each in snapshot.left_out]
        engine = engine_tree(start.job)
        made = made_image(start.job)
        image = made.to_json() if made is not None else None
        digest = snapshot.sha256
        write_origin(run, start.project, digest, secrets, left_out, engine, image, started=started)
        if start.needs is not None:
            write_inputs(run, start.needs)
        write_starter(run)
    write_json(run.job, start.document)


def _refuse_taken_slots(run: RunFolder, start: Start, before: int, outcome: Outcome) -> None:
    """Raise TrainkitError (exit 17) where a supervisor found the slots taken at its very first try:
    what it has written tells nothing, and is removed. After any attempt that ran there is something
    to keep, however the last one ended. `before`: attempts that the run had."""
    attempts = run.attempts()[before:]
    if outcome.exit != Exit.HOSTS_BUSY or len(attempts) != 1:
        return
    (attempt,) = attempts
    if first_event(read_events(attempt), AllRanksStarted) is not None:
        return
    made = [run.path] if start.run is None else [attempt.path, run.session(attempt.number)]
    for folder in made:
        shutil.rmtree(folder, ignore_errors=True)
    cause = outcome.root_cause or {}
    raise TrainkitError(
        str(cause.get("message")), exit=Exit.HOSTS_BUSY, hint=str(cause.get("advice", ""))
    )


def spawn_supervisor(run: RunFolder, *, share: bool) -> None:
    """Start the run's supervisor in a session of its own, from the run's own code; it lives on
    when this process and its terminal are gone.

    Returns when launch/supervisor.json says that it is there. Raises TrainkitError with its own
    message where it ended before.
    """
    program = program_path(run.code.resolve(), "supervisor")
    argv = [
        sys.executable,
        "-I",
        str(program),
        str(run.path.resolve()),
        *(["--share"] if share else []),
    ]
    log = run.path / "launch" / "supervisor.log"
    with open(log, "ab") as output:
        child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd="/",
            start_new_session=True,
        )
    deadline = time.monotonic() + SPAWN_SECONDS
    while (sign := read_supervisor_status(run)) is None or sign.identity.pid != child.pid:
        if (code := child.poll()) is not None:
            raise _ended_at_once(run, code, log)
        if time.monotonic() > deadline:
            child.kill()
            raise TrainkitError(
                f"the supervisor did not begin within {SPAWN_SECONDS:g} s",
                exit=Exit.START,
                hint=f"see {log}",
            )
        time.sleep(0.02)


def _ended_at_once(run: RunFolder, code: int, log: Path) -> TrainkitError:
    """The error for a supervisor that ended before it had signed."""
    if code < 0:  # as `status` says of the run that it leaves
        return TrainkitError(
            f"the supervisor was ended by {signal_name(-code)} before it had begun",
            exit=Exit.RANK_INFRA,
            hint=f"invoke resume {run.id}",
        )
    known = Exit(code) if code in {each.value for each in Exit} else Exit.BUG
    last = log.read_text(errors="replace").strip().splitlines()[-1:] or [f"exit code {code}"]
    return TrainkitError(f"the supervisor ended at once: {last[0]}", exit=known, hint=f"see {log}")
