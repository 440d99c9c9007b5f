"""The state of a run from what its folder holds, and finding runs by words."""

from __future__ import annotations

import os
import resource
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from trainkit.base.errors import ConfigError
from trainkit.base.files import read_json, write_json
from trainkit.base.locks import locked
from trainkit.base.process import identity
from trainkit.runs.events import (
    AttemptEnded,
    AttemptStarted,
    EventLog,
    EventTail,
    FailureClass,
    RankEnded,
    RetryPlanned,
    StrangerRefused,
    ViewLost,
    read_events,
)
from trainkit.runs.find import all_runs, find_run
from trainkit.runs.folder import RunFolder, new_run_folder
from trainkit.runs.record import read_run_record, write_starter


def make_run(root: Path, job: str, name: str) -> RunFolder:
    run = RunFolder(root / "runs" / job / name)
    run.path.mkdir(parents=True)
    run.job.write_text("{}")
    return run


def begin(run: RunFolder, attempt: int = 1, **supervisor: Any) -> EventLog:
    events = EventLog(run.attempt(attempt))
    events.write(AttemptStarted(run.id, attempt, identity().to_json() | supervisor, 1))
    return events


def end(events: EventLog, code: int, failure_class: FailureClass) -> None:
    events.write(AttemptEnded(code, None, failure_class=failure_class))


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
def test_the_supervisors_last_word_decides(
    tmp_path: Path, code: int, failure_class: FailureClass, state: str
) -> None:
    run = make_run(tmp_path, "j", "a")
    end(begin(run), code, failure_class)
    record = read_run_record(run)
    assert (record.state, record.exit, record.failure_class) == (state, code, failure_class)


def test_without_a_last_word_the_supervisors_life_decides(tmp_path: Path) -> None:
    run = make_run(tmp_path, "j", "a")
    assert read_run_record(run).state == "failed"  # it never started
    begin(run)
    assert read_run_record(run).state == "running"
    begin(run, 2, start_time=identity().start_time + 1)  # another process has our pid now
    assert (
        read_run_record(run).state,
        read_run_record(run).failure_class,
        read_run_record(run).attempt,
    ) == (
        "failed",
        "infra",
        2,
    )
    begin(run, 3, boot_id="another")
    assert read_run_record(run).state == "failed"
    begin(run, 4, host="elsewhere")
    assert read_run_record(run).state == "unknown"


def test_whoever_began_it_lives_and_no_supervisor_is_there_yet(tmp_path: Path) -> None:
    run = make_run(tmp_path, "j", "a")
    write_starter(run)
    assert (read_run_record(run).state, read_run_record(run).exit) == ("starting", None)
    value = read_json(run.maker)
    write_json(run.maker, value | {"identity": value["identity"] | {"start_time": 1}})
    assert read_run_record(run).state == "failed", "it is gone, and so is whoever could have begun"
    write_json(run.maker, value | {"identity": value["identity"] | {"host": "elsewhere"}})
    assert read_run_record(run).state == "starting"
    write_json(
        run.maker,
        value | {"identity": value["identity"] | {"host": "elsewhere"}, "time": time.time() - 100},
    )
    assert read_run_record(run).state == "failed"
    end(begin(run), 9, "user")
    sign(run, ago=10, ended=True)
    write_starter(run)  # resumed
    assert read_run_record(run).state == "starting"
    sign(run, ago=5, ended=True)  # there, and gone again; by the clock of a host that is behind
    assert read_run_record(run).state == "failed"


def test_a_torn_event_is_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path, "j", "a")
    begin(run)
    with open(run.attempt(1).events, "a") as file:
        file.write('{"event": "ended", "exi')
    assert [e.name for e in read_events(run.attempt(1))] == ["started"]
    assert read_run_record(run).state == "running"


