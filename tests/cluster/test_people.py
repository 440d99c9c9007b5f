"""Runs of ordinary users, whose home all hosts share: nothing here needs root but the hosts
themselves."""

from __future__ import annotations

import json
import os
import signal
import stat
from pathlib import Path

import pytest

from tests.cluster.machines import HEAD
from tests.cluster.on_head import ClusterProject
from tests.cluster.slurm_project import SlurmProject
from tests.cluster.test_endings import (
    NO_RETRIES,
    begun,
    events,
    nothing_left,
    of_agent,
    of_keeper,
    supervisor,
)
from tests.conftest import wait_for

FOR_EVER = "steps(100_000, 0.1)"
DAEMON = """
import os, sys
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(1000)"
        os.execve(sys.executable, [sys.executable, "-I", "-c", deaf], {})
    os._exit(0)
steps(100_000, 0.1)
"""


def for_everybody_to_write(folder: Path) -> list[str]:
    """What below a folder others may write."""
    found = [
        Path(above, name)
        for above, folders, files in os.walk(folder)
        for name in (*folders, *files)
    ]
    return [
        str(path) for path in found if not path.is_symlink() and path.lstat().st_mode & stat.S_IWOTH
    ]


def test_two_people_on_one_machine(people: tuple[ClusterProject, ClusterProject]) -> None:
    """At once, beside each other; what either writes is for nobody else to write. (That a second
    one is refused by name: tests/base/test_slots.py.)"""
    ann, ben = people
    ann.ranks_do(FOR_EVER)
    ben.ranks_do("steps(2, 0)\ndone()")
    run = begun(ann, ann.start("train", "random", "--detach"), ranks=4)
    owners = {os.stat(f"/proc/{p.pid}").st_uid for p in ann.cluster.processes_of(run.name)}
    assert owners == {ann.path.stat().st_uid} != {0}
    assert ben.document("train", "random", "--share")["state"] == "succeeded"
    assert "node1  nothing" in ann.invoke("cancel", run.name, exit=15).stdout
    assert not for_everybody_to_write(ben.path / "runs") and not for_everybody_to_write(
        ben.path / "code"
    )
    kept = (run, run / "job.json", run / "attempts/1/events.jsonl", run / "attempts/1/logs/0.log")
    assert {path.stat().st_mode & 0o077 for path in kept} == {0}, (
        "as ann's umask says, on the nodes too"
    )


def test_a_root_of_somebody_elses_is_told(people: tuple[ClusterProject, ClusterProject]) -> None:
    ann, ben = people
    ben.ranks_do("steps(2, 0)\ndone()")
    root = ann.cluster.folder / "home/shared"
    root.mkdir(mode=0o755)
    ann.cluster.on(HEAD, "chown", "ann", str(root))
    try:
        refused = ben.invoke("train", "random", "--set", f"cluster.root={root}", exit=6).stderr
    finally:
        root.rmdir()
    assert f"{root} belongs to ann" in refused and "${host:USER}" in refused


@pytest.mark.slow
def test_whoever_is_killed_nothing_is_left_and_the_run_goes_on(
    people: tuple[ClusterProject, ClusterProject],
) -> None:
    """Without cgroups, without root: agent and keeper at once, then the supervisor. Eight starts
    of a run's processes."""
    ann, cluster = people[0], people[0].cluster
    ann.ranks_do(DAEMON)
    following = ann.start("train", "random", *NO_RETRIES)
    run = begun(ann, following)
    victims = [
        p
        for p in cluster.processes_of(run.name)
        if p.host == "node1" and (of_agent(p) or of_keeper(p))
    ]
    assert len(victims) == 2
    for number in (signal.SIGSTOP, signal.SIGKILL):
        cluster.kill(*victims, number=number)
    following.communicate()
    assert (
        following.returncode == 10
        and events(run)[-1]["event"] == "swept"
        and len(events(run)[-1]["killed"]) == 2
    )
    begun(ann, ann.start("resume", run.name, "--detach"), attempt=2)
    cluster.kill(*[p for p in cluster.processes_of(run.name) if p.pid == supervisor(run)])
    (ann.path / "does.py").write_text("steps(2, 0)\ndone()")
    assert ann.document("resume", run.name)["state"] == "succeeded"
    nothing_left(cluster, run.name)
    assert json.loads((run / "attempts/3/heartbeat/0.json").read_text())["phase"] == "done"


def test_a_job_of_an_ordinary_user(slurm_person: SlurmProject) -> None:
    """Slurm requeues it, it goes on in one record, and its person ends it; all of it is that
    person's."""
    ann = slurm_person
    ann.ranks_count(10_000)
    run, id = ann.submit()
    ann.wait_step(3)
    ann.cluster.on(HEAD, "scontrol", "requeue", id)
    wait_for((run / "attempts/2/heartbeat/0.json").exists, "attempt 2 to begin")
    owners = {
        os.stat(f"/proc/{p.pid}").st_uid
        for p in ann.cluster.processes()
        if p.mark.startswith(run.name)
    }
    assert owners == {ann.path.stat().st_uid} != {0}
    assert (
        ann.document("cancel", id, exit=15)["state"] == "cancelled"
        and ann.job_state(id) == "CANCELLED"
    )
