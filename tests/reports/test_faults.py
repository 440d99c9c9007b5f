"""What faults cost: by a script's own clock, and of a real run whose rank is killed."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Project, wait_for
from tests.launch.live_runs import events, rank_pids, slow_down, wait_for_step
from tests.reports.drill import START, Drill, iso
from trainkit.reports.faults import STAGES, build_faults
from trainkit.reports.ledger import BINS, build_ledger
from trainkit.reports.page import report_page
from trainkit.reports.read import read_report, read_run_times
from trainkit.runs.folder import RunFolder
from trainkit.runs.phases import PhaseLog, read_phases
from trainkit.runs.record import read_run_record
from trainkit.runs.sample_windows import SampleWindow, SampleWindowLog


@pytest.fixture
def drill(tmp_path: Path) -> Drill:
    """A run of one rank whose host's clock is ahead, at its begin."""
    run = RunFolder(tmp_path / "runs" / "job" / "20270115-080000-aaaa")
    run.path.mkdir(parents=True)
    run.job.write_text(json.dumps({"schema": "job/1", "job": {}, "origins": {}}))
    run.origin.write_text(json.dumps({"schema": "origin/1", "started": iso(START)}))
    return Drill(run, 37.5)


def fail(drill: Drill, *, step: int, said: float, seconds: float) -> None:
    """A rank that was killed is heard of so late, and its attempt ends so much later."""
    cause = {"message": "ended by SIGKILL\nand more", "time": iso(drill.now)}
    drill.spend(said, "lost")
    drill.event("rank_ended", rank=0, code=-9, stopped=False, done=False)
    drill.spend(seconds, "idle")
    words = {"exit": 10, "root_cause": cause, "step": step, "class": "infra"}
    drill.event("ended", **words, survivors=[], unanswered=[], budget="infra")


def beat(drill: Drill, step: int) -> None:
    path = drill.run.attempt(drill.attempt).heartbeat(0)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"step": step, "time": drill.now + drill.ahead}))


def test_each_stage_is_the_scripts_own(drill: Drill) -> None:
    """Two faults, the second while steps were made again; the first state came from disk, the
    other one from memory, in the middle of what was trained without a save."""
    drill.begin(1, 40)
    drill.train(0, 100, data=0)
    drill.other("save", 10, 5, "checkpoint")
    drill.train(10, 30, data=0, lost=True)
    beat(drill, 12)  # the last steps were too quick for a heartbeat
    fail(drill, step=12, said=0.5, seconds=1.5)
    drill.spend(3, "idle")
    drill.begin(1, 8)
    drill.phase("again", 10)
    drill.spend(10, "training")
    drill.spend(20, "lost")
    beat(drill, 13)
    fail(drill, step=13, said=0.25, seconds=0.5)
    drill.begin(1, 4)
    restored = {"source": "memory", "step": 11, "disk_step": 10}
    (drill.run.attempt(3).path / "restored.json").write_text(json.dumps(restored))
    drill.phase("again", 11)
    drill.spend(40, "training")
    drill.train(14, 60, data=0)
    drill.other("save", 20, 5, "checkpoint")
    drill.end(0, "success", 1)
    record = read_run_record(drill.run)
    first, second = build_faults(read_run_times(record))
    assert [first.seconds[stage] for stage in STAGES] == pytest.approx([0.5, 1.5, 7, 2, 2, 30])
    assert [second.seconds[stage] for stage in STAGES] == pytest.approx([0.25, 0.5, 2, 1, 1, 40])
    assert (first.source, first.step, first.steps_lost) == ("disk", 10, 2)
    assert (second.source, second.step, second.steps_lost) == ("memory", 11, 2)
    assert first.what == "ended by SIGKILL" and first.time == pytest.approx(START + 175)
    seconds = build_ledger(read_run_times(record)).seconds
    assert seconds == pytest.approx(dict.fromkeys(BINS, 0.0) | drill.bins, abs=0.002)
    page = report_page(read_report(drill.run))
    assert "What faults cost" in page and "memory, step 11" in page