def test_a_full_disk_tears_one_event_and_not_the_next(tmp_path: Path) -> None:
    run = make_run(tmp_path, "j", "a")
    log = begin(run)
    limits, handler = (
        resource.getrlimit(resource.RLIMIT_FSIZE),
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN),
    )
    try:
        resource.setrlimit(
            resource.RLIMIT_FSIZE, (run.attempt(1).events.stat().st_size + 20, limits[1])
        )
        with pytest.raises(OSError, match="File too large"):
            log.write_soon(RankEnded(1, 0, stopped=False, done=True))
        with pytest.raises(OSError, match="File too large"):  # nothing of this one is written
            log.write_soon(RankEnded(2, 0, stopped=False, done=True))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    log.write(RetryPlanned(2))
    end(log, 0, "success")
    assert [e.name for e in read_events(run.attempt(1))] == ["started", "retry", "ended"]


def test_the_word_of_another_after_a_torn_event(tmp_path: Path) -> None:
    """Who cancels a run whose supervisor died in the middle of a line writes the last one."""
    run = make_run(tmp_path, "j", "a")
    begin(run).close()
    with open(run.attempt(1).events, "a") as file:
        file.write('{"event": "rank_en')
    end(EventLog(run.attempt(1)), 130, "cancelled")
    assert [e.name for e in read_events(run.attempt(1))] == ["started", "ended"]


def test_a_closed_log_writes_to_nobody_elses_file(tmp_path: Path) -> None:
    run = make_run(tmp_path, "j", "a")
    log = begin(run)
    log.close()
    # one of them has the log's number now
    with open(tmp_path / "other", "wb") as first, open(tmp_path / "others", "wb"):
        log.write(ViewLost("closed"))
        log.write_soon(StrangerRefused("peer", "why"))
        log.close()
        first.write(b"x")
    assert os.stat(tmp_path / "other").st_size == 1 and os.stat(tmp_path / "others").st_size == 0
    assert [e.name for e in read_events(run.attempt(1))] == ["started"]


def test_the_step_is_that_of_the_last_whole_row(tmp_path: Path) -> None:
    run = make_run(tmp_path, "j", "a")
    assert read_run_record(run).step == 0
    run.metrics.write_text(
        "".join(f'{{"step": {s}, "lm_loss": 1.0}}\n' for s in range(1, 5000)) + '{"step": 5000, "lm'
    )
    assert read_run_record(run).step == 4999


def test_runs_are_found_by_id_prefix_job_and_last(tmp_path: Path) -> None:
    other = tmp_path / "other"
    first, second, third = (
        make_run(tmp_path, "a", "20260101-000000-aaaa"),
        make_run(other, "b", "20260101-000001-bbbb"),
        make_run(tmp_path, "a", "20260102-000000-cccc"),
    )
    roots = [tmp_path, other, tmp_path / "missing"]
    assert all_runs(roots) == [first, second, third]
    assert (
        find_run(roots, "last") == third
        and find_run(roots, "a") == third
        and find_run(roots, "b") == second
    )
    assert find_run(roots, first.id) == first and find_run(roots, "20260102") == third
    with pytest.raises(ConfigError, match="beginning of 2 runs"):
        find_run(roots, "20260101")
    with pytest.raises(ConfigError, match="no run and no job"):
        find_run(roots, "zzz")
    with pytest.raises(ConfigError, match="there are no runs"):
        find_run([tmp_path / "missing"], "last")


def sign(run: RunFolder, *, ago: float = 0, ended: bool = False, **who: Any) -> None:
    me = identity().to_json() | who
    value = {
        "identity": me,
        "host": me["host"],
        "time": time.time() - ago,
        "attempt": 1,
        "address": "127.0.0.1",
        "port": 1,
        "ended": ended,
    }
    write_json(run.supervisor, {"schema": "supervisor/1", **value})


def test_the_supervisors_sign_of_life(tmp_path: Path) -> None:
    run = make_run(tmp_path, "j", "a")
    sign(run)
    # its first attempt is yet to begin
    assert (read_run_record(run).state, read_run_record(run).attempt) == ("running", 0)
    end(begin(run), 10, "infra")
    assert read_run_record(run).state == "running"  # between two attempts
    sign(run, ended=True)
    assert (read_run_record(run).state, read_run_record(run).exit) == ("failed", 10)
    sign(run, start_time=1)  # killed between two attempts
    assert (read_run_record(run).state, read_run_record(run).exit) == ("failed", 10)


