"""Failures and what follows them: budgets by class, hosts left out, spares, fewer hosts, the
same failure again; over real programs with agents in this process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.conftest import alive, wait_for
from tests.launch.stub_agents import Debug, StubAgent
from tests.launch.supervised import DONE, Program, events, make_run, supervised
from trainkit.base.errors import Exit, Problem
from trainkit.base.files import read_json
from trainkit.jobs.schema import Job, RetrySettings
from trainkit.launch.hosts.hostfile import Host
from trainkit.launch.hosts.quarantine import read_quarantine
from trainkit.launch.protocol.client import ask_supervisor
from trainkit.launch.protocol.frames import CancelRun, ReserveSlots, StartProcesses
from trainkit.launch.supervise import supervisor
from trainkit.launch.supervise.attempt_context import AttemptResult
from trainkit.launch.supervise.observer import RunObserver
from trainkit.launch.supervise.outcome import Outcome
from trainkit.launch.supervise.retry_policy import HostChoice, RetryBudgets
from trainkit.launch.supervise.supervisor import Supervisor, supervise
from trainkit.runs.events import FailureClass
from trainkit.runs.folder import RunFolder

HOSTS = [Host(f"h{i}", slots=(0, 1)) for i in range(4)]
QUICK = ["cluster.watch.lease=1", "cluster.watch.grace=0.5"]


def failed(
    failure_class: FailureClass,
    step: int = 1,
    exit: Exit = Exit.RANK_INFRA,
    kind: str = "SIGKILL",
    began: bool = True,
) -> AttemptResult:
    return AttemptResult(Outcome(exit, failure_class, {"signal": kind}), began, step)


def test_one_kind_of_failure_does_not_eat_the_budget_of_another() -> None:
    budgets = RetryBudgets(RetrySettings(infra=2, hang=1, user=0, preempted=1))
    ends = [
        failed(kind, step)  # type: ignore[arg-type]
        for step, kind in enumerate(["infra", "hang", "infra", "preempted", "infra"])
    ]
    assert [budgets.decide(end) for end in ends] == ["again", "again", "again", "again", "enough"]
    assert (
        budgets.decide(failed("user", 9, Exit.RANK_USER))
        == budgets.decide(failed("hang", 10))
        == "enough"
    )


def test_the_same_failure_at_the_same_step_ends_it() -> None:
    budgets = RetryBudgets(RetrySettings(infra=10, same_step=3))
    assert [budgets.decide(failed("infra", 7)) for _ in range(3)] == [
        "again",
        "again",
        "no-progress",
    ]
    budgets = RetryBudgets(RetrySettings(infra=10, same_step=3))
    assert [budgets.decide(failed("infra", step)) for step in (7, 7, 8, 8, 9)] == ["again"] * 5


def test_what_the_next_attempt_would_be_told_again_is_not_tried() -> None:
    end = failed("user", exit=Exit.NO_CHECKPOINT)
    assert RetryBudgets(RetrySettings(user=5)).decide(end) == "enough" and not end.budget


def test_an_end_says_what_it_has_used_up() -> None:
    end = failed("preempted")
    assert (
        RetryBudgets(RetrySettings(infra=1)).decide(end, "infra") == "again"
        and end.budget == "infra"
    ), "of another kind than its class"


def test_hosts_of_the_next_attempt() -> None:
    choice = HostChoice(HOSTS)

    def names(found: Sequence[Host]) -> list[str]:
        return [host.name for host in found]

    assert names(choice.choose(2, lambda n: False)) == ["h0", "h1"]
    choice.excluded["h0"] = "x"
    assert names(choice.choose(2, lambda n: False)) == ["h2", "h1"], "h1 keeps its place"
    choice.excluded["h1"] = "x"
    choice.excluded["h2"] = "x"
    assert names(choice.choose(2, lambda n: True)) == ["h3"]
    assert names(choice.choose(2, lambda n: False)) == ["h0", "h1"] and not choice.excluded
    again = HostChoice(HOSTS, ["h2", "h1"])  # as `resume` finds it
    again.excluded["h2"] = "x"
    assert names(again.choose(2, lambda n: False)) == ["h0", "h1"]
    assert names(HostChoice(HOSTS, ["h9", "h1"]).choose(2, lambda n: False)) == ["h0", "h1"]
    assert names(HostChoice(HOSTS, ["h1", "h0"]).choose(2, lambda n: False)) == ["h1", "h0"]
    waiting = HostChoice(HOSTS, ["h0", "h1"])
    waiting.excluded["h0"] = "lost"
    chosen = waiting.choose(2, lambda n: False, ready=["h1", "h3"])
    assert names(chosen) == ["h3", "h1"], "the spare whose agent is there"


FAILS_ONCE = f"""
import os, signal, time
if os.environ["ATTEMPT"] == "1":
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(10_000)
{DONE}
"""


def test_a_killed_rank_is_tried_again_and_done(tmp_path: Path) -> None:
    run = make_run(tmp_path, ["retry.infra=1"])
    outcome, _ = supervised(run, Program(FAILS_ONCE))  # a real agent
    assert outcome.exit == 0 and len(run.attempts()) == 2
    first = events(run, 1)
    assert (
        [e["event"] for e in first[-2:]] == ["ended", "retry"]
        and first[-2]["budget"] == "infra"
        and events(run, 2)[-1]["budget"] is None
        and first[-1]["class"] == "infra"
        and first[-1]["next_attempt"] == 2
    )
    cause = first[-2]["root_cause"]
    assert (cause["rank"], cause["signal"], first[-2]["exit"]) == (1, "SIGKILL", 10) and first[-2][
        "survivors"
    ] == []


def test_the_same_crash_three_times_is_no_progress(tmp_path: Path) -> None:
    run = make_run(tmp_path, ["retry.infra=9"])
    outcome, told = supervised(run, Program("import os; os.abort()"))
    assert (outcome.exit, outcome.failure_class) == (14, "no-progress") and len(run.attempts()) == 3
    assert told[-1]["exit"] == 14 and "3 times" in told[-1]["root_cause"]["message"]


def test_a_users_error_is_not_tried_again(tmp_path: Path) -> None:
    run = make_run(tmp_path, ["retry.infra=9"])
    outcome, told = supervised(run, Program("import sys; print('what went wrong'); sys.exit(3)"))
    assert (outcome.exit, outcome.failure_class) == (9, "user") and len(run.attempts()) == 1
    assert told[-1]["root_cause"]["last"] == ["what went wrong"]


def test_an_abort_in_teardown_after_success(tmp_path: Path) -> None:
    outcome, _ = supervised(
        make_run(tmp_path),
        Program(DONE + "import os; os.abort() if os.environ['RANK'] == '1' else None"),
    )
    assert outcome.exit == 0


LEAVES = """
import os, sys, time
if os.environ["RANK"] == "1":
    sys.exit(0)
