"""Experts by themselves: engines keep the matrices of each, a checkpoint of ours those of all of a
layer one below the other, and those down as (in, out) (trainkit/train/model/experts.py).

Expert e of `layers.0.mlp.experts.down.weight` is called `layers.0.mlp.experts.down.weight.e` here.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch import Tensor

from trainkit.base.lazy_dataclasses import dataclass, field
from trainkit.jobs.schema import Model
from trainkit.train.huggingface.names import Shape, table
from trainkit.train.huggingface.weights import NamedWeights

_STACKED = re.compile(r".+\.mlp\.experts\.(gate_up|down)\.weight")
_ONE = re.compile(rf"({_STACKED.pattern})\.(\d+)")


def shapes_apart(model: Model, vocab_size: int) -> dict[str, Shape]:
    """The shapes of a model's tensors, each expert's by themselves: (2I, H) up and (H, I) down, of
    width I and hidden size H."""
    found: dict[str, Shape] = {}
    for name, entry in table(model, vocab_size).items():
        stacked = _STACKED.fullmatch(name)
        if not stacked or model.moe is None:
            found[name] = entry.shape
            continue
        count = model.moe.num_experts
        shape = (entry.shape[0] // count, entry.shape[1])
        if stacked[1] == "down":
            shape = shape[::-1]
        found |= {f"{name}.{number}": shape for number in range(count)}
    return found


@dataclass
class Apart:
    """Named weights whose experts can be read by themselves. Of the stacked ones the last is kept:
    its experts are asked for one after the other."""

    weights: NamedWeights
    model: Model
    _last: tuple[str, Tensor] = field(default=("", torch.empty(0)))

    def read(self, name: str) -> Tensor:
        """One tensor, or one expert's part of one."""
        one = _ONE.fullmatch(name)
        if not one or self.model.moe is None:
            return self.weights.read(name)
        if self._last[0] != one[1]:
            self._last = (one[1], self.weights.read(one[1]))
        rows = self._last[1].chunk(self.model.moe.num_experts)[int(one[3])]
        return rows.T.contiguous() if one[2] == "down" else rows


def read_together(name: str, model: Model, read: Callable[[str], Tensor]) -> Tensor:
    """One of our tensors, put together where it is of all experts.

    Args:
        name: ours.
        model: the shape.
        read: gives a tensor by a name of `shapes_apart`.
    """
    stacked = _STACKED.fullmatch(name)
    if not stacked or model.moe is None:
        return read(name)
    parts = [read(f"{name}.{number}") for number in range(model.moe.num_experts)]
    return torch.cat([part.T for part in parts] if stacked[1] == "down" else parts)
