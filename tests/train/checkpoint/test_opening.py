"""All ranks choose the same checkpoint, by one view of the file system: rank 0's. What a rank
cannot read of its share of the hashes counts for all."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.distributed import run_ranks
from trainkit.base.errors import TrainkitError
from trainkit.runs import checkpoints
from trainkit.runs.checkpoints import checkpoint_folder
from trainkit.train.checkpoint import save_load as checkpoint
from trainkit.train.checkpoint.newest import newest_valid_together
from trainkit.train.checkpoint.save_load import CheckpointMetadata


def save(folder: Path, step: int) -> None:
    mine = torch.full((4, 3), float(10 * step + dist.get_rank()))
    checkpoint.save(
        folder,
        {f"model.w{dist.get_rank()}": mine},
        CheckpointMetadata(step, consumed_samples=8 * step),
    )


def found(folder: Path, how: Any = "full") -> tuple[int, str]:
    """The step of what this rank is to load, 0 where none is whole; what it was told of others."""
    told: list[str] = []
    try:
        newest = newest_valid_together(folder, how, told.append)
    except TrainkitError as error:
        return 0, f"exit {int(error.exit)}"
    assert newest is not None and set(newest.manifest.tensors) == {"model.w0", "model.w1"}
    return newest.manifest.step, "; ".join(told)


def stale(*args: Any, **kwargs: Any) -> Any:
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))


def on_two_ranks(root: Path) -> dict[str, tuple[int, str]]:
    dist.init_process_group("gloo")
    rank, newest = dist.get_rank(), checkpoint_folder(root, 2)
    for step in (1, 2):
        save(root, step)
    results = {"whole": found(root)}
    checkpoints.PAUSES = (0.01, 0.02)  # of this process
    with contextlib.ExitStack() as patched:
        for name in ("read_bytes", "stat", "is_file", "iterdir") if rank == 1 else ():
            patched.enter_context(mock.patch.object(Path, name, stale))
        results["rank 1 sees no folder"] = found(root)
        if rank == 1:
            patched.enter_context(mock.patch.object(checkpoints, "_xxh128", stale))
        results["rank 1 cannot read"] = found(root)
    dist.barrier()
    if rank == 0:
        with open(newest / "rank-00001.bin", "r+b") as file:
            file.write(b"\1")
    dist.barrier()
    # which sets it aside
    results |= {"nobody hashes": found(root, "size"), "a byte of rank 1's share": found(root)}
    dist.barrier()
    if rank == 0:
        (checkpoint_folder(root, 1) / "rank-00000.bin").write_bytes(b"")
    dist.barrier()
    results["none is whole"] = found(root)
    return results


def test_all_ranks_choose_the_same(tmp_path: Path) -> None:
    of_ranks = run_ranks(
        2, "tests.train.checkpoint.test_opening:on_two_ranks", tmp_path / "checkpoints"
    )
    steps = {
        "whole": 2,
        "rank 1 sees no folder": 2,
        "rank 1 cannot read": 0,
        "a byte of rank 1's share": 1,
        "nobody hashes": 2,
        "none is whole": 0,
    }
    assert [{what: step for what, (step, _) in of_rank.items()} for of_rank in of_ranks] == [
        steps,
        steps,
    ]
    told = {what: words for what, (_, words) in of_ranks[0].items()}
    assert (
        "step-00000002 is damaged: rank-00001.bin does not have the hash"
        in told["a byte of rank 1's share"]
    )
    assert (told["rank 1 cannot read"], told["none is whole"]) == ("exit 10", "exit 16")
    assert not any(of_ranks[1][what][1] for what in ("whole", "a byte of rank 1's share"))
