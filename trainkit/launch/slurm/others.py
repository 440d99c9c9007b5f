"""Arrays that another run has submitted: how far they are, for whoever needs what they make."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from trainkit.launch.slurm.arrays import states
from trainkit.launch.slurm.queue import BEFORE, RUNNING
from trainkit.launch.slurm.settle import settled
from trainkit.runs.folder import RunFolder
from trainkit.runs.record import read_record
from trainkit.stages.making import Making


def progress_of(making: Making) -> Literal["going", "failing", "over"]:
    """How far arrays are; failing: a unit has failed, and others go on. Raises TrainkitError (exit 8) where Slurm cannot be asked.

    Of those that are over, the runs that waited for them have it noted how they ended: the next arrays write over what tells it.
    """
    found = {state for _, state in states(making.jobs)}
    if found & (BEFORE | RUNNING):
        return "failing" if found - BEFORE - RUNNING - {"COMPLETED"} else "going"
    for run in map(Path, making.runs):
        if (run / "job.json").is_file():
            settled(read_record(RunFolder(run)))
    return "over"


def is_going(making: Making) -> bool:
    """The `Going` of `make_fresh`."""
    return progress_of(making) != "over"