def test_what_was_never_written_is_no_stage(drill: Drill) -> None:
    """A hang that rank 0's last heartbeat begins, then an attempt that never began and a supervisor
    that is gone: no second is counted twice, and none is negative."""
    drill.begin(1, 4)
    drill.train(0, 10, data=0)
    beat(drill, 3)
    drill.spend(60, "lost")
    drill.event("hang", missing=[0], silent=[], states={}, stacks="")
    drill.end(-9, "hang", 1)
    drill.attempt += 1
    gone = {"host": "gone", "pid": 1, "start_time": 1, "boot_id": "another"}
    drill.event("started", run="r", attempt=2, supervisor=gone, world_size=1)
    drill.spend(5, "start")
    words = {"exit": 8, "root_cause": {"message": "no host"}, "step": 0, "class": "infra"}
    drill.event("ended", **words, survivors=[], unanswered=[], budget="infra")
    drill.begin(1, 4)
    drill.train(0, 10, data=0)
    drill.spend(100, "idle")
    drill.begin(1, 4)
    drill.train(0, 10, data=0)
    faults = build_faults(read_run_times(read_run_record(drill.run)))
    assert [each.attempt for each in faults] == [1, 2, 3]
    hang, refused, lost = faults
    assert hang.failure_class == "hang" and hang.seconds["detection"] == pytest.approx(60)
    assert hang.total == pytest.approx(66) and hang.steps_lost is None
    assert refused.seconds["start"] == pytest.approx(2) and refused.total == pytest.approx(4)
    assert lost.what == "its supervisor is gone" and min(lost.seconds.values()) >= 0


def test_rank_0_knows_what_was_made_before(drill: Drill) -> None:
    windows = SampleWindowLog(drill.run)
    for step in range(1, 8):
        windows.note(SampleWindow(step, step, 1))  # it was killed in step 7
    windows.close()
    attempt = drill.run.attempt(2)
    log = PhaseLog(attempt.path / "phases.jsonl")
    for phase, step in (("load", 0), ("train", 4), ("train", 5), ("train", 6), ("train", 7)):
        log.note(phase, step, 0.0)
    found = [(each.phase, each.step) for each in read_phases(attempt)]
    assert found == [("load", 0), ("again", 4), ("train", 6)]


def test_a_rank_that_is_killed_is_billed(project: Project) -> None:
    """A real run: what the bill says is what was seen from outside."""
    slow_down(project)
    process = project.start("train", "random", "--set", "retry.infra=1")
    victim = rank_pids(project)[1]
    wait_for_step(project, 12)
    run = project.runs()[0]
    before = time.time()
    os.kill(victim, signal.SIGKILL)
    again = run / "attempts/2/phases.jsonl"

    def trains() -> list[dict[str, Any]]:
        lines = again.read_text().splitlines() if again.exists() else []
        found = [json.loads(line) for line in lines]
        return [row for row in found if row["phase"] == "train"]

    trained = wait_for(trains, "the steps to be made again")
    project.invoke("cancel", run.name, exit=15)
    process.communicate()
    value = project.document("report", run.name)
    (fault,) = value["faults"]
    lost = run / "metrics-taken-back.jsonl"
    made = max(json.loads(line)["step"] for line in lost.read_text().splitlines())
    (resumed,) = [each["step"] for each in value["resumed_at"]]
    assert fault["steps_lost"] == made - resumed == trained[0]["step"] - resumed > 0
    assert (fault["attempt"], fault["source"], fault["step"]) == (1, "disk", resumed)
    assert fault["failure_class"] == "infra"
    assert fault["time"] >= before - 0.001  # events have milliseconds
    ahead = next(e["clock_offset"] for e in events(run, 2) if e["event"] == "agent_joined")
    end = fault["time"] + fault["total_seconds"]
    assert end == pytest.approx(trained[0]["time"] - ahead, abs=0.002)
    assert min(fault["seconds"].values()) >= 0 and fault["seconds"]["repeat"] > 0
    assert "1 fault cost" in project.invoke("status", run.name).stdout
    assert f"disk, step {resumed}" in project.invoke("why", run.name).stdout
    assert project.document("why", run.name)["faults"] == [fault]