time.sleep(10_000)
"""


def test_one_that_leaves_with_0_is_no_good_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its peers are stopped at once: they wait for it."""
    monkeypatch.setattr("trainkit.launch.supervise.attempt.TEARDOWN_SECONDS", 10_000.0)
    outcome, _ = supervised(make_run(tmp_path, ["retry.infra=0"]), Program(LEAVES))
    assert (outcome.exit, (outcome.root_cause or {})["rank"]) == (
        10,
        1,
    ) and "had not recorded success" in (outcome.root_cause or {})["message"]


TOLD = f"""
import os, signal, sys, threading, time
if os.environ["ATTEMPT"] == "2":
    {DONE.strip().replace(chr(10), "; ")}
    sys.exit()
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(12) if os.environ["PEERS"] == "leave" else None)
open(os.path.join(os.environ["FOUND"], os.environ["RANK"]), "w").close()
if os.environ["RANK"] == "1":
    while len(os.listdir(os.environ["FOUND"])) < 2:
        time.sleep(0.01)
    sys.exit(12)
while True:
    time.sleep(1)
"""


@pytest.mark.parametrize("peers", ["leave", "stay"])
def test_one_told_to_save_during_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, peers: str
) -> None:
    """Its peers are told too; where they do not leave, nothing is saved, and the run goes on
    from what it had."""
    monkeypatch.setattr(
        "trainkit.launch.supervise.attempt.TEARDOWN_SECONDS", 10_000.0 if peers == "leave" else 1.0
    )
    found = tmp_path / "found"
    found.mkdir()
    run = make_run(tmp_path, ["retry.infra=1"])
    outcome, _ = supervised(run, Program(TOLD, env={"FOUND": str(found), "PEERS": peers}))
    first = next(e for e in events(run, 1) if e["event"] == "ended")
    assert "saving" in [e["event"] for e in events(run, 1)] and first["exit"] == 12
    if peers == "leave":
        assert outcome.exit == 12 and len(run.attempts()) == 1
    else:
        assert (
            outcome.exit == 0
            and first["root_cause"]["rank"] == 1
            and first["root_cause"]["saved"] is False
        )


