"""The table of schedulers, by launcher; and which of them has a run."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainkit.jobs.schema import Cluster, Job
from trainkit.launch.direct import DIRECT
from trainkit.launch.scheduler_contract import Scheduler
from trainkit.runs.folder import RunFolder
from trainkit.runs.record import RunRecord
from trainkit.stages.in_flight import ArraysInFlight, StillRunning

if TYPE_CHECKING:
    from trainkit.launch.preparation import Preparation, StageUi, UnitRunner

# by launcher: its module, and the object there
PLACES = {
    "local": ("trainkit.launch.direct", "DIRECT"),
    "ssh": ("trainkit.launch.direct", "DIRECT"),
    "pdsh": ("trainkit.launch.direct", "DIRECT"),
    "slurm": ("trainkit.launch.slurm.scheduler", "SLURM"),
    "kubernetes": ("trainkit.launch.kubernetes.scheduler", "KUBERNETES"),
}


class SchedulerTable(dict[str, Scheduler]):
    """The schedulers by launcher, each imported when it is asked for: every start, and every
    supervisor, is spared those of others."""

    def __missing__(self, launcher: str) -> Scheduler:
        module, scheduler = PLACES[launcher]
        self[launcher] = getattr(importlib.import_module(module), scheduler)
        return self[launcher]


SCHEDULERS = SchedulerTable()


def scheduler_for(cluster: Cluster) -> Scheduler:
    """The scheduler that runs on a cluster are submitted to."""
    return SCHEDULERS[cluster.launcher]


def scheduler_of(run: RunFolder) -> Scheduler:
    """The scheduler that has a run, or had it: its cluster may be another one by now."""
    for launcher in PLACES:
        if launcher in SCHEDULERS or (run.path / "launch" / f"{launcher}.json").is_file():
            scheduler = SCHEDULERS[launcher]
            if scheduler is not DIRECT and scheduler.owns(run):
                return scheduler
    return DIRECT


def launchers_with_queue() -> list[str]:
    """Launchers whose scheduler gives out allocations."""
    return [launcher for launcher in PLACES if SCHEDULERS[launcher].queues]


def current(record: RunRecord) -> RunRecord:
    """The record of a run in the light of what its scheduler says, where it must be asked."""
    return scheduler_of(record.run).state(record)


def current_all(records: Sequence[RunRecord]) -> list[RunRecord]:
    """As `current`, with one question to each scheduler for all of its runs."""
    owners = [scheduler_of(record.run) for record in records]
    found = list(records)
    for scheduler in {id(owner): owner for owner in owners}.values():
        places = [number for number, owner in enumerate(owners) if owner is scheduler]
        seen = scheduler.states([records[place] for place in places])
        for place, record in zip(places, seen, strict=True):
            found[place] = record
    return found


def stage_jobs_in_flight(notice: Callable[[str], None]) -> StillRunning:
    """Tells whether jobs that make a stage, submitted by any run to any scheduler, may still
    write. `notice` is called with one line where a scheduler cannot be asked."""
    asked: dict[str, StillRunning] = {}

    def going(making: ArraysInFlight) -> bool:
        if making.scheduler not in asked:
            asked[making.scheduler] = SCHEDULERS[making.scheduler].in_flight(notice)
        return asked[making.scheduler](making)

    return going


def preparation_for(
    job: Job | None, root: Path, ui: StageUi, *, workers: int | None = None, force: bool = False
) -> Preparation:
    """What brings stages up to date on the hosts that the job's cluster has for them.

    Args:
        job: on whose behalf; None: this machine runs all units.
        root: the folder that holds data/ and stamps/.
        ui: how the person follows.
        workers: see `Preparation`.
        force: see `Preparation`.
    """

    # no supervisor makes stages
    from trainkit.launch.preparation import Preparation, direct_units

    def runner_of(stage: str) -> UnitRunner:
        if job is None:
            return direct_units(None, stage, ui.say)
        return scheduler_for(job.cluster).unit_runner(job, stage, ui.say)

    return Preparation(root, ui, runner_of, stage_jobs_in_flight(ui.say), workers, force)
