"""The state of a run from what its folder holds, and finding runs by words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainkit.base.errors import ConfigError
from trainkit.base.process import identity
from trainkit.runs.folder import RunFolder
from trainkit.runs.record import EventLog, all_runs, find_run, read_events, read_record


def make_run(root: Path, job: str, name: str) -> RunFolder:
    run = RunFolder(root / "runs" / job / name)
    run.path.mkdir(parents=True)
    run.job.write_text("{}")
    return run


def begin(run: RunFolder, attempt: int = 1, **supervisor: Any) -> EventLog:
    events = EventLog(run.attempt(attempt))
    events.write("started", run=run.id, attempt=attempt, supervisor=identity().as_dict() | supervisor, world_size=1)
    return events


def end(events: EventLog, code: int, failure_class: str) -> None:
    events.write("ended", exit=code, root_cause=None, survivors=[], **{"class": failure_class})


@pytest.mark.parametrize(
    ("code", "failure_class", "state"),
    [
        (0, "success", "succeeded"),
        (9, "user", "failed"),
        (10, "infra", "failed"),
        (11, "hang", "failed"),
        (12, "preempted", "preempted"),
        (130, "cancelled", "cancelled"),
    ],
)
def test_the_supervisors_last_word_decides(tmp_path: Path, code: int, failure_class: str, state: str) -> None:
    run = make_run(tmp_path, "j", "a")
    end(begin(run), code, failure_class)
    record = read_record(run)
    assert (record.state, record.exit, record.failure_class) == (state, code, failure_class)


def test_without_a_last_word_the_supervisors_life_decides(tmp_path: Path) -> None:
    run = make_run(tmp_path, "j", "a")
    assert read_record(run).state == "failed"  # it never started
    begin(run)
    assert read_record(run).state == "running"
    begin(run, 2, start_time=identity().start_time + 1)  # another process has our pid now
    assert (read_record(run).state, read_record(run).failure_class, read_record(run).attempt) == ("failed", "infra", 2)
    begin(run, 3, boot_id="another")
    assert read_record(run).state == "failed"
    begin(run, 4, host="elsewhere")
    assert read_record(run).state == "unknown"


def test_a_torn_event_is_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path, "j", "a")
    begin(run)
    with open(run.attempt(1).events, "a") as file:
        file.write('{"event": "ended", "exi')
    assert [e["event"] for e in read_events(run.attempt(1))] == ["started"]
    assert read_record(run).state == "running"


def test_the_step_is_that_of_the_last_whole_row(tmp_path: Path) -> None:
    run = make_run(tmp_path, "j", "a")
    assert read_record(run).step == 0
    run.metrics.write_text("".join(f'{{"step": {s}, "lm_loss": 1.0}}\n' for s in range(1, 5000)) + '{"step": 5000, "lm')
    assert read_record(run).step == 4999


def test_runs_are_found_by_id_prefix_job_and_last(tmp_path: Path) -> None:
    other = tmp_path / "other"
    first, second, third = (
        make_run(tmp_path, "a", "20260101-000000-aaaa"),
        make_run(other, "b", "20260101-000001-bbbb"),
        make_run(tmp_path, "a", "20260102-000000-cccc"),
    )
    roots = [tmp_path, other, tmp_path / "missing"]
    assert all_runs(roots) == [first, second, third]
    assert find_run(roots, "last") == third and find_run(roots, "a") == third and find_run(roots, "b") == second
    assert find_run(roots, first.id) == first and find_run(roots, "20260102") == third
    with pytest.raises(ConfigError, match="beginning of 2 runs"):
        find_run(roots, "20260101")
    with pytest.raises(ConfigError, match="no run and no job"):
        find_run(roots, "zzz")
    with pytest.raises(ConfigError, match="there are no runs"):
        find_run([tmp_path / "missing"], "last")
