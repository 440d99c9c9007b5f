"""Real ranks under the supervisor: one is killed, and the next attempt goes on from memory."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest

from tests.launch.supervised import make_run
from tests.train.test_resume import facts, steps
from trainkit.base.files import read_json
from trainkit.launch.supervise.observer import RunObserver, silent_observer
from trainkit.launch.supervise.supervisor import supervise
from trainkit.runs.folder import RunFolder
from trainkit.runs.restored import Restored

SETS = ["training.train_iters=12", "training.save_interval=6", "training.eval_interval=4"]


def kept(run: RunFolder) -> list[Path]:
    """Folders in memory of all runs on this host's node folder."""
    return list((run.root / "node").glob("trainkit-memory-*"))


@pytest.mark.parametrize("retries", [2, pytest.param(0, marks=pytest.mark.slow)])
def test_a_killed_rank_costs_a_step_at_most(retries: int, tmp_path: Path) -> None:
    """In the same supervisor, and in one that `resume` begins. The run's end takes the copies."""
    left = make_run(tmp_path / "left", SETS)
    assert supervise(left, {}, silent_observer(), share=False).exit == 0
    run = make_run(
        tmp_path / "killed", [*SETS, "checkpoint.memory_interval=1", f"retry.infra={retries}"]
    )
    killed: list[int] = []

    def kill_one() -> None:
        if not killed and (steps(run) or [0])[-1] >= 9:
            with contextlib.suppress(OSError, ValueError):
                pid = int(str(read_json(run.attempt(1).heartbeat(1))["pid"]))
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)

    view = RunObserver(lambda run: None, kill_one, lambda text: None)
    first = supervise(run, {}, view, share=False)
    if retries == 0:
        assert first.exit != 0 and len(kept(run)) == 1
        first = supervise(run, {}, silent_observer(), share=False)
    assert first.exit == 0 and killed
    restored = Restored.from_file(run.attempt(2).restored)
    assert restored.source == "memory" and restored.disk_step == 6 and restored.step >= 8
    assert not run.attempt(1).restored.exists() and not kept(run)
    assert facts(run) == facts(left)
