"""Ranks of the native trainer that stop in the midst of training: each is named, with its host, why
it does not go on, and the collective in which its peer waits for it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.launch.supervised import Program, make_run, supervised
from trainkit.engines.native import rank_variables
from trainkit.jobs.resolved import read_job

# The last line of the fault is where rank 1 stays. By then its heartbeats say how long steps take.
RANK = """
import ctypes, os, signal, sys, time
import torch
import torch.distributed as dist
from trainkit.train import main
from trainkit.train.update.step import Step

lock, mutex = ctypes.PyDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
real, steps, apart = Step.run, [], []
def broken(*given, **named):
    steps.append(time.monotonic())
    if len(steps) == 1:
        apart.append(dist.new_group([0, 1], group_desc="apart"))
    if os.environ["RANK"] == "1" and len(steps) > 20 and steps[-1] > steps[0] + 2:
        {fault}
    return real(*given, **named)
Step.run = broken
main.main()
"""


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        pytest.param(
            "os.kill(os.getpid(), signal.SIGSTOP)",
            r"stopped\); rank 0 waits in \w+ #\d+ of",
            marks=pytest.mark.slow,
        ),
        (
            "while True: pass",
            r"runs at <string>:15 \(broken\)\); rank 0 waits in \w+ #\d+ of",
        ),
        pytest.param(
            "lock(mutex), lock(mutex)",
            r"holds the interpreter's lock, is at <string>:15 \(broken\)\); rank 0 waits in",
            marks=pytest.mark.slow,
        ),
        (
            "dist.all_reduce(torch.ones(1), group=apart[0])",
            r"waits in all_reduce #1 of group \d+ \(apart\)\)$",
        ),
    ],
)
def test_a_rank_that_does_not_go_on_is_named(tmp_path: Path, fault: str, said: str) -> None:
    run = make_run(
        tmp_path,
        ["training.train_iters=1000000", "cluster.watch.lease=5", "cluster.watch.hang_floor=5"],
    )
    program = RANK.format(fault=fault)
    engine = Program(
        argv=(sys.executable, "-c", program, str(run.path), "--attempt", "1"),
        env=rank_variables(read_job(run.job)),
    )
    outcome, told = supervised(run, engine)
    assert (outcome.exit, outcome.failure_class) == (11, "hang"), outcome.root_cause
    assert outcome.root_cause is not None
    message = outcome.root_cause["message"]
    assert re.search(rf"rank 1 on localhost \(step \d+, train, {said}", message), message
    assert 1 in outcome.root_cause["missing"]
    assert told[-1]["survivors"] == []
