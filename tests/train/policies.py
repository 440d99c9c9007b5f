"""What two ranks do when gradients go wrong on one of them: run by test_policies.py in one
spawn."""

from __future__ import annotations

import errno
import functools
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.train.support import new_run, tiny_job, whole
from trainkit.base.errors import TrainkitError
from trainkit.jobs.schema import Model, Parallelism
from trainkit.runs.checkpoints import published_folders
from trainkit.runs.folder import RunFolder
from trainkit.runs.metrics import read_rows
from trainkit.train.metrics.heartbeat import Heartbeat
from trainkit.train.model.batch import Batch
from trainkit.train.parallel import data_parallel
from trainkit.train.parallel.data_parallel import World
from trainkit.train.torch_compat import local_part
from trainkit.train.trainer import Trainer

OVERFLOWS = (2, 3, 4, 9, 10, 16)  # steps of the fp16 table


def trainer(
    root: Path,
    model: dict[str, Any] | None = None,
    parallelism: dict[str, Any] | None = None,
    **training: Any,
) -> Trainer:
    """A trainer of this rank, going on with what lies in `root`."""
    world = World.from_environment()
    job = tiny_job(world.size, root, **{"eval_iters": 0, "micro_batch_size": 4, **training})
    more = (
        {"second": job.dataset.model_copy(update={"split": "50,50,0"})}
        if job.training.eval_iters
        else {}
    )
    job = job.model_copy(update={"parallelism": Parallelism(**(parallelism or {}))})
    job = job.model_copy(
        update={
            "model": Model.model_validate({**job.model.model_dump(), **(model or {})}),
            "validation": more,
        }
    )
    run = RunFolder(root / "runs/tiny/one")
    if world.rank == 0:
        new_run(job)
    return Trainer(job, run, world, Heartbeat(None, world.rank), threading.Event())


def spoil(made: Trainer, wrong: Callable[[Trainer], None], steps: Iterable[int]) -> None:
    """Call `wrong` between backward and update, on the second rank only, in the given steps of
    this trainer's own counting."""
    backward, count, when = made.step_runner.backward, [made.step], set(steps)

    def spoilt(batches: Iterable[Batch], samples: int) -> tuple[Tensor, Tensor, int]:
        result = backward(batches, samples)
        count[0] += 1
        if count[0] in when and made.world.rank == 1:
            wrong(made)
        return result

    made.step_runner.backward = spoilt  # type: ignore[method-assign]


def infinite_gradient(made: Trainer) -> None:
    """One element of one shard."""
    local_part(made.step_runner.parameters["layers.0.mlp.up.weight"].grad).view(-1)[3] = torch.inf  # type: ignore[arg-type]


def ended(made: Trainer) -> dict[str, Any]:
    """Train to the end or to the error; what is left."""
    try:
        error, code = "", int(made.train())
    except TrainkitError as raised:
        error, code = raised.message, int(raised.exit)
    weights = whole(made.step_runner.parameters)
    found = {
        "error": error,
        "code": code,
        "step": made.step,
        "consumed": made.consumed_samples,
        "weights": weights,
        "rows": read_rows(made.run.metrics),
    }
    return found | {"saved": [folder.name for folder in published_folders(made.run.checkpoints)]}


def fp16_table(root: Path) -> dict[str, Any]:
    """Step by step, with forced overflows; stopped at step 11, saved, and gone on with by
    another trainer."""
    keys: dict[str, Any] = {
        "precision": "fp16",
        "initial_loss_scale": 1024.0,
        "min_loss_scale": 256.0,
        "loss_scale_window": 4,
        "train_iters": 18,
        "clip_grad": 0.0,
    }
    table = []
    for first, last in ((0, 11), (11, 18)):
        made = trainer(root, **keys)
        assert made.step == first
        spoil(made, infinite_gradient, OVERFLOWS)
        while made.step < last:
            before = whole(made.step_runner.parameters)
            made.train_step()
            made.process_results(all=True)
            after = whole(made.step_runner.parameters)
            changed = any((after[name] != before[name]).any() for name in before)
            state = made.step_runner.scale.state()
            table.append(
                (
                    made.step,
                    state["scale"],
                    state["growth_tracker"],
                    state["hysteresis_tracker"],
                    made.step_runner.optimizer.applied_steps(),
                    changed,
                )
            )
        made.save()
    return {"table": table, "rows": read_rows(made.run.metrics)}


def resumed(root: Path) -> dict[str, Any]:
    """(weights after 6 steps without a break, after 3 and 3 by two trainers), for models and
    options whose state is more than weights."""
    found = {}
    drops = {"hidden_dropout": 0.2, "attention_dropout": 0.1}
    neox = {"family": "gpt-neox", "hidden_size": 24, "rotary_percent": 0.5, **drops}
    llama = {"family": "llama", "hidden_size": 24, "num_query_groups": 1, **drops}
    for name, model, training in (
        ("dropout", drops, {"recompute_granularity": "selective"}),
        ("fp16", neox, {"precision": "fp16", "initial_loss_scale": 64.0, "loss_scale_window": 2}),
        (
            "bf16-sgd",
            llama,
            {
                "precision": "bf16",
                "optimizer": "sgd",
                "recompute_granularity": "full",
                "micro_batch_size": 2,
                "rampup_batch_size": (4, 4, 16),
            },
        ),
    ):
        weights = []
        for parts, folder in (((6,), "whole"), ((3, 6), "broken")):
            for last in parts:
                made = trainer(
                    root / f"{name}-{folder}",
                    model,
                    eval_iters=1,
                    eval_interval=3,
                    save_interval=3,
                    train_iters=6,
                    **training,
                )
                made.model_parts.train()
                while made.step < last:
                    made.train_step()
                    made.process_results(all=True)
                made.evaluate()
                made.save()
            weights.append(whole(made.step_runner.tensors()))
        evaluations = [row for row in read_rows(made.run.metrics) if "eval" in row]
        found[name] = {
            "weights": weights,
            "evaluations": evaluations,
            "consumed": made.consumed_samples,
        }
    return found


