"""Runs through a real Slurm: submitted, followed, ended by it and by us, and one record of it
all."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.cluster.machines import HEAD
from tests.cluster.slurm_project import SlurmProject
from tests.conftest import HANGS, wait_for

DEAF = """
import signal, time
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, signal.SIG_IGN)
beat(1)
open(f"{folder}/count-{{rank}}", "w").write("1")
while True:
    time.sleep(1)
"""


def test_what_is_changed_while_it_waits_changes_nothing(slurm: SlurmProject) -> None:
    slurm.ranks_do(
        "import os; open(os.environ['TARGET'] + str(rank), 'w').write(os.environ['SAID']); beat(1);"
        " done()"
    )
    text = (slurm.path / "jobs.toml").read_text()
    given = text.replace(
        "env = { RANK_DOES", f'env = {{ TARGET = "{slurm.path}/said", SAID = "before", RANK_DOES'
    )
    (slurm.path / "jobs.toml").write_text(given)
    slurm.slurm(hold=True)
    run, id = slurm.submit()
    waiting = slurm.wait_state(run, "queued")
    assert waiting["slurm"]["reason"] == "JobHeldUser" and waiting["next"][0].startswith(
        "invoke attach"
    )
    said = f"job {id} is held (JobHeldUser): `scontrol release {id}` lets it go"
    assert said in slurm.invoke("status", id).stdout
    (slurm.path / "jobs.toml").write_text(given.replace("before", "after"))
    slurm.cluster.on(HEAD, "scontrol", "release", id)
    slurm.wait_state(run, "succeeded")
    assert {path.read_text() for path in slurm.path.glob("said[0-3]")} == {"before"}


def test_a_rank_that_exits_3_is_9(slurm: SlurmProject) -> None:
    slurm.ranks_do(
        "import sys, time; beat(1); time.sleep(0.3 if rank == 3 else 86400); print('no such luck');"
        " sys.exit(3)"
    )
    slurm.invoke("train", "random", exit=9)
    (run,) = slurm.runs()
    why = slurm.document("why", run.name)["root_cause"]
    assert (why["rank"], why["host"], why["code"]) == (3, "node2", 3) and "no such luck" in why[
        "last"
    ]
    id = slurm.slurm_jobs(run)[0]["id"]
    wait_for(lambda: slurm.job_state(id) == "FAILED", "the batch job to end", timeout=HANGS)
    assert "9:0" in slurm.cluster.on(HEAD, "scontrol", "show", "job", id)


def test_ctrl_c_only_stops_following_and_cancel_stops(slurm: SlurmProject) -> None:
    slurm.ranks_count(10_000)
    following = slurm.start("train", "random")
    slurm.wait_step(3)
    following.send_signal(signal.SIGINT)
    out, err = following.communicate()
    assert following.returncode == 130 and "goes on" in out, out + err
    (run,) = slurm.runs()
    count = slurm.count()
    slurm.wait_step(count + 3)
    id = slurm.slurm_jobs(run)[0]["id"]
    assert f"job {id}" in out
    assert (
        slurm.document("cancel", id, exit=15)["state"] == "cancelled"
        and slurm.job_state(id) == "CANCELLED"
    ), "no failure in Slurm's accounts"
    wait_for(
        lambda: not slurm.jobs() and not slurm.cluster.processes_of(run.name), "nothing to be left"
    )


def test_cancel_in_the_queue(slurm: SlurmProject) -> None:
    slurm.slurm(hold=True)
    run, id = slurm.submit()
    assert slurm.document("cancel", run.name, exit=15)["state"] == "cancelled"
    assert slurm.job_state(id) == "CANCELLED"
    assert slurm.document("status", run.name)["exit"] == 15


def test_scancel_saves_and_is_the_end(slurm: SlurmProject) -> None:
    slurm.ranks_count(10_000)
    run, id = slurm.submit()
    slurm.wait_step(3)
    wait_for(
        lambda: all((slurm.path / f"count-{rank}").exists() for rank in range(4)),
        "all ranks to count",
    )
    slurm.cluster.on(HEAD, "scancel", id)
    ended = slurm.wait_state(run, "preempted")
    assert ended["exit"] == 12 and "scancel" in ended["root_cause"]["message"]
    wait_for(lambda: slurm.job_state(id) == "CANCELLED", "the batch job to end", timeout=HANGS)
    counts = {(slurm.path / f"count-{rank}").read_text() for rank in range(4)}
    assert len(slurm.runs()) == 1 and max(map(int, counts)) < 10_000
    # a person goes on with it, in the same record
    (slurm.path / "does.py").write_text(
        (slurm.path / "does.py").read_text().replace("10000", str(slurm.count() + 20))
    )
    slurm.may_end()
    slurm.invoke("resume", run.name)
    assert slurm.slurm_jobs(run)[0]["id"] == id and len(slurm.slurm_jobs(run)) == 2
    assert slurm.document("status", run.name)["attempt"] == 2


def test_ranks_that_outlast_scancel_leave_a_record(slurm: SlurmProject) -> None:
    """Of an engine that takes longer to save than KillWait lets it: Slurm's KILL ends all."""
    slurm.ranks_do(DEAF.format(folder=slurm.path))
    run, id = slurm.submit()
    slurm.wait_step(1)
    # a rank may count before its supervisor has heard that all have begun
    wait_for(lambda: "go" in slurm.events(run, 1), "all ranks to have begun", timeout=HANGS)
    slurm.cluster.on(HEAD, "scancel", id)
    wait_for(lambda: slurm.job_state(id) == "CANCELLED", "the batch job to end", timeout=HANGS)
    ended = slurm.events(run, 1)["ended"]
    assert (ended["exit"], ended["class"]) == (12, "preempted")
    assert "scancel" in ended["root_cause"]["message"]
    assert ended["root_cause"]["message"].endswith("not all of its ranks had saved")


