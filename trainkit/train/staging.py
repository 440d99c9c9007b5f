"""Copies of tensors in host memory that is used again: what a checkpoint is written from while training goes on."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trainkit.train.shards import Offsets, Shards
from trainkit.train.torch_compat import like, local_part


def parts_of(tensor: Tensor) -> dict[Offsets, Tensor]:
    """What this rank holds of a tensor that a checkpoint is written from."""
    return tensor.parts if isinstance(tensor, Shards) else {(): local_part(tensor)}


class Staging:
    """Room for one checkpoint's tensors; page-locked where they come from a CUDA device, so that the copy does not keep the host waiting.

    It is made at the first copy and kept: the system would clear every page of new memory again.
    """

    def __init__(self) -> None:
        self._room: dict[tuple[str, Offsets], Tensor] = {}
        self._arrived: torch.cuda.Event | None = None

    @property
    def bytes(self) -> int:
        """Held on this rank."""
        return sum(room.nbytes for room in self._room.values())

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The same tensors as they are now, in host memory. On CUDA they are there after `wait`; what the device is told later may change the originals."""
        copies: dict[str, Tensor] = {}
        cuda = False
        for name, tensor in tensors.items():
            parts = {at: self._take(name, at, part) for at, part in parts_of(tensor).items()}
            cuda = cuda or any(part.is_cuda for part in parts_of(tensor).values())
            copies[name] = Shards(parts, tuple(tensor.shape), tensor.dtype) if isinstance(tensor, Shards) else like(tensor, parts[()])
        if cuda:
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()
        return copies

    def wait(self) -> None:
        """Until the device has written the copies."""
        if self._arrived is not None:
            self._arrived.synchronize()

    def _take(self, name: str, at: Offsets, part: Tensor) -> Tensor:
        room = self._room.get((name, at))
        if room is None or room.shape != part.shape:
            room = self._room[name, at] = torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda)
        return room.copy_(part, non_blocking=True)
