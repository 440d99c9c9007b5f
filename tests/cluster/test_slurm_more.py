"""Runs through a real Slurm where the scheduler itself, or the way in, is out of the ordinary."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.conftest import bring_up
from tests.cluster.machines import HEAD, Cluster
from tests.cluster.slurm_project import SlurmProject, make_slurm_project
from tests.cluster.test_endings import of_agent
from tests.conftest import HANGS, wait_for


def test_inside_salloc(slurm: SlurmProject) -> None:
    """--existing: on the nodes at hand, no job of its own; more nodes than those are refused
    before anything starts."""
    slurm.ranks_do(
        "import os; open(f'{os.environ[\"TARGET\"]}{rank}', 'w').write(host + ' ' +"
        " os.environ['SLURM_JOB_ID']); beat(1); done()"
    )
    slurm.edit_jobs("env = { RANK_DOES", f'env = {{ TARGET = "{slurm.path}/said", RANK_DOES')
    invoke = [sys.executable, "-m", "invoke"]
    argv = slurm.cluster.command(
        HEAD,
        "salloc",
        "--nodes=2",
        "--nodelist=node[2-3]",
        *invoke,
        "train",
        "random",
        "--existing",
    )
    done = subprocess.run(
        argv, cwd=slurm.path, env=slurm.environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = [(slurm.path / f"said{rank}").read_text().split() for rank in range(4)]
    assert [host for host, _ in said] == ["node2", "node2", "node3", "node3"] and len(
        {job for _, job in said}
    ) == 1
    argv = slurm.cluster.command(
        HEAD, "salloc", "--nodes=1", *invoke, "train", "random", "--existing"
    )
    done = subprocess.run(
        argv, cwd=slurm.path, env=slurm.environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 3 and "wants 2 nodes" in done.stderr and len(slurm.runs()) == 1
    slurm.invoke("train", "random", "--existing", exit=3)


def agents_of(slurm: SlurmProject, run: Path) -> dict[str, int]:
    """The pid of the one agent of each node."""
    found = [p for p in slurm.cluster.processes_of(run.name) if of_agent(p)]
    assert len({p.host for p in found}) == len(found)
    return {p.host: p.pid for p in found}


@pytest.mark.slow
def test_a_killed_rank_goes_on_in_the_same_allocation(slurm: SlurmProject) -> None:
    slurm.ranks_count(50)
    run, id = slurm.submit()
    slurm.wait_step(3)
    agents = agents_of(slurm, run)
    assert sorted(agents) == ["node1", "node2"]
    victims = wait_for(
        lambda: [p for p in slurm.cluster.processes_of(run.name) if p.mark == f"{run.name}/1/1/3"],
        "rank 3",
        timeout=600,
    )
    slurm.cluster.kill(*victims)
    wait_for(lambda: "go" in slurm.events(run, 2), "the next attempt", timeout=600)
    assert agents_of(slurm, run) == agents
    slurm.may_end()
    slurm.wait_state(run, "succeeded")
    assert (
        slurm.events(run, 1)["retry"]["class"] == "infra"
        and "by" not in slurm.events(run, 1)["retry"]
    )
    assert [entry["id"] for entry in slurm.slurm_jobs(run)] == [id] and slurm.count() == 50


@pytest.mark.slow
def test_a_killed_agent_starts_again_in_a_step_of_its_own(slurm: SlurmProject) -> None:
    """In salloc, where no other node can be had."""
    slurm.ranks_count(50)
    words = ["train", "random", "--existing", "--set=retry.shrink=false", "--set=retry.infra=3"]
    argv = slurm.cluster.command(
        HEAD, "salloc", "--nodes=2", "--nodelist=node[2-3]", sys.executable, "-m", "invoke", *words
    )
    with subprocess.Popen(
        argv, cwd=slurm.path, env=slurm.environment(), stdout=subprocess.PIPE, text=True
    ) as process:
        slurm.wait_step(3)
        (run,) = slurm.runs()
        agents = agents_of(slurm, run)
        victims = [p for p in slurm.cluster.processes_of(run.name) if p.pid == agents["node3"]]
        slurm.cluster.kill(*victims)
        wait_for(lambda: "go" in slurm.events(run, 2), "the next attempt", timeout=600)
        again = agents_of(slurm, run)
        slurm.may_end()
        said = process.communicate()[0]
    assert process.returncode == 0, said
    assert again["node2"] == agents["node2"] and again["node3"] != agents["node3"]


@pytest.mark.slow
def test_the_supervisor_is_killed(slurm: SlurmProject) -> None:
    """Its agents stop by themselves, the job ends, and the run can go on by hand; nothing is
    left."""
    slurm.ranks_count(50)
    run, id = slurm.submit()
    slurm.wait_step(3)
    (supervisor,) = [
        p
        for p in slurm.cluster.processes_of(run.name)
        if any(word.endswith("launch/main.py") for word in p.argv)
    ]
    slurm.cluster.kill(supervisor)
    wait_for(
        lambda: slurm.job_state(id) in ("FAILED", "CANCELLED"), "the job to end", timeout=HANGS
    )
    wait_for(lambda: not slurm.cluster.processes_of(run.name), "nothing to be left")
    (slurm.path / "count-0").unlink()
    slurm.may_end()
    wait_for(
        lambda: slurm.document("status", run.name)["state"] != "running",
        "the record to say so",
        timeout=HANGS,
    )
    slurm.invoke("resume", run.name)
    assert slurm.document("status", run.name)["attempt"] == 2


@pytest.mark.slow
def test_cancel_of_a_supervisor_that_does_not_answer(slurm: SlurmProject) -> None:
    """Slurm ends the job, and wakes it for its last word: its ranks have saved (12), or its
    agents' leases had ended before (15). Nothing is left, and the run can be gone on with."""
    slurm.ranks_count(10_000)
    run, id = slurm.submit()
    slurm.wait_step(3)
    (supervisor,) = [
        p
        for p in slurm.cluster.processes_of(run.name)
        if any(word.endswith("launch/main.py") for word in p.argv)
    ]
    slurm.cluster.kill(supervisor, number=signal.SIGSTOP)
    cancelling = slurm.start("cancel", run.name, "--json")
    out, err = cancelling.communicate()
    assert (cancelling.returncode, json.loads(out)["state"]) in [
        (12, "preempted"),
        *((15, state) for state in ("failed", "preempted", "cancelled")),
    ], out + err
    assert slurm.job_state(id) == "CANCELLED"
    wait_for(lambda: not slurm.cluster.processes_of(run.name), "nothing to be left")


