"""Two attempts never write at once, what has been trained is never deleted, and trouble of the
head is not blamed on every host."""

from __future__ import annotations

import asyncio
import dataclasses
import fcntl
import functools
import json
import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any, Literal

import pytest

import trainkit
from tests.conftest import JOBS, wait_for
from tests.launch.fake_supervisor import Session
from tests.launch.stub_agents import Debug, StubAgent
from tests.launch.supervised import DONE, Program, events, make_run, supervised
from trainkit.base.documents import utc_now
from trainkit.base.errors import TrainkitError
from trainkit.engines.contract import Command
from trainkit.jobs.load import load
from trainkit.jobs.resolved import write_job
from trainkit.jobs.schema import Job
from trainkit.launch import start
from trainkit.launch.hosts.hostfile import Host
from trainkit.launch.hosts.quarantine import read_quarantine
from trainkit.launch.hosts.selection import local_hosts
from trainkit.launch.protocol.frames import StartProcesses
from trainkit.launch.scheduler_contract import Start
from trainkit.launch.supervise import supervisor
from trainkit.launch.supervise.code_snapshot import link_code, take_snapshot
from trainkit.launch.supervise.outcome import RankExit, judge_outcome
from trainkit.plan.planner import make_plan
from trainkit.runs.folder import RunFolder
from trainkit.runs.record import read_run_record

# Killed as soon as another run waits for this one's slots.
KILLED_LATER = """
import os, signal, time
while not os.path.exists(os.environ["TAKER_WAITS"]):
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""


def locks_of(path: Path) -> list[str]:
    """Who has that file locked or waits to ("->"), as the kernel says (proc_locks(5))."""
    inode = f":{path.stat().st_ino} "
    return [line for line in Path("/proc/locks").read_text().splitlines() if inode in line]


def test_slots_taken_between_two_attempts_delete_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "jobs.toml").write_text(JOBS)
    (tmp_path / "node").mkdir()
    sets = [
        f"cluster.node_folder={tmp_path / 'node'}",
        f"cluster.root={tmp_path}",
        "cluster.watch.grace=1",
        "retry.infra=1",
    ]
    resolved = load(tmp_path).resolve("random", sets)

    def fill(run: RunFolder, *rest: Any) -> None:
        (run.checkpoints / "step-00005000").mkdir(parents=True)
        link_code(take_snapshot(Path(trainkit.__file__).parent, tmp_path / "code").folder, run.code)
        write_job(run.job, resolved)

    monkeypatch.setattr(start, "fill_run", fill)
    monkeypatch.setattr(
        supervisor,
        "supervise",
        functools.partial(
            supervisor.supervise,
            engine=Program(KILLED_LATER, env={"TAKER_WAITS": str(tmp_path / "waits")}),
        ),
    )
    over = threading.Event()

    def take() -> None:
        """Be the other run that waits for these slots."""
        path = tmp_path / "node" / "trainkit-cpu.lock"
        wait_for(
            lambda: over.is_set() or (path.exists() and locks_of(path)), "the first attempt's lock"
        )
        if over.is_set():  # the run ended without it: nothing to wait for
            return
        with open(path, "r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.truncate(0)
            file.write(json.dumps({"run": "another"}))
            file.flush()
            over.wait()

    def say() -> None:
        """Tell the ranks when it waits."""
        path = tmp_path / "node" / "trainkit-cpu.lock"
        wait_for(
            lambda: (
                over.is_set() or (path.exists() and any("->" in line for line in locks_of(path)))
            ),
            "its wait",
        )
        (tmp_path / "waits").touch()

    racer = threading.Thread(target=take)
    racer.start()
    threading.Thread(target=say, daemon=True).start()
    try:
        plan = make_plan(resolved.job)
        hosts = local_hosts(resolved.job)
        run, outcome = start.start_run(
            Start(resolved.job, resolved.to_json(), plan, hosts, tmp_path, needs=[])
        )
    finally:
        over.set()
        racer.join()
    assert outcome is not None and outcome.exit == 17
    assert (run.checkpoints / "step-00005000").is_dir() and len(run.attempts()) == 2
    assert (
        next(e for e in events(run, 1) if e["event"] == "ended")["root_cause"]["signal"]
        == "SIGKILL"
    )


def test_a_resumed_run_ends_what_a_dead_supervisor_left(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    attempt = run.attempt(1)
    attempt.path.mkdir(parents=True)
    (run.session(1)).mkdir(parents=True)
    (run.session(1) / "secrets.json").write_text("{}")
    told = [{"event": "started"}, {"event": "agent_joined", "host": "localhost"}, {"event": "go"}]
    attempt.events.write_text(
        "".join(json.dumps({"time": utc_now(), **event}) + "\n" for event in told)
    )
    left = subprocess.Popen(
        ["sleep", "600"],
        env={**os.environ, "TRAINKIT_RUN": f"{run.id}/1/0/0"},
        start_new_session=True,
    )
    try:
        outcome, after = supervised(run, Program(DONE))
        assert left.poll() is not None, "the attempt after it ran beside it"
    finally:
        left.kill()
        left.wait()
    assert (
        outcome.exit == 0
        and after[0]["attempt"] == 2
        and not (run.session(1) / "secrets.json").exists()
    )


def test_a_resumed_run_takes_its_slots_from_agents_that_stand_still(tmp_path: Path) -> None:
    """Agent and keeper of the attempt before are stopped, its supervisor is gone: they would
    hold the slots of their own run for ever (exit 17)."""
    run = make_run(tmp_path / "run")
    old = Session(tmp_path / "old", run=run.id, node_folder=str(tmp_path / "run" / "node"))
    old.run, old.mark = run.id, f"{run.id}/1/0"
    run.attempt(1).path.mkdir(parents=True)
    told = [{"event": "started"}, {"event": "agent_joined", "host": "localhost"}, {"event": "go"}]
    run.attempt(1).events.write_text(
        "".join(json.dumps({"time": utc_now(), **event}) + "\n" for event in told)
    )
    try:
        peer = old.begin()
        assert old.agent is not None
        for pid in (old.agent.pid, int(peer.hello["pid"])):
            os.kill(pid, signal.SIGSTOP)
        peer.sock.close()
        outcome, _ = supervised(run, Program(DONE))
        assert outcome.exit == 0 and old.agent.wait() == -9
    finally:
        old.close()


def test_agents_and_keepers_carry_their_runs_mark(tmp_path: Path) -> None:
    """So that they are found with it; but not below the node, where they would end themselves."""
    program = f"""
