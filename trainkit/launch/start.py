"""From a resolved job to a run: its folder, its code, its world, and one attempt after another."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trainkit
from trainkit.base.errors import Exit, TrainkitError
from trainkit.base.files import write_json, write_text
from trainkit.base.forms import document, read_form
from trainkit.base.locks import Busy, locked
from trainkit.engines import ENGINES
from trainkit.jobs.change import write_changed_job
from trainkit.jobs.resolved import Resolved, write_job
from trainkit.jobs.schema import Job
from trainkit.launch.outcome import Outcome
from trainkit.launch.slots import locked_slots
from trainkit.launch.snapshot import link_code, take_snapshot
from trainkit.launch.supervise import Interrupts, Supervisor
from trainkit.launch.world import allocate_local, secret_values, world_document
from trainkit.plan.make import Plan
from trainkit.runs.folder import RunFolder, new_run_folder
from trainkit.runs.origin import write_origin
from trainkit.stages.contract import Need
from trainkit.stages.stamps import file_identity

PACKAGE = Path(trainkit.__file__).parent


@dataclass(frozen=True)
class Watch:
    """How a person follows an attempt.

    Args:
        begin: called once with the run before its ranks start.
        tick: called some twenty times a second.
        notice: called with one line when something a person should know happens.
    """

    begin: Callable[[RunFolder], None]
    tick: Callable[[], None]
    notice: Callable[[str], None]


def start_run(resolved: Resolved, plan: Plan, needs: Sequence[Need], project: Path, watch: Watch, *, share: bool) -> tuple[RunFolder, Outcome]:
    """Make a run and follow its first attempt to the end.

    Raises TrainkitError: 17 if the host's slots are taken, 3 if a secret is missing; then nothing is left behind.
    """
    job = resolved.job
    secrets = secret_values(job.cluster.secrets, os.environ)
    run = new_run_folder(Path(job.cluster.root or "."), job.name)
    try:
        with _locked_run(run), locked_slots(job, run, share=share):
            _fill(run, resolved, plan, needs, project, secrets)
            return run, _attempt(run, job, watch, secrets)
    finally:
        if not run.job.exists():
            shutil.rmtree(run.path)


def resume_run(run: RunFolder, job: Job, document: dict[str, Any], watch: Watch, *, share: bool) -> Outcome:
    """Follow the next attempt of a run to the end. `document` is the job.json it goes on with.

    Raises TrainkitError: 17 if it is running or the host's slots are taken, 3 if a secret is missing.
    """
    secrets = secret_values(job.cluster.secrets, os.environ)
    with _locked_run(run), locked_slots(job, run, share=share):
        write_changed_job(run.job, document)
        return _attempt(run, job, watch, secrets)


def _fill(run: RunFolder, resolved: Resolved, plan: Plan, needs: Sequence[Need], project: Path, secrets: Mapping[str, str]) -> None:
    """Snapshot, plan, origin, inputs, and last job.json, which makes the folder a run."""
    sha256, snapshot = take_snapshot(PACKAGE, run.root / "code")
    link_code(snapshot, run.code)
    write_json(run.plan, plan.to_json())
    write_origin(run, project, sha256, secrets)
    made = [path for need in needs if need.stage != "build" for path in need.outputs]
    ready = [path for need in needs for path in need.inputs if path.suffix in (".bin", ".idx")]  # pairs that nobody made here: the run reads them itself
    files = [file_identity(path) for path in dict.fromkeys([*made, *ready])]
    write_json(run.path / "launch" / "inputs.json", document("inputs/1", files=files))
    write_job(run.job, resolved)


def refuse_other_inputs(run: RunFolder) -> None:
    """Raise (exit 5) if a file that the run's samples come from is not the one it began with: its losses would jump."""
    path = run.path / "launch" / "inputs.json"
    for old in read_form(path, "inputs/1")["files"]:
        new = file_identity(Path(old[0]))
        if new != old:
            what = "is missing" if new is None else "has changed"
            message = f"{old[0]} {what} since run {run.id} began; its samples would no longer be the same"
            raise TrainkitError(message, exit=Exit.STAGE_STALE, hint="put the file back, or start a new run with invoke train")


@contextlib.contextmanager
def _locked_run(run: RunFolder) -> Iterator[None]:
    """Hold the run's lock: one supervisor a run. Raises TrainkitError (exit 17) where another holds it."""
    try:
        with locked(run.path / "lock", {"run": run.id}, wait=False):
            yield
    except Busy as busy:
        raise TrainkitError(
            f"run {run.id} is running already (pid {busy.holder.get('pid', '?')})", exit=Exit.HOSTS_BUSY, hint=f"invoke status {run.id}"
        ) from None


def _attempt(run: RunFolder, job: Job, watch: Watch, secrets: Mapping[str, str]) -> Outcome:
    number = max((a.number for a in run.attempts()), default=0) + 1
    command = ENGINES[job.engine].command(job, run, number)
    for name, text in command.files.items():
        write_text(run.path / name, text)
    world = world_document(run, number, command, allocate_local(command, f"{run.id}/{number}"))
    write_json(run.world, world)
    with Interrupts().listening() as interrupts:
        supervisor = Supervisor(world, run.attempt(number), secrets, watch.tick, watch.notice)
        supervisor.record_start()
        supervisor.show(lambda: watch.begin(run))
        return supervisor.run(interrupts)
