"""A rank that computes more than its peer is named by `status`, whose wait for it is none of its
work."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.conftest import TASKS, Project
from tests.launch.supervised import Program, make_run, supervised
from trainkit.engines.native import rank_variables
from trainkit.jobs.resolved import read_job
from trainkit.runs.metrics import read_rows
from trainkit.runs.slow_rank import slow_rank

# Each rank computes for so long besides, so that the model, which is tiny, does not matter.
RANK = """
import os, time
from trainkit.train import main
from trainkit.train.metrics.timers import Timers

real, work = Timers.begin, 0.1 * (1.2 if os.environ["RANK"] == "1" else 1.0)
def broken(self, phase):
    real(self, phase)
    if phase == "forward":
        end = time.thread_time() + work
        while time.thread_time() < end:
            pass
Timers.begin = broken
main.main()
"""


def test_a_slow_rank_is_named_within_fifty_steps(tmp_path: Path) -> None:
    sets = [
        "training.train_iters=55",
        "training.log_interval=1",
        "training.eval_interval=1000",
        "training.save_interval=1000",
        "training.global_batch_size=4",
    ]
    run = make_run(tmp_path, sets)
    engine = Program(
        argv=(sys.executable, "-c", RANK, str(run.path), "--attempt", "1"),
        env=rank_variables(read_job(run.job)),
    )
    outcome, _ = supervised(run, engine)
    assert outcome.exit == 0, outcome.root_cause
    rows = [row for row in read_rows(run.metrics) if "eval" not in row]
    assert [row["step"] for row in rows if "slow" in row["ranks"]] == list(range(50, 56))
    found = slow_rank(run)
    assert found is not None and (found.rank, found.host) == (1, "localhost")
    assert 1.07 < found.times < 1.3
    project = Project(tmp_path)
    (tmp_path / "tasks.py").write_text(TASKS)
    assert found.in_words() in project.invoke("status", "last").stdout
    assert project.document("status", "last")["slow_rank"]["rank"] == 1
