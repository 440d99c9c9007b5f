"""The supervisor over small programs in place of ranks: what it keeps, hides, survives and records."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainkit.engines.contract import Command
from trainkit.launch.outcome import Outcome
from trainkit.launch.supervise import Interrupts, Supervisor
from trainkit.launch.world import allocate_local, world_document
from trainkit.runs.folder import RunFolder

SECRET = "first-line-of-a-key\nsecond-line-of-a-key"
DONE = """
import json, os
open(os.environ["TRAINKIT_HEARTBEAT_FILE"], "w").write(json.dumps({"phase": "done"}))
"""


def supervised(
    run: RunFolder, program: str, *, ranks: int = 2, tick: Callable[[], None] = lambda: None, argv: tuple[str, ...] | None = None
) -> tuple[Outcome, list[dict[str, Any]]]:
    """(outcome, events) of an attempt whose ranks run `program`."""
    run.path.mkdir(parents=True)
    command = Command(argv or (sys.executable, "-c", program), {}, ("KEY",), run.path, ranks_per_node=ranks)
    world = world_document(run, 1, command, allocate_local(command, "seed"))
    supervisor = Supervisor(world, run.attempt(1), {"KEY": SECRET}, tick, lambda text: None)
    supervisor.record_start()
    outcome = supervisor.run(Interrupts())
    return outcome, [json.loads(line) for line in run.attempt(1).events.read_text().splitlines()]


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "runs" / "job" / "id")


def test_secrets_reach_the_rank_and_no_record(run: RunFolder) -> None:
    program = """
import json, os, sys
key = os.environ["KEY"]
print("length", len(key)); print(key); print(repr(key))
json.dump({"schema": "rank-error/1", "message": "bad key: " + key, "exit": 9}, open(os.environ["TORCHELASTIC_ERROR_FILE"], "w"))
sys.exit(9)
"""
    outcome, _ = supervised(run, program)
    assert outcome.exit == 9 and outcome.root_cause is not None and outcome.root_cause["message"] == "bad key: ***"
    log = run.attempt(1).log(0).read_text()
    assert f"length {len(SECRET)}" in log and "***" in log
    for file in run.path.rglob("*"):
        assert not file.is_file() or b"line-of-a-key" not in file.read_bytes(), file


def test_a_full_disk_under_a_log_does_not_stop_the_rank(run: RunFolder) -> None:
    log = run.attempt(1).log(0)
    log.parent.mkdir(parents=True)
    run.path.rename(run.path)  # the folder is there already
    log.symlink_to("/dev/full")
    command = Command((sys.executable, "-c", DONE + "print('x' * 200000)"), {}, (), run.path, ranks_per_node=2)
    supervisor = Supervisor(world_document(run, 1, command, allocate_local(command, "seed")), run.attempt(1), {}, lambda: None, lambda text: None)
    assert supervisor.run(Interrupts()).failure_class == "success"


def test_a_view_that_fails_is_switched_off_and_the_run_goes_on(run: RunFolder) -> None:
    calls = []

    def tick() -> None:
        calls.append(1)
        raise SystemExit(1)  # what rich raises where the pipe is closed

    outcome, events = supervised(run, DONE, tick=tick)
    assert outcome.failure_class == "success" and len(calls) == 1
    assert [e["event"] for e in events if e["event"] in ("view_lost", "ended")] == ["view_lost", "ended"]


def test_a_program_that_is_not_there(run: RunFolder) -> None:
    outcome, events = supervised(run, "", argv=("/no/such/program",))
    assert outcome.exit == 8 and events[-1]["event"] == "ended" and events[-1]["exit"] == 8 and "/no/such/program" in events[-1]["root_cause"]["message"]


def test_a_rank_that_leaves_processes_behind_is_cleaned_up_after(run: RunFolder) -> None:
    program = DONE + "import subprocess; print('child', subprocess.Popen(['sleep', '600']).pid, flush=True)"
    outcome, _ = supervised(run, program)
    assert outcome.failure_class == "success"
    pid = int(run.attempt(1).log(0).read_text().split()[1])
    assert not Path(f"/proc/{pid}").exists() or ") Z" in Path(f"/proc/{pid}/stat").read_text()


def test_nohups_wish_is_heeded() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts().listening() as interrupts:
            os.kill(os.getpid(), signal.SIGHUP)
            assert interrupts.count == 0
            os.kill(os.getpid(), signal.SIGTERM)
            assert interrupts.count == 1 and interrupts.first == signal.SIGTERM
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert threading.current_thread() is threading.main_thread()
