"""Which part of every tensor this rank holds: what initial weights, checkpoints and sums over
replicas are built on.

Two things cut a tensor. Tensor parallelism takes some rows or columns of it, in one or several
segments (the queries, keys and values of a fused projection); fully_shard cuts what is left
along the first dimension over the data-parallel ranks. What remains are boxes of the whole
tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from trainkit.train.torch_compat import local_part, local_slices, outline

Offsets = tuple[int, ...]


class Segment(NamedTuple):
    """A stretch of one dimension: where it begins in the local tensor and in the whole one, how
    long it is, and on how many tensor-parallel ranks it lies."""

    local: int
    whole: int
    length: int
    replicas: int = 1


@dataclass(frozen=True)
class TensorLayout:
    """How tensor parallelism cuts a tensor of `shape`: along `dim` into segments that lie one
    after another in the local tensor."""

    shape: tuple[int, ...]
    dim: int
    segments: tuple[Segment, ...]

    @property
    def local_shape(self) -> tuple[int, ...]:
        """What one tensor-parallel rank holds."""
        return (
            *self.shape[: self.dim],
            sum(s.length for s in self.segments),
            *self.shape[self.dim + 1 :],
        )


def replicated_layout(shape: tuple[int, ...], replicas: int) -> TensorLayout:
    """The layout of a tensor that every one of `replicas` tensor-parallel ranks holds in whole."""
    return TensorLayout(shape, 0, (Segment(0, 0, shape[0], replicas),))


class ShardBox(NamedTuple):
    """A box of this rank's shard of a tensor: `length` from `start` along `dim`; where it lies
    in the whole; how many tensor-parallel ranks hold the same."""

    dim: int
    start: int
    length: int
    offsets: Offsets
    replicas: int

    def of(self, local: Tensor) -> Tensor:
        """The box of a shard."""
        return local.narrow(self.dim, self.start, self.length)


@dataclass(frozen=True)
class ShardedParameter:
    """A parameter that this rank holds a part of.

    Args:
        name: in the whole model.
        parameter: as fully_shard left it.
        layout: how tensor parallelism cuts it.
        counts: whether its elements count in the gradient's norm; the second copy of tied weights
            does not.
        copies: data-parallel copies of it (HSDP, ZeRO 0).
    """

    name: str
    parameter: Tensor
    layout: TensorLayout
    counts: bool = True
    copies: int = 1

    @cached_property
    def boxes(self) -> tuple[ShardBox, ...]:
        """The boxes that this rank's shard consists of, none where it is empty."""
        inside = local_slices(self.parameter)
        dim = self.layout.dim
        if any(s.start >= s.stop for s in inside):
            return ()
        found = []
        for segment in self.layout.segments:
            start = max(segment.local, inside[dim].start)
            stop = min(segment.local + segment.length, inside[dim].stop)
            if start < stop:
                offsets = [s.start for s in inside]
                offsets[dim] = segment.whole + start - segment.local
                found.append(
                    ShardBox(
                        dim,
                        start - inside[dim].start,
                        stop - start,
                        tuple(offsets),
                        segment.replicas,
                    )
                )
        return tuple(found)

    def views(self, tensor: Tensor) -> dict[Offsets, Tensor]:
        """Views of the boxes of a tensor that is shaped and sharded like the parameter (itself,
        its gradient, a moment), by where they lie in the whole."""
        local = local_part(tensor)
        return {box.offsets: box.of(local) for box in self.boxes}


def slices(offsets: Offsets, view: Tensor) -> tuple[slice, ...]:
    """Where a box lies in the whole tensor."""
    return tuple(
        slice(start, start + size) for start, size in zip(offsets, view.shape, strict=True)
    )


def saved_tensors(module: nn.Module) -> dict[str, Tensor]:
    """What training changes: parameters, and buffers that are saved."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def sharded_parameters(module: nn.Module, replicas: int) -> dict[str, ShardedParameter]:
    """Every tensor that is saved with its layout, which swapped modules name (`layouts`); the
    others are whole on each of `replicas` ranks."""
    named = {
        f"{prefix}.{name}": layout
        for prefix, part in module.named_modules()
        for name, layout in getattr(part, "layouts", {}).items()
    }
    return {
        name: ShardedParameter(
            name, p, named.get(name) or replicated_layout(tuple(p.shape), replicas)
        )
        for name, p in saved_tensors(module).items()
    }


class Shards(torch.Tensor):
    """Boxes of a tensor for torch.distributed.checkpoint (DCP), which asks by these three
    methods what there is to write and where to read into. Its own DTensor holds one box a rank;
    a fused projection has several. Reading writes into the views. Nothing can be computed with
    it.

    Args:
        parts: the boxes by their offsets; none on a rank that holds nothing of the tensor.
        shape, dtype: of the whole.
    """

    parts: dict[Offsets, Tensor]

    @staticmethod
    def __new__(
        cls, parts: dict[Offsets, Tensor], shape: tuple[int, ...], dtype: torch.dtype
    ) -> Shards:
        return outline(cls, shape, dtype)

    def __init__(
        self, parts: dict[Offsets, Tensor], shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        self.parts = parts

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(f"shards are for checkpoints only, not for {function}")

    def __repr__(self) -> str:  # type: ignore[override]
        return (
            f"Shards({list(self.shape)}:"
            f" {', '.join(f'{list(view.shape)} at {list(at)}' for at, view in self.parts.items())})"
        )

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(at), view.shape) for at, view in self.parts.items()]

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        def item(at: Offsets, view: Tensor) -> WriteItem:
            data = TensorWriteData(
                ChunkStorageMetadata(torch.Size(at), view.shape),
                TensorProperties(dtype=view.dtype),
                self.shape,
            )
            return WriteItem(MetadataIndex(fqn, at), WriteItemType.SHARD, tensor_data=data)

        return [item(at, view) for at, view in self.parts.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.parts[tuple(index.offset)]


def shards_of(parameter: ShardedParameter, tensor: Tensor) -> Shards:
    """A tensor like the parameter, for a checkpoint."""
    return Shards(parameter.views(tensor), parameter.layout.shape, tensor.dtype)


def model_tensors(parameters: Mapping[str, ShardedParameter]) -> dict[str, Shards]:
    """model.NAME of all parameters; of two copies the first."""
    return {f"model.{h.name}": shards_of(h, h.parameter) for h in reversed([*parameters.values()])}
