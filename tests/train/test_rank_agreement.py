"""What ranks compare before they train."""

from __future__ import annotations

import platform
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed import run_ranks
from tests.train.support import tiny_job
from trainkit.base.errors import ConfigError
from trainkit.ops.kernels import FUSED, REFERENCE, Choice
from trainkit.train import rank_agreement as agree
from trainkit.train.parallel import data_parallel
from trainkit.train.parallel.data_parallel import World, join


def _refusals(root: Path) -> dict[str, list[str]]:
    """What each of these ranks is told when the last one differs."""
    world = World.from_environment()
    join(world, "cpu")
    job = tiny_job(world.size, root)
    other = job.model_copy(
        update={"training": job.training.model_copy(update={"lr": 0.5, "seed": 7})}
    )
    layout = job.model_copy(
        update={"parallelism": job.parallelism.model_copy(update={"tensor_model_parallel_size": 2})}
    )
    known, found = agree.fingerprint, {}
    chosen = Choice(REFERENCE)
    cases = {"same": job, "job": other, "layout": layout, "torch": job, "kernels": job}
    for name, mine in cases.items():
        if name == "torch" and world.rank == world.size - 1:
            agree.fingerprint = lambda *given: {**known(*given), "torch": "2.0.0"}
        elif name == "kernels":
            agree.fingerprint = known
            if world.rank < world.size - 1:
                chosen = Choice(FUSED)
            else:
                chosen = Choice(REFERENCE, "they are not compiled")
        try:
            agree.refuse_disagreement(mine if world.rank == world.size - 1 else job, world, chosen)
            found[name] = ["agreed"]
        except ConfigError as error:
            found[name] = [problem.message for problem in error.list]
    dist.destroy_process_group()
    return found


def test_a_rank_that_differs_is_named_everywhere(tmp_path: Path) -> None:
    told: list[dict[str, Any]] = run_ranks(3, "tests.train.test_rank_agreement:_refusals", tmp_path)
    assert told[0] == told[1] == told[2]
    for found in told[0].values():
        assert len(found) == 1  # of three ranks one differs
    assert told[0]["same"] == ["agreed"]
    assert told[0]["job"][0].startswith(
        f"rank 2 on {platform.node()} was started with something else: "
    )
    assert (
        "job.training.lr is 0.5, on rank 0 0.01" in told[0]["job"][0]
        and "job.training.seed is 7, on rank 0 1234" in told[0]["job"][0]
    )
    assert "layout is tensor 2" in told[0]["layout"][0]
    assert told[0]["kernels"][0].endswith(
        "kernels is reference, on rank 0 fused; its kernels are not fused because they are not"
        " compiled"
    )
    assert f"torch is 2.0.0, on rank 0 {torch.__version__}" in told[0]["torch"][0]


def test_differences_are_cut_short_not_hidden() -> None:
    first, other = {str(i): "a" for i in range(9)}, {str(i): "b" for i in range(9)}
    assert len(agree.differences(first, other)) == 9
    assert agree.differences({"a": "1"}, {}) == ["a is missing, on rank 0 1"]


def test_nobody_knocks_at_rank_0_before_it_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own client, refused once, stays away for half a second."""
    with socket.socket() as rank_0:
        rank_0.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(rank_0.getsockname()[1]))
        waited: list[float] = []

        def sleep(seconds: float) -> None:
            waited.append(seconds)
            if len(waited) == 3:
                rank_0.listen()

        monkeypatch.setattr(time, "sleep", sleep)
        data_parallel._wait_for_rank_0(World(1, 2))
        assert len(waited) == 3
        rank_0.accept()[0].close()
    monkeypatch.setenv("MASTER_ADDR", "no such host")
    data_parallel._wait_for_rank_0(World(1, 2))  # what is wrong torch says