@pytest.mark.slow
def test_slurmctld_restarts(slurm: SlurmProject) -> None:
    """While the job waits, and while it runs: who follows says so and goes on, the run does not
    notice."""
    slurm.ranks_count(80)
    slurm.slurm(hold=True)
    following = slurm.start("train", "random")
    wait_for(slurm.jobs, "the job to be queued", timeout=HANGS)
    restart(slurm)
    (run,) = slurm.runs()
    id = slurm.slurm_jobs(run)[0]["id"]
    slurm.cluster.on(HEAD, "scontrol", "release", id)
    slurm.wait_step(5)
    restart(slurm)
    slurm.may_end()
    out, err = following.communicate()
    assert following.returncode == 0, out + err
    assert slurm.document("status", run.name)["attempt"] == 1


def restart(slurm: SlurmProject) -> None:
    """Stop the controller for some seconds, and start it again."""
    before = [
        p for p in slurm.cluster.processes() if p.host == HEAD and p.argv[:1] == ("slurmctld",)
    ]
    slurm.cluster.kill(*before, number=signal.SIGTERM)
    wait_for(
        lambda: not [p for p in slurm.cluster.processes() if p in before],
        "slurmctld to end",
        timeout=HANGS,
    )
    slurm.cluster.on(HEAD, "slurmctld")
    wait_for(
        lambda: (
            "idle" in slurm.cluster.on(HEAD, "sinfo", "--noheader")
            or "mix" in slurm.cluster.on(HEAD, "sinfo", "--noheader")
        ),
        "nodes to be known",
        timeout=HANGS,
    )


