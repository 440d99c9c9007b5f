"""Steps come back in order: at once on the CPU, one late where the device is asked not to wait.
On a GPU no step makes the host wait."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from tests.train.support import new_run, tiny_job
from trainkit.jobs.devices import built_in_device
from trainkit.train.metrics.heartbeat import Heartbeat
from trainkit.train.metrics.readback import Readback
from trainkit.train.parallel.data_parallel import World
from trainkit.train.trainer import Trainer


def test_a_step_is_handed_out_before_the_next_is_waited_for() -> None:
    """Else both would be logged at the time of the second."""
    readback: Readback[int] = Readback(torch.device("cpu"))
    for step in (1, 2):
        readback.push(step, torch.tensor([float(step)]))
    steps = readback.take(all=True)
    assert next(steps) == (1, [1.0])
    assert len(readback._pending) == 1
    assert next(steps) == (2, [2.0])


def test_order_and_delay() -> None:
    readback: Readback[int] = Readback(torch.device("cpu"))
    readback.push(1, torch.tensor([1.5, 2.0]))
    assert list(readback.take()) == [(1, [1.5, 2.0])]
    readback.lag = 1  # as on CUDA
    readback.push(2, torch.tensor([2.0]))
    assert list(readback.take()) == []
    readback.push(3, torch.tensor([3.0]))
    assert list(readback.take()) == [(2, [2.0])]
    readback.push(4, torch.tensor([4.0]))
    assert list(readback.take(all=True)) == [(3, [3.0]), (4, [4.0])]
    readback.push(5, torch.tensor([5.0]))
    readback.forget()
    assert list(readback.take(all=True)) == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_no_step_waits_for_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch raises at any operation that makes the host wait, in steps after the first."""
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29511",
    }.items():
        monkeypatch.setenv(name, value)
    job = tiny_job(1, tmp_path, precision="fp16", eval_iters=0)
    cluster = job.cluster.model_copy(update={"device": built_in_device("cuda"), "gpus_per_node": 1})
    job = job.model_copy(update={"cluster": cluster})
    trainer = Trainer(job, new_run(job), World(0, 1), Heartbeat(None, 0), threading.Event())
    trainer.train_step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            trainer.train_step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