def unlogged(root: Path) -> dict[str, Any]:
    """Step 2 is skipped, step 4 saved and gone on with, and step 6 rolled back to it; a row
    tells of every fifth step."""
    made = trainer(root, train_iters=10, log_interval=5, on_nan="skip")
    spoil(made, infinite_gradient, [2])
    while made.step < 4:
        made.train_step()
        made.process_results(all=True)
    made.save()
    made = trainer(root, train_iters=10, log_interval=5, on_nan="rollback")
    spoil(made, infinite_gradient, [6])
    return ended(made)


def poisoned(
    root: Path, where: str, sample: int, *, backward: bool = False, **keys: Any
) -> dict[str, Any]:
    """Whenever this sample passes through a module, what it makes, or the gradient of that, is
    infinite."""
    made = trainer(root, train_iters=10, micro_batch_size=2, **keys)
    running: list[Batch] = []

    def seed(batch: Batch, chunk: int) -> None:
        running[:] = [batch]

    def poison(module: torch.nn.Module, given: tuple[Tensor, ...], y_BSH: Tensor) -> Tensor:
        factor_B11 = y_BSH.new_ones(len(y_BSH), 1, 1)
        if sample - running[0].position in range(len(y_BSH)):
            factor_B11[sample - running[0].position] = torch.inf
        if backward:
            y_BSH.register_hook(lambda gradient: gradient * factor_B11)  # type: ignore[no-untyped-call]
        return y_BSH if backward else y_BSH * factor_B11

    made.step_runner._seed = seed  # type: ignore[method-assign]  # both are told which micro-batch comes
    if made.step_runner.pipeline:
        made.step_runner.pipeline.seed = seed
    for module in made.model_parts.modules:
        for name, part in module.named_modules():
            if name == where:
                part.register_forward_hook(poison)
    return {key: value for key, value in ended(made).items() if key in ("error", "code", "step")}


def full_disk(root: Path) -> dict[str, Any]:
    """Nothing reported can be made durable when a step ends the run."""
    made = trainer(root, train_iters=10, save_interval=4)
    spoil(made, infinite_gradient, [6])
    if made.reporter:
        made.reporter.sync = full  # type: ignore[method-assign]
    return ended(made)


def full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def scenarios(root: Path) -> dict[str, Any]:
    """All of them, one after another, in one process group: the port of a former one may not be
    free at once."""
    data_parallel.join = functools.cache(data_parallel.join)
    found: dict[str, Any] = {
        "fp16": fp16_table(root / "fp16"),
        "resumed": resumed(root / "resumed"),
    }
    keys = {"train_iters": 10, "save_interval": 4}

    def run(
        name: str,
        wrong: Callable[[Trainer], None],
        steps: Iterable[int],
        *,
        lag: int = 0,
        **training: Any,
    ) -> None:
        made = trainer(root / name, **{**keys, **training})
        made.readback.lag = lag
        spoil(made, wrong, steps)
        found[name] = ended(made)

    def blow_up(made: Trainer) -> None:
        with torch.no_grad():
            for p in made.step_runner.parameters.values():
                local_part(p).mul_(30)

    found |= {"unlogged": unlogged(root / "unlogged"), "full": full_disk(root / "full")}
    run("stop", infinite_gradient, [6])
    found["value"] = poisoned(root / "value", "layers.1.mlp.down", 47)
    stages = {"pipeline_model_parallel_size": 2}
    found["gradient"] = poisoned(
        root / "gradient", "layers.0.mlp", 45, backward=True, parallelism=stages
    )
    run("skip", infinite_gradient, [6])
    run("skip", infinite_gradient, [6], on_nan="skip")
    run("too-many", infinite_gradient, [5, 6, 7], on_nan="skip", max_skipped_in_a_row=2)
    run("rollback", infinite_gradient, [6], on_nan="rollback")
    run("late-rollback", infinite_gradient, [6], lag=1, on_nan="rollback")
    run("late-stop", infinite_gradient, [8], lag=1)  # due to be saved at this very step
    lowest: dict[str, Any] = {
        "precision": "fp16",
        "initial_loss_scale": 256.0,
        "min_loss_scale": 256.0,
        "loss_scale_window": 4,
    }
    run("lowest", infinite_gradient, range(1, 7), on_nan="skip", **lowest)
    fixed: dict[str, Any] = {"precision": "fp16", "loss_scale": 1024.0, "max_skipped_in_a_row": 2}
    run("fixed", infinite_gradient, [4, 6, 7, 9], **fixed)
    run("fixed-too-many", infinite_gradient, [5, 6, 7], **fixed)
    run("no-checkpoint", infinite_gradient, [2], on_nan="rollback")
    run("used-up", infinite_gradient, [6, 8, 10], on_nan="rollback", max_rollbacks=2)
    run("spike", blow_up, [6], on_spike="rollback", spike_window=3, spike_factor=1.5)
    run("ignored", blow_up, [6], spike_window=3, spike_factor=1.5)
    return found