def test_a_prolog_that_fails(slurm: SlurmProject) -> None:
    """On every node: nobody's host is to blame, and the record says what the nodes said."""
    slurm.edit_jobs(
        "ranks_per_node = 2", 'ranks_per_node = 2\nprolog = ["source /no/such/venv"]', count=1
    )
    slurm.invoke("train", "random", exit=8)
    (run,) = slurm.runs()
    cause = slurm.document("status", run.name)["root_cause"]
    assert (
        "2 of 2 hosts are not reached" in cause["message"]
        and cause["message"].count("/no/such/venv: No such file") == 2
    )
    assert "retry" not in slurm.events(run, 1)


def test_what_sbatch_refuses_leaves_nothing(slurm: SlurmProject) -> None:
    slurm.slurm(partition="nowhere")
    said = slurm.invoke("train", "random", exit=8).stderr
    assert "invalid partition specified: nowhere" in said and not slurm.runs()


@pytest.mark.slow
def test_a_script_submitted_by_hand(slurm: SlurmProject) -> None:
    """The script of a run that ended goes on with it, as it stands."""
    slurm.ranks_count(40)
    run, _ = slurm.submit()
    slurm.wait_step(3)
    slurm.invoke("cancel", run.name, exit=15)
    slurm.may_end()
    id = slurm.cluster.on(HEAD, "sbatch", "--parsable", str(run / "launch" / "slurm.sh")).strip()
    slurm.wait_state(run, "succeeded")
    assert slurm.slurm_jobs(run)[-1]["id"] == id and slurm.document("status", id)["attempt"] == 2


@pytest.mark.slow
def test_secrets_travel_in_no_environment_of_the_job(slurm: SlurmProject) -> None:
    """Ranks have them, after a requeue too; the job's own environment, its script and every file
    that is left have not."""
    secret = "hunter2-hunter2"
    slurm.edit_jobs("ranks_per_node = 2", 'ranks_per_node = 2\nsecrets = ["THE_KEY"]', count=1)
    slurm.ranks_do("""
        import os, time
        with open(f"{os.environ['HERE']}/knows-{attempt}-{rank}", "w") as known:
            known.write(str(len(os.environ["THE_KEY"])))
        beat(1)
        while attempt == 1: time.sleep(0.1)
        done()
        """)
    slurm.edit_jobs("env = { RANK_DOES", f'env = {{ HERE = "{slurm.path}", RANK_DOES')
    slurm.invoke("train", "random", exit=3)
    slurm.invoke("train", "random", "--detach", THE_KEY=secret)
    (run,) = slurm.runs()
    id = slurm.slurm_jobs(run)[0]["id"]
    wait_for(lambda: len(list(slurm.path.glob("knows-1-*"))) == 4, "ranks", timeout=HANGS)
    supervisors = [
        p
        for p in slurm.cluster.processes_of(run.name)
        if any(word.endswith("launch/main.py") for word in p.argv)
    ]
    assert supervisors and all(
        secret.encode() not in Path(f"/proc/{p.pid}/environ").read_bytes() for p in supervisors
    )
    assert (run / "launch" / "secrets.json").stat().st_mode & 0o777 == 0o600
    slurm.cluster.on(HEAD, "scontrol", "requeue", id)
    slurm.wait_state(run, "succeeded")
    assert {path.read_text() for path in slurm.path.glob("knows-2-*")} == {str(len(secret))}
    assert not [p for p in run.rglob("*") if p.is_file() and secret.encode() in p.read_bytes()]


