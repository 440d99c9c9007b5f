"""`why`, `logs` and `status --watch` of runs over two hosts, from what their folders hold."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import Project
from tests.runs.test_record import begin, end
from trainkit.base.errors import ConfigError, Exit, TrainkitError
from trainkit.base.files import rotated_log
from trainkit.cli.inspect import logs, runs as follow
from trainkit.cli.inspect.logs import why
from trainkit.cli.options import LogOptions
from trainkit.cli.wrapper import TaskContext
from trainkit.experiment.follow import describe_event
from trainkit.jobs.load import load
from trainkit.jobs.resolved import write_job
from trainkit.runs.events import (
    AllRanksStarted,
    AttemptEnded,
    EventLog,
    EventTail,
    HangDetected,
    RankEnded,
    RankStarted,
    RetryPlanned,
    RootCause,
)
from trainkit.runs.folder import RunFolder

FAILED: RootCause = {
    "rank": 3,
    "host": "node2",
    "code": 1,
    "type": "ValueError",
    "message": "the tokens end",
    "step": 7,
    "time": "2026-01-01T00:00:02.000Z",
}


@pytest.fixture
def run(project: Project) -> RunFolder:
    """A run of two attempts over two hosts: the first lost a host, in the second rank 3 failed
    and rank 0 after it."""
    run = RunFolder(project.path / "runs" / "random" / "20260101-000000-aaaa")
    run.path.mkdir(parents=True)
    write_job(run.job, load(project.path).resolve("random"))
    events = begun(run, 1)
    cause: RootCause = {
        "host": "node1",
        "message": "contact with node1 was lost",
        "advice": "look whether it is up",
    }
    events.write(AttemptEnded(13, cause, unanswered=["node1"]))
    events.write(RetryPlanned(2))
    events = begun(run, 2)
    for rank in range(4):
        run.attempt(2).log(rank).parent.mkdir(exist_ok=True)
        run.attempt(2).log(rank).write_text("".join(f"line {i} of {rank}\n" for i in range(40)))
    events.write(RankEnded(3, 1, stopped=False, done=False))
    events.write(RankEnded(0, -6, stopped=False, done=False))
    events.write(RankEnded(1, -15, stopped=True, done=False))
    events.write(RankEnded(2, 0, stopped=False, done=True))
    last: RootCause = {
        "log": str(run.attempt(2).log(3)),
        "last": [f"line {i} of 3" for i in range(10, 40)],
        "advice": "look at the data",
    }
    events.write(AttemptEnded(9, {**FAILED, **last}, failure_class="user"))
    return run


def begun(run: RunFolder, attempt: int) -> EventLog:
    events = begin(run, attempt, start_time=1)
    for rank in range(4):
        events.write(RankStarted(rank, f"node{1 + rank // 2}", 100 + rank))
    events.write(AllRanksStarted())
    return events


def task(project: Project, json: bool = False) -> TaskContext:
    return TaskContext(json=json, dry_run=False, folder=project.path)


def explained(project: Project, attempt: int = 0) -> dict[str, Any]:
    """The document of `why`, whose page is printed."""
    result = why(task(project), "last", attempt)
    task(project).show(result.page)
    return result.document


def said(
    project: Project,
    capsys: pytest.CaptureFixture[str],
    rank: str,
    node: str,
    attempt: int,
    lines: int = 1,
) -> list[str]:
    """Lines that `logs` prints."""
    asked = LogOptions(rank=rank, node=node, attempt=attempt, lines=lines)
    task(project).show(logs.logs(task(project), "last", asked).page)
    return capsys.readouterr().out.splitlines()


def test_why_names_rank_host_and_line(
    project: Project, run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    document = explained(project)
    out = capsys.readouterr().out
    assert (
        "rank 3 on node2: ValueError: the tokens end" in out
        and "advice: look at the data" in out
        and "  line 39 of 3" in out
        and "in step 7" in out
    )
    assert (
        "attempt 2 of 2: exit 9, class user" in out
        and "later: rank 0 on node1 ended with -6" in out
        and "invoke why" not in out
    )
    rows = [line for line in out.splitlines() if line.split()[:1] == ["1"]]
    assert any("contact with node1 was lost" in row for row in rows)  # the table of attempts
    assert [row["attempt"] for row in document["attempts"]] == [1, 2] and document["attempts"][1][
        "hosts"
    ] == ["node1", "node2"]
    assert (
        document["schema"],
        document["root_cause"]["rank"],
        len(document["root_cause"]["last"]),
    ) == ("why/1", 3, 30)
    assert [other["rank"] for other in document["others"]] == [0]
    first = explained(project, 1)
    assert (
        first["root_cause"]["host"] == "node1"
        and "contact with node1 was lost" in capsys.readouterr().out
    )
    with pytest.raises(ConfigError, match="has no attempt 3"):
        why(task(project), "last", 3)


def test_why_of_a_supervisor_without_a_last_word(
    project: Project, run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    begun(run, 3)
    document = explained(project)
    assert (
        document["attempt"] == 3
        and "is gone and did not say how it ended" in document["root_cause"]["message"]
        and document["exit"] == 10
    )
    assert "attempt 3 of 3" in capsys.readouterr().out


def test_why_of_a_good_run(
    project: Project, run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    other = RunFolder(run.path.with_name("20260102-000000-bbbb"))
    other.path.mkdir()
    write_job(other.job, load(project.path).resolve("random"))
    end(begin(other), 0, "success")
    assert explained(project)["root_cause"] is None
    assert "nothing has failed" in capsys.readouterr().out


def test_logs_of_several_ranks(
    project: Project, run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(project, capsys, "", "", 0) == ["line 39 of 0"]
    assert said(project, capsys, "2", "", 2) == ["line 39 of 2"]
    assert said(project, capsys, "1,2-3", "", 0) == [
        "[1] line 39 of 1",
        "[2] line 39 of 2",
        "[3] line 39 of 3",
    ]
    assert said(project, capsys, "failed", "", 0) == ["[0] line 39 of 0", "[3] line 39 of 3"]
    assert said(project, capsys, "", "node2", 0) == ["[2] line 39 of 2", "[3] line 39 of 3"]
    assert said(project, capsys, "0-2", "node2", 0) == ["line 39 of 2"]
    assert len(said(project, capsys, "0", "", 0, lines=0)) == 40
    with pytest.raises(ConfigError, match="no log of rank 9") as error:
        said(project, capsys, "9", "", 0)
    assert error.value.list[0].hint == "ranks with a log: 0-3"
    with pytest.raises(ConfigError, match="has no attempt 5"):
        said(project, capsys, "0", "", 5)
    for words in ("x", "1-", "3-1", "0-99999999", "1,,2"):
        with pytest.raises(TrainkitError, match="--rank takes ranks") as usage:
            said(project, capsys, words, "", 0)
        assert usage.value.exit == Exit.USAGE


def test_logs_of_a_host_that_started_nothing(
    project: Project, run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run.attempt(2).transports / "node9.log"
    path.parent.mkdir()
    path.write_text("ssh: connect to host node9 port 22: No route to host\n")
    assert (
        said(project, capsys, "", "node9", 0)[1]
        == "ssh: connect to host node9 port 22: No route to host"
    )
    with pytest.raises(ConfigError, match="had no host 'nodeX'") as error:
        said(project, capsys, "", "nodeX", 0)
    assert error.value.list[0].hint == "its hosts: node1, node2, node9"


def test_logs_as_a_document(
    project: Project, run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = TaskContext(json=True, dry_run=False, folder=project.path)
    answer = logs.logs(asked, "last", LogOptions(rank="0-1", attempt=2, lines=1))
    document = answer.document
    assert (document["schema"], document["run"], document["attempt"]) == ("logs/1", run.id, 2)
    assert [(each["rank"], each["lines"]) for each in document["logs"]] == [
        (rank, [run.attempt(2).log(rank).read_text().splitlines()[-1]]) for rank in (0, 1)
    ]
    assert capsys.readouterr().out == ""
    run.attempt(2).log(1).write_text("")
    answer = logs.logs(asked, "last", LogOptions(rank="1", attempt=2, lines=1))
    assert answer.document["logs"][0]["lines"] == []
    assert said(project, capsys, "1", "", 2) == ["rank 1 has printed nothing in attempt 2"]
    with pytest.raises(ConfigError, match="cannot be combined"):
        logs.logs(asked, "last", LogOptions(follow=True, lines=1))


def test_following_several_logs_to_the_end(
    project: Project,
    run: RunFolder,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events = begin(run, 3)  # this process is its supervisor, and lives
    for rank in range(2):
        run.attempt(3).log(rank).parent.mkdir(exist_ok=True)
        run.attempt(3).log(rank).write_text("torn" if rank else "")
        events.write(RankStarted(rank, "node1", 1))

    pieces = iter([(0, "half a "), (1, "from one\n"), (0, "line\n"), (1, "last")])

    def write(_: float) -> None:
        """Between two looks at the logs a piece more is written; after the last of them the run
        ends."""
        if (piece := next(pieces, None)) is None:
            end(events, 0, "success")
            return
        with open(run.attempt(3).log(piece[0]), "a") as file:
            file.write(piece[1])

    monkeypatch.setattr(logs, "time", SimpleNamespace(sleep=write))
    logs.logs(task(project), "last", LogOptions(rank="0-1", follow=True, lines=0))
    assert sorted(capsys.readouterr().out.splitlines()) == [
        "[0] half a line",
        "[1] last",
        "[1] tornfrom one",
    ]


def test_following_a_log_that_begins_anew(
    project: Project,
    run: RunFolder,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events, path = begin(run, 3), run.attempt(3).log(0)
    for rank in range(2):
        run.attempt(3).log(rank).parent.mkdir(exist_ok=True)
        run.attempt(3).log(rank).write_text("one\n" if rank == 0 else "")

    def write(_: float) -> None:
        """What is written just before it is put aside is told too, once."""
        if rotated_log(path).exists():
            end(events, 0, "success")
            return
        with open(path, "a") as file:
            file.write("two\nthr")
        path.rename(rotated_log(path))
        path.write_text("ee\nfour\n")

    monkeypatch.setattr(logs, "time", SimpleNamespace(sleep=write))
    logs.logs(task(project), "last", LogOptions(rank="0-1", follow=True, lines=0))
    assert capsys.readouterr().out.splitlines() == ["[0] one", "[0] two", "[0] three", "[0] four"]
    task(project).show(logs.logs(task(project), "last", LogOptions(rank="0", lines=3)).page)
    assert capsys.readouterr().out.splitlines()[-2:] == ["ee", "four"]


def test_status_again_until_the_end(
    project: Project,
    run: RunFolder,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events, waits = begin(run, 3), iter([False, True])
    monkeypatch.setattr(
        follow,
        "time",
        SimpleNamespace(sleep=lambda _: end(events, 12, "preempted") if next(waits) else None),
    )
    answer = follow.status(task(project), "last", watch=True)
    out = capsys.readouterr().out
    assert (
        answer.document["state"] == "preempted" and out.count("attempt 3") == 3 and "running" in out
    )


def test_a_run_that_cannot_be_read_hides_no_other(
    project: Project, run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    other = RunFolder(run.path.with_name("20260102-000000-bbbb"))
    other.supervisor.parent.mkdir(parents=True)
    other.job.write_text("{}")
    other.supervisor.write_text('{"schema": "supervisor/9"}')
    assert [row["run"] for row in follow.runs(task(project), "").document["runs"]] == [run.id]
    assert "20260102-000000-bbbb" in capsys.readouterr().err


def test_events_are_told_once(project: Project, run: RunFolder) -> None:
    seen, all_of_it = EventTail(run, skip_existing=True), EventTail(run)
    assert seen.new() == [] and [
        describe_event(number, event)
        for number, event in all_of_it.new()
        if describe_event(number, event)
    ] == [
        "attempt 1 failed (infra); going on as attempt 2",
        "attempt 2 begins",
    ]
    with open(run.attempt(2).events, "a") as file:
        file.write('{"event": "contact_lost", "ho')
        file.flush()
        assert seen.new() == []
        file.write('st": "node2"}\nnonsense\n')
    assert [describe_event(*each) for each in seen.new()] == ["contact to node2 is lost"]


def test_a_hang_names_who_is_missing() -> None:
    assert describe_event(1, HangDetected([1, 3])).startswith(
        "no rank moves any more: a hang; missing ranks: 1, 3;"
    )
    assert describe_event(1, AllRanksStarted()) == ""
