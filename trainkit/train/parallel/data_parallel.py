"""Data parallelism from outside the model: the process group, and ZeRO by fully_shard, the same
code for one rank and for many."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from trainkit.jobs.devices import Precision
from trainkit.jobs.schema import Job
from trainkit.plan.batch import batch_sizes
from trainkit.plan.parameter_shapes import is_one_unit
from trainkit.train.model.transformer import Transformer
from trainkit.train.torch_compat import placed_apart

# seconds between two looks whether rank 0 is there: after more, torch's client does as well
LEAST_WAIT, MOST_WAIT = 0.02, 1.0


@dataclass(frozen=True)
class World:
    """Who this process is among the ranks."""

    rank: int
    size: int
    local_rank: int = 0

    @classmethod
    def from_environment(cls) -> World:
        """From torch's standard variables RANK, WORLD_SIZE and LOCAL_RANK."""
        return cls(
            rank=int(os.environ["RANK"]),
            size=int(os.environ["WORLD_SIZE"]),
            local_rank=int(os.environ["LOCAL_RANK"]),
        )


def join(world: World, device_type: str) -> torch.device:
    """Meet the other ranks at MASTER_ADDR:MASTER_PORT; returns this rank's device."""
    if device_type == "cuda":
        device = torch.device("cuda", world.local_rank)
        torch.cuda.set_device(device)
        _wait_for_rank_0(world)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl", rank=world.rank, world_size=world.size, device_id=device
        )
    else:
        device = torch.device("cpu")
        _wait_for_rank_0(world)
        dist.init_process_group("gloo", rank=world.rank, world_size=world.size)
    return device


def _wait_for_rank_0(world: World) -> None:
    """Return as soon as it listens: torch's client, refused once, tries again after half a second
    (TCPStore.cpp of 2.13). What else is wrong torch says better."""
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    wait = LEAST_WAIT
    with contextlib.suppress(OSError):
        while world.rank and wait < MOST_WAIT:
            with contextlib.suppress(ConnectionRefusedError):
                socket.create_connection(place, timeout=MOST_WAIT).close()
                return
            time.sleep(wait)
            wait *= 1.05


# in "fp8" what is no product of float8 is in 16 bits
COMPUTE = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


class OneRank:
    """fully_shard's reduction where there is one rank (its ReduceScatter interface), on the CPU.
    Nothing is added up, so the tensor that "receives" is the very one that "sends", and fully_shard
    copies nothing. (Where streams overlap it would free what was sent while that is added.)"""

    def __init__(self) -> None:
        self._sent: torch.Tensor | None = None

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        sent, self._sent = self._sent, None
        if sent is None:
            sent = self._sent = torch.empty(*size, dtype=dtype, device=device)
        return sent

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: object,
        op: object,
        async_op: bool = False,
    ) -> None:
        output_tensor.copy_(input_tensor)


def reduced_type(device_type: str) -> torch.dtype:
    """What gradients are summed in; see `shard`."""
    return torch.float64 if device_type == "cpu" else torch.float32


def accumulates_whole(job: Job) -> bool:
    """Whether whole gradients add up on each rank over the micro-batches of a step, before the
    last reduces them: under ZeRO 0 and 1, and in a pipeline, whose schedules reduce once."""
    p = job.parallelism
    micro_batches = max(batch_sizes(job)) // (
        job.training.micro_batch_size * job.data_parallel_size
    )
    return micro_batches > 1 and (p.zero_stage < 2 or p.pipeline_model_parallel_size > 1)


def shard(
    model: Transformer,
    mesh: DeviceMesh,
    precision: Precision = "fp32",
    *,
    stage: int = 1,
    sums: bool = True,
    apart: tuple[frozenset[nn.Parameter], DeviceMesh] | None = None,
) -> FSDPModule:
    """Apply ZeRO in place: each block, and the rest of the model, is one unit of communication; a
    small model on one rank is one as a whole.

    Parameters are fp32 at rest, the optimizer's master weights; what is gathered for computing
    is in `precision`.

    Gradients are summed, never averaged: the loss of a micro-batch is divided by the number of
    tokens of the whole global batch instead, so that its gradient is the same number in every
    layout. On the CPU they are summed in fp64 and rounded once: the order of the sum, which the
    layout decides, then leaves no trace, where in fp32 Adam makes 4e-5 of it in the loss after
    80 steps of `demo`. On a GPU they are summed in fp32.

    Args:
        mesh: the data-parallel ranks; with two dimensions the first holds copies (HSDP, and ZeRO 0,
            whose copies are sharded over one rank each).
        stage: of ZeRO; with 3 parameters are gathered for forward and for backward, else once a
            step.
        sums: whether a step adds gradients up at all, of several ranks or micro-batches. Without,
            fp64 on the CPU would be a detour of 40 bytes a parameter to the same numbers.
        apart: parameters that lie on other ranks, and which these are.
    """
    reduce_dtype = reduced_type(mesh.device_type) if sums else torch.float32
    # What goes from block to block is in 16 bits already; what is not (rotary tables, the factor of
    # the loss) is meant to be wider.
    policy = MixedPrecisionPolicy(
        param_dtype=COMPUTE[precision], reduce_dtype=reduce_dtype, cast_forward_inputs=False
    )
    place = None if apart is None else placed_apart(*apart)
    blocks = list(model.layers.values())
    if apart is None and is_one_unit(sum(p.numel() for p in model.parameters()), mesh.size()):
        blocks = []
    for module in (*blocks, model):
        fully_shard(
            module,
            mesh=mesh,
            shard_placement_fn=place,
            reshard_after_forward=stage == 3 and mesh.size() > 1,
            mp_policy=policy,
        )
        unit = cast(FSDPModule, module)
        if mesh.size() == 1 and mesh.device_type == "cpu" and apart is None:
            unit.set_custom_reduce_scatter(cast(Any, OneRank()))
            continue
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
    return cast(FSDPModule, model)


def prepare_backward(model: FSDPModule, *, last: bool, stage: int = 1, keeps: bool = False) -> None:
    """Call before each micro-batch of a step. ZeRO 0 and 1: whole gradients accumulate until the
    `last`, which reduces them and frees gathered parameters. 2 and 3 reduce each to shards,
    which accumulate; copies (HSDP) are added up at the last alone. 3 frees gathered parameters
    each time. Where the rank `keeps` them they stay gathered, for the update to write into."""
    model.set_is_last_backward(last)
    model.set_requires_gradient_sync(last or stage >= 2)
    model.set_requires_all_reduce(last)
    model.set_reshard_after_backward((last or stage == 3) and not keeps)


def release(model: nn.Module) -> None:
    """Free the parameters that a forward without a backward left gathered."""
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()
