"""A scheduler is one package and one entry of the table: a tiny one, in this process, is submitted
to, followed and cancelled by the same tasks."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

import trainkit
from tests.conftest import Project
from tests.runs.test_record import begin, end
from trainkit.base.errors import ConfigError, Exit
from trainkit.cli.hosts.doctor import doctor
from trainkit.cli.inspect.logs import why
from trainkit.cli.inspect.runs import runs, status
from trainkit.cli.run.attach import attach, cancel
from trainkit.cli.run.train import resume, train
from trainkit.cli.wrapper import TaskContext
from trainkit.experiment.options import RehearseOptions, ResumeOptions, TrainOptions
from trainkit.jobs.clusters import LAUNCHER_TRAITS, Cluster
from trainkit.jobs.load import load
from trainkit.launch.direct import DIRECT, Direct
from trainkit.launch.run_inputs import write_inputs
from trainkit.launch.scheduler_contract import (
    CancelledJob,
    ClusterNode,
    DryRun,
    HostsToAsk,
    JobAccount,
    QueueFollower,
    QueueReport,
    Start,
    Submission,
)
from trainkit.launch.scheduler_registry import PLACES, SCHEDULERS, scheduler_for, scheduler_of
from trainkit.launch.start import fill_run
from trainkit.launch.supervise.host_consistency import Finding
from trainkit.launch.supervise.outcome import Outcome
from trainkit.rehearse.place_checks import check_hosts
from trainkit.rehearse.scene import RehearsalScene
from trainkit.runs.events import FailureClass
from trainkit.runs.folder import RunFolder, new_run_folder
from trainkit.runs.record import RunRecord

PACKAGE = Path(trainkit.__file__).parent


def finish(run: RunFolder, exit: Exit, failure_class: FailureClass) -> None:
    """Write what a supervisor would have written of one attempt."""
    run.maker.unlink()
    end(begin(run), int(exit), failure_class)


class TinyFollower:
    """Starts and ends the run while it is looked at."""

    def __init__(self, scheduler: TinyScheduler, run: RunFolder) -> None:
        self.scheduler = scheduler
        self.run = run

    def look(self, record: RunRecord) -> tuple[RunRecord, str]:
        if self.scheduler.jobs[self.run.id] == "queued":
            self.scheduler.jobs[self.run.id] = "over"
            finish(self.run, Exit.DONE, "success")
            return replace(record, state="queued"), "job 1 waits for a teapot"
        return self.scheduler.state(record), ""


class TinyScheduler(Direct):
    """A queue in this process: what is submitted waits until somebody follows it."""

    title = "Tiny"
    queues = True

    def __init__(self) -> None:
        self.jobs: dict[str, Literal["queued", "over"]] = {}

    def nodes(self, cluster: Cluster) -> list[ClusterNode] | None:
        return [ClusterNode("teapot", "idle", "kitchen", "1", "", "")]

    def dry_run(self, start: Start, after: str = "") -> DryRun:
        return DryRun(["would brew"], {"command": {}, "tiny": True})

    def submit(self, start: Start) -> Submission:
        run = start.run or new_run_folder(start.root, start.job.name)
        fill_run(run, start, {})
        number = "1" if start.run is None else "2"
        self.jobs[run.id] = "queued"
        return Submission(run, number, f"job {number} of Tiny")

    def supervise(
        self, run: RunFolder, environment: Mapping[str, str], *, share: bool, prolog_failed: int
    ) -> Outcome:
        raise NotImplementedError

    def owns(self, run: RunFolder) -> bool:
        return run.id in self.jobs

    def state(self, record: RunRecord) -> RunRecord:
        if self.jobs[record.run.id] == "queued":
            return replace(record, state="queued", exit=None, failure_class=None, root_cause=None)
        return record

    def states(self, records: Sequence[RunRecord]) -> list[RunRecord]:
        return [self.state(record) for record in records]

    def report(self, record: RunRecord) -> QueueReport | None:
        return QueueReport("job 1 waits", {"tiny": {"waits": True}})

    def follower(self, run: RunFolder) -> QueueFollower | None:
        return TinyFollower(self, run)

    def accounts(self, run: RunFolder) -> list[JobAccount] | None:
        return [JobAccount("1", "BREWED", "0:0", "", "", "", "", "teapot")]

    def cancel(self, run: RunFolder, *, queued: bool) -> CancelledJob:
        assert queued
        self.jobs[run.id] = "over"
        finish(run, Exit.CANCELLED, "cancelled")
        return CancelledJob("1", "POURED", ["7"])


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> TinyScheduler:
    """Registered for a launcher; nothing else is told of it."""
    scheduler = TinyScheduler()
    monkeypatch.setitem(SCHEDULERS, "local", scheduler)
    return scheduler


def task(project: Project, *, dry_run: bool = False) -> TaskContext:
    return TaskContext(json=False, dry_run=dry_run, folder=project.path)


def test_another_scheduler_is_followed_to_the_end(
    project: Project, tiny: TinyScheduler, capsys: pytest.CaptureFixture[str]
) -> None:
    done = train(task(project), "random", TrainOptions(detach=True))
    assert done.document["state"] == "starting" and list(tiny.jobs.values()) == ["queued"]
    assert "is job 1 of Tiny" in capsys.readouterr().out
    asked = status(task(project), "last")
    assert asked.document["state"] == "queued" and asked.document["tiny"] == {"waits": True}
    assert [row["state"] for row in runs(task(project), "").document["runs"]] == ["queued"]
    capsys.readouterr()
    followed = attach(task(project), "last")
    out = capsys.readouterr().out
    assert followed.exit == Exit.DONE and "waits for a teapot" in out
    said = why(task(project), "last", 0)
    task(project).show(said.page)
    assert said.document["slurm"][0]["state"] == "BREWED"
    assert "what Tiny kept of it" in capsys.readouterr().out


def test_another_scheduler_takes_a_run_out_of_its_queue(
    project: Project, tiny: TinyScheduler, capsys: pytest.CaptureFixture[str]
) -> None:
    train(task(project), "random", TrainOptions(detach=True))
    cancelled = cancel(task(project), "last", save=False)
    assert cancelled.exit == Exit.CANCELLED and cancelled.document["state"] == "cancelled"
    assert "job 1 is out of the queue (POURED), with jobs 7" in capsys.readouterr().out
    run = RunFolder(Path(cancelled_folder(project)))
    write_inputs(run, [])
    resumed = resume(task(project), "last", ResumeOptions(detach=True))
    assert tiny.jobs[run.id] == "queued" and resumed.document["run"] == run.id
    assert "job 2 of Tiny" in capsys.readouterr().out


def cancelled_folder(project: Project) -> str:
    (row,) = runs(task(project), "").document["runs"]
    return str(row["folder"])


def test_another_scheduler_shows_what_it_would_do(
    project: Project, tiny: TinyScheduler, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: dict[str, Any] = train(task(project, dry_run=True), "random", TrainOptions()).document
    assert shown["tiny"] is True and "would brew" in capsys.readouterr().out and not tiny.jobs


def test_another_scheduler_tells_what_is_wrong_with_its_cluster(
    project: Project,
    tiny: TinyScheduler,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cold = Finding("teapot", "cluster", "it is cold", "put the kettle on")
    monkeypatch.setattr(tiny, "examine", lambda job: [cold], raising=False)
    monkeypatch.setattr(tiny, "hosts_to_ask", lambda *a, **b: HostsToAsk([]), raising=False)
    told = doctor(task(project), "", "", all_reduce=False)
    assert told.exit == Exit.HEALTH and told.document["findings"] == [vars(cold)]
    assert "teapot (cluster): it is cold" in capsys.readouterr().out
    jobs = load(project.path)
    with pytest.raises(ConfigError, match="teapot: it is cold"):
        check_hosts(RehearsalScene(jobs, jobs.resolve("random"), RehearseOptions()))


def test_every_launcher_has_a_scheduler(project: Project) -> None:
    assert set(PLACES) == set(LAUNCHER_TRAITS)
    assert scheduler_for(Cluster(name="x", launcher="pdsh")) is DIRECT
    assert scheduler_for(Cluster(name="x", launcher="slurm")).title == "Slurm"
    assert scheduler_of(RunFolder(project.path / "runs" / "a" / "b")) is DIRECT


@pytest.mark.parametrize("launcher", ["slurm", "kubernetes"])
def test_only_the_table_knows(launcher: str) -> None:
    """Nothing else imports its package, or compares a launcher with its name."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        place = path.relative_to(PACKAGE).as_posix()
        if place.startswith(f"launch/{launcher}/"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            if place != "launch/scheduler_registry.py":
                found += [
                    f"{place} imports {name}"
                    for name in names
                    if name.startswith(f"trainkit.launch.{launcher}")
                ]
            if isinstance(node, ast.Compare) and any(
                isinstance(each, ast.Constant) and each.value == launcher
                for part in (node.left, *node.comparators)
                for each in ast.walk(part)
            ):
                found.append(f"{place}:{node.lineno} asks whether something is {launcher}")
    assert not found, "\n".join(found)