import os, sys
agent = os.getppid()
keeper = int(open(f"/proc/{{agent}}/stat").read().rpartition(")")[2].split()[1])
environments = [open(f"/proc/{{pid}}/environ").read().split(chr(0)) for pid in (agent, keeper)]
marks = [line for lines in environments for line in lines if line.startswith("TRAINKIT_RUN=")]
{DONE}
open(os.environ["FOUND"], "w").write(str(marks))
"""
    run = make_run(tmp_path, ["cluster.ranks_per_node=1"])
    outcome, _ = supervised(run, Program(program, env={"FOUND": str(tmp_path / "found")}))
    assert outcome.exit == 0 and (tmp_path / "found").read_text() == str(
        [f"TRAINKIT_RUN={run.id}/1/agents/0"] * 2
    )


def test_hosts_that_cannot_be_asked_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "stop_seconds", lambda job: 10_000.0)

    class Unreachable(StubAgent):
        async def run(self) -> None:
            if self.session.run.startswith("sweep"):
                raise OSError("no route to host")
            await super().run()

    run = make_run(
        tmp_path,
        ["cluster.watch.lease=1", "cluster.watch.grace=0.5"],
        hosts=[Host(f"h{i}", slots=(0, 1)) for i in range(2)],
        nodes=2,
    )
    run.attempt(1).path.mkdir(parents=True)
    ended: dict[str, Any] = {
        "event": "ended",
        "class": "infra",
        "exit": 13,
        "root_cause": None,
        "survivors": [],
        "unanswered": ["h1"],
    }
    told: list[dict[str, Any]] = [{"event": "agent_joined", "host": "h1"}, ended]
    run.attempt(1).events.write_text(
        "".join(json.dumps({"time": utc_now(), **event}) + "\n" for event in told)
    )
    waits: list[float] = []

    async def wait(self: object, seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(supervisor.Supervisor, "_wait", wait)
    outcome, _ = supervised(run, Program(DONE), launcher=Debug(Unreachable))
    assert outcome.exit == 0 and waits[0] > 5_000


def test_a_head_that_loses_most_hosts_blames_none(tmp_path: Path) -> None:
    class Gone(StubAgent):
        """Three of four go at once, as they do where the head's own network fails."""

        async def on_go(self, frame: StartProcesses) -> None:
            await super().on_go(frame)
            if self.session.attempt == 1 and self.node:
                await asyncio.sleep(0.3)
                await self.stop(0)
                self.connection.close()
                raise OSError("cut")

    hosts = [Host(f"h{i}", slots=(0, 1)) for i in range(4)]
    sets = ["retry.infra=1", "cluster.watch.lease=1", "cluster.watch.grace=0.5", "cluster.spares=0"]
    run = make_run(tmp_path, sets, hosts=hosts, nodes=4)
    second = f"import os, time\nif os.environ['ATTEMPT'] == '1':\n    time.sleep(10_000)\n{DONE}"
    outcome, told = supervised(run, Program(second), launcher=Debug(Gone))
    assert outcome.exit == 0 and read_quarantine(run.root) == {} and told[0]["world_size"] == 8, (
        outcome
    )


