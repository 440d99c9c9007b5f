"""Weights from a Hugging Face folder into a model's parameters, each rank reading only the rows
it holds."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open

from trainkit.base.errors import raise_problems
from trainkit.jobs.schema import Model
from trainkit.train.huggingface.folder import further_layers, open_weights, problems_of
from trainkit.train.huggingface.names import RowMapping, table, with_output_factor
from trainkit.train.huggingface.quantized import StoredTensor, unpacked

if TYPE_CHECKING:  # torch is imported where weights are read: stages import this package too
    from torch import Tensor

    from trainkit.train.parallel.shards import ShardedParameter


def load_weights(
    folder: Path, parameters: Mapping[str, ShardedParameter], model: Model, rows: int
) -> list[int]:
    """Fill parameters, in whole or what is here of them, with the weights of a Hugging Face
    folder; fp16, bf16 and what is packed become the parameters' dtype.

    Everything is checked before the first weight is written. Files are mapped and read part by
    part: never more than one tensor is in memory.

    Args:
        folder: config.json and safetensors.
        parameters: of the model or a part of it, on their device.
        model: its shape.
        rows: of its embedding.

    Returns the numbers of the folder's layers that are not read: `further_layers`.

    Raises:
        ConfigError: exit 3, the folder is not of this model; all reasons.
    """
    import torch

    from trainkit.train.parallel.shards import slices

    weights = open_weights(folder, model.architecture.hugging_face)
    raise_problems(problems_of(folder, weights, model, rows))
    entries = table(model, rows)
    with torch.no_grad(), TensorFiles() as files:
        for sharded in parameters.values():
            for offsets, target in sharded.views(sharded.parameter).items():
                box = slices(offsets, target)
                for piece in entries[sharded.name].pieces:
                    start, stop = (
                        max(piece.start, box[0].start),
                        min(piece.start + piece.rows, box[0].stop),
                    )
                    if start < stop:
                        found = files.read(
                            weights.tensors[piece.source], piece, start, stop, box[1:]
                        )
                        found = with_output_factor(sharded.name, found, model, model.width_factor)
                        target[start - box[0].start : stop - box[0].start].copy_(found)
    return sorted({*further_layers(weights.tensors, model).values()})


class TensorFiles:
    """Opens safetensors files as they are needed, and closes them together."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._open = dict[Path, Any]()

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def read(
        self,
        stored: StoredTensor,
        piece: RowMapping,
        start: int,
        stop: int,
        columns: tuple[slice, ...],
    ) -> Tensor:
        """Some rows of one of our tensors.

        Args:
            stored: the tensor of the folder that has them.
            piece: which rows of ours it has.
            start, stop: rows of ours, which lie in `piece`.
            columns: of these rows.
        """
        rows = piece.part(start, stop)
        whole = slice(rows.start, rows.stop)  # files are read without steps
        at = (*columns, whole) if piece.transposed else (whole, *columns)
        if piece.expert is not None:
            at = (slice(piece.expert, piece.expert + 1), *at)
        found: Tensor
        if stored.scales is None:
            found = self._part(stored)[*at]
        else:
            found = unpacked(stored, at, self._part)
        if piece.expert is not None:
            found = found[0]
        return (found.T if piece.transposed else found)[:: rows.step]

    def _part(self, stored: StoredTensor) -> Any:
        if stored.file not in self._open:
            self._open[stored.file] = self._stack.enter_context(
                safe_open(stored.file, framework="pt")
            )
        return self._open[stored.file].get_slice(stored.name)
