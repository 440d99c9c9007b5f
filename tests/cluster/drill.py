"""Kills of random processes of runs on hosts, and what is left of the runs: python -m
tests.cluster.drill KILLS [--bare] [--seed N].

Every rank starts a daemon: a session of its own, no parent of ours, an empty environment. Each
fifth kill takes supervisor, agents and keepers of all hosts at one moment. Then the next command
(`cancel`) is typed. Nothing may be left; on hosts without cgroups (--bare) what is left must be
named by it.
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.machines import HEAD, Cluster, Process
from tests.cluster.on_head import ClusterProject, make_project
from tests.cluster.test_endings import NO_RETRIES, begun, of_agent, of_keeper, supervisor

DAEMON = "drill-daemon"
RANKS = f"""
import os, sys
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(100_000)"
        os.execve(sys.executable, [sys.executable, "-I", "-c", deaf, "{DAEMON}"], {{}})
    os._exit(0)
steps(100_000, 0.1)
"""
LIMIT = 600.0  # seconds until what is still there counts as left: no machine is so slow


@dataclass(frozen=True)
class Row:
    """One kill: who, the seconds until nothing was left by itself or with the next command's
    help, and whether that was needed."""

    number: int
    victims: tuple[str, ...]
    seconds: float
    helped: bool
    left: tuple[str, ...]
    named: bool


def what(run: Path, process: Process) -> str:
    """The part that a process plays in a run."""
    if process.host == HEAD:
        return (
            "supervisor"
            if process.pid == supervisor(run)
            else "client"
            if "invoke" in process.argv
            else Path(process.argv[0]).name
        )
    return next(
        (name for name, found in (("agent", of_agent), ("keeper", of_keeper)) if found(process)),
        "rank" if process.started else DAEMON,
    )


def of_run(cluster: Cluster, run: Path) -> list[Process]:
    """All of it, daemons too: one run at a time is on these hosts."""
    return [p for p in cluster.processes() if p.belongs_to(run.name) or DAEMON in p.argv]


def kills(project: ClusterProject, number: int, chance: random.Random) -> Iterator[Row]:
    """Do them, one run each."""
    cluster = project.cluster
    project.hosts("node1 slots=1", "node2 slots=1")
    project.ranks_do(RANKS)
    for each in range(number):
        process = project.start("train", "random", *NO_RETRIES)
        run = begun(project, process, runs=each + 1)
        everybody = [p for p in of_run(cluster, run) if what(run, p) not in ("client", DAEMON)]
        heads = [p for p in everybody if what(run, p) in ("supervisor", "agent", "keeper")]
        victims = heads if each % 5 == 4 else chance.sample(everybody, chance.choice((1, 1, 2, 3)))
        began = time.monotonic()
        for sent in (signal.SIGSTOP, signal.SIGKILL) if victims is heads else (signal.SIGKILL,):
            cluster.kill(*victims, number=sent)
        process.communicate()
        alone = until(lambda run=run: not of_run(cluster, run), 2.0 if victims is heads else 60.0)  # type: ignore[misc]
        before = of_run(cluster, run)
        said = project.start("cancel", run.name)
        words = "".join(said.communicate())
        until(lambda run=run: not of_run(cluster, run), LIMIT if not alone else 0.0)  # type: ignore[misc]
        left = of_run(cluster, run)
        named = all(str(p.pid) in words for p in left) and (
            alone or "ended just now" in words or not before
        )
        yield Row(
            each + 1,
            tuple(sorted(f"{what(run, p)}@{p.host}" for p in victims)),
            time.monotonic() - began,
            not alone,
            tuple(f"{p.host}: {p.argv}" for p in left),
            named,
        )
        cluster.kill(*left)


def until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether it came true in that time."""
    deadline = time.monotonic() + seconds
    while not (true := condition()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return true


def main() -> None:
    """The program."""
    parser = argparse.ArgumentParser(
        description="Kills of random processes of runs on hosts, and what is left."
    )
    parser.add_argument("kills", type=int)
    parser.add_argument("--bare", action="store_true", help="hosts without cgroup v2")
    parser.add_argument("--seed", type=int, default=0)
    words = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(Path(folder) / "cluster", 2, unified=not words.bare)
        try:
            rows = []
            for row in kills(
                make_project(Path(folder) / "project", cluster),
                words.kills,
                random.Random(words.seed),
            ):
                rows.append(row)
                print(
                    f"{row.number:4} {row.seconds:6.1f} s {'helped ' if row.helped else 'alone  '}"
                    f" {', '.join(row.victims)}",
                    *row.left,
                    flush=True,
                )
        finally:
            cluster.close()
    left, helped = sum(bool(row.left) for row in rows), sum(row.helped for row in rows)
    print(
        f"{len(rows)} kills: {len(rows) - helped} ended by themselves, {helped} with the next"
        f" command, {left} left something",
        flush=True,
    )


if __name__ == "__main__":
    try:
        main()
    except subprocess.SubprocessError as error:
        raise SystemExit(str(error)) from None