class Dies(StubAgent):
    """The agent of host h1 goes, with all it started, when its ranks run; there is no way to
    that host afterwards."""

    async def run(self) -> None:
        if self.session.run.startswith("sweep"):
            raise OSError("no route to host")
        await super().run()

    async def on_go(self, frame: StartProcesses) -> None:
        await super().on_go(frame)
        if self.session.hosts[self.node].name == "h1":
            await asyncio.sleep(0.3)
            await self.stop(0)
            self.connection.close()
            raise OSError("the host has gone")


SECOND_IS_DONE = f"""
import os, time
if os.environ["ATTEMPT"] == "1":
    time.sleep(10_000)
{DONE}
"""


def waited(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long the supervisor wants to wait, of which it waits nothing; what it grants a lost
    host is out of all proportion."""
    waits: list[float] = []

    async def wait(self: object, seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(Supervisor, "_wait", wait)
    monkeypatch.setattr(supervisor, "stop_seconds", lambda job: 20_000.0)
    return waits


@pytest.mark.parametrize(("hosts", "nodes", "world"), [(3, 2, 4), (2, 2, 2)])
def test_a_lost_host_is_replaced_or_done_without(
    tmp_path: Path, hosts: int, nodes: int, world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = waited(monkeypatch)
    sets = ["retry.infra=2", *QUICK, "cluster.watch.lease=10000"]
    run = make_run(tmp_path, sets, hosts=HOSTS[:hosts], nodes=nodes)
    outcome, told = supervised(run, Program(SECOND_IS_DONE), launcher=Debug(Dies))
    assert outcome.exit == 0 and len(run.attempts()) == 2, outcome
    first = events(run, 1)
    ended = next(e for e in first if e["event"] == "ended")
    assert (
        ended["root_cause"]["host"] == "h1"
        and ended["exit"] == 10
        and ended["unanswered"] == ["h1"]
    )
    assert next(e for e in first if e["event"] == "host_left_out")["host"] == "h1"
    assert told[0]["world_size"] == world and "h1" not in [
        e["host"] for e in told if e["event"] == "agent_joined"
    ]
    assert (
        read_json(run.job)["job"]["nodes"] == world // 2
        and read_json(run.job)["job"]["training"]["global_batch_size"] == 8
    )
    assert set(read_quarantine(run.root)) == {"h1"}
    assert 5_000 < max(waits) < 15_000, (
        "the next attempt waits until the lost host has surely stopped; not for the lease of an"
        " agent that has ended"
    )


class SameRanksOnly(Program):
    """An engine whose checkpoint is read by as many nodes as wrote it only."""

    def resume_problems(self, job: Job, run: RunFolder) -> list[Problem]:
        return [Problem(f"written on 2 nodes, not {job.nodes}")] if job.nodes != 2 else []


def test_a_run_is_not_continued_on_fewer_nodes_than_its_engine_can_read_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lost host is tried again instead: a layout that is refused would end the run."""
    waited(monkeypatch)
    run = make_run(tmp_path, ["retry.infra=1", *QUICK], hosts=HOSTS[:2], nodes=2)
    supervised(run, SameRanksOnly(SECOND_IS_DONE), launcher=Debug(Dies))
    assert len(run.attempts()) == 2
    assert read_json(run.job)["job"]["nodes"] == 2
    joined = [e["host"] for e in events(run, 2) if e["event"] == "agent_joined"]
    assert sorted(joined) == ["h0", "h1"]


KILLS_ITS_AGENT = f"""
import os, signal, subprocess, sys, time
from pathlib import Path
if os.environ["ATTEMPT"] == "2":
    {DONE.strip().replace(chr(10), "; ")}
    sys.exit()
if os.environ["RANK"] == "0":
    child = subprocess.Popen(["sleep", "10000"], start_new_session=True)
    (Path(os.environ["FOUND"]) / "pid").write_text(str(child.pid))
    agent = os.getppid()
    keeper = int(Path("/proc", str(agent), "stat").read_text().rpartition(")")[2].split()[1])
    time.sleep(0.5)
    os.kill(agent, signal.SIGSTOP)  # so that it cannot notice, and do, anything in between
    os.kill(keeper, signal.SIGKILL)
    os.kill(agent, signal.SIGKILL)
time.sleep(10_000)
"""


def test_what_a_killed_agent_and_its_killed_keeper_leave_is_swept(tmp_path: Path) -> None:
    run = make_run(tmp_path, ["retry.infra=1", "cluster.watch.lease=10000"])
    outcome, _ = supervised(run, Program(KILLS_ITS_AGENT, env={"FOUND": str(tmp_path)}))
    told = events(run, 1)
    ended = next(e for e in told if e["event"] == "ended")
    assert outcome.exit == 0 and (ended["exit"], ended["class"]) == (10, "infra")
    pid = int((tmp_path / "pid").read_text())
    swept = next(e for e in told if e["event"] == "swept")
    assert pid in [each["pid"] for each in swept["killed"]] and swept["left"] == []
    assert not alive(pid) and not list((tmp_path / "sessions").iterdir())


class Silent(StubAgent):
    """The contact with host h1 is cut when its ranks run; neither side is told."""

    async def on_go(self, frame: StartProcesses) -> None:
        await super().on_go(frame)
        if self.session.hosts[self.node].name == "h1":
            await asyncio.sleep(0.3)
            for task in asyncio.all_tasks():
                if (
                    getattr(task.get_coro(), "__qualname__", "") == "StubAgent._beat"
                    and task.get_coro().cr_frame.f_locals["self"] is self  # type: ignore[union-attr]
                ):
                    task.cancel()
            await asyncio.sleep(3)


def test_a_cut_network_is_a_lost_contact_within_the_lease(tmp_path: Path) -> None:
    run = make_run(tmp_path, ["retry.infra=0", *QUICK], nodes=2)
    outcome, told = supervised(
        run, Program("import time; time.sleep(10_000)"), launcher=Debug(Silent)
    )
    ended = next(e for e in told if e["event"] == "ended")
    assert (outcome.exit, outcome.failure_class) == (13, "infra") and ended["unanswered"] == ["h1"]


# Each rank goes on when the supervisor has heard of both (and keeps what it heard), so that nobody
# is behind who only was slow to start.
HANGS = """
import json, os, time
from pathlib import Path
path, rank = os.environ["TRAINKIT_HEARTBEAT_FILE"], os.environ["RANK"]
def beat(step):
    said = {"phase": "train", "step": step, "time": time.time()}
    open(path + ".new", "w").write(json.dumps(said))
    os.rename(path + ".new", path)
heard = [Path(os.environ["HEARD"]) / f"{number}.json" for number in range(2)]
assert Path(path) not in heard
beat(2)
while not all(each.exists() for each in heard):
    time.sleep(0.01)
if rank == "0":
    beat(3)
time.sleep(10_000)
"""


def test_a_hang_is_found_stacks_are_kept_and_the_missing_named(tmp_path: Path) -> None:
    run = make_run(tmp_path, ["cluster.watch.heartbeat=2.5"])
    outcome, told = supervised(
        run, Program(HANGS, env={"HEARD": str(run.attempt(1).heartbeat(0).parent)})
    )
    assert (outcome.exit, outcome.failure_class) == (11, "hang") and outcome.root_cause is not None
    assert (
        outcome.root_cause["missing"] == [1]
        and outcome.root_cause["rank"] == 1
        and "step 2" in outcome.root_cause["message"]
    )
    assert next(e for e in told if e["event"] == "hang")["missing"] == [1]
    assert told[-1]["survivors"] == []


def test_ranks_that_never_come_to_a_step_hang_after_the_start_limit(tmp_path: Path) -> None:
    run = make_run(tmp_path, ["cluster.watch.start=1"])
    outcome, _ = supervised(run, Program("import time; time.sleep(10_000)"))
    assert outcome.exit == 11 and "never said where it is" in (outcome.root_cause or {})["message"]


ENDLESS = """
import os, signal, sys, time
signal.signal(signal.SIGUSR1, lambda number, frame: sys.exit(12))
open(os.path.join(os.environ["READY"], os.environ["RANK"]), "w").write(str(os.getpid()))
time.sleep(10_000)
"""


def in_thread(run: RunFolder, folder: Path, act: threading.Thread) -> Outcome:
    """The outcome of an endless run that `act` ends."""
    act.start()
    try:
        return supervise(
            run,
            {},
            RunObserver(lambda run: None, lambda: None, lambda text: None),
            share=False,
            engine=Program(ENDLESS, env={"READY": str(folder)}),
        )
    finally:
        act.join()


def ready(folder: Path) -> list[int]:
    """Pids of two ranks once they run."""
    pids = wait_for(
        lambda: (
            [int(p.read_text() or 0) for p in folder.iterdir()]
            if len(list(folder.iterdir())) == 2
            else None
        ),
        "the ranks",
    )
    assert isinstance(pids, list)
    return pids


@pytest.mark.parametrize(
    ("save", "code", "failure_class"), [(False, 15, "cancelled"), (True, 12, "preempted")]
)
def test_cancelled_over_the_control_connection(
    tmp_path: Path, save: bool, code: int, failure_class: str
) -> None:
    run, folder = make_run(tmp_path, ["retry.preempted=5", "retry.infra=5"]), tmp_path / "ready"
    folder.mkdir()
    answers: list[bool] = []

    def cancel() -> None:
        pids.extend(ready(folder))
        answers.append(ask_supervisor(run, CancelRun(save)))

    pids: list[int] = []
    outcome = in_thread(run, folder, threading.Thread(target=cancel))
    assert (outcome.exit, outcome.failure_class) == (code, failure_class) and answers == [True]
    assert len(run.attempts()) == 1, "it went on although it was asked to stop"
    assert not any(alive(pid) for pid in pids)
    assert not ask_supervisor(run, CancelRun(save))


def test_asked_to_stop_before_the_ranks_run(tmp_path: Path) -> None:
    class Slow(StubAgent):
        async def on_reserve(self, frame: ReserveSlots) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(10_000)

    run = make_run(tmp_path, ["retry.preempted=5"])
    outcome, told = supervised(run, Program(DONE), launcher=Debug(Slow))
    assert (outcome.exit, outcome.failure_class) == (12, "preempted")
    assert "rank_started" not in json.dumps(told) and len(run.attempts()) == 1
