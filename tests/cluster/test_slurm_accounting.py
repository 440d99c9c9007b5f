"""Slurm with slurmdbd, whose controller forgets a job as soon as it is over: how runs ended is
asked of sacct, and nothing waits for a slurmdbd in trouble."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.machines import HEAD, Process
from tests.cluster.slurm_project import SlurmProject
from tests.conftest import HANGS, wait_for


def forgotten(project: SlurmProject, id: str) -> None:
    """Until slurmctld does not know the job any more, and slurmdbd knows its end."""
    wait_for(
        lambda: (
            id
            not in project.cluster.on(
                HEAD, "squeue", "--noheader", "--states=all", "--format=%i"
            ).split()
        ),
        "slurmctld to forget",
        timeout=HANGS,
    )
    wait_for(
        lambda: (
            "Unknown"
            not in project.cluster.on(HEAD, "sacct", "-XnP", f"--jobs={id}", "--format=End")
        ),
        "slurmdbd to know",
        timeout=HANGS,
    )


def states(project: SlurmProject, id: str) -> list[str]:
    """What sacct says of every start of a job."""
    return [
        word.split()[0]
        for word in project.cluster.on(
            HEAD, "sacct", "-XnPD", f"--jobs={id}", "--format=State"
        ).splitlines()
    ]


def prolog(project: SlurmProject, line: str) -> None:
    project.edit_jobs(
        "ranks_per_node = 2", f"ranks_per_node = 2\nprolog = {json.dumps([line])}", count=1
    )


@pytest.fixture
def slurmdbd(accounting: SlurmProject) -> Iterator[Process]:
    """The daemon, for a test that gives it trouble; up and well again afterwards."""
    (daemon,) = [p for p in accounting.cluster.processes() if p.argv[:1] == ("slurmdbd",)]
    yield daemon
    if [p for p in accounting.cluster.processes() if p.pid == daemon.pid]:
        accounting.cluster.kill(daemon, number=signal.SIGCONT)
    else:
        accounting.cluster.on(HEAD, "slurmdbd")
    wait_for(lambda: answers(accounting), "slurmdbd to answer", timeout=HANGS)


def answers(project: SlurmProject) -> bool:
    try:
        return "tk" in project.cluster.on(
            HEAD, "timeout", "5", "sacctmgr", "--noheader", "show", "cluster"
        )
    except AssertionError:
        return False


def test_a_job_that_was_cancelled_and_forgotten(accounting: SlurmProject) -> None:
    """Nobody looked while slurmctld knew: sacct says that it was cancelled, and by whom; the
    record keeps that."""
    accounting.slurm(hold=True, account="physics")
    run, id = accounting.submit()
    accounting.cluster.on(HEAD, "scancel", id)
    forgotten(accounting, id)
    (row,) = [row for row in accounting.document("runs")["runs"] if row["run"] == run.name]
    assert row["state"] == "cancelled"
    ended = accounting.document("status", id)
    assert (ended["state"], ended["exit"], ended["root_cause"]["slurm_state"]) == (
        "cancelled",
        15,
        "CANCELLED",
    )
    assert "by root" in ended["root_cause"]["message"]
    assert (
        accounting.cluster.on(HEAD, "sacct", "-XnP", f"--jobs={id}", "--format=Account").strip()
        == "physics"
    )
    (kept,) = accounting.document("why", id)["slurm"]
    assert kept["state"].startswith("CANCELLED by") and kept["nodes"] == "None assigned"


def test_a_job_that_failed_and_was_forgotten(accounting: SlurmProject) -> None:
    """Before its supervisor began."""
    # else the supervisor judges what a failed prolog means
    prolog(accounting, "trap - EXIT; exit 41")
    run, id = accounting.submit()
    forgotten(accounting, id)
    ended = accounting.document("status", run.name)
    assert (ended["state"], ended["exit"]) == ("failed", 8) and "FAILED (exit code 41:0)" in ended[
        "root_cause"
    ]["message"], ended
    said = accounting.invoke("why", run.name).stdout
    assert "what Slurm kept of it" in said and f"{id}.batch" in said and "41:0" in said


def end_time(project: SlurmProject, id: str) -> None:
    project.cluster.on(HEAD, "scontrol", "update", f"JobId={id}", "EndTime=now+1")


def crash(project: SlurmProject, id: str) -> None:
    project.cluster.crash("node1")
    try:
        forgotten(project, id)
    finally:
        project.cluster.boot("node1")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("state", "ends"), [("TIMEOUT", end_time), ("NODE_FAIL", crash)], ids=["time-limit", "node"]
)
def test_an_end_before_the_supervisor(
    accounting: SlurmProject, state: str, ends: Callable[[SlurmProject, str], None]
) -> None:
    prolog(accounting, "sleep 300")
    accounting.edit_jobs('cluster = "queue"', 'cluster = "queue"\nresume = "never"', count=1)
    accounting.slurm(nodelist="node[1-2]")
    run, id = accounting.submit()
    wait_for(lambda: accounting.job_state(id) == "RUNNING", "the job to start", timeout=HANGS)
    ends(accounting, id)
    forgotten(accounting, id)
    ended = accounting.document("status", run.name)
    assert (ended["state"], ended["exit"], ended["root_cause"]["slurm_state"]) == (
        "failed",
        8,
        state,
    ), ended


def test_an_account_that_is_not_there(accounting: SlurmProject) -> None:
    accounting.slurm(account="alchemy")
    assert (
        "Invalid account" in accounting.invoke("train", "random", exit=8).stderr
        and not accounting.runs()
    )


@pytest.mark.slow
def test_a_demo_whose_queue_slurmctld_forgets(accounting: SlurmProject) -> None:
    """Real ranks on 2 nodes, followed through queue and requeue to the end; the folder says how
    it ended, and sacct of all starts."""
    # so that the requeue comes before the end on any machine
    following = accounting.start("train", "random", "--set", "training.train_iters=300")
    run: Path = wait_for(
        lambda: next((r for r in accounting.runs() if (r / "metrics.jsonl").exists()), None),
        "steps",
        timeout=HANGS,
    )
    wait_for(lambda: len(accounting.losses(run)) >= 7, "some steps", timeout=HANGS)
    id = accounting.slurm_jobs(run)[0]["id"]
    accounting.cluster.on(HEAD, "scontrol", "requeue", id)
    out, err = following.communicate()
    assert following.returncode == 0 and "Slurm goes on with the run as attempt 2" in out, out + err
    forgotten(accounting, id)
    assert (
        accounting.document("status", run.name)["state"] == "succeeded"
        and len(accounting.losses(run)) == 300
    )
    assert states(accounting, id) == ["REQUEUED", "COMPLETED"]
    kept = [row for row in accounting.document("why", id)["slurm"] if row["id"] == id]
    assert [row["state"] for row in kept] == ["REQUEUED", "COMPLETED"] and {
        row["nodes"] for row in kept
    } == {"node[1-2]"}


@pytest.mark.slow
def test_a_supervisor_without_a_word_and_a_job_forgotten(accounting: SlurmProject) -> None:
    """KILL to the job: the record has no last word, Slurm's is told, noted, and outlives
    slurmdbd."""
    accounting.ranks_count(10_000)
    accounting.edit_jobs('cluster = "queue"', 'cluster = "queue"\nresume = "never"', count=1)
    run, id = accounting.submit()
    accounting.wait_step(3)
    (supervisor,) = [
        p
        for p in accounting.cluster.processes_of(run.name)
        if any(word.endswith("launch/main.py") for word in p.argv)
    ]
    accounting.cluster.kill(supervisor)
    forgotten(accounting, id)
    silent = run / "launch" / "supervisor.json"
    value = json.loads(silent.read_text())
    # rather than a minute of waiting
    silent.write_text(json.dumps(value | {"time": value["time"] - 100}))
    ended = accounting.document("status", run.name)
    assert (ended["state"], ended["exit"], ended["class"]) == (
        "failed",
        10,
        "infra",
    ) and "Slurm says FAILED (exit code 0:9)" in ended["root_cause"]["message"]
    assert accounting.slurm_jobs(run)[-1]["ended"]["state"] == "FAILED"
    why = accounting.document("why", run.name)
    assert "FAILED" in why["root_cause"]["message"] and why["attempts"][-1]["class"] == "infra"
    # it can be gone on with, in the same record
    (accounting.path / "does.py").write_text(
        (accounting.path / "does.py").read_text().replace("10000", str(accounting.count() + 10))
    )
    accounting.may_end()
    accounting.invoke("resume", run.name)
    assert accounting.document("status", run.name)["attempt"] == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "trouble", [pytest.param(signal.SIGSTOP, id="silent"), pytest.param(signal.SIGKILL, id="down")]
)
def test_slurmdbd_in_trouble(
    accounting: SlurmProject, slurmdbd: Process, trouble: signal.Signals
) -> None:
    """Runs are submitted and followed as ever; what it alone could tell is not known now, said
    so, and not noted as the truth."""
    accounting.ranks_do("beat(1); done()")
    accounting.slurm(hold=True)
    run, id = accounting.submit()
    accounting.cluster.kill(slurmdbd, number=trouble)
    accounting.cluster.on(HEAD, "scancel", id)
    wait_for(
        lambda: (
            id
            not in accounting.cluster.on(
                HEAD, "squeue", "--noheader", "--states=all", "--format=%i"
            ).split()
        ),
        "slurmctld to forget",
        timeout=HANGS,
    )
    for words in (("status", run.name), ("why", run.name), ("runs",)):
        said: dict[str, Any] = accounting.document(*words)
        if words[0] == "status":
            assert (
                said["state"] == "failed"
                and "slurmdbd cannot be asked" in said["root_cause"]["message"]
            ), said
    assert accounting.slurm_jobs(run)[-1]["ended"] is None
    (accounting.path / "jobs.toml").write_text(
        (accounting.path / "jobs.toml").read_text().replace("hold = true", "")
    )
    accounting.invoke("train", "random")
    if trouble == signal.SIGSTOP:
        accounting.cluster.kill(slurmdbd, number=signal.SIGCONT)
    else:
        accounting.cluster.on(HEAD, "slurmdbd")
    wait_for(
        lambda: answers(accounting) and states(accounting, id) == ["CANCELLED"],
        "slurmdbd to be told",
        timeout=HANGS,
    )
    assert accounting.document("status", run.name)["state"] == "cancelled"
