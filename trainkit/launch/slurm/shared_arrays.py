"""Arrays that another run has submitted: how far they are, for runs that need what they make."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from trainkit.base.errors import TrainkitError
from trainkit.launch.slurm.reconcile import reconciled
from trainkit.launch.slurm.squeue import element_statuses
from trainkit.runs.folder import RunFolder
from trainkit.runs.record import read_run_record
from trainkit.stages.in_flight import ArraysInFlight


def array_progress(arrays: ArraysInFlight) -> Literal["going", "failing", "over"]:
    """How far arrays are; failing: a unit has failed, and others go on. Raises TrainkitError
    (exit 8) where Slurm cannot be asked.

    Of those that are over, the runs that waited for them have it noted how they ended: the next
    arrays write over what tells it.
    """
    found = element_statuses(arrays.jobs)
    if not all(each.over for each in found):
        over = {each.state for each in found if each.over}
        return "failing" if over - {"COMPLETED"} else "going"
    for run in map(Path, arrays.runs):
        if (run / "job.json").is_file():
            reconciled(read_run_record(RunFolder(run)))
    return "over"


class SharedArrayStatus:
    """Asks about others' arrays for runs that wait for them. That Slurm cannot be asked is said
    once, by `say`, and waited out: nobody knows that they are over.

    It is the `StillRunning` of `update_stage`. Raises TrainkitError (exit 8) only where Slurm's
    programs are not there at all.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._said = False

    def progress(self, arrays: ArraysInFlight) -> Literal["going", "failing", "over"]:
        """As `array_progress`; failing where Slurm cannot be asked: nothing to join."""
        try:
            found = array_progress(arrays)
        except TrainkitError as error:
            if shutil.which("squeue") is None:
                raise
            if not self._said:
                self._say(
                    f"Slurm cannot be asked about {arrays.words()} ({error.message}); asking again"
                )
            self._said = True
            return "failing"
        self._said = False
        return found

    def __call__(self, arrays: ArraysInFlight) -> bool:
        return self.progress(arrays) != "over"
