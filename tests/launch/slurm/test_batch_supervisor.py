"""What a supervisor knows of the attempts before it: budgets last over requeues, since every one
begins a new process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.launch.supervised import make_run
from trainkit.base.errors import TrainkitError
from trainkit.launch.slurm.allocation import SlurmAllocation
from trainkit.launch.slurm.batch_supervisor import BatchStopRequests, BatchSupervisor
from trainkit.launch.supervise.observer import silent_observer
from trainkit.runs.events import (
    AllRanksStarted,
    AttemptEnded,
    AttemptStarted,
    Event,
    EventLog,
    FailureClass,
    RequeueFailed,
    RetryPlanned,
)
from trainkit.runs.folder import RunFolder
from trainkit.runs.record import read_run_record
from trainkit.runs.slurm import add_slurm_job, read_slurm_jobs

GONE: list[Event] = [AttemptStarted("r", 1, {}, 1), AllRanksStarted()]


def ended(
    kind: FailureClass, step: int, exit: int, *, budget: str | None = None, **cause: Any
) -> list[Event]:
    """Events of an attempt that ended so."""
    root_cause: Any = {"message": "m", **cause}
    return [*GONE, AttemptEnded(exit, root_cause, step, failure_class=kind, budget=budget)]


def retried(by: str, step: int) -> list[Event]:
    """Of one that saved, after which Slurm goes on."""
    retry = RetryPlanned(2, by="slurm", failure_class=by)
    return [*ended("preempted", step, 12, budget=by), retry]


def supervisor_after(
    folder: Path, attempts: Sequence[Sequence[Event]], *sets: str
) -> tuple[RunFolder, BatchSupervisor]:
    """The supervisor of job 7, before its first attempt."""
    run = make_run(folder, ["cluster.launcher=slurm", *sets])
    add_slurm_job(run, "7", first_attempt=1)
    for number, events in enumerate(attempts, 1):
        log = EventLog(run.attempt(number))
        for event in events:
            log.write(event)
        log.close()
    return run, BatchSupervisor(
        run,
        {},
        BatchStopRequests(),
        silent_observer(),
        SlurmAllocation("7", ("n1",), len(attempts)),
    )


def test_kinds_have_budgets_of_their_own(tmp_path: Path) -> None:
    """20 time limits and 20 preemptions with steps between them eat nothing of what is for
    failures."""
    attempts = [
        retried(kind, 10 * n + m)
        for n in range(20)
        for m, kind in enumerate(("time-limit", "preemption"))
    ]
    _, supervisor = supervisor_after(tmp_path, attempts)
    supervisor.replay(1)
    assert (
        supervisor.budgets.left["time-limit"] == 1000 - 20
        and supervisor.budgets.left["preemption"] == 100 - 20
    )
    assert supervisor.budgets.left["infra"] == 3


def test_a_supervisor_that_left_no_word_counts_as_infra(tmp_path: Path) -> None:
    _, supervisor = supervisor_after(tmp_path / "a", [GONE, GONE], "retry.same_step=9")
    supervisor.replay(1)
    assert supervisor.budgets.left["infra"] == 1
    run, supervisor = supervisor_after(tmp_path / "b", [GONE] * 4, "retry.same_step=9")
    with pytest.raises(
        TrainkitError, match=r"attempt 4 ended \(infra\), and the budget retry.infra is used up"
    ) as caught:
        supervisor.replay(1)
    assert caught.value.exit == 10
    record = read_run_record(run)
    assert (record.state, record.exit) == ("failed", 10) and "budget" in str(record.root_cause)


def test_a_person_s_word_gives_new_budgets(tmp_path: Path) -> None:
    """`resume`, and scontrol requeue of a run that had ended."""
    _, supervisor = supervisor_after(tmp_path / "a", [GONE] * 5, "retry.same_step=9")
    supervisor.replay(5)
    assert supervisor.budgets.left["infra"] == 2
    _, supervisor = supervisor_after(
        tmp_path / "b", [GONE, GONE, ended("user", 4, 9), GONE], "retry.same_step=9"
    )
    supervisor.replay(1)
    assert supervisor.budgets.left["infra"] == 2


def test_time_limits_without_a_step_between_them_end(tmp_path: Path) -> None:
    """A step that takes longer than the limit would requeue for ever."""
    run, supervisor = supervisor_after(
        tmp_path,
        [retried("time-limit", 40), retried("time-limit", 50)] + [retried("time-limit", 50)] * 2,
    )
    with pytest.raises(TrainkitError, match="3 times in the same way at step 50") as caught:
        supervisor.replay(1)
    assert caught.value.exit == 14 and read_run_record(run).failure_class == "no-progress"


def test_attempts_in_one_allocation_count_too(tmp_path: Path) -> None:
    again = [*ended("infra", 3, 10, budget="infra", signal="SIGKILL"), RetryPlanned(2)]
    _, supervisor = supervisor_after(tmp_path, [again, retried("preemption", 8)])
    supervisor.replay(1)
    assert supervisor.budgets.left["infra"] == 2 and supervisor.budgets.left["preemption"] == 99


def test_a_budget_counts_though_the_supervisor_was_killed_before_its_last_word(
    tmp_path: Path,
) -> None:
    """KILL between `ended` and `retry`: `ended` says what was used up. One that Slurm would not
    put back was the end."""
    cut_short = ended("infra", 3, 10, budget="infra", signal="SIGKILL")
    _, supervisor = supervisor_after(tmp_path / "a", [cut_short, GONE], "retry.same_step=9")
    supervisor.replay(1)
    assert supervisor.budgets.left["infra"] == 1
    _, supervisor = supervisor_after(
        tmp_path / "b", [[*cut_short, RequeueFailed()], GONE], "retry.same_step=9"
    )
    supervisor.replay(1)
    assert supervisor.budgets.left["infra"] == 2


def test_the_first_sign_of_life_takes_the_run_out_of_the_queue(tmp_path: Path) -> None:
    run, supervisor = supervisor_after(tmp_path, [])
    assert read_slurm_jobs(run)[0].waiting
    supervisor._write_sign_of_life()
    assert not read_slurm_jobs(run)[0].waiting
