"""Numbers on their way between host and device, without either waiting for the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

import torch
from torch import Tensor

from trainkit.base.lazy_dataclasses import dataclass

T = TypeVar("T")


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on `device`. To CUDA it goes from page-locked memory: a copy from any
    other waits until the device has done all it has to do."""
    if device.type == "cuda":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)


@dataclass(frozen=True)
class _Pending(Generic[T]):
    facts: T
    values: Tensor
    arrived: torch.cuda.Event | None


class Readback(Generic[T]):
    """Hands out each step's numbers in order: at once on the CPU, one step late on CUDA, where
    waiting for them would leave the device idle.

    The delay is the same on every rank, so that what they decide by these numbers they decide at
    the same step.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type == "cuda":
            self.lag = 1
        else:
            self.lag = 0
        self._pending: deque[_Pending[T]] = deque()

    def push(self, facts: T, values: Tensor) -> None:
        """Take in one step: what the host knows of it, and a vector on the device."""
        arrived = None
        if values.is_cuda:
            host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            host.copy_(values, non_blocking=True)
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record()
            values = host
        self._pending.append(_Pending(facts, values, arrived))

    def take(self, *, all: bool = False) -> Iterator[tuple[T, list[float]]]:
        """The steps that are due, oldest first, each when it is there; with `all` every one,
        which waits for the device."""
        while len(self._pending) > (0 if all else self.lag):
            pending = self._pending.popleft()
            if pending.arrived is not None:
                pending.arrived.synchronize()
            yield pending.facts, pending.values.tolist()

    def forget(self) -> None:
        """Drop what was not taken: those steps are undone."""
        self._pending.clear()