def test_a_host_that_cannot_be_done_without_is_not_kept_from_the_resume(tmp_path: Path) -> None:
    """The `resume` that is advised would have too few hosts (exit 8)."""
    program = (
        "import os, sys, time\nif os.environ['RANK'] != '2': time.sleep(10_000)\nprint('No CUDA"
        " GPUs are available'); sys.exit(1)"
    )
    for number, (hosts, expected) in enumerate([(2, set()), (3, {"h1"})]):
        run = make_run(
            tmp_path / str(number),
            ["retry.infra=0", "retry.shrink=false"],
            hosts=[Host(f"h{i}", slots=(0, 1)) for i in range(hosts)],
            nodes=2,
        )
        outcome, _ = supervised(run, Program(program), launcher=Debug(StubAgent))
        assert outcome.suspects == ("h1",) and set(read_quarantine(run.root)) == expected


def test_a_supervisor_that_is_killed_before_its_first_word(tmp_path: Path) -> None:
    """`train` says of it what `status` says."""
    run = make_run(tmp_path)
    program = run.code.resolve() / "trainkit" / "launch" / "main.py"
    program.unlink()  # see tests/linked_code.py
    program.write_text("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(TrainkitError, match="ended by SIGKILL before it had begun") as error:
        start.spawn_supervisor(run, share=False)
    assert error.value.exit == read_run_record(run).exit == 10


@pytest.mark.parametrize(("spawn", "ranks"), [("per_node", [0, 2]), ("per_run", [0])])
def test_a_program_that_starts_ranks_itself_is_started_once(
    tmp_path: Path, spawn: Literal["per_node", "per_run"], ranks: list[int]
) -> None:
    class Once(Program):
        def command(self, job: Job, run: RunFolder, attempt: int) -> Command:
            return dataclasses.replace(super().command(job, run, attempt), spawn=spawn)

    hosts = [Host(f"h{i}", slots=(0, 1)) for i in range(2)]
    run = make_run(tmp_path, hosts=hosts, nodes=2)
    outcome, told = supervised(run, Once(DONE), launcher=Debug(StubAgent))
    assert outcome.exit == 0
    assert [e["rank"] for e in told if e["event"] == "rank_started"] == ranks
    hostfile = next(tmp_path.rglob("launch/hostfile"), None)
    if spawn == "per_run":  # DeepSpeed's launcher fails at any other line
        assert hostfile and hostfile.read_text() == "h0 slots=2\nh1 slots=2\n"
    else:
        assert hostfile is None


def test_what_a_rank_writes_of_itself_cannot_end_the_supervisor() -> None:
    strange = RankExit(
        0, "h", 9, 1.0, False, error={"exit": [1], "type": ["x"], "message": None, "step": {}}
    )
    assert judge_outcome([strange], 1, None).exit == 9
