"""Writes down what a rank would say to others, while it computes nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup, _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode

from trainkit.base.lazy_dataclasses import dataclass
from trainkit.train.rehearsal.fake_world import META

PACKAGE = str(Path(__file__).resolve().parents[2])
NAMESPACES = ("c10d", "_c10d_functional")
# what waits for an operation, and says nothing itself
SILENT = ("wait_tensor", "barrier", "monitored_barrier_")
# whose sizes may differ from rank to rank
UNEQUAL = ("alltoall_base", "alltoall", "gather", "scatter", "all_to_all_single")
# (operation, where its arguments have the other rank of the group)
PEERS = {"send": 2, "recv": 2}
# kernels of optimizers, which change their arguments in place and have no form without memory
FUSED = ("_fused_adam", "_fused_sgd")
# plumbing, which the lines of a message leave out
PLUMBING = ("torch_compat.py", "rehearsal/")


@dataclass(frozen=True)
class CollectiveCall:
    """One operation of a rank with others.

    Args:
        operation: "allreduce", "send", ...
        group: the ranks of its group, in order.
        sizes: (elements, dtype) of each tensor; empty where ranks may have different ones.
        peer: the other rank of a send or recv; -1 for all of the group.
        where: the line of trainkit that it comes from, "train/update/step.py:126".
    """

    operation: str
    group: tuple[int, ...]
    sizes: tuple[tuple[int, str], ...]
    peer: int
    where: str

    @property
    def words(self) -> str:
        """What it is, as its peers must see it too."""
        tensors = ", ".join(f"{count:,} {dtype}" for count, dtype in self.sizes)
        if self.peer >= 0:
            way = {"send": "to", "recv": "from"}[self.operation]
            return f"{self.operation} {way} rank {self.peer} of {tensors}"
        if tensors:
            return f"{self.operation} of {tensors}"
        return self.operation

    def to_json(self, groups: dict[tuple[int, ...], int]) -> list[object]:
        """As a list; `groups` numbers the groups, and gets this one."""
        group = groups.setdefault(self.group, len(groups))
        return [self.operation, group, self.sizes, self.peer, self.where]

    @classmethod
    def from_json(cls, value: Sequence[Any], groups: Sequence[tuple[int, ...]]) -> CollectiveCall:
        """The inverse of `to_json`."""
        operation, group, sizes, peer, where = value
        pairs = tuple((int(count), str(dtype)) for count, dtype in sizes)
        return cls(operation, groups[group], pairs, peer, where)


class CollectiveRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, tensors are made on meta, and what goes to other ranks is kept in
    `calls`.

    A value that the device would have to be asked for is 1: with the answers that torch's
    pipelines ask of each other, this means that every stage knows its shapes.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[CollectiveCall] = []
        self._groups: dict[str, tuple[int, ...]] = {}

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if operation is torch.ops.aten._local_scalar_dense.default:
            return 1
        if operation.namespace == "aten" and operation._opname.startswith(FUSED):
            return None
        if operation.namespace in NAMESPACES:
            self._keep(operation, args)
        elif kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": META}
            kwargs.pop("pin_memory", None)
        return operation(*args, **kwargs)

    def _keep(self, operation: Any, args: Sequence[Any]) -> None:
        name = operation._schema.name.partition("::")[2]
        if name in SILENT:
            return
        plain = name.strip("_")
        group = next(found for each in reversed(args) if (found := self._ranks(each)))
        peer = group[args[PEERS[plain]]] if plain in PEERS else -1
        sizes: tuple[tuple[int, str], ...] = ()
        if plain not in UNEQUAL:
            sizes = tuple(_sizes(args))
        self.calls.append(CollectiveCall(plain, group, sizes, peer, _line()))

    def _ranks(self, argument: Any) -> tuple[int, ...] | None:
        """The ranks of a group, where the argument is one, or the name of one."""
        group: ProcessGroup | None = None
        if isinstance(argument, str) and argument not in ("sum", "max", "avg", "min", "product"):
            group = _resolve_process_group(argument)  # type: ignore[arg-type]
        elif isinstance(argument, torch.ScriptObject):
            if not argument._type().qualified_name().endswith("ProcessGroup"):
                return None
            group = ProcessGroup.unbox(argument)
        if group is None:
            return None
        name = group.group_name
        if name not in self._groups:
            self._groups[name] = tuple(dist.get_process_group_ranks(group))
        return self._groups[name]


def _sizes(value: Any) -> Iterator[tuple[int, str]]:
    """(elements, dtype) of every tensor in an argument."""
    if isinstance(value, Tensor):
        yield value.numel(), str(value.dtype).removeprefix("torch.")
    elif isinstance(value, Mapping):
        yield from _sizes(list(value.values()))
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for part in value:
            yield from _sizes(part)


def _line() -> str:
    """The nearest caller in trainkit that is more than plumbing."""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(PACKAGE):
            name = file[len(PACKAGE) + 1 :]
            if not any(part in name for part in PLUMBING):
                return f"{name}:{frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return "torch"
