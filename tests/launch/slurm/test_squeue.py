"""What is made of the answers of squeue and sacct: programs on PATH that print what the real
ones print."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.programs import put_program
from trainkit.base.documents import document
from trainkit.base.errors import TrainkitError
from trainkit.base.files import write_json
from trainkit.base.process import identity
from trainkit.launch.slurm.reconcile import reconciled
from trainkit.launch.slurm.squeue import UNSURE, job_accounts, job_statuses
from trainkit.runs.folder import RunFolder
from trainkit.runs.record import read_run_record
from trainkit.runs.slurm import add_slurm_job, change_slurm_job, read_slurm_jobs

# sacct --duplicates --parsable2 of Slurm 22.05, format ACCOUNT_FIELDS
REQUEUED = """\
7|REQUEUED|0:0|2026-11-22T10:00:00|2026-11-22T10:00:05|2026-11-22T10:03:00|01:00:00|node[1-2]
7.batch|FAILED|15:0|2026-11-22T10:00:05|2026-11-22T10:00:05|2026-11-22T10:03:00||node1
7|OUT_OF_MEMORY|0:125|2026-11-22T10:03:00|2026-11-22T10:03:06|2026-11-22T10:09:00|01:00:00|node[1-2]
7.batch|OUT_OF_MEMORY|0:125|2026-11-22T10:03:06|2026-11-22T10:03:06|2026-11-22T10:09:00||node1
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs, first on PATH, and a controller that has forgotten every job."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    says(tmp_path, "squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    return tmp_path


def says(folder: Path, name: str, script: str) -> None:
    put_program(folder, name, f'#!/bin/bash\necho "$*" >> {folder}/{name}.asked\n{script}\n')


def test_the_newest_start_counts_and_all_can_be_had(slurm: Path) -> None:
    says(slurm, "sacct", f"cat <<'END'\n{REQUEUED}END")
    seen = job_statuses(["7"])["7"]
    assert (seen.state, seen.reason, seen.over) == ("OUT_OF_MEMORY", "exit code 0:125", True)
    assert [(row.id, row.state_word) for row in job_accounts(["7"]) or ()][:3] == [
        ("7", "REQUEUED"),
        ("7.batch", "FAILED"),
        ("7", "OUT_OF_MEMORY"),
    ]
    assert (
        "--duplicates" in (slurm / "sacct.asked").read_text()
        and "--jobs=7 " in (slurm / "sacct.asked").read_text()
    )


def test_one_question_for_all_that_are_forgotten(slurm: Path) -> None:
    says(slurm, "squeue", "echo '8|PENDING|Priority|N/A|1:00:00|'")
    says(slurm, "sacct", "echo '7|CANCELLED by 0|0:0|a|b|c|01:00:00|None assigned'")
    seen = job_statuses(["7", "8", "9"])
    assert {id: each.state for id, each in seen.items()} == {
        "8": "PENDING",
        "7": "CANCELLED",
    } and seen["7"].reason == "by root"
    assert (slurm / "sacct.asked").read_text().count("\n") == 1 and "--jobs=7,9 " in (
        slurm / "sacct.asked"
    ).read_text()
    (slurm / "sacct.asked").unlink()
    assert set(job_statuses(["8"])) == {"8"} and not (slurm / "sacct.asked").exists(), (
        "slurmdbd is not asked for what slurmctld knows"
    )


def test_a_record_that_nobody_closed(slurm: Path) -> None:
    """A job whose end slurmdbd was never told, of a controller that lost its state: it does not
    run for ever."""
    says(slurm, "sacct", "echo '7|RUNNING|0:0|a|b|Unknown|01:00:00|node1'")
    seen = job_statuses(["7"])["7"]
    assert seen.state == UNSURE and seen.over and "still says RUNNING" in seen.words()


