"""From a resolved job to a run: its folder, its code, its hosts, and a supervisor."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import trainkit
from trainkit.base.errors import Exit, TrainkitError
from trainkit.base.files import write_json
from trainkit.jobs.resolved import ResolvedJob, write_job
from trainkit.jobs.resume_changes import write_changed_job
from trainkit.jobs.schema import Job
from trainkit.launch.hosts.selection import HostList, write_hosts
from trainkit.launch.programs import program_path
from trainkit.launch.run_inputs import write_inputs
from trainkit.launch.supervise.code_snapshot import link_code, take_snapshot
from trainkit.launch.supervise.observer import RunObserver
from trainkit.launch.supervise.outcome import Outcome, signal_name
from trainkit.launch.supervise.rank_environment import secret_values
from trainkit.launch.supervise.supervisor import locked_run, supervise
from trainkit.plan.planner import Plan
from trainkit.runs.events import AllRanksStarted, first_event, read_events
from trainkit.runs.folder import RunFolder, new_run_folder
from trainkit.runs.origin import write_origin
from trainkit.runs.supervisor_status import read_supervisor_status, write_starter
from trainkit.stages.contract import Need

__all__ = ["RunObserver", "resume_run", "spawn_supervisor", "start_run"]

# a shared file system under load may take that long to give Python its modules
SPAWN_SECONDS = 60.0
PACKAGE = Path(trainkit.__file__).parent


def start_run(
    resolved: ResolvedJob,
    plan: Plan,
    needs: Sequence[Need],
    project: Path,
    watch: RunObserver,
    *,
    hosts: HostList,
    share: bool,
    background: bool,
) -> tuple[RunFolder, Outcome | None]:
    """Make a run and supervise it to its end, or have a process of its own do that.

    Args:
        resolved: the job. plan: its plan. needs: what it reads, up to date. project: the folder
        of jobs.toml. watch: how a person follows; not used in the background. hosts: where it
        runs, and spares. share: run beside other runs on the same slots. background: return as
        soon as a supervisor that outlives this process has taken over; then the outcome is None.

    Raises TrainkitError: 17 if the slots are taken, 3 if a secret is missing; then nothing is
    left behind.
    """
    job = resolved.job
    secrets = secret_values(job.cluster.secrets, os.environ)
    run = new_run_folder(Path(job.cluster.root or "."), job.name)
    with locked_run(run):
        try:
            fill_run(run, resolved, plan, needs, project, secrets)
            write_hosts(run, hosts)
        except BaseException:
            shutil.rmtree(run.path, ignore_errors=True)
            raise
        if not background:
            outcome = supervise(run, secrets, watch, share=share)
            if _never_began(run, 0, outcome):
                shutil.rmtree(run.path)
                raise _busy(outcome)
            return run, outcome
    spawn_supervisor(run, share=share)
    return run, None


def resume_run(
    run: RunFolder,
    job: Job,
    document: dict[str, Any],
    watch: RunObserver,
    *,
    hosts: HostList,
    share: bool,
    background: bool,
    code: bool = False,
    project: Path | None = None,
) -> Outcome | None:
    """Go on with a run, as `start_run`. `document` is the job.json it goes on with; `code`: with
    a new snapshot of `project` instead of its own code.

    Raises TrainkitError (exit 17) if somebody else is just doing that, or if the slots are taken.
    """
    secrets = secret_values(job.cluster.secrets, os.environ)
    with locked_run(run):
        if code:
            link_code(
                take_snapshot(PACKAGE, run.root / "code", project or run.root).folder, run.code
            )
        write_changed_job(run.job, document)
        write_hosts(run, hosts)
        write_starter(run)
        if not background:
            before = len(run.attempts())
            outcome = supervise(run, secrets, watch, share=share)
            if _never_began(run, before, outcome):
                attempt = run.attempts()[-1]
                shutil.rmtree(attempt.path)
                shutil.rmtree(run.session(attempt.number), ignore_errors=True)
                raise _busy(outcome)
            return outcome
    spawn_supervisor(run, share=share)
    return None


def _never_began(run: RunFolder, before: int, outcome: Outcome) -> bool:
    """Whether a supervisor found the slots taken at its very first try, so that what it has
    written tells nothing. After any attempt that ran there is something to keep, however the
    last one ended."""
    attempts = run.attempts()[before:]
    return (
        outcome.exit == Exit.HOSTS_BUSY
        and len(attempts) == 1
        and first_event(read_events(attempts[0]), AllRanksStarted) is None
    )


def _busy(outcome: Outcome) -> TrainkitError:
    cause = outcome.root_cause or {}
    return TrainkitError(
        str(cause.get("message")), exit=Exit.HOSTS_BUSY, hint=str(cause.get("advice", ""))
    )


def spawn_supervisor(run: RunFolder, *, share: bool) -> None:
    """Start the run's supervisor in a session of its own, from the run's own code; it lives on
    when this process and its terminal are gone.

    Returns when launch/supervisor.json says that it is there. Raises TrainkitError with its own
    words where it ended before.
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
            said = log.read_text(errors="replace").strip().splitlines()[-1:]
            if code < 0:  # as `status` says of the run that it leaves
                words = f"the supervisor was ended by {signal_name(-code)} before it had begun"
                hint = f"invoke resume {run.id}"
                raise TrainkitError(words, exit=Exit.RANK_INFRA, hint=hint)
            if code in {e.value for e in Exit}:
                known = Exit(code)
            else:
                known = Exit.BUG
            raise TrainkitError(
                f"the supervisor ended at once: {said[0] if said else f'exit code {code}'}",
                exit=known,
                hint=f"see {log}",
            )
        if time.monotonic() > deadline:
            child.kill()
            raise TrainkitError(
                f"the supervisor did not begin within {SPAWN_SECONDS:g} s",
                exit=Exit.START,
                hint=f"see {log}",
            )
        time.sleep(0.02)


def fill_run(
    run: RunFolder,
    resolved: ResolvedJob,
    plan: Plan,
    needs: Sequence[Need] | None,
    project: Path,
    secrets: Mapping[str, str],
) -> None:
    """Snapshot, plan, origin, inputs, and last job.json, which makes the folder a run. `needs`
    are None while they are still to be made: no inputs then."""
    snapshot = take_snapshot(PACKAGE, run.root / "code", project)
    link_code(snapshot.folder, run.code)
    write_json(run.plan, plan.to_json())
    write_origin(run, project, snapshot.sha256, secrets, [vars(each) for each in snapshot.left_out])
    if needs is not None:
        write_inputs(run, needs)
    write_starter(run)
    write_job(run.job, resolved)
