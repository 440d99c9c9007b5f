"""training.deterministic: torch is told, and on CPUs nothing changes."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch

from tests.distributed import run_ranks
from tests.train.support import new_run, tiny_job
from trainkit.runs.metrics import read_rows
from trainkit.train.metrics.heartbeat import Heartbeat
from trainkit.train.parallel.data_parallel import World
from trainkit.train.trainer import Trainer


def trained(root: Path, deterministic: bool) -> tuple[bool, bool, list[Any]]:
    """Whether torch was told, whether it fills new memory, and losses and norms."""
    job = tiny_job(1, root, deterministic=deterministic, train_iters=3)
    run = new_run(job)
    Trainer(job, run, World.from_environment(), Heartbeat(None, 0), threading.Event()).train()
    rows = [(row["step"], row["lm_loss"], row.get("grad_norm")) for row in read_rows(run.metrics)]
    fills: bool = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    return torch.are_deterministic_algorithms_enabled(), fills, rows


def test_torch_is_told_and_no_bit_changes_on_cpus(tmp_path: Path) -> None:
    target = "tests.train.test_deterministic:trained"
    (usual,) = run_ranks(1, target, tmp_path / "usual", False, timeout=600)
    (again,) = run_ranks(1, target, tmp_path / "again", True, timeout=600)
    assert not usual[0] and again[:2] == (True, False)
    assert usual[2] == again[2] and len(again[2]) == 5
