"""Units of a stage over several agents, all of them on this machine: order, stamps, failures,
lost hosts. (tests/cluster has them on real hosts.)"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.conftest import alive, wait_for
from trainkit.base.errors import ConfigError, TrainkitError
from trainkit.base.process_marks import find_marked
from trainkit.jobs.load import load
from trainkit.jobs.schema import Job
from trainkit.launch import remote_units as units
from trainkit.launch.hosts.hostfile import Host
from trainkit.launch.hosts.quarantine import quarantine_host
from trainkit.launch.remote_units import StageHosts, stage_hosts
from trainkit.stages.contract import Need, Unit
from trainkit.stages.execute import StageWork
from trainkit.stages.stamps import Freshness, unit_folder

# all are this machine, which needs no ssh to itself
HOSTS = ("127.0.0.1", socket.gethostname(), "::1")
JOBS = """
[clusters.pair]
launcher = "ssh"
hostfile = "hostfile"
ranks_per_node = 1
env = { SAID = "by the cluster" }
watch = { connect = 300, lease = 10, grace = 0.5 }
[clusters.pair.stages.weights]
nodes = 2
tasks_per_node = 2
[models.tiny]
num_layers = 2
hidden_size = 32
num_attention_heads = 2
seq_length = 16
vocab_size = 128
[jobs.random]
cluster = "pair"
model = "tiny"
dataset = "mock"
training = { micro_batch_size = 2, global_batch_size = 8, train_iters = 30, lr = 1e-2 }
"""
PROGRAM = """
import json, os, sys, time
for path in sys.argv[1:]:
    spec = json.load(open(path))
    def note(what):
        with open(spec["log"], "a") as log:
            log.write(f"{spec['name']} {what} {os.getppid()} {os.getpid()}\\n")
    print(json.dumps({"progress": 1, "total": 4, "tokens": 7, "text_bytes": 9}), flush=True)
    note("begins")
    exec(spec["do"])
    note("ends")
    print("a library prints this")
    print(json.dumps({"result": {"tokens": 70, "text_bytes": 90}}), flush=True)
"""


class Reporter:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.ended: list[str] = []
        self.counts: dict[str, int] = {}

    def verdict(self, verdict: Freshness) -> None: ...
    def waiting(self, need: Need, holder: str) -> None: ...
    def started(self, need: Need, units: Sequence[Unit]) -> None: ...
    def finished(self, need: Need) -> None: ...

    def counted(self, unit: Unit, counts: Mapping[str, int]) -> None:
        self.counts[unit.name] = counts["tokens"]

    def progress(self, unit: Unit, fraction: float) -> None:
        if fraction == 1 and unit.name not in self.ended:
            self.ended.append(unit.name)


class Work:
    """A stage with a folder, hosts, and a log of who did what."""

    def __init__(self, folder: Path, hosts: int = 2, tasks: int = 2) -> None:
        (folder / "jobs.toml").write_text(JOBS)
        (folder / "hostfile").write_text("localhost slots=1\nnode[1-2] slots=1\n")
        self.folder, self.reporter, self.notices = folder, Reporter(), list[str]()
        self.place = StageHosts(
            self.job(),
            tuple(Host(name, slots=(0,)) for name in HOSTS[:hosts]),
            tasks,
            folder,
            self.notices.append,
        )
        unit_folder(folder, "thing").mkdir(parents=True)

    def job(self) -> Job:
        return load(self.folder).resolve("random").job

    def unit(
        self,
        name: str,
        do: str = "",
        after: tuple[str, ...] = (),
        size: int = 1,
        *,
        several: bool = False,
        network: bool = False,
    ) -> Unit:
        spec = {"log": str(self.folder / "log"), "name": name, "do": do}
        return Unit(
            name,
            (sys.executable, "-I", "-S", "-c", PROGRAM),
            spec,
            (),
            after,
            size,
            several=several,
            network=network,
        )

    def run(self, *units: Unit) -> None:
        need = Need("stage", "thing", "thing", 1, {}, (), (), units)
        self.place.run(StageWork(need, units, self.folder, self.reporter))

    def log(self) -> list[list[str]]:
        """[unit, "begins" or "ends", pid of its parent (the agent), pid], in order."""
        path = self.folder / "log"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def stamped(self) -> set[str]:
        return {
            p.stem
            for p in unit_folder(self.folder, "thing").glob("*.json")
            if not p.name.endswith(".spec.json")
        }

    def nothing_left(self) -> bool:
        """No process of it, and no session's folder."""
        return not any(alive(int(row[3])) for row in self.log()) and not list(
            (self.folder / "sessions").glob("*")
        )


@pytest.fixture
def work(tmp_path: Path) -> Work:
    return Work(tmp_path)


