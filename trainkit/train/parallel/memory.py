"""Where a rank's memory goes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from trainkit.train.parallel.data_parallel import reduced_type
from trainkit.train.parallel.shards import ShardedParameter
from trainkit.train.torch_compat import local_part

STATUS = Path("/proc/self/status")
KEYS = {"VmRSS": "resident", "VmHWM": "max_resident"}  # proc(5)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(local.numel() * local.element_size() for local in map(local_part, tensors))


def resident_memory(status: str) -> dict[str, int]:
    """Resident memory and its peak since the process began, in bytes, from the text of
    /proc/PID/status."""
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return {name: int(fields[key].split()[0]) * 1024 for key, name in KEYS.items() if key in fields}


class MemoryStats:
    """Bytes of this rank by kind.

    Args:
        parameters: the model's parameters, as fully_shard left them.
        optimizer_tensors: what the optimizer keeps, sharded as they are.
        device: this rank's device.
        accumulates: whole gradients add up over the micro-batches of a step before they are reduced
            to shards (`data_parallel.accumulates_whole`).

    Sizes of tensors never change, so they are added up once: to look at each shard takes
    milliseconds.
    """

    def __init__(
        self,
        parameters: Mapping[str, ShardedParameter],
        optimizer_tensors: Iterable[Tensor],
        device: torch.device,
        *,
        accumulates: bool = False,
    ) -> None:
        self.device = device
        gradients = shards = _bytes(h.parameter for h in parameters.values())
        if accumulates:
            gradients = max(
                shards,
                reduced_type(device.type).itemsize
                * sum(math.prod(h.layout.local_shape) for h in parameters.values()),
            )
        self._states = {
            "parameters": shards,
            "gradients": gradients,
            "optimizer": _bytes(optimizer_tensors),
        }

    def now(self) -> dict[str, int]:
        """parameters, optimizer: this rank's shards. gradients: its shards of them, or the whole
        ones that add up over the micro-batches of a step, as the plan counts them (gathered
        parameters, which come and go within a step, are in the peaks). On CUDA max_allocated and
        max_reserved: the allocator's peaks since the last call. On the CPU resident and
        max_resident: the process's memory now, and its peak since it began."""
        if self.device.type != "cuda":
            return self._states | resident_memory(STATUS.read_text())
        peaks = {
            "max_allocated": torch.cuda.max_memory_allocated(self.device),
            "max_reserved": torch.cuda.max_memory_reserved(self.device),
        }
        torch.cuda.reset_peak_memory_stats(self.device)
        return self._states | peaks
