"""The mean of the weights of several checkpoints of a run, as a checkpoint (Izmailov et al. 2018,
arXiv:1803.05407)."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from trainkit.base.errors import TrainkitError
from trainkit.runs.checkpoints import Checkpoint
from trainkit.train.checkpoint.dcp_storage import DTYPES
from trainkit.train.checkpoint.save_load import CheckpointMetadata, NotSaved, save
from trainkit.train.huggingface.weights import read_tensor
from trainkit.train.parallel.shards import Shards


class _Mean(Shards):
    """A whole tensor that is computed when it is written, and not kept."""

    key: str
    checkpoints: Sequence[Checkpoint]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        total: Tensor | None = None
        for saved in self.checkpoints:
            entry = saved.manifest.tensors[self.key]
            found = read_tensor(saved.folder, self.key, entry).double()
            total = found if total is None else total.add_(found)
        assert total is not None
        return (total / len(self.checkpoints)).to(self.dtype)


def write_average(folder: Path, checkpoints: Sequence[Checkpoint]) -> Checkpoint:
    """Write the mean of the weights, summed in fp64, one tensor in memory at a time.

    Args:
        folder: of averages; the checkpoint's step is that of the last.
        checkpoints: of one model, oldest first.

    Raises:
        TrainkitError: exit 10, the disk did not take it, or another process writes one; nothing is
            left of it.
    """
    last = checkpoints[-1].manifest
    tensors: dict[str, Tensor] = {}
    for name, entry in last.tensors.items():
        if name.startswith("model."):
            dtype = DTYPES[entry.dtype]
            outline = torch.empty(entry.shape, dtype=dtype, device="meta")
            mean = _Mean({(0,) * len(entry.shape): outline}, entry.shape, dtype)
            mean.key = name
            mean.checkpoints = checkpoints
            tensors[name] = mean
    metadata = CheckpointMetadata(
        step=last.step,
        consumed_samples=last.consumed_samples,
        layout={"world_size": 1},
        job=last.job,
        state={"averaged_checkpoints": len(checkpoints)},
    )
    with warnings.catch_warnings():
        # one process is meant
        warnings.filterwarnings("ignore", message="torch.distributed is")
        try:
            return save(folder, tensors, metadata)
        except NotSaved as error:
            hint = "make room, or wait for the other; then the same command again"
            raise TrainkitError(error.message, exit=error.exit, hint=hint) from None
