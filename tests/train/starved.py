"""What two ranks do with experts that get nothing: run by test_expert_loads.py in one spawn."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.train.plain_loop import job_of
from tests.train.support import new_run
from trainkit.runs.folder import RunFolder
from trainkit.train.metrics.heartbeat import Heartbeat
from trainkit.train.model.experts import MixtureOfExperts
from trainkit.train.model.router import route
from trainkit.train.parallel.data_parallel import World
from trainkit.train.trainer import Trainer

STARVED = (2, 3)  # (layer, expert)


def watched(root: Path) -> tuple[Path, list[list[list[float]]]]:
    """Train with a bias that keeps tokens away from one expert. Returns the run's folder, and what
    each expert of each layer had in each step, counted from routers' products."""
    world = World.from_environment()
    training = {"train_iters": 5, "log_interval": 2, "save_interval": 3, "eval_iters": 1}
    job = job_of("moe-biased", world.size, root, {}, "mock", **training)
    run = new_run(job) if world.rank == 0 else RunFolder(root / "runs/matrix/one")
    trainer = Trainer(job, run, world, Heartbeat(None, world.rank), threading.Event())
    layers: dict[str, Any] = dict(trainer.model_parts.modules[0].layers.items())
    loads_NLE = torch.zeros(5, job.model.num_layers, 8, dtype=torch.float64)

    def watch(layer: int, mixture: MixtureOfExperts) -> None:
        def count(router: nn.Module, _: Any, logits_TE: Tensor) -> None:
            if router.training:
                chosen = route(logits_TE, mixture.router.expert_bias, job.model.routing).experts_TK
                loads_NLE[trainer.step, layer] += torch.bincount(chosen.flatten(), minlength=8)

        mixture.router.register_forward_hook(count)

    for number, block in layers.items():
        if isinstance(block.mlp, MixtureOfExperts):
            watch(int(number), block.mlp)
    layer, expert = STARVED
    layers[str(layer)].mlp.router.expert_bias[expert] = -1e9
    trainer.train()
    dist.all_reduce(loads_NLE)
    return run.path, loads_NLE.tolist()
