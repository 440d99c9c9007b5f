"""launch/slurm.json: the Slurm jobs of a run, and the state of a run that they decide."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainkit.base.errors import ConfigError
from trainkit.runs.find import find_run
from trainkit.runs.folder import RunFolder
from trainkit.runs.record import read_run_record, record_of_end
from trainkit.runs.slurm import (
    SlurmJob,
    add_slurm_job,
    change_slurm_job,
    drop_slurm_job,
    read_slurm_jobs,
)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "runs" / "job" / "20260101-000000-aaaa")
    folder.path.mkdir(parents=True)
    folder.job.write_text("{}")
    return folder


def test_submissions_are_added_changed_and_dropped(run: RunFolder) -> None:
    assert read_slurm_jobs(run) == []
    add_slurm_job(run, "7", first_attempt=1)
    add_slurm_job(run, "8", first_attempt=1, follows="7")
    first, second = read_slurm_jobs(run)
    assert (first.id, first.follows, second.id, second.follows) == ("7", None, "8", "7")
    assert first.waiting and second.waiting and first.submitted.endswith("Z")
    change_slurm_job(run, "7", began=2)
    assert [job.began for job in read_slurm_jobs(run)] == [2, None]
    assert [job.waiting for job in read_slurm_jobs(run)] == [False, True]
    drop_slurm_job(run, "8")
    assert [job.id for job in read_slurm_jobs(run)] == ["7"]
    run.slurm.write_text('{"schema": "slurm/2", "jobs": []}')
    with pytest.raises(ConfigError, match="slurm/2"):
        read_slurm_jobs(run)


def test_the_newest_job_decides_while_no_supervisor_began(run: RunFolder) -> None:
    add_slurm_job(run, "7", first_attempt=1)
    record = read_run_record(run)
    assert (record.state, record.exit) == ("queued", None)
    assert record.next_tasks() == [f"invoke attach {run.id}", f"invoke cancel {run.id}"]
    change_slurm_job(run, "7", ended={"state": "CANCELLED by 0", "message": "cancelled"})
    assert (read_run_record(run).state, read_run_record(run).exit) == ("cancelled", 15)
    change_slurm_job(
        run, "7", ended={"state": "FAILED", "message": "no node", "exit": 14, "host": "n1"}
    )
    record = read_run_record(run)
    assert (record.state, record.exit, record.failure_class) == ("failed", 14, "no-progress")
    assert record.root_cause == {
        "message": "no node",
        "host": "n1",
        "slurm_job": "7",
        "slurm_state": "FAILED",
    }
    add_slurm_job(run, "8", first_attempt=1)
    assert read_run_record(run).state == "queued"
    change_slurm_job(run, "8", began=1)
    assert read_run_record(run).state == "failed"  # it began, and there is no supervisor


@pytest.mark.parametrize(
    ("ended", "exit", "failure_class"),
    [
        ({"state": "NODE_FAIL"}, 8, "infra"),
        ({"state": "FAILED", "exit": 6, "class": "user"}, 6, "user"),
        ({"state": "TIMEOUT", "exit": 14}, 14, "no-progress"),
    ],
)
def test_how_a_job_ended(
    run: RunFolder, ended: dict[str, object], exit: int, failure_class: str
) -> None:
    add_slurm_job(run, "7", first_attempt=1)
    record = record_of_end(read_run_record(run), {"slurm_job": "7"}, ended)
    assert (record.state, record.exit, record.failure_class) == ("failed", exit, failure_class)
    assert record.lost is False


def test_a_run_is_found_by_the_number_of_its_job(run: RunFolder) -> None:
    root = run.root
    other = RunFolder(root / "runs" / "job" / "20260102-000000-bbbb")
    other.path.mkdir(parents=True)
    other.job.write_text("{}")
    add_slurm_job(run, "20260102", first_attempt=1)
    assert find_run([root], "20260102") == run  # before the beginning of an id
    with pytest.raises(ConfigError, match="no run and no job"):
        find_run([root], "99")


def test_one_that_waits_has_neither_begun_nor_ended() -> None:
    job = SlurmJob("1", "2026-01-01T00:00:00.000Z", 1)
    assert job.waiting
    assert not SlurmJob("1", job.submitted, 1, began=1).waiting
    assert not SlurmJob("1", job.submitted, 1, ended={"state": "FAILED"}).waiting