@pytest.mark.parametrize(
    "said",
    ["sacct: error: Slurm accounting storage is disabled", ""],
    ids=["disabled", "not-known"],
)
def test_nothing_is_known(slurm: Path, said: str) -> None:
    says(slurm, "sacct", f"echo '{said}' >&2; exit 1" if said else "exit 0")
    assert job_statuses(["7"]) == {} and job_accounts(["7"]) == (None if said else [])


def test_slurmdbd_does_not_answer(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainkit.launch.slurm.squeue.ACCOUNT_SECONDS", 0.2)
    says(slurm, "sacct", "exec sleep 86400")
    seen = job_statuses(["7"])["7"]
    assert (
        seen.state == UNSURE
        and seen.over
        and "slurmdbd cannot be asked (sacct did not answer within 0.2 s)" in seen.reason
    )
    with pytest.raises(TrainkitError, match="slurmdbd cannot be asked"):
        job_accounts(["7"])


def silent_run(root: Path) -> RunFolder:
    """A run whose supervisor was on another host and has said nothing for long."""
    run = RunFolder(root / "runs" / "j" / "a")
    run.path.mkdir(parents=True)
    run.job.write_text("{}")
    add_slurm_job(run, "7", first_attempt=1)
    change_slurm_job(run, "7", began=1)
    rest = {"host": "node1", "time": 0, "attempt": 1, "address": "", "port": 0, "ended": False}
    write_json(
        run.supervisor,
        document("supervisor/1", identity=identity().to_json() | {"host": "node1"}, **rest),
    )
    return run


def test_how_a_job_ended_whose_supervisor_left_no_word(slurm: Path, tmp_path: Path) -> None:
    run = silent_run(tmp_path)
    assert read_run_record(run).state == "unknown"
    says(slurm, "sacct", "echo 'slurmdbd is down' >&2; exit 1")
    told = reconciled(read_run_record(run))
    assert (told.state, told.exit) == ("failed", 10) and "slurmdbd is down" in (
        told.root_cause or {}
    )["message"]
    assert read_run_record(run).state == "unknown" and read_slurm_jobs(run)[0].ended is None, (
        "no truth to keep"
    )
    says(slurm, "sacct", "echo '7|NODE_FAIL|1:0|a|b|c|01:00:00|node1'")
    told = reconciled(read_run_record(run))
    assert (told.state, told.exit) == ("failed", 10) and "Slurm says NODE_FAIL (exit code 1:0)" in (
        told.root_cause or {}
    )["message"]
    says(slurm, "sacct", "exit 0")
    assert reconciled(read_run_record(run)) == told == read_run_record(run), (
        "kept, when nobody else knows it any more"
    )
    says(slurm, "squeue", "echo '7|PENDING|BeginTime|N/A|1:00:00|'")
    assert reconciled(read_run_record(run)).state == "queued", (
        "a person has put it back: scontrol requeue"
    )


def test_a_cancelled_job_whose_supervisor_left_no_word(slurm: Path, tmp_path: Path) -> None:
    run = silent_run(tmp_path)
    says(slurm, "sacct", "echo '7|CANCELLED by 0|0:9|a|b|c|01:00:00|node1'")
    told = reconciled(read_run_record(run))
    assert (told.state, told.exit, told.failure_class) == (
        "cancelled",
        15,
        "cancelled",
    ) and "by root" in (told.root_cause or {})["message"]


def test_an_element_that_was_cancelled_while_it_waited_is_known_by_the_others(
    slurm: Path, tmp_path: Path
) -> None:
    """Slurm keeps nothing of it: no line of squeue, no account."""
    run = RunFolder(tmp_path / "runs" / "j" / "r")
    (run.path / "launch").mkdir(parents=True)
    add_slurm_job(run, "7_2", first_attempt=1)
    says(slurm, "sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1")
    others = "7_0|RUNNING|None|N/A|1:00|n1"
    says(slurm, "squeue", f"case $* in *--jobs=7\\ *) echo '{others}';; esac")
    record = reconciled(read_run_record(run))
    assert (record.state, record.exit) == ("cancelled", 15)
    assert "job 7_2 was taken out of the queue" in (record.root_cause or {})["message"]
