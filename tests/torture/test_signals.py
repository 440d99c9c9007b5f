"""Told to stop at any moment: the checkpoint of that step exists, all ranks end with 12, and
nothing is done twice or left out."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import wait_for
from tests.torture.conftest import Ranks, job_of
from tests.torture.test_disk import log_of, whole_steps
from tests.train.support import new_run
from tests.train.test_resume import facts, steps
from trainkit.runs.folder import RunFolder

NEVER = 1e6  # seconds: the test ends only if nobody waits for this to end


def told(mark: Path) -> Path:
    """The file that is there when all that were to be signalled have taken their signal."""
    return mark.with_name(f"{mark.name}.told")


def until_told(mark: Path) -> dict[str, Any]:
    """How long a rank sleeps that is to be signalled meanwhile."""
    return {"mark": str(mark), "until": str(told(mark)), "seconds": 0.1}


def _taken(pid: int, signal_number: signal.Signals) -> bool:
    """Whether the process has taken the signal (proc(5), ShdPnd), or has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    found = re.search(r"^ShdPnd:\s+(\w+)$", status, re.MULTILINE)
    return found is None or not int(found[1], 16) >> (signal_number - 1) & 1


def tell(
    signal_number: signal.Signals, mark: Path, victims: slice = slice(None)
) -> Callable[[list[int]], None]:
    """Signal these ranks while one of them sleeps in the midst of what it does."""

    def during(pids: list[int]) -> None:
        wait_for(mark.exists, "the moment to come")
        for pid in pids[victims]:
            os.kill(pid, signal_number)
        for pid in pids[victims]:
            wait_for(partial(_taken, pid, signal_number), "the signal to be taken")
        told(mark).touch()

    return during


# where and in which call rank 0 sleeps; the step whose checkpoint must be there; USR1 comes to rank
# 1 alone, a scheduler's TERM to all
FEW = [
    ("step", 5, 5, signal.SIGUSR1),
    ("write", 2, 6, signal.SIGTERM),
    ("publish", 3, 9, signal.SIGUSR1),
    ("prune", 3, 9, signal.SIGUSR1),
    ("eval", 4, 12, signal.SIGTERM),  # the very last one
]
CASES = [
    *FEW,
    ("step", 5, 5, signal.SIGTERM),
    ("eval", 2, 4, signal.SIGUSR1),  # the first is made before the first step
    ("prepare", 2, 6, signal.SIGUSR1),
    ("write", 2, 6, signal.SIGUSR1),
]


@pytest.mark.parametrize(
    ("at", "call", "step", "signal_number"),
    [case if case in FEW else pytest.param(*case, marks=pytest.mark.slow) for case in CASES],
    ids=[f"{name.name} in {at} {call}" for at, call, _, name in CASES],
)
def test_a_stop_is_heard(
    at: str,
    call: int,
    step: int,
    signal_number: signal.Signals,
    ranks: Ranks,
    tmp_path: Path,
    reference: RunFolder,
) -> None:
    """All stop at the same step, at most one step on, and go on as if nothing had been."""
    run = new_run(job_of("DP2", tmp_path, keep={"keep_last": 9}))
    sleep = {
        "do": "sleep",
        "at": at,
        "call": call,
        "when": "before",
        "rank": 0,
        **until_told(tmp_path / "mark"),
    }
    victim = slice(1, 2) if signal_number == signal.SIGUSR1 else slice(None)
    # training does not wait for what is deleted
    sleeps = [sleep, *([{**sleep, "at": "step", "call": step + 1}] if at == "prune" else [])]
    assert ranks.run(run, 2, sleeps, tell(signal_number, tmp_path / "mark", victim)) == [
        12,
        12,
    ], log_of(run)
    saved = whole_steps(run)[-1]
    # the told rank has given its word for this step already, or for the next
    late = {"step": 1, "prune": 2}.get(at, 0)
    assert step <= saved <= step + late and steps(run)[-1] == saved
    assert ranks.run(run, 2) == [0, 0], log_of(run)
    assert facts(run) == facts(reference)
    if step == 12:  # the evaluation was all there was to do: once more finds nothing
        assert ranks.run(run, 2) == [0, 0] and facts(run) == facts(reference)
        assert log_of(run).count("validation loss at iteration 12 ") == 1


