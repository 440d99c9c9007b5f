"""Which elements of arrays wait, run or are over, and which of them is to blame for what is not
made: as Slurm knows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from trainkit.base.documents import read_document
from trainkit.base.errors import TrainkitError
from trainkit.launch.array_units import name_some
from trainkit.launch.slurm.squeue import (
    JobStatus,
    account_status,
    element_statuses,
    job_accounts,
)
from trainkit.stages.array_task import FORM


def element_ends(ids: Sequence[str]) -> list[JobStatus]:
    """As `element_statuses`, of jobs that are over: slurmdbd is asked for those that slurmctld has
    forgotten, and where it does not answer they are left out."""
    found = element_statuses(ids)
    forgotten = [id for id in ids if id not in {each.array for each in found}]
    try:
        rows = job_accounts(forgotten) if forgotten else None
    except TrainkitError:
        rows = None
    kept = {row.id: account_status(row) for row in rows or () if "." not in row.id}
    return [*found, *(each for each in kept.values() if each.over)]


def first_failed(ids: Sequence[str], ends: Sequence[JobStatus]) -> list[JobStatus]:
    """The elements that did not end well of the first of the jobs that has such: what Slurm did
    to those after it follows from that."""
    bad = [each for each in ends if each.over and each.state != "COMPLETED"]
    return next((found for id in ids if (found := [e for e in bad if e.array == id])), [])


def describe_failure(
    levels: Mapping[str, Path | None], ends: Sequence[JobStatus], left: Sequence[str]
) -> tuple[str, str]:
    """(which units did not end, "" for none; what Slurm says of their elements).

    Args:
        levels: what the tasks of each array read, by its job, in the order of the graph; None: of
            a job that has no units.
        ends: of these jobs' elements.
        left: units that are not made.
    """
    failed = first_failed(list(levels), ends)
    blamed = {name for each in failed for name in _units_of(levels[each.array], each)}
    names = [name for name in left if name in blamed] or list(left)
    said = name_some([f"job {each.id} {each.ending()}" for each in failed])
    return name_some(names), said or "Slurm knows the jobs no more"


def _units_of(level: Path | None, element: JobStatus) -> list[str]:
    """Units that an element was to do; all of its array's where Slurm does not name it alone."""
    if level is None or not level.is_file():  # of another run, which has been deleted
        return []
    value = read_document(level, FORM)
    shares = value["shares"]
    index = element.id.partition("_")[2]
    if index.isdigit():
        first = int(index) * value["tasks"]
        shares = shares[first : first + value["tasks"]]
    return [unit["name"] for share in shares for unit in share]


def jobs_are_over(ids: Sequence[str]) -> bool:
    """Whether no element of the arrays will run any more."""
    return all(each.over for each in element_statuses(ids))
