"""checkpoint.save_first: from the first moment on there is a checkpoint to go on from."""

from __future__ import annotations

import errno
import json
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import run_ranks
from tests.torture.conftest import Ranks, job_of
from tests.torture.test_disk import log_of, whole_steps
from tests.torture.test_signals import tell, until_told
from tests.train.support import new_run
from tests.train.test_resume import facts, steps
from trainkit.runs.checkpoints import open_checkpoint
from trainkit.runs.folder import RunFolder
from trainkit.runs.metrics import read_rows
from trainkit.train.metrics.heartbeat import Heartbeat
from trainkit.train.parallel.data_parallel import World
from trainkit.train.trainer import Trainer


def run_in(root: Path, **keep: Any) -> RunFolder:
    return new_run(job_of("DP2", root, keep={"keep_last": 9, "save_first": True, **keep}))


def test_it_changes_nothing_and_goes_when_two_newer_ones_are_there(
    ranks: Ranks, tmp_path: Path, reference: RunFolder
) -> None:
    run = run_in(tmp_path, keep_last=2, keep_every=None, keep_best=0)
    assert ranks.run(run, 2) == [0, 0], log_of(run)
    assert facts(run) == facts(reference) and whole_steps(run) == [9, 12]
    log = log_of(run)
    assert (
        log.index(" saved checkpoint 0: ") < log.index(" validation loss at iteration 0 ")
        and " deleted checkpoint 0\n" in log
    )


@pytest.mark.parametrize("save_async", [False, True])
def test_a_run_that_dies_in_its_first_step_goes_on_from_it(
    save_async: bool, ranks: Ranks, tmp_path: Path, reference: RunFolder
) -> None:
    """With the same losses, bit for bit, and the evaluation before the first step in the metrics
    once; no second one is written."""
    run = run_in(tmp_path, save_async=save_async)
    assert (
        ranks.run(run, 2, [{"do": "kill", "at": "step", "call": 1, "when": "before", "rank": 1}])[1]
        == -signal.SIGKILL
    )
    assert whole_steps(run) == [0] and steps(run) == []
    saved = open_checkpoint(run.checkpoints / "step-00000000").manifest
    assert (
        saved.consumed_samples,
        saved.state["optimizer_steps"],
        saved.state["evaluation_due"],
        saved.validation,
    ) == (0, 0, True, {})
    assert ranks.run(run, 2) == [0, 0], log_of(run)
    assert (
        facts(run) == facts(reference)
        and whole_steps(run) == [0, 3, 6, 9, 12]
        and log_of(run).count(" saved checkpoint 0: ") == 1
    )


NEVER = 1e6  # seconds: the test ends only if nobody waits for this to end
# where rank 0 stands still until the signal was taken, at which call and for how much longer;
# whether the step's end is heard of
CASES = [
    ("step", 1, NEVER, signal.SIGTERM),  # a compilation: nobody waits for its end
    # the same, where an evaluation compiles first
    pytest.param("eval", 1, NEVER, signal.SIGTERM, marks=pytest.mark.slow),
    pytest.param("eval", 1, 0.0, signal.SIGUSR1, marks=pytest.mark.slow),
    ("write", 1, 4.0, signal.SIGTERM),  # longer than ranks wait that have nothing to save
    ("publish", 1, 0.0, signal.SIGUSR1),
]


@pytest.mark.parametrize(("at", "call", "seconds", "signal_number"), CASES, ids=str)
def test_a_stop_before_the_first_step_is_done(
    at: str,
    call: int,
    seconds: float,
    signal_number: signal.Signals,
    ranks: Ranks,
    tmp_path: Path,
    reference: RunFolder,
) -> None:
    run, mark = run_in(tmp_path), tmp_path / "mark"
    sleep = {
        "do": "sleep",
        "at": at,
        "call": call,
        "when": "before",
        "rank": 0,
        **until_told(mark),
        "seconds": seconds,
    }
    assert ranks.run(run, 2, [sleep], tell(signal_number, mark)) == [12, 12], log_of(run)
    assert whole_steps(run) == [0] and steps(run) == []
    assert ranks.run(run, 2) == [0, 0] and facts(run) == facts(reference)


def test_a_disk_that_does_not_take_it_ends_the_run_before_it_costs_anything(
    ranks: Ranks, tmp_path: Path
) -> None:
    run = run_in(tmp_path)
    assert ranks.run(
        run, 2, [{"do": errno.ENOSPC, "at": "byte", "byte": 5000, "call": 1, "rank": 1}]
    ) == [10, 10], log_of(run)
    assert whole_steps(run) == [] and read_rows(run.metrics) == []
    assert "No space left on device" in json.loads(run.attempt(1).error(0).read_text())["message"]


def rolled_back(root: Path) -> dict[str, Any]:
    """One rank, whose second step has an infinite gradient before any other checkpoint was
    written."""
    job = job_of(
        "1",
        root,
        keep={"save_first": True},
        on_nan="rollback",
        train_iters=4,
        save_interval=4,
        eval_interval=4,
    )
    run = new_run(job)
    made = Trainer(job, run, World.from_environment(), Heartbeat(None, 0), threading.Event())
    backward, calls = made.step_runner.backward, iter(range(1, 100))

    def spoilt(*args: Any) -> Any:
        result = backward(*args)
        if next(calls) == 2:
            held = [each.parameter for each in made.model_parts.parameters.values()]
            next(p.grad for p in held if p.grad is not None).fill_(torch.inf)
        return result

    made.step_runner.backward = spoilt  # type: ignore[method-assign, assignment]
    return {"code": int(made.train()), "rows": read_rows(run.metrics)}


def test_training_may_roll_back_to_it(tmp_path: Path) -> None:
    """The evaluation before the first step stays in the metrics; the samples of the lost steps
    are passed over."""
    (found,) = run_ranks(1, "tests.torture.test_save_first:rolled_back", tmp_path)
    assert found["code"] == 0
    assert [(row["step"], row["consumed_samples"]) for row in found["rows"] if "eval" in row] == [
        (0, 0),
        (4, 48),
    ]
    trained = [
        (row["step"], row["consumed_samples"], row["rollbacks"])
        for row in found["rows"]
        if "eval" not in row
    ]
    assert trained == [(1, 24, 1), (2, 32, 1), (3, 40, 1), (4, 48, 1)]
