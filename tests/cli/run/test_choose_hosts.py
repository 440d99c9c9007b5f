"""Which hosts a task takes: words, hostfile, quarantine; and what a dry run says of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

import trainkit
from tests.conftest import Project
from tests.runs.test_record import begin, sign
from trainkit.base.errors import ConfigError
from trainkit.base.files import write_json
from trainkit.cli.hosts.nodes import release
from trainkit.cli.wrapper import TaskContext
from trainkit.experiment.cancel import cancel_run
from trainkit.experiment.hosts import hosts_of_job, job_on_hosts, rank_override
from trainkit.experiment.options import HostOptions, TrainOptions
from trainkit.jobs.load import Jobs, load
from trainkit.jobs.resolved import ResolvedJob, write_job
from trainkit.launch.hosts.quarantine import quarantine_host, read_quarantine
from trainkit.launch.hosts.selection import HostList
from trainkit.launch.protocol.client import ask_supervisor
from trainkit.launch.supervise.code_snapshot import link_code, take_snapshot
from trainkit.runs.folder import RunFolder

FAR = """
[clusters.far]
launcher = "pdsh"
hostfile = "hosts"
ranks_per_node = 2
spares = 1
"""


@pytest.fixture
def jobs(project: Project) -> Jobs:
    (project.path / "jobs.toml").write_text((project.path / "jobs.toml").read_text() + FAR)
    (project.path / "hosts").write_text("n[1-4] slots=4\n")
    return load(project.path, {})


def chosen(
    jobs: Jobs, sets: Sequence[str] = (), cluster: str = "far", **words: object
) -> tuple[ResolvedJob, HostList]:
    """The job `random` and its hosts."""
    options = TrainOptions(cluster=cluster, set=sets, **words)  # type: ignore[arg-type]
    return job_on_hosts(jobs, jobs.resolve("random", options.overrides()), options)


def test_slots_are_the_ranks_of_a_node_and_say_where_they_come_from(
    project: Project, jobs: Jobs
) -> None:
    resolved, hosts = chosen(jobs, nodes=2)
    assert (
        [h.name for h in hosts.running],
        [h.name for h in hosts.spares],
        resolved.job.world_size,
    ) == (["n1", "n2"], ["n3"], 8)
    origin = resolved.origins["cluster.ranks_per_node"]
    assert str(origin.place) == f"{project.path}/hosts:1" and [
        older.value for older in origin.overrode
    ] == [2, None]
    resolved, hosts = chosen(jobs, nodes=2, include="n[3-4]:1-2")
    assert ([h.slots for h in hosts.hosts], resolved.job.ranks_per_node) == ([(1, 2), (1, 2)], 2)
    with pytest.raises(
        ConfigError, match=r"cluster\.ranks_per_node = 3, but n1 has 4 slots in .*hosts"
    ):
        chosen(jobs, ["cluster.ranks_per_node=3"], nodes=2)
    assert chosen(jobs, ["cluster.ranks_per_node=4"], nodes=2)[0].job.world_size == 8


def test_never_fewer_hosts_than_asked_for(project: Project, jobs: Jobs) -> None:
    with pytest.raises(ConfigError, match=r"wants 9 nodes, and .*hosts has 4 hosts"):
        chosen(jobs, nodes=9)
    (project.path / "hosts").unlink()
    with pytest.raises(ConfigError, match=r"clusters\.far\.hostfile = .*there is no such file"):
        chosen(jobs)


def test_hosts_in_quarantine_are_passed_over_and_let_in_again(
    project: Project, jobs: Jobs, capsys: pytest.CaptureFixture[str]
) -> None:
    quarantine_host(project.path, "n1", "Xid 79", "some-run", 1000)
    hosts = chosen(jobs, nodes=2)[1]
    assert [h.name for h in hosts.hosts] == ["n2", "n3", "n4"] and hosts.left_out == ("n1",)
    with pytest.raises(
        ConfigError, match=r"wants 4 nodes.*; n1 is left out: Xid 79 \(run some-run\), until"
    ) as error:
        chosen(jobs, nodes=4)
    assert error.value.exit == 8 and "--release" in str(error.value)
    task = TaskContext(json=False, dry_run=False, folder=project.path)
    assert (
        release(task, "far", "N1").document["released"] == "N1"
        and read_quarantine(project.path) == {}
    )
    with pytest.raises(ConfigError, match="'n1' is not left out"):
        release(task, "far", "n1")


def test_a_run_that_goes_on_takes_the_hosts_it_had(project: Project, jobs: Jobs) -> None:
    resolved, had = chosen(jobs, nodes=2, exclude="n1")
    job = resolved.job
    assert (
        [h.name for h in hosts_of_job(job, HostOptions(), had).hosts]
        == ["n2", "n3", "n4"]
        == [h.name for h in had.hosts]
    )
    quarantine_host(project.path, "n2", "it broke", "r", 1000)
    assert [h.name for h in hosts_of_job(job, HostOptions(), had).hosts] == ["n3", "n4"]
    assert [h.name for h in hosts_of_job(job, HostOptions(include="n1@n4"), had).hosts] == [
        "n1",
        "n4",
    ]
    quarantine_host(project.path, "n3", "it broke too", "r", 1000)
    # too few of its own: the hostfile has others
    assert [h.name for h in hosts_of_job(job, HostOptions(), had).hosts] == ["n1", "n4"]
    assert rank_override(job, had, []) == []
    (project.path / "hosts").write_text("n[1-4] slots=1\n")
    assert rank_override(job, hosts_of_job(job, HostOptions(include="n1@n4"), had), []) == [
        "cluster.ranks_per_node=1"
    ]


@pytest.mark.parametrize(("launcher", "program"), [("ssh", "ssh"), ("pdsh", "pdsh")])
def test_a_dry_run_says_hosts_ranks_and_command_lines(
    project: Project, jobs: Jobs, launcher: str, program: str
) -> None:
    words = (
        "--cluster",
        "far",
        "--nodes",
        "2",
        "--set",
        f'cluster.launcher="{launcher}"',
        "--set",
        "training.global_batch_size=16",
        "--dry-run",
    )
    document = project.document("train", "random", *words)
    assert document["hosts"] == [
        {"host": "n1", "ranks": [0, 1, 2, 3], "slots": [0, 1, 2, 3]},
        {"host": "n2", "ranks": [4, 5, 6, 7], "slots": [0, 1, 2, 3]},
    ]
    assert (
        document["spares"] == ["n3"]
        and document["launcher"][0][0] == program
        and len(document["launcher"]) == (1 if launcher == "pdsh" else 2)
    )
    out = project.invoke("train", "random", *words).stdout
    assert (
        "hosts of" in out
        and "would start on n2: ranks 4 to 7" in out
        and f"would run: {program} " in out
        and "outlives this terminal" in out
    )
    assert not (project.path / "runs").exists()


def test_nodes_of_this_machine(project: Project, jobs: Jobs) -> None:
    (row,) = json.loads(project.invoke("nodes", "--cluster", "here", "--json").stdout)["hosts"]
    assert row["reachable"] and row["busy"] == [] and row["cpus"] >= 1 and row["versions"]["python"]
    assert not list((project.path / "sessions").glob("*"))
    assert "of job text, named in [defaults]" in project.invoke("nodes").stdout
    assert "has no cluster 'fra'" in project.invoke("nodes", "--cluster", "fra", exit=3).stderr
    assert (
        "--hostfile is for clusters"
        in project.invoke("nodes", "--cluster", "here", "--hostfile", "hosts", exit=3).stderr
    )


def test_a_run_whose_head_is_gone(
    project: Project, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its hosts are asked from here; one that will never answer again must not keep it from
    going on for ever."""
    (project.path / "hosts").write_text("nowhere-1.invalid slots=2\n")
    resolved, hosts = chosen(jobs, ['cluster.launcher="ssh"'])
    run = RunFolder(project.path / "runs" / "random" / "20260101-000000-aaaa")
    run.path.mkdir(parents=True)
    write_job(run.job, resolved)
    write_json(run.hosts, hosts.to_json())
    link_code(take_snapshot(Path(trainkit.__file__).parent, project.path / "code").folder, run.code)
    begin(run, host="elsewhere")
    sign(run, ago=3600, host="elsewhere")
    assert project.document("status", "last", exit=0)["state"] == "unknown"
    assert "no sign of life since" in project.invoke("resume", "last", "--dry-run", exit=13).stderr
    with monkeypatch.context() as patched:  # its supervisor is asked, in vain, but not for 10 s
        patched.setattr(ask_supervisor, "__defaults__", (0.1,))
        cancelled = cancel_run(run, save=False, force=False, say=print)
    assert cancelled.exit == 13 and cancelled.hosts is not None
    (left,) = cancelled.hosts
    assert left.host == "nowhere-1.invalid" and not left.answered
    assert "has no address here" in (left.error or "")
    forced = project.document("cancel", "last", "--force", exit=15)
    assert forced["state"] == "cancelled"
    assert [(row["host"], row["answered"]) for row in forced["hosts"]] == [(left.host, False)]
    assert "has ended already" in project.invoke("cancel", "last").stdout


def test_hosts_without_an_address(project: Project, jobs: Jobs) -> None:
    """Hosts that have one and do not answer need a network: tests/cluster."""
    (project.path / "hosts").write_text("nowhere-1.invalid slots=1\nnowhere-2.invalid slots=1\n")
    assert (
        "nowhere-1.invalid has no address here"
        in project.invoke("nodes", "--cluster", "far", exit=8).stderr
    )
    assert not list((project.path / "sessions").glob("*"))
