"""How a run's end is told and made sure of where Slurm has a word in it. Slurm's programs are
recorded ones."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.launch.recorded_slurm import Slurm
from tests.runs.test_record import begin, end
from trainkit.base.errors import Exit, TrainkitError
from trainkit.cli.inspect.logs import why
from trainkit.cli.run import stages as prepare, summary as ending
from trainkit.cli.run.attach import attach
from trainkit.jobs.clusters import StagePlace
from trainkit.jobs.load import load
from trainkit.jobs.resolved import write_job
from trainkit.launch.cluster_care import health_checks as doctor
from trainkit.launch.hosts.hostfile import Host
from trainkit.launch.slurm import reconcile as settling
from trainkit.launch.slurm.reconcile import SlurmQueueFollower, reconcile
from trainkit.launch.slurm.sbatch import note_end
from trainkit.launch.slurm.scheduler import end_after_supervisor
from trainkit.launch.slurm.squeue import JobStatus, PollBackoff
from trainkit.runs.events import FailureClass
from trainkit.runs.folder import RunFolder
from trainkit.runs.record import read_run_record
from trainkit.runs.slurm import add_slurm_job, change_slurm_job, read_slurm_jobs


def a_run(slurm: Slurm, exit: int, kind: FailureClass) -> RunFolder:
    """A run of job 7 whose supervisor has ended its first attempt so."""
    run = slurm.run("one")
    write_job(run.job, load(slurm.folder).resolve("small"))
    add_slurm_job(run, "7", first_attempt=1)
    change_slurm_job(run, "7", began=1)
    end(begin(run), exit, kind)
    return run


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at the queue is due."""
    monkeypatch.setattr(PollBackoff, "due", lambda self: True)


@pytest.mark.parametrize(("exit", "kind"), [(8, "infra"), (12, "preempted")])
@pytest.mark.usefixtures("impatient")
def test_a_run_has_not_failed_before_slurm_says_so(
    slurm: Slurm, exit: int, kind: FailureClass
) -> None:
    """scontrol requeue as its supervisor begins: `train` would return 8, and the run succeed 20
    s later."""
    run = a_run(slurm, exit, kind)
    queue = SlurmQueueFollower(run)
    slurm.says("7|COMPLETING")
    assert queue.look(read_run_record(run))[0].state == "running"
    slurm.says("7|PENDING")
    record, said = queue.look(read_run_record(run))
    assert record.state == "queued" and "Slurm has put job 7 back into the queue" in said
    slurm.says("7|FAILED")
    record, _ = queue.look(read_run_record(run))
    assert (record.state, record.exit) == (read_run_record(run).state, exit)


@pytest.mark.usefixtures("impatient")
def test_an_end_of_the_run_s_own_making_is_told_at_once(slurm: Slurm) -> None:
    run = a_run(slurm, 9, "user")
    slurm.says("7|COMPLETING")
    assert SlurmQueueFollower(run).look(read_run_record(run))[0].state == "failed"


@pytest.mark.usefixtures("impatient")
def test_a_job_that_never_ends_keeps_nobody(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settling, "ENDING_SECONDS", -1.0)
    run = a_run(slurm, 8, "infra")
    slurm.says("7|COMPLETING")
    queue = SlurmQueueFollower(run)
    assert [queue.look(read_run_record(run))[0].state for _ in range(2)][1] == "failed"


def test_a_job_that_was_cancelled_in_the_queue_no_longer_waits(slurm: Slurm) -> None:
    """squeue still says why it had waited."""
    run = slurm.run("one")
    add_slurm_job(run, "7", first_attempt=1)
    seen = JobStatus("7", "CANCELLED", "Priority", "N/A", "1:00", "")
    assert seen.words() == "job 7 is over: CANCELLED"
    told = (reconcile(read_run_record(run), seen).root_cause or {})["message"]
    assert told == "job 7 was over before its supervisor began: CANCELLED"
    assert (
        JobStatus("7", "CANCELLED", "by root", "", "", "").words()
        == "job 7 is over: CANCELLED (by root)"
    )