def test_a_stop_behind_a_save_behind_training(
    ranks: Ranks, tmp_path: Path, reference: RunFolder
) -> None:
    run = new_run(job_of("DP2", tmp_path, keep={"keep_last": 9, "save_async": True}))
    sleep = {
        "do": "sleep",
        "at": "publish",
        "call": 1,
        "when": "before",
        "rank": 0,
        **until_told(tmp_path / "mark"),
    }
    assert ranks.run(run, 2, [sleep], tell(signal.SIGUSR1, tmp_path / "mark")) == [12, 12], log_of(
        run
    )
    assert whole_steps(run)[-1] == steps(run)[-1] < 12
    assert ranks.run(run, 2) == [0, 0] and facts(run) == facts(reference)


@pytest.mark.parametrize("at", ["load", "step"])
def test_while_there_is_nothing_new_to_save_nobody_waits(
    at: str, ranks: Ranks, tmp_path: Path, reference: RunFolder
) -> None:
    """A first step that is compiled for minutes, a checkpoint that takes as long to load: the
    process leaves, and nothing is lost."""
    run = new_run(job_of("DP2", tmp_path, keep={"keep_last": 9}))
    mark = tmp_path / "mark"
    sleep = {
        "do": "sleep",
        "at": "step",
        "call": 5,
        "when": "before",
        "rank": 0,
        **until_told(mark),
    }
    assert ranks.run(run, 2, [sleep], tell(signal.SIGUSR1, mark)) == [12, 12], log_of(run)
    reached, mark = whole_steps(run)[-1], tmp_path / "again"
    compiles = {
        "do": "sleep",
        "at": at,
        "call": 1,
        "when": "before",
        "seconds": NEVER,
        "mark": str(mark),
    }
    assert ranks.run(run, 2, [compiles], tell(signal.SIGTERM, mark)) == [12, 12], log_of(run)
    assert whole_steps(run)[-1] == reached
    assert ranks.run(run, 2) == [0, 0] and facts(run) == facts(reference)


def test_a_rank_that_stands_still_for_a_while_changes_nothing(
    ranks: Ranks, tmp_path: Path, reference: RunFolder
) -> None:
    """Stopped and continued in a save (that it does not go on is for the launcher to see: its
    heartbeat is old)."""
    run = new_run(job_of("DP2", tmp_path, keep={"keep_last": 9}))
    mark = tmp_path / "mark"

    def stand_still(pids: list[int]) -> None:
        tell(signal.SIGSTOP, mark, slice(1, 2))(pids)
        time.sleep(1.5)  # for a while
        os.kill(pids[1], signal.SIGCONT)

    sleep = {
        "do": "sleep",
        "at": "write",
        "call": 2,
        "when": "before",
        "rank": 0,
        **until_told(mark),
    }
    assert ranks.run(run, 2, [sleep], stand_still) == [0, 0], log_of(run)
    assert facts(run) == facts(reference) and whole_steps(run) == [3, 6, 9, 12]


def test_heartbeats_tell_how_long_a_save_takes(ranks: Ranks, tmp_path: Path) -> None:
    run = new_run(job_of("1", tmp_path))
    assert ranks.run(run, 1) == [0]
    took = max(
        float(seconds)
        for seconds in re.findall(r" saved checkpoint \d+: .* in (\d+\.\d+) s", log_of(run))
    )
    # the log rounds
    assert json.loads(run.attempt(1).heartbeat(0).read_text())["save_seconds"] == pytest.approx(
        took, abs=0.006
    )
