"""A run that two processes train: one was taken for dead, another one went on, and the first wakes up."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.conftest import wait_for
from tests.distributed import finish
from tests.torture.conftest import Ranks, job_of
from tests.torture.test_disk import log_of, whole_steps
from tests.train.support import new_run, start_ranks
from tests.train.test_resume import facts


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("at", "call"), [("step", 4), ("step", 6), ("write", 2)])
def test_who_wakes_up_late_ends_and_changes_nothing(at: str, call: int, ranks: Ranks, tmp_path: Path) -> None:
    """Stopped before it saves, it finds out at its next save; stopped in a save, it holds the lock, and the other one cannot save."""
    whole = new_run(job_of("1", tmp_path / "whole"))
    assert ranks.run(whole, 1) == [0]
    run, mark, others = new_run(job_of("1", tmp_path)), tmp_path / "mark", list[int]()

    def meanwhile(pids: list[int]) -> None:
        wait_for(mark.exists, "the moment to come", 60)
        os.kill(pids[0], signal.SIGSTOP)
        others.extend(finish(start_ranks(run, 1), 120))
        os.kill(pids[0], signal.SIGCONT)

    sleep = {"do": "sleep", "at": at, "call": call, "when": "before", "seconds": 0.2, "mark": str(mark)}
    assert ranks.run(run, 1, [sleep], meanwhile) == [17], log_of(run)
    assert "two of them train one run" in log_of(run)
    if at == "write":
        assert others == [10] and "writer.lock is locked by {'pid'" in log_of(run)
        assert ranks.run(run, 1) == [0], log_of(run)
    else:
        assert others == [0], log_of(run)
    assert facts(run) == facts(whole) and whole_steps(run) == whole_steps(whole)