def test_order_shares_and_stamps(work: Work) -> None:
    """Two agents, each with two at once; network units on this machine; those that wait for
    others come after them; small ones share a process."""
    fetch = [work.unit(f"fetch{i}", network=True) for i in range(2)]
    small = [
        work.unit(f"small{i:02d}", "time.sleep(0.02)", ("fetch0", "fetch1"), several=True)
        for i in range(40)
    ]
    together = "while open(spec['log']).read().count('large') < 4: time.sleep(0.01)"
    large = [work.unit(f"large{i}", together, ("fetch0", "fetch1"), size=2**30) for i in range(4)]
    work.run(
        *fetch, *small, *large, work.unit("merge", after=tuple(u.name for u in (*small, *large)))
    )
    rows = work.log()
    begun = [row[0] for row in rows if row[1] == "begins"]
    assert (
        sorted(begun) == sorted(set(begun))
        and len(begun) == 47
        and begun[-1] == "merge"
        and set(begun[:2]) == {"fetch0", "fetch1"}
    )
    parents = {row[0]: int(row[2]) for row in rows}
    assert (
        parents["fetch0"] == os.getpid()
        and len({parents[f"large{i}"] for i in range(4)} - {os.getpid()}) == 2
    ), "both agents had large ones"
    assert (
        max(
            sum(r[1] == "begins" for r in rows[:n]) - sum(r[1] == "ends" for r in rows[:n])
            for n in range(len(rows))
        )
        == 4
    )
    assert len({row[3] for row in rows if row[0].startswith("small")}) < 30
    assert work.stamped() == set(begun) == set(work.reporter.ended) and set(
        work.reporter.counts.values()
    ) == {70}
    assert (
        not list(unit_folder(work.folder, "thing").glob("*.log"))
        and work.nothing_left()
        and not work.notices
    )


def test_what_a_unit_sees(work: Work) -> None:
    """The cluster's variables and nothing else of the caller's; its log names the host."""
    work.run(
        work.unit(
            "look",
            'json.dump(dict(os.environ), open(spec["log"] + ".json", "w")); print("to people",'
            " file=sys.stderr)",
        )
    )
    seen = json.loads((work.folder / "log.json").read_text())
    assert (
        seen["SAID"] == "by the cluster"
        and "PYTEST_CURRENT_TEST" in os.environ
        and "PYTEST_CURRENT_TEST" not in seen
    )
    assert (unit_folder(work.folder, "thing") / "look.log").read_text() in [
        f"on {name}:\nto people\n" for name in HOSTS[:2]
    ]


@pytest.mark.parametrize(
    ("do", "words"),
    [
        (
            "os.kill(os.getpid(), 9)",
            "bad on NAME was ended by signal 9, as the kernel does when memory runs out",
        ),
        ("print('why it fails', file=sys.stderr); sys.exit(3)", "bad on NAME exited with 3"),
        (
            (
                'print(json.dumps({"error": {"problems": [{"message": "line 7 is not JSON"}],'
                ' "exit": 6}}), flush=True); sys.exit(6)'
            ),
            "bad on NAME: line 7 is not JSON",
        ),
        ("sys.exit(0)", "bad on NAME exited with 0"),
    ],
)
def test_the_first_failure_stops_the_others(work: Work, do: str, words: str) -> None:
    """What was finished before it is stamped; the error names unit and host, and the end of the
    log."""
    rest = [work.unit(f"rest{i}", "time.sleep(10_000)", ("first",)) for i in range(2)]
    with pytest.raises(TrainkitError) as caught:
        work.run(
            work.unit("first"),
            *rest,
            work.unit("bad", f"time.sleep(0.3); {do}", ("first",), size=9),
            work.unit("never", after=("bad",)),
        )
    assert (
        any(words.replace("NAME", name) in str(caught.value) for name in HOSTS[:2])
        and caught.value.exit == 6
    )
    assert "why it fails" not in do or "why it fails" in str(caught.value.hint)
    assert (
        work.stamped() == {"first"}
        and "never" not in {row[0] for row in work.log()}
        and work.nothing_left()
    )


def interrupted(work: Work, number: int, *units: Unit) -> None:
    """Run units, with a signal to this process once four have begun."""

    def send() -> None:
        wait_for(lambda: len(work.log()) >= 4, "four units")
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        work.run(*units)
    finally:
        thread.join()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_term_stop_all_of_it(work: Work, number: int) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        interrupted(
            work,
            number,
            work.unit("fetch", "time.sleep(10_000)", network=True),
            *(work.unit(f"u{i}", "time.sleep(10_000)") for i in range(4)),
        )
    assert work.nothing_left() and not work.stamped() and signal.getsignal(signal.SIGTERM) == before


