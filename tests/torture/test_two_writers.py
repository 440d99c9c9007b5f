"""A run that two processes train: one was taken for dead, another one went on, and the first
wakes up."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.conftest import wait_for
from tests.distributed import finish
from tests.torture.conftest import Ranks, job_of
from tests.torture.test_disk import log_of, whole_steps
from tests.torture.test_signals import told, until_told
from tests.train.support import new_run, start_ranks
from tests.train.test_resume import facts


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("at", "call"),
    [
        pytest.param("step", 4, marks=pytest.mark.slow),
        pytest.param("step", 6, marks=pytest.mark.slow),
        ("write", 2),
    ],
)
def test_who_wakes_up_late_ends_and_changes_nothing(
    at: str, call: int, ranks: Ranks, tmp_path: Path
) -> None:
    """Stopped before it saves, it finds out at its next save; stopped in a save, it holds the
    lock, and the other one cannot save."""
    whole = new_run(job_of("1", tmp_path / "whole"))
    assert ranks.run(whole, 1) == [0]
    run, mark, others = new_run(job_of("1", tmp_path)), tmp_path / "mark", list[int]()

    def meanwhile(pids: list[int]) -> None:
        wait_for(mark.exists, "the moment to come")
        os.kill(pids[0], signal.SIGSTOP)
        told(mark).touch()
        others.extend(finish(start_ranks(run, 1), 600))
        os.kill(pids[0], signal.SIGCONT)

    sleep = {"do": "sleep", "at": at, "call": call, "when": "before", **until_told(mark)}
    assert ranks.run(run, 1, [sleep], meanwhile) == [17], log_of(run)
    assert "two of them train one run" in log_of(run)
    if at == "write":
        assert others == [10] and "writer.lock is locked by {'pid'" in log_of(run)
        assert ranks.run(run, 1) == [0], log_of(run)
    else:
        assert others == [0], log_of(run)
    assert facts(run) == facts(whole) and whole_steps(run) == whole_steps(whole)


@pytest.mark.parametrize("save_async", [False, True])
def test_a_metrics_file_that_somebody_replaced_costs_no_steps(
    save_async: bool, ranks: Ranks, tmp_path: Path
) -> None:
    """By an editor, a copy from elsewhere: what was trained is saved first, for nobody else has
    gone on with the run."""
    run, mark = (
        new_run(job_of("DP2", tmp_path, keep={"keep_last": 9, "save_async": save_async})),
        tmp_path / "mark",
    )

    def replace(pids: list[int]) -> None:
        wait_for(mark.exists, "the moment to come")
        # its own look at the file, too
        wait_for(lambda: "saved checkpoint 3" in log_of(run), "the save behind training to be over")
        shutil.copy(run.metrics, tmp_path / "copy")
        os.replace(tmp_path / "copy", run.metrics)
        told(mark).touch()

    sleep = {
        "do": "sleep",
        "at": "step",
        "call": 5,
        "when": "before",
        "rank": 0,
        **until_told(mark),
    }
    assert ranks.run(run, 2, [sleep], replace) == [17, 17], log_of(run)
    assert "two of them train one run" in log_of(run) and whole_steps(run)[-1] >= 6
    assert ranks.run(run, 2) == [0, 0] and whole_steps(run) == [3, 6, 9, 12]