def test_requeue_goes_on_in_one_record(slurm: SlurmProject) -> None:
    """scontrol requeue while a person follows: saved, queued, attempt 2, one output file."""
    slurm.ranks_count(60)
    following = slurm.start("train", "random")
    slurm.wait_step(5)
    (run,) = slurm.runs()
    id = slurm.slurm_jobs(run)[0]["id"]
    slurm.cluster.on(HEAD, "scontrol", "requeue", id)
    slurm.may_end()
    out, err = following.communicate()
    assert following.returncode == 0, out + err
    assert "Slurm goes on with the run as attempt 2" in out and "attempt 2 begins" in out
    first = slurm.events(run, 1)
    assert first["ended"]["class"] == "preempted" and first["retry"]["class"] == "preemption"
    assert slurm.document("status", id)["attempt"] == 2 and slurm.count() == 60
    (output,) = (run / "launch").glob("slurm-*.out")
    assert output.read_text().count("run ") >= 2


@pytest.mark.slow
def test_the_time_limit_comes_near(slurm: SlurmProject) -> None:
    """USR1 before the limit: save, requeue by ourselves, go on; the limit itself never strikes."""
    slurm.ranks_count(10_000)
    slurm.slurm(time="1", signal="B:USR1@55")
    run, _ = slurm.submit()
    wait_for((run / "attempts" / "2").exists, "attempt 2", timeout=HANGS)
    first = slurm.events(run, 1)
    assert (
        first["ended"]["exit"] == 12
        and first["retry"]["class"] == "time-limit"
        and "time limit" in first["ended"]["root_cause"]["message"]
    )
    slurm.invoke("cancel", run.name, exit=15)


@pytest.mark.slow
def test_a_job_of_higher_priority_takes_the_nodes(slurm: SlurmProject) -> None:
    slurm.ranks_count(10_000)
    slurm.slurm(nodelist="node[1-2]")
    run, id = slurm.submit()
    slurm.wait_step(3)
    slurm.cluster.on(
        HEAD,
        "sbatch",
        "--partition=urgent",
        "--nodelist=node[1-2]",
        "--nodes=2",
        "--exclusive",
        "--output=/dev/null",
        "--wrap",
        "sleep 5",
    )
    wait_for(lambda: slurm.events(run, 1).get("retry"), "the run to make room", timeout=HANGS)
    assert slurm.events(run, 1)["retry"]["class"] == "preemption"
    slurm.wait_state(run, "queued")
    count = slurm.count()
    slurm.wait_step(count + 3)
    assert slurm.document("status", id)["attempt"] == 2 and slurm.slurm_jobs(run)[0]["began"] == 2
    slurm.invoke("cancel", run.name, exit=15)


@pytest.mark.slow
def test_a_chain_does_without_requeue(slurm: SlurmProject) -> None:
    """resume = "chain": a successor waits from the beginning, and is taken back when it is not
    needed."""
    slurm.ranks_count(60)
    slurm.edit_jobs('cluster = "queue"', 'cluster = "queue"\nresume = "chain"')
    run, id = slurm.submit()
    slurm.wait_step(3)
    assert [entry["follows"] for entry in slurm.slurm_jobs(run)] == [None, id]
    slurm.cluster.on(HEAD, "scancel", "--batch", "--signal=USR1", id)
    slurm.may_end()
    slurm.wait_state(run, "succeeded")
    entries = slurm.slurm_jobs(run)
    assert [entry["began"] for entry in entries] == [1, 2] and slurm.count() == 60
    wait_for(lambda: not slurm.jobs(), "no successor to be left", timeout=HANGS)


@pytest.mark.slow
@pytest.mark.parametrize("host", ["node1", "node2"], ids=["batch-host", "other-host"])
def test_a_node_crashes(slurm: SlurmProject, host: str) -> None:
    """Slurm puts the job back into the queue; on good nodes it goes on from the last step saved."""
    slurm.ranks_count(60)
    slurm.slurm(nodelist="node[1-2]")
    run, id = slurm.submit()
    slurm.wait_step(5)
    slurm.cluster.crash(host)
    before = slurm.count()
    try:
        wait_for(
            lambda: slurm.job_state(id) == "PENDING" or (run / "attempts" / "2").exists(),
            "the job to be queued again",
            timeout=HANGS,
        )
    finally:
        slurm.cluster.boot(host)
    slurm.may_end()
    slurm.wait_state(run, "succeeded")
    assert slurm.document("status", run.name)["attempt"] >= 2 and 5 <= before <= 60 == slurm.count()


def test_hostile_words_arrive(slurm: SlurmProject) -> None:
    words = [
        "a b",
        '"double"',
        "it's",
        "$HOME",
        "`id`",
        "new\nline",
        "%h %n %% %j",
        '{"a": [1]}',
        "unicode é 漢字",
        "#SBATCH",
        "a;b|c&d",
        "\\",
    ]
    slurm.ranks_do("""
        import json, os
        values = [v for k, v in sorted(os.environ.items()) if k.startswith('W_')]
        open(os.environ['TARGET'] + str(rank), 'w').write(json.dumps(values))
        beat(1); done()
    """)
    pairs = ", ".join(f"W_{i:02} = {json.dumps(word)}" for i, word in enumerate(words))
    slurm.edit_jobs(
        "env = { RANK_DOES", f'env = {{ TARGET = "{slurm.path}/said", {pairs}, RANK_DOES'
    )
    slurm.slurm(comment='it\'s "a # comment" with $HOME')
    slurm.invoke("train", "random")
    for rank in range(4):
        assert json.loads(Path(slurm.path / f"said{rank}").read_text()) == words
