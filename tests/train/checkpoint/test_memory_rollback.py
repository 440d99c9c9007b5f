"""A rollback takes the checkpoint on the disk, and copies of steps that it takes back are gone."""

from __future__ import annotations

import functools
import os
import threading
from pathlib import Path

import pytest

from tests.distributed import run_ranks
from tests.train.policies import infinite_gradient, spoil
from tests.train.support import new_run, tiny_job
from trainkit.runs.folder import RunFolder
from trainkit.runs.restored import Restored
from trainkit.train.metrics.heartbeat import Heartbeat
from trainkit.train.parallel import data_parallel
from trainkit.train.parallel.data_parallel import World
from trainkit.train.trainer import Trainer

DIED = "tests.train.checkpoint.test_memory_rollback:died_after_rollback"


class Died(Exception):
    """In place of a kill."""


def begun(root: Path, world: World) -> Trainer:
    job = tiny_job(world.size, root, train_iters=10, save_interval=4, on_nan="rollback")
    keep = job.checkpoint.model_copy(update={"memory_interval": 1})
    job = job.model_copy(update={"checkpoint": keep})
    run = RunFolder(root / "runs/tiny/one")
    if world.rank == 0:
        new_run(job)
    return Trainer(job, run, world, Heartbeat(None, world.rank), threading.Event())


def died_after_rollback(root: Path, spoilt: list[int]) -> Restored | None:
    """What a second trainer goes on from: the first dies in its seventh step. `spoilt`: steps in
    which a gradient is infinite."""
    data_parallel.join = functools.cache(data_parallel.join)
    world = World.from_environment()
    os.environ["TRAINKIT_MEMORY_FOLDER"] = str(root)
    made = begun(root, world)
    spoil(made, infinite_gradient, spoilt)
    steps = iter(range(1, 7))
    step = made.train_step

    def train_step() -> None:
        if next(steps, None) is None:
            raise Died
        step()

    made.train_step = train_step  # type: ignore[method-assign]
    with pytest.raises(Died):
        made.train()
    return begun(root, world).checkpoints.restored


def test_what_was_rolled_back_is_not_gone_on_from(tmp_path: Path) -> None:
    """Of step 5 all had a copy when step 6 was bad."""
    disk, disk_too = run_ranks(2, DIED, tmp_path, [6])
    assert disk == disk_too == Restored("disk", 4, 4)


def test_without_one_the_same_death_costs_nothing(tmp_path: Path) -> None:
    memory, memory_too = run_ranks(2, DIED, tmp_path, [])
    assert memory == memory_too == Restored("memory", 6, 4)
