"""Which elements of arrays wait, run or are over, and how they ended: as Slurm knows it."""

from __future__ import annotations

from collections.abc import Sequence

from trainkit.base.errors import TrainkitError
from trainkit.launch.slurm.allocation import slurm_output
from trainkit.launch.slurm.squeue import RUNNING, WAITING, job_accounts


def element_states(ids: Sequence[str]) -> list[tuple[str, str]]:
    """(job, state) of all elements that Slurm still knows."""
    try:
        text = slurm_output(
            [
                "squeue",
                "--noheader",
                "--array",
                "--states=all",
                f"--jobs={','.join(ids)}",
                "--format=%F|%T",
            ]
        )
    except TrainkitError as error:
        if "Invalid job id" not in error.message:
            raise
        return []
    return [
        (words[0], words[1]) for line in text.splitlines() if len(words := line.split("|")) == 2
    ]


def element_ends(ids: Sequence[str]) -> list[tuple[str, str]]:
    """As `element_states`, of jobs that are over: slurmdbd is asked for those that slurmctld has
    forgotten, and where it does not answer they are left out."""
    found = element_states(ids)
    forgotten = [id for id in ids if id not in {id for id, _ in found}]
    try:
        if forgotten:
            rows = job_accounts(forgotten)
        else:
            rows = None
    except TrainkitError:
        rows = None
    kept = [
        (row.id.partition("_")[0], row.state_word)
        for row in rows or ()
        if "." not in row.id and row.state_word not in WAITING | RUNNING | {"REQUEUED"}
    ]
    return [*found, *dict.fromkeys(kept)]


def describe_ends(ids: Sequence[str]) -> str:
    """How those of the jobs ended that did not end well, for people."""
    bad = dict.fromkeys(
        f"job {id} {state}"
        for id, state in element_ends(ids)
        if state not in WAITING | RUNNING | {"COMPLETED"}
    )
    return ", ".join(bad) or "Slurm knows the jobs no more"


def jobs_are_over(ids: Sequence[str]) -> bool:
    """Whether no element of the arrays will run any more."""
    return not any(state in WAITING or state in RUNNING for _, state in element_states(ids))
