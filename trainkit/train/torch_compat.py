"""The private names of torch that the trainer leans on, in one place. Works with 2.11 to 2.13."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def local_part(tensor: Tensor) -> Tensor:
    """The elements this rank holds, sharing storage: the local shard of a DTensor, else the tensor itself."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_slices(tensor: Tensor) -> tuple[slice, ...]:
    """Where `local_part` lies in the whole tensor."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, n) for n in tensor.shape)
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(start, start + n) for start, n in zip(offsets, sizes, strict=True))


def scale_in_place(tensors: list[Tensor], factor: float) -> None:
    """Multiply all tensors by one number, in few kernels."""
    torch._foreach_mul_(tensors, factor)