def test_jobs_that_cannot_be_taken_out_are_named(slurm: Slurm) -> None:
    run = a_run(slurm, 15, "cancelled")
    add_slurm_job(run, "8", first_attempt=1, follows="7")
    scancel = slurm.folder / "bin" / "scancel"
    scancel.write_text("#!/bin/bash\necho slurmctld is away >&2; exit 1\n")
    slurm.says("7|COMPLETED", "8|PENDING")
    with pytest.raises(TrainkitError, match="Slurm still has them: 8 PENDING") as caught:
        end_after_supervisor(run)
    assert caught.value.exit == Exit.CONTACT_LOST and "scancel 8" in str(caught.value.hint)
    assert [job.id for job in read_slurm_jobs(run)] == [
        "7",
        "8",
    ], "it will run, and whoever looks must know"
    (slurm.folder / "bin" / "squeue").write_text(
        "#!/bin/bash\necho slurmctld is away >&2; exit 1\n"
    )
    with pytest.raises(TrainkitError, match="whether jobs 7, 8 are over is not known") as caught:
        end_after_supervisor(run)
    assert caught.value.exit == Exit.CONTACT_LOST


def test_a_job_that_is_over_anyway_needs_no_scancel(slurm: Slurm) -> None:
    run = a_run(slurm, 15, "cancelled")
    add_slurm_job(run, "8", first_attempt=1, follows="7")
    (slurm.folder / "bin" / "scancel").write_text(
        "#!/bin/bash\necho 'Kill job error on job id 7: already completing' >&2; exit 1\n"
    )
    slurm.says("7|COMPLETED", "8|CANCELLED")
    end_after_supervisor(run)
    assert [job.id for job in read_slurm_jobs(run)] == ["7"]


def test_why_says_what_status_says_of_a_spent_budget(slurm: Slurm) -> None:
    """The supervisor of the next start has given up: its word comes after the last attempt's."""
    run = a_run(slurm, 12, "preempted")
    note_end(
        run,
        "7",
        {
            "state": "GIVEN UP",
            "message": "attempt 1 ended (preemption), and the budget is used up",
            "exit": 12,
        },
    )
    document = why(slurm.task, "one", 0).document
    status = read_run_record(run)
    assert (
        document["root_cause"]["message"] == (status.root_cause or {})["message"]
        and document["exit"] == status.exit
    )
    assert "budget" in document["root_cause"]["message"]


def test_attach_to_a_run_that_has_ended_loads_no_model(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """This may be a login node; the sample was printed when it ended."""
    a_run(slurm, 0, "success")
    asked = list[Any]()
    monkeypatch.setattr(ending, "_print_sample", lambda *words: asked.append(words))
    assert attach(slurm.task, "one").exit == Exit.DONE and not asked
    assert "next:" in capsys.readouterr().out


def test_places_of_stages_that_there_are_not_are_named(
    slurm: Slurm, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare.say_unused_stages(slurm.task, slurm.job)
    assert capsys.readouterr().out == ""
    places = {"prep-data": StagePlace(), "prepdata": StagePlace(), "compile": StagePlace()}
    cluster = slurm.job.cluster.model_copy(update={"stages": places})
    prepare.say_unused_stages(slurm.task, slurm.job.model_copy(update={"cluster": cluster}))
    unknown, prepdata = capsys.readouterr().out.splitlines()
    assert (
        "stages.compile is the place of no stage" in unknown
        and "stages.prepdata" in prepdata
        and "prep-data" in prepdata
    )


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_doctor_says_that_the_root_is_full(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def full(*words: object) -> Callable[[], None]:
        raise OSError(number, "no room")

    monkeypatch.setattr("trainkit.launch.supervise.orphan_sweep.take_snapshot", full)
    with pytest.raises(TrainkitError, match="cannot be written") as caught:
        doctor.examine_hosts(slurm.job.cluster, [Host("n1")], tmp_path)
    assert caught.value.exit == Exit.HEALTH and "clusters.X.root" in str(caught.value.hint)
