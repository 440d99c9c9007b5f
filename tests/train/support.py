"""A tiny job, its run folder, and what the ranks of the multi-process tests do."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn
from torch.distributed.tensor import DTensor

from tests import forkserver
from tests.distributed import ROOT, rank_environments
from trainkit.jobs.schema import CheckpointSettings, Cluster, Dataset, Job, Model, Training
from trainkit.runs.checkpoints import checkpoint_folder
from trainkit.runs.folder import RunFolder
from trainkit.train.metrics.heartbeat import Heartbeat
from trainkit.train.parallel.data_parallel import World
from trainkit.train.parallel.shards import Shards
from trainkit.train.torch_compat import local_part
from trainkit.train.trainer import Trainer

Arrays = dict[str, NDArray[Any]]
# 18 and 301 divide by nothing used here
MODEL = Model(
    name="tiny", num_layers=2, hidden_size=18, num_attention_heads=3, seq_length=16, vocab_size=301
)
TRAINING: dict[str, Any] = {
    "micro_batch_size": 2,
    "global_batch_size": 8,
    "train_iters": 12,
    "lr": 1e-2,
    "lr_warmup_iters": 3,
    "clip_grad": 0.5,
    "eval_iters": 1,
}


def tiny_job(ranks: int, root: Path, **training: Any) -> Job:
    """Random tokens through a tiny model."""
    return Job(
        name="tiny",
        cluster=Cluster(name="here", ranks_per_node=ranks, root=str(root)),
        model=MODEL,
        dataset=Dataset(name="mock", source="mock", split="90,10,0"),
        training=Training(**{**TRAINING, **training}),
        checkpoint=CheckpointSettings(keep_last=2),
    )


def new_run(job: Job) -> RunFolder:
    """The job's run folder with job.json in it."""
    run = RunFolder(Path(str(job.cluster.root)) / "runs" / job.name / "one")
    run.path.mkdir(parents=True, exist_ok=True)
    run.job.write_text(
        json.dumps({"schema": "job/1", "job": job.model_dump(mode="json"), "origins": {}})
    )
    return run


def start_ranks(
    run: RunFolder, ranks: int, start: type[subprocess.Popen[Any]] = forkserver.Popen
) -> list[subprocess.Popen[Any]]:
    """The rank's program itself, as the launcher starts it. `start`: subprocess.Popen where the
    caller must be the parent."""
    attempt, children = run.attempt(1), list[subprocess.Popen[Any]]()
    for rank, environment in enumerate(rank_environments(ranks)):
        attempt.log(rank).parent.mkdir(parents=True, exist_ok=True)
        reports = {
            "TORCHELASTIC_ERROR_FILE": str(attempt.error(rank)),
            "TRAINKIT_HEARTBEAT_FILE": str(attempt.heartbeat(rank)),
        }
        argv = [
            sys.executable,
            "-I",
            str(ROOT / "trainkit/train/main.py"),
            str(run.path),
            "--attempt",
            "1",
        ]
        with open(attempt.log(rank), "ab") as log:
            children.append(
                start(argv, env=environment | reports, stdout=log, stderr=subprocess.STDOUT)
            )
    return children


def whole(tensors: Mapping[str, torch.Tensor]) -> Arrays:
    """Tensors gathered from all ranks: all Shards at once, as each time costs 5 ms a rank."""
    mine = {
        name: {at: view.numpy().copy() for at, view in tensor.parts.items()}
        for name, tensor in tensors.items()
        if isinstance(tensor, Shards)
    }
    everyone: list[Any] = [mine]
    if mine:
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
    return {
        name: _joined(tensor, [held[name] for held in everyone])
        if isinstance(tensor, Shards)
        else _full(tensor)
        for name, tensor in tensors.items()
    }


def _full(tensor: torch.Tensor) -> NDArray[Any]:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().clone().numpy()


def _joined(tensor: Shards, everyone: list[dict[Any, NDArray[Any]]]) -> NDArray[Any]:
    """What all ranks hold of a tensor; where they hold the same part, it must be the same."""
    found = np.full(tuple(tensor.shape), np.nan, dtype=str(tensor.dtype).removeprefix("torch."))
    for at, part in ((at, part) for parts in everyone for at, part in parts.items()):
        box = found[
            tuple(slice(start, start + size) for start, size in zip(at, part.shape, strict=True))
        ]
        assert np.isnan(box).all() or np.array_equal(box, part), (
            f"ranks hold different values at {at}"
        )
        box[...] = part
    return found


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """This rank's shards of all gradients."""
    return [local_part(p.grad) for p in parameters if p.grad is not None]


def train_and_save(root: Path) -> dict[str, Any]:
    """Three steps on the ranks of this world, and the folder of their checkpoint with all it
    should hold."""
    world = World.from_environment()
    job = tiny_job(world.size, root)
    run = new_run(job) if world.rank == 0 else RunFolder(root / "runs/tiny/one")
    trainer = Trainer(job, run, world, Heartbeat(None, world.rank), threading.Event())
    for _ in range(3):
        trainer.train_step()
    trainer.save()
    saved = whole(trainer.step_runner.tensors())
    return {"saved": saved, "folder": checkpoint_folder(trainer.run.checkpoints, 3)}


def same(left: Arrays, right: Arrays) -> bool:
    """Equal names, shapes and bits."""
    return left.keys() == right.keys() and all(
        left[k].shape == right[k].shape and np.array_equal(left[k], right[k]) for k in left
    )