def test_nodes_are_those_of_sinfo(slurm: SlurmProject) -> None:
    slurm.cluster.on(HEAD, "scontrol", "update", "NodeName=node3", "State=DRAIN", "Reason=bad fan")
    try:
        rows = {row["host"]: row for row in slurm.document("nodes", "--cluster", "queue")["hosts"]}
    finally:
        slurm.cluster.on(HEAD, "scontrol", "update", "NodeName=node3", "State=RESUME")
    assert (
        "drain" in rows["node3"]["state"]
        and rows["node3"]["reason"] == "bad fan"
        and rows["node1"]["state"] == "idle"
    )


@pytest.mark.slow
def test_processes_tracked_by_their_parents(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """linuxproc loses daemons: nothing is left of ranks that leave their session all the same,
    and the run goes on after a requeue."""
    cluster = bring_up(request, "Slurm", 2, slurm=True, cgroup=False)
    try:
        daemons_and_a_requeue(make_slurm_project(tmp_path / "project", cluster))
    finally:
        cluster.close()


@pytest.mark.slow
def test_processes_tracked_by_cgroup(slurm: SlurmProject) -> None:
    conf = slurm.cluster.on(HEAD, "scontrol", "show", "config")
    if "proctrack/cgroup" not in conf:
        pytest.skip("this machine has no freezer hierarchy of cgroup v1 to write to")
    daemons_and_a_requeue(slurm)


def daemons_and_a_requeue(slurm: SlurmProject) -> None:
    """A requeue, and the scancel of another run: none of the ranks' daemons outlives its job."""
    ranks = """
        import subprocess, time
        subprocess.run(["setsid", "--fork", "sleep", "1000"])
        beat(1)
        while attempt == 1: time.sleep(0.1)
        done()
        """
    slurm.ranks_do(ranks)
    run, id = slurm.submit()
    wait_for(lambda: len(_sleepers(slurm.cluster)) == 4, "the ranks' daemons", timeout=HANGS)
    slurm.cluster.on(HEAD, "scontrol", "requeue", id)
    slurm.wait_state(run, "succeeded")
    nothing_left(slurm, run)
    run, id = slurm.submit()
    wait_for(lambda: len(_sleepers(slurm.cluster)) == 4, "the ranks' daemons", timeout=HANGS)
    slurm.cluster.on(HEAD, "scancel", id)
    slurm.wait_state(run, "preempted")
    nothing_left(slurm, run)


def nothing_left(slurm: SlurmProject, run: Path) -> None:
    wait_for(
        lambda: not slurm.jobs() and not slurm.cluster.processes_of(run.name),
        "nothing to be left",
        timeout=HANGS,
    )
    assert not _sleepers(slurm.cluster)


def _sleepers(cluster: Cluster) -> list[int]:
    return [p.pid for p in cluster.processes() if p.argv == ("sleep", "1000")]


@pytest.mark.slow
def test_training_goes_on_with_the_same_losses(slurm: SlurmProject) -> None:
    """Real ranks, requeued in the middle: the losses are those of a run that nobody disturbed."""
    # so that the requeue comes before the end on any machine
    many = ("--set", "training.train_iters=300")
    slurm.invoke("train", "random", "--cluster", "here", "--nodes", "1", *many, timeout=HANGS)
    following = slurm.start("train", "random", *many)
    run = wait_for(
        lambda: next(
            (
                r
                for r in slurm.runs()
                if (r / "launch" / "slurm.json").exists() and (r / "metrics.jsonl").exists()
            ),
            None,
        ),
        "steps",
        timeout=HANGS,
    )
    wait_for(lambda: len(slurm.losses(run)) >= 7, "some steps", timeout=HANGS)
    slurm.cluster.on(HEAD, "scontrol", "requeue", slurm.slurm_jobs(run)[0]["id"])
    out, err = following.communicate()
    assert following.returncode == 0, out + err
    local = next(r for r in slurm.runs() if r != run)
    assert (
        slurm.losses(run) == slurm.losses(local)
        and slurm.document("status", run.name)["attempt"] == 2
    )
