"""Averages of weights: the moving one beside a loop in fp64 in several layouts, resumed in its own
and in another; the mean of the last checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed import run_ranks
from tests.train.layout_cases import layout
from tests.train.layouts import Case, gathered, rank_of_world, take_steps
from tests.train.resharding import State
from tests.train.support import new_run, tiny_job
from trainkit.base.errors import ConfigError, TrainkitError
from trainkit.jobs.optimizers import EMA
from trainkit.runs.checkpoints import Checkpoint, verify
from trainkit.runs.folder import RunFolder
from trainkit.train.checkpoint.save_load import CheckpointMetadata, save, writer_lock
from trainkit.train.huggingface.weights import CheckpointWeights
from trainkit.train.inference.averages import write_average
from trainkit.train.inference.load import choose_checkpoint, load_model

DECAY = 0.7
KEPT = f"optimizer.{EMA}."
STEPS = 3
CASES = [
    Case("llama", layout(2, sp=True), 2, {"ema_decay": DECAY}),
    Case("gpt", layout(pipeline=2), 2, {"ema_decay": DECAY}),
    Case("llama", layout(zero=3), 2, {"ema_decay": DECAY}),
]


def states(case: Case, root: Path) -> list[State]:
    """What a checkpoint would hold after each step, whole, on rank 0."""
    with rank_of_world(case, root) as rank:
        size = rank.job.global_batch_size
        found = []
        for step in range(STEPS):
            take_steps(rank, [(size * step, size)])
            found.append(gathered(rank.step.tensors()))
        return found


@pytest.mark.parametrize("case", CASES, ids=["tensor", "pipeline", "zero-3"])
def test_the_moving_average_is_that_of_a_loop_in_fp64(case: Case, tmp_path: Path) -> None:
    found = run_ranks(case.ranks, "tests.train.inference.test_averages:states", case, tmp_path)[0]
    names = [name.removeprefix(KEPT) for name in found[-1] if name.startswith(KEPT)]
    assert len(names) == sum(name.startswith("model.") for name in found[-1]) > 10
    for name in names:
        weights = [state[f"model.{name}"] for state in found]
        assert not np.array_equal(weights[0], weights[-1])
        expected = weights[0]
        for later in weights[1:]:
            expected = DECAY * expected + (1 - DECAY) * later
        np.testing.assert_allclose(found[-1][KEPT + name], expected, rtol=1e-12, atol=1e-14)


def test_the_moving_average_is_resumed_bit_equal_and_in_another_layout(tmp_path: Path) -> None:
    one, other = CASES[0], Case("llama", layout(zero=3), 2, {"ema_decay": DECAY})
    whole = run_ranks(2, "tests.train.resharding:save_in", one, tmp_path)[0]
    again, moved = (
        run_ranks(2, "tests.train.resharding:load_in", case, tmp_path, tmp_path / to)[0]
        for case, to in ((one, "again"), (other, "moved"))
    )
    names = [name for name in whole.end if name.startswith(KEPT)]
    assert names
    for name in names:
        assert np.array_equal(again.end[name], whole.end[name])
        assert np.array_equal(moved.state[name], whole.state[name])
        np.testing.assert_allclose(moved.end[name], whole.end[name], rtol=1e-9, atol=1e-12)


def test_a_skipped_step_leaves_the_average() -> None:
    from trainkit.jobs.schema import Training
    from trainkit.train.update.optimizer import Optimizer

    weight = torch.nn.Parameter(torch.tensor([[1.0, 2.0]]))
    words: dict[str, Any] = {"train_iters": 9, "lr": 0.1, "ema_decay": DECAY}
    optimizer = Optimizer({"w": weight}, Training(**words))
    seen = []
    for skip in (1.0, 0.0, 1.0, 0.0):
        weight.grad = torch.ones_like(weight)
        optimizer.step(torch.tensor(0.1), torch.tensor(1.0), torch.tensor(skip))
        seen.append((weight.detach().clone(), optimizer.state_tensors()["ema.w"].clone()))
    assert not seen[0][1].any()  # no update yet
    assert torch.equal(seen[1][0], seen[1][1])  # it begins with the first
    assert torch.equal(seen[2][1], seen[1][1])
    expected = DECAY * seen[1][0].double() + (1 - DECAY) * seen[3][0].double()
    torch.testing.assert_close(seen[3][1].double(), expected, rtol=1e-6, atol=0)


def checkpoints_of(run: RunFolder, steps: int) -> list[dict[str, torch.Tensor]]:
    """Checkpoints of random weights, with moving averages; the model's tensors of each."""
    from trainkit.train.model.transformer import build_on_meta

    job = tiny_job(1, run.root)
    model = build_on_meta(job.model, 301).to_empty(device="cpu")
    found = []
    for step in range(1, steps + 1):
        torch.manual_seed(step)
        values = {name: torch.randn(p.shape) for name, p in model.named_parameters()}
        tensors = {f"model.{name}": value for name, value in values.items()}
        kept = {KEPT + name: value + 1 for name, value in values.items()} if step < steps else {}
        save(run.checkpoints, {**tensors, **kept}, CheckpointMetadata(step, step))
        found.append(values)
    return found


def read(saved: Checkpoint, run: RunFolder) -> dict[str, torch.Tensor]:
    weights = CheckpointWeights(saved, tiny_job(1, run.root).model)
    return {name: weights.read(name) for name in weights.shapes}


def test_what_to_do_where_an_average_was_not_written(tmp_path: Path) -> None:
    """Not what helps a run whose checkpoint was not."""
    run = new_run(tiny_job(1, tmp_path))
    checkpoints_of(run, 2)
    with writer_lock(run.averages), pytest.raises(TrainkitError, match=r"writer\.lock") as error:
        write_average(run.averages, [choose_checkpoint(run, step) for step in (1, 2)])
    assert "the same command again" in str(error.value) and "resume" not in str(error.value)


def test_the_mean_of_checkpoints_and_moving_averages_are_read_by_choice(tmp_path: Path) -> None:
    job = tiny_job(1, tmp_path)
    run = new_run(job)
    values = checkpoints_of(run, 4)
    with pytest.raises(TrainkitError, match="no average of checkpoints"):
        choose_checkpoint(run, weights="average")
    written = write_average(run.averages, [choose_checkpoint(run, step) for step in (2, 3, 4)])
    assert written.manifest.step == 4 and not verify(written.folder)
    assert not any(name.startswith("optimizer.") for name in written.manifest.tensors)
    mean = read(choose_checkpoint(run, weights="average"), run)
    model = load_model(
        job, choose_checkpoint(run, weights="average"), torch.device("cpu"), torch.float32
    )
    for name, parameter in model.named_parameters():
        second, third, fourth = (each[name].double() for each in values[1:])
        expected = (second + third + fourth) / 3
        assert torch.equal(mean[name], expected.float())
        assert torch.equal(parameter, expected.float())
    ema = read(choose_checkpoint(run, 3, "ema"), run)
    assert all(torch.equal(ema[name], values[2][name] + 1) for name in ema)
    with pytest.raises(ConfigError, match="no moving average"):
        choose_checkpoint(run, 4, "ema")
    with pytest.raises(ConfigError, match="'mean' is not one of: trained, ema, average"):
        choose_checkpoint(run, weights="mean")
