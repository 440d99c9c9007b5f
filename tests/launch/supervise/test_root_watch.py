"""A shared root that does not answer for a while: nobody is late meanwhile."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from tests.launch.supervised import DONE, Program, make_run, supervised
from trainkit.launch.supervise import root_watch, supervisor
from trainkit.launch.supervise.root_watch import RootWatch
from trainkit.runs.folder import RunFolder
from trainkit.runs.record import SupervisorStatus

# says nothing for longer than it may
SILENT = f"import time; time.sleep(4)\n{DONE}"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(root_watch, "SIGN_SECONDS", 0.01)
    monkeypatch.setattr(root_watch, "PATIENCE_SECONDS", 0.05)


def test_the_clock_stands_still_until_the_root_answers() -> None:
    answers = threading.Event()
    watch = RootWatch(lambda: answers.wait(600))
    watch.start()
    while not watch.stalled():
        time.sleep(0.01)
    began = watch.clock()
    until = time.monotonic() + 0.2
    while time.monotonic() < until:
        assert watch.clock() == pytest.approx(began, abs=1e-6)
    answers.set()
    while not watch.stalls:
        time.sleep(0.01)
    assert watch.stalls[0] > 0.2 and not watch.stalled()
    while watch.clock() < began + 0.05:  # it goes on
        time.sleep(0.01)
    watch.close()


def test_ranks_that_wait_for_the_root_do_not_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stalls(run: RunFolder, status: SupervisorStatus) -> None:
        if threading.current_thread().name != "signs of life":
            return
        events = run.attempt(1).events
        while "agent_joined" in (text := events.read_text()) and "rank_ended" not in text:
            time.sleep(0.02)

    monkeypatch.setattr(supervisor, "write_supervisor_status", stalls)
    run = make_run(tmp_path, ["cluster.watch.start=2", "cluster.ranks_per_node=1"])
    outcome, _ = supervised(run, Program(SILENT))
    assert outcome.exit == 0, outcome