def losing(work: Work, lose: Callable[[list[int]], None], *units: Unit) -> None:
    """Run units and do something to the agents once two of them have begun one each."""

    def act() -> None:
        agents: set[int] = wait_for(
            lambda: (found := {int(row[2]) for row in work.log()}) and len(found) == 2 and found,
            "two agents",
        )
        lose(sorted(agents))

    thread = threading.Thread(target=act)
    thread.start()
    try:
        work.run(*units)
    finally:
        thread.join()


def test_what_a_lost_host_had_not_finished_is_done_by_another(tmp_path: Path) -> None:
    """Not before the lost one has surely stopped; what it had finished is not done again."""
    work, lost = Work(tmp_path, tasks=1), tmp_path / "lost"

    def kill(agents: list[int]) -> None:
        begun = [int(row[3]) for row in work.log() if int(row[2]) == agents[0]]
        os.kill(agents[0], signal.SIGKILL)
        # its keeper ends them: what waits for the file must not see it before
        wait_for(lambda: not any(alive(pid) for pid in begun), "the end of the lost host's unit")
        lost.touch()

    until_lost = f"while not os.path.exists({str(lost)!r}): time.sleep(0.01)"
    losing(work, kill, *(work.unit(f"u{i}", until_lost) for i in range(4)))
    rows = work.log()
    begun = [row[0] for row in rows if row[1] == "begins"]
    assert work.stamped() == {"u0", "u1", "u2", "u3"} and len(begun) == 5, rows
    (again,) = {name for name in begun if begun.count(name) == 2}
    assert [row[1] for row in rows if row[0] == again] == ["begins", "begins", "ends"]
    (notice,) = work.notices
    assert (
        "is lost" in notice
        and "its 1 unfinished units go to the other 1 hosts" in notice
        and work.nothing_left()
    )


def test_all_hosts_lost(tmp_path: Path) -> None:
    def kill_all(agents: list[int]) -> None:
        for pid in agents:
            os.kill(pid, signal.SIGKILL)

    work = Work(tmp_path, tasks=1)
    with pytest.raises(TrainkitError, match=r"all 2 hosts are lost: .*: .*; .*: ") as caught:
        losing(work, kill_all, *(work.unit(f"u{i}", "time.sleep(10_000)") for i in range(4)))
    assert caught.value.exit == 13 and work.nothing_left()


def test_outputs_that_are_seen_late(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on NFS, which remembers for a while that a file is not there: a unit counts when its
    output is seen here."""
    path = work.folder / "made"
    unit = replace(work.unit("u"), outputs=(path,))
    timer = threading.Timer(2.0, path.write_text, ("late",))
    timer.start()
    work.run(unit, work.unit("after", after=("u",)))
    timer.join()
    stamp = json.loads((unit_folder(work.folder, "thing") / "u.json").read_text())
    assert stamp["outputs"][0][:2] == [str(path), 4] and work.stamped() == {"u", "after"}
    path.unlink()
    monkeypatch.setattr(units, "SEEN_SECONDS", 0.5)
    with pytest.raises(TrainkitError, match=r"made, which cannot be seen here after 0\.5 s"):
        work.run(unit)


def test_where_a_stage_runs(work: Work) -> None:
    """Where the cluster says so, and it has hosts; too few are an error, never fewer without a
    word."""
    job = work.job()
    place = stage_hosts(job, "weights", print)
    assert (
        place is not None
        and [host.name for host in place.hosts] == [socket.gethostname(), "node1"]
        and place.tasks == 2
    )
    assert stage_hosts(job, "index", print) is None
    quarantine_host(work.folder, "node1", "it fell", "a-run", 100)
    assert [host.name for host in stage_hosts(job, "weights", print).hosts] == [  # type: ignore[union-attr]
        socket.gethostname(),
        "node2",
    ]
    quarantine_host(work.folder, "node2", "it fell", "a-run", 100)
    with pytest.raises(
        ConfigError,
        match=(
            r"stages\.weights\.nodes = 2, and .*/hostfile has 1 hosts, without node1, node2, left"
            r" out as suspected"
        ),
    ):
        stage_hosts(job, "weights", print)
    local = job.model_copy(update={"cluster": job.cluster.model_copy(update={"launcher": "local"})})
    assert stage_hosts(local, "weights", print) is None


def test_a_host_that_does_not_answer_is_named(tmp_path: Path) -> None:
    work = Work(tmp_path)
    with socket.socket() as nobody:  # a port without ssh behind it
        nobody.bind(("127.0.0.2", 0))
        hosts = (
            Host("127.0.0.1", slots=(0,)),
            Host("127.0.0.2", port=nobody.getsockname()[1], slots=(0,)),
        )
        work.place = StageHosts(work.job(), hosts, 1, tmp_path, print)
        with pytest.raises(TrainkitError, match=r"127\.0\.0\.2 .*refused") as caught:
            work.run(work.unit("u"))
    assert caught.value.exit == 8 and work.nothing_left() and not find_marked("stage-thing")