def test_a_supervisor_on_another_host(tmp_path: Path) -> None:
    run = make_run(tmp_path, "j", "a")
    begin(run, host="elsewhere")
    sign(run, ago=30, host="elsewhere")
    assert read_run_record(run).state == "running"
    sign(run, ago=3600, host="elsewhere")
    record = read_run_record(run)
    assert (record.state, record.exit) == ("unknown", 13)
    assert (
        record.root_cause is not None
        and "the supervisor on elsewhere has given no sign of life since 2"
        in record.root_cause["message"]
    )
    assert record.next_tasks()[0] == "invoke cancel a"
    sign(run, ago=3600, host="elsewhere", ended=True)
    assert read_run_record(run).state == "failed"  # it said that it had ended, but not how
    run.supervisor.write_text('{"schema": "supervisor/1", "identity": {}}')
    with pytest.raises(ConfigError, match=r"supervisor.json: identity: host is missing"):
        read_run_record(run)


def test_a_root_that_cannot_be_read_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = make_run(tmp_path / "good", "j", "a")
    (tmp_path / "bad").mkdir()
    # a loop: as a dead mount, it can be seen and not be read
    (tmp_path / "bad/runs").symlink_to("runs")
    assert find_run([tmp_path / "bad", tmp_path / "good"], "last") == seen
    assert "bad/runs cannot be read" in capsys.readouterr().err


def test_a_run_whose_making_was_killed_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its folder is there, locked at first, and job.json comes last."""
    unmade = new_run_folder(tmp_path, "demo")
    with locked(unmade.path / "lock", {}):
        pass
    with pytest.raises(ConfigError, match="there are no runs in"):
        find_run([tmp_path], unmade.id)
    said = capsys.readouterr().err
    assert f"{unmade.path} has no job.json" in said and f"rm -r {unmade.path}" in said
    made = new_run_folder(tmp_path, "demo")
    write_json(made.job, {})
    assert find_run([tmp_path], "demo") == made


def test_a_run_that_nobody_watched_is_lost_only_where_somebody_began_it(tmp_path: Path) -> None:
    """`lost`: somebody else, such as Slurm, may know how it ended."""
    run = make_run(tmp_path, "j", "a")
    assert read_run_record(run).lost is False  # no process ever began
    begin(run, start_time=1)
    record = read_run_record(run)
    assert (record.state, record.lost) == ("failed", True)  # events and no status
    assert record.root_cause is not None and "did not say how" in record.root_cause["message"]
    other = make_run(tmp_path, "j", "b")
    sign(other, start_time=1)
    assert read_run_record(other).lost is True  # a status and no events


def test_new_events_of_each_attempt_come_once(tmp_path: Path) -> None:
    run = make_run(tmp_path, "j", "a")
    tail = EventTail(run)
    assert tail.new() == []
    first = begin(run)
    assert [(number, event.name) for number, event in tail.new()] == [(1, "started")]
    first.write(ViewLost("closed"))  # of the newest attempt still
    assert [(number, event.name) for number, event in tail.new()] == [(1, "view_lost")]
    second = begin(run, 2)
    assert [(number, event.name) for number, event in tail.new()] == [(2, "started")]
    first.write(ViewLost("late"))  # its supervisor has gone on
    second.write(ViewLost("closed"))
    assert [(number, event.name) for number, event in tail.new()] == [(2, "view_lost")]
    assert EventTail(run, skip_existing=True).new() == []


def test_what_was_never_prepared_is_not_resumed(tmp_path: Path) -> None:
    run = make_run(tmp_path, "j", "a")
    assert read_run_record(run).next_tasks() == ["invoke why a", "invoke train j"]
    write_json(run.inputs, {})
    assert "invoke resume a" in read_run_record(run).next_tasks()
