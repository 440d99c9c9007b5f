"""Copies of what a checkpoint is written from, in host memory that is used again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from trainkit.train.parallel.shards import Offsets, Shards
from trainkit.train.torch_compat import like, local_part


def parts_of(tensor: Tensor) -> dict[Offsets, Tensor]:
    """What this rank holds of a tensor that a checkpoint is written from."""
    return tensor.parts if isinstance(tensor, Shards) else {(): local_part(tensor)}


class StagingBuffers:
    """Host memory for one checkpoint's tensors; page-locked where they come from a CUDA device, so
    that the copy does not keep the host waiting.

    It is made at the first copy and kept: the system would clear every page of new memory again.
    Nor does training wait for a copy from host memory: it goes on beside the next step's forward
    and backward, which only read the weights; `wait_for_staging` is for the moment before they
    change.
    """

    def __init__(self) -> None:
        self._room: dict[tuple[str, Offsets], Tensor] = {}
        self._arrived: torch.cuda.Event | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="stage")
        self._staging_future: Future[None] | None = None

    @property
    def bytes(self) -> int:
        """Held on this rank."""
        return sum(room.nbytes for room in self._room.values())

    def stage(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The same tensors in host memory: there after `wait_for_copies`, as the originals are
        now, which must not change before `wait_for_staging` has returned. The copies of the time
        before must no longer be in use."""
        copies: dict[str, Tensor] = {}
        moves: list[tuple[Tensor, Tensor]] = []
        for name, tensor in tensors.items():
            parts = {
                at: (self._room_for(name, at, part), part) for at, part in parts_of(tensor).items()
            }
            moves += parts.values()
            rooms = {at: room for at, (room, _) in parts.items()}
            if isinstance(tensor, Shards):
                copies[name] = Shards(rooms, tuple(tensor.shape), tensor.dtype)
            else:
                copies[name] = like(tensor, rooms[()])
        if any(part.is_cuda for _, part in moves):
            copy_all(moves)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()
        else:
            self._staging_future = self._thread.submit(copy_all, moves)
        return copies

    @property
    def staging(self) -> bool:
        """Whether `wait_for_staging` would wait."""
        return self._staging_future is not None and not self._staging_future.done()

    def wait_for_staging(self) -> None:
        """Wait until the originals may change. On CUDA that is at once: the device does what it
        gets later after the copy."""
        if self._staging_future is not None:
            self._staging_future.result()

    def wait_for_copies(self) -> None:
        """Wait until the copies are there. In a thread of its own: without the device of the
        copies as its current one it would make a context on GPU 0."""
        self.wait_for_staging()
        if self._arrived is not None:
            with torch.cuda.device(self._arrived.device):
                self._arrived.synchronize()

    def _room_for(self, name: str, at: Offsets, part: Tensor) -> Tensor:
        room = self._room.get((name, at))
        if room is None or room.shape != part.shape:
            room = self._room[name, at] = torch.empty(
                part.shape, dtype=part.dtype, pin_memory=part.is_cuda
            )
        return room


@torch.no_grad()
def copy_all(moves: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy (where to, what) pairs. From a CUDA device the host does not wait for them."""
    for room, part in moves:
        room.copy_(part, non_blocking=True)
