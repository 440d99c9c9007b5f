"""What dies when: whoever is killed, nothing of the run is left on any host, others are
untouched, and the end has a class and a cause."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.machines import HEAD, Cluster, Process
from tests.cluster.on_head import ClusterProject
from tests.conftest import wait_for

GRACE = 1.0  # watch.grace of the project
NO_RETRIES = (
    "--set",
    "retry.infra=0",
    "--set",
    "retry.hang=0",
    "--set",
    "cluster.quarantine_seconds=0",
)


def events(run: Path, attempt: int = 1) -> list[dict[str, Any]]:
    path = run / f"attempts/{attempt}/events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def begun(
    project: ClusterProject,
    process: subprocess.Popen[str],
    runs: int = 1,
    attempt: int = 1,
    ranks: int = 2,
) -> Path:
    """The newest run's folder once all of its ranks have made a step."""

    def there() -> Path | None:
        if process.poll() not in (None, 0):
            pytest.fail("".join(process.communicate()))
        found = project.runs()
        beats = (
            [found[-1] / f"attempts/{attempt}/heartbeat/{rank}.json" for rank in range(ranks)]
            if len(found) >= runs
            else []
        )
        return (
            found[-1]
            if beats
            and all(path.exists() and json.loads(path.read_text())["step"] >= 1 for path in beats)
            else None
        )

    run = wait_for(there, "all ranks to make a step", timeout=600)
    assert isinstance(run, Path)
    return run


def supervisor(run: Path) -> int:
    return int(json.loads((run / "launch/supervisor.json").read_text())["identity"]["pid"])


def nothing_left(cluster: Cluster, run: str) -> None:
    """Wait until nothing is left of a run on any host."""
    wait_for(
        lambda: not cluster.processes_of(run), f"the end of all that is left of {run}", timeout=600
    )


def of_agent(p: Process) -> bool:
    return p.host != HEAD and any(word.endswith("/agent/main.py") for word in p.argv)


def of_keeper(p: Process) -> bool:
    return p.host != HEAD and p.argv[0].startswith("run-keeper ")


def of_transport(name: str) -> Callable[[Process], bool]:
    return lambda p: p.host == HEAD and Path(p.argv[0]).name == name


@pytest.fixture
def busy(head: ClusterProject) -> Iterator[ClusterProject]:
    """A project in whose runs every rank makes steps for ever, and has a child that ignores TERM
    in a session of its own; one rank a host."""
    head.hosts("node1 slots=1", "node2 slots=1")
    head.ranks_do("""
        import subprocess, sys
        deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(1000)"
        subprocess.Popen([sys.executable, "-c", deaf], start_new_session=True)
        steps(100_000, 0.1)
        """)
    yield head
    for run in head.runs():
        left = head.cluster.processes_of(run.name)
        head.cluster.kill(*left)


VICTIMS: list[tuple[str, Callable[[Path, Process], bool], int]] = [
    ("ssh", lambda run, p: p.pid == supervisor(run), signal.SIGKILL),
    ("pdsh", lambda run, p: p.pid == supervisor(run), signal.SIGTERM),
    ("ssh", lambda run, p: of_agent(p) and p.host == "node2", signal.SIGKILL),
    ("pdsh", lambda run, p: of_keeper(p) and p.host == "node1", signal.SIGKILL),
    ("ssh", lambda run, p: (of_agent(p) or of_keeper(p)) and p.host == "node2", signal.SIGKILL),
    ("pdsh", lambda run, p: of_keeper(p) and p.host == "node1", signal.SIGTERM),
    ("pdsh", lambda run, p: of_transport("pdsh")(p), signal.SIGKILL),
    ("pdsh", lambda run, p: of_transport("pdsh")(p), signal.SIGTERM),
    ("pdsh", lambda run, p: of_transport("ssh")(p), signal.SIGKILL),
    ("ssh", lambda run, p: of_transport("ssh")(p), signal.SIGKILL),
    ("ssh", lambda run, p: of_transport("ssh")(p), signal.SIGTERM),
    ("ssh", lambda run, p: of_agent(p) and p.host == "node2", signal.SIGTERM),
]


AT_ONCE = 4  # most of the time until a run has ended is waited
FEW = [VICTIMS[0], VICTIMS[3], VICTIMS[8], VICTIMS[11]]  # of each kind, and of both signals


