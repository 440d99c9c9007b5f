"""A run whose supervisor is a process of its own: followed, left alone, saved, stopped, and what
is left of it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Project, alive, wait_for

HANGS = 600.0  # seconds; only against a test that would never end
LONG = ("--set", "training.train_iters=100000")


def events(run: Path, attempt: int) -> list[dict[str, object]]:
    return [
        json.loads(line)
        for line in (run / f"attempts/{attempt}/events.jsonl").read_text().splitlines()
    ]


def ranks(run: Path, attempt: int) -> list[int]:
    return [int(str(e["pid"])) for e in events(run, attempt) if e["event"] == "rank_started"]


def wait_for_rows(run: Path, count: int) -> None:
    path = run / "metrics.jsonl"
    wait_for(lambda: path.exists() and path.read_text().count("\n") >= count, f"{count} rows")


def followed(
    project: Project, presses: int, number: signal.Signals = signal.SIGINT
) -> tuple[int, str]:
    """(exit code, output) of `attach` that is sent a signal so many times."""
    process = project.start("attach", "last")
    assert process.stdout is not None
    first = process.stdout.readline()  # it listens by then
    for press in range(presses):
        process.send_signal(number)
        # two at once would be one signal: the second comes after the answer
        while press + 1 < presses and "Ctrl-C again within" not in first:
            first += process.stdout.readline()
    out, err = process.communicate(timeout=HANGS)
    assert "Traceback" not in err, err
    return process.returncode, first + out


@pytest.fixture
def running(project: Project) -> Iterator[Path]:
    """The folder of a run that goes on by itself; whatever a test does, nothing of it is left."""
    started = project.document("train", "random", "--detach", *LONG)
    assert started["state"] == "running" and started["attempt"] == 1
    (run,) = project.runs()
    yield run
    left = project.start("cancel", "last")
    left.communicate(timeout=HANGS)


def test_followed_left_alone_saved_and_stopped(project: Project, running: Path) -> None:
    wait_for_rows(running, 2)
    assert all(map(alive, ranks(running, 1)))
    code, out = followed(project, 1)
    assert code == 130 and "the run goes on" in out and "invoke attach" in out
    assert followed(project, 1, signal.SIGHUP)[0] == -signal.SIGHUP  # a terminal that is closed
    assert project.document("status", "last")["state"] == "running" and all(
        map(alive, ranks(running, 1))
    )
    refused = project.invoke("resume", "last", exit=17)
    assert "is still running" in refused.stderr and "invoke attach" in refused.stderr
    code, out = followed(project, 2)
    # this process was too slow for the second press: the run goes on, and is asked again
    while code == 130:
        code, out = followed(project, 2)
    assert code == 12 and "saving at the end of this step" in out
    status = project.document("status", "last")
    assert (
        status["state"] == "preempted"
        and (running / f"checkpoints/step-{status['step']:08d}/manifest.json").is_file()
    )
    assert not any(map(alive, ranks(running, 1)))

    project.invoke("resume", "last", "--detach", "--code", "current")
    (node,) = project.document("nodes", "--cluster", "here")["hosts"]
    assert (
        node["reachable"]
        and node["host"] == os.uname().nodename
        and node["busy"][0]["run"] == running.name
        and node["quarantine"] is None
    )
    cancelled = project.document("cancel", "last", exit=15)
    assert (cancelled["state"], cancelled["exit"]) == ("cancelled", 15)
    assert [(row["host"], row["answered"], row["left"]) for row in cancelled["hosts"]] == [
        (node["host"], True, [])
    ]
    assert not any(map(alive, ranks(running, 2)))
    assert "has ended already: cancelled" in project.invoke("cancel", "last").stdout
    assert project.invoke("attach", "last", exit=15).stdout.startswith("cancelled, exit 15")


def test_saved_by_cancel_and_cancelled_without_a_supervisor(
    project: Project, running: Path
) -> None:
    wait_for_rows(running, 2)
    out = project.invoke("cancel", "last", "--save", exit=12).stdout
    assert (
        "its supervisor was asked to save and stop" in out
        and "nothing" in out
        and f"invoke resume {running.name} goes on" in out
    )
    project.invoke("resume", "last", "--detach")
    supervisor = json.loads((running / "launch/supervisor.json").read_text())["identity"]["pid"]
    os.kill(supervisor, signal.SIGKILL)
    wait_for(
        lambda: project.document("status", "last")["state"] == "failed",
        "the supervisor's death to be seen",
        timeout=HANGS,
    )
    out = project.invoke("cancel", "last", exit=15).stdout
    assert "has no supervisor that could be asked" in out and "nothing" in out
    assert not any(map(alive, ranks(running, 2)))
    assert "is gone and did not say how it ended" in project.invoke("why", "last").stdout
    status = project.document("status", "last")
    assert (
        status["state"] == "cancelled"
        and "did not say how it ended" in status["root_cause"]["message"]
    )
    assert "has ended already" in project.invoke("cancel", "last").stdout


def test_a_supervisor_that_stands_still(project: Project, running: Path) -> None:
    """It is named with its pid, left alone by `cancel`, ended by `cancel --force`, and the run goes
    on; a sign of life that only looks old, as of another clock, is nothing to worry about."""
    sign = running / "launch/supervisor.json"

    def age() -> None:
        value = json.loads(sign.read_text())
        sign.write_text(json.dumps(value | {"time": value["time"] - 3600}))

    wait_for_rows(running, 2)
    pid = json.loads(sign.read_text())["identity"]["pid"]
    age()
    assert project.document("status", "last")["state"] == "running"
    os.kill(pid, signal.SIGSTOP)
    age()
    status = project.document("status", "last")
    assert (status["state"], status["exit"]) == ("unknown", 13)
    assert f"the supervisor (pid {pid} on " in status["root_cause"]["message"]
    assert "hangs since" in status["root_cause"]["message"]
    assert "hangs since" in project.invoke("resume", "last", exit=13).stderr
    refused = project.invoke("cancel", "last", exit=13).stderr
    assert f"pid {pid}" in refused and "--force ends that process too" in refused
    assert alive(pid) and project.invoke("cancel", "last", "--force", exit=15)
    assert not alive(pid) and not any(map(alive, ranks(running, 1)))
    project.invoke("resume", "last", "--detach", "--set", "training.train_iters=5")
    assert project.invoke("attach", "last")


def test_words_that_contradict_each_other(project: Project) -> None:
    assert (
        "contradict" in project.invoke("train", "random", "--detach", "--foreground", exit=3).stderr
    )
    assert (
        "is for clusters whose launcher is ssh or pdsh"
        in project.invoke("train", "random", "--include", "a", exit=3).stderr
    )
    assert not (project.path / "runs").exists()