def end_them(
    busy: ClusterProject, victims: list[tuple[str, Callable[[Path, Process], bool], int]]
) -> None:
    """A run for each, side by side; then each loses what was chosen of it, and ends by itself."""
    cluster, runs, unheard = busy.cluster, [], []
    for launcher, _, _ in victims:
        known = len(busy.runs())
        process = busy.start(
            "train", "random", "--share", "--set", f"cluster.launcher={launcher}", *NO_RETRIES
        )
        runs.append((process, begun(busy, process, runs=known + 1)))
    for (_, chosen, sent), (_, run) in zip(victims, runs, strict=True):
        found = [p for p in cluster.processes_of(run.name) if chosen(run, p)]
        assert found
        unheard.append(sent == signal.SIGKILL and found[0].pid == supervisor(run))
        cluster.kill(*found, number=sent)
    for killed, (launcher, _, sent), (process, run) in zip(unheard, victims, runs, strict=True):
        out, err = process.communicate()
        nothing_left(cluster, run.name)
        assert process.returncode in (10, 12, 13), out + err
        ends = [e["exit"] for e in events(run) if e["event"] == "ended"]
        assert ends == ([] if killed else [process.returncode]), (
            f"{launcher}, {signal.Signals(sent).name}: {ends}"
        )


@pytest.mark.parametrize("victims", [FEW, pytest.param(VICTIMS, marks=pytest.mark.slow)], ids=len)
def test_whoever_is_killed_nothing_is_left_and_another_run_goes_on(
    victims: list[tuple[str, Callable[[Path, Process], bool], int]],
    busy: ClusterProject,
    cluster: Cluster,
) -> None:
    other = begun(busy, busy.start("train", "random", "--detach"))
    before = {(p.host, p.pid) for p in cluster.processes_of(other.name)}
    started = [p for p in cluster.processes_of(other.name) if p.started]
    ranks = [p for p in started if not any("/train/parent.py" in word for word in p.argv)]
    assert {host for host, _ in before} == {HEAD, "node1", "node2"} and len(ranks) == 4
    for first in range(0, len(victims), AT_ONCE):
        end_them(busy, victims[first : first + AT_ONCE])
    assert before <= {(p.host, p.pid) for p in cluster.processes_of(other.name)}
    step = json.loads((other / "attempts/1/heartbeat/0.json").read_text())["step"]
    wait_for(
        lambda: json.loads((other / "attempts/1/heartbeat/0.json").read_text())["step"] > step,
        "the other run to go on",
    )
    done = busy.invoke("cancel", other.name, exit=15)
    assert "node1" in done.stdout
    nothing_left(cluster, other.name)


def test_a_closed_terminal_leaves_the_run_alive(busy: ClusterProject, cluster: Cluster) -> None:
    leader, terminal = pty.openpty()

    def own_terminal() -> None:
        os.setsid()
        fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)

    argv = cluster.command(HEAD, sys.executable, "-m", "invoke", "train", "random")
    process = subprocess.Popen(
        argv,
        cwd=busy.path,
        env=busy.environment(),
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        text=True,
        preexec_fn=own_terminal,  # noqa: PLW1509 (two system calls)
    )
    os.close(terminal)
    run = begun(busy, process)
    os.close(leader)
    process.wait()
    time.sleep(GRACE + 1)
    marked = [p for p in cluster.processes_of(run.name) if p.started]
    assert {p.host for p in marked} >= {"node1", "node2"} and busy.document("status", run.name)[
        "state"
    ] == "running"
    attached = busy.start("attach", run.name)
    time.sleep(2)
    busy.invoke("cancel", run.name, "--save", exit=12)
    out, err = attached.communicate()
    assert attached.returncode == 12, out + err
    nothing_left(cluster, run.name)


def test_a_rank_that_exits_with_3(head: ClusterProject, cluster: Cluster) -> None:
    head.ranks_do("""
        import sys
        steps(3, 0.1)
        if rank == 3:
            print("the data of rank 3 is odd", file=sys.stderr)
            raise SystemExit(3)
        steps(10_000, 0.1)
        """)
    failed = head.invoke("train", "random", exit=9)
    assert "rank 3" in failed.stdout + failed.stderr
    why = head.invoke("why", "last")
    assert all(word in why.stdout for word in ("rank 3", "node2", "the data of rank 3 is odd")), (
        why.stdout
    )
    cause = head.document("why", "last")["root_cause"]
    assert (cause["rank"], cause["host"], cause["code"]) == (
        3,
        "node2",
        3,
    ) and "the data of rank 3 is odd" in cause["last"][-1]
    assert head.document("status", "last")["class"] == "user"
    nothing_left(cluster, head.runs()[-1].name)
