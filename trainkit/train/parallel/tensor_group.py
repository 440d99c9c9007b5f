"""The ranks that one layer is split over, and how they communicate.

Shapes: B samples of a micro-batch, S tokens of a sample (between split layers, with sequence
parallelism, this rank's part of them), H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trainkit.train.torch_compat import gathered, scattered, summed

# what every rank calls its own tensor-parallel group: a group's name is a constant of compiled
# graphs, which so are the same on all
TENSOR = "trainkit-tensor"


@dataclass(frozen=True)
class TensorGroup:
    """The ranks that one layer is split over. Strings and numbers: no object of torch's gets
    into a compiled graph.

    Args:
        size, rank: of the group.
        sequence: activations between the split layers are split along the sequence (Korthikanti et
            al. 2022, arXiv:2205.05198, section 4.2.2).
        name: the group's.
    """

    size: int = 1
    rank: int = 0
    sequence: bool = False
    name: str = TENSOR


def enter(x_BSH: Tensor, group: TensorGroup) -> Tensor:
    """From what lies between the split layers to what a split layer reads: all tokens."""
    if group.sequence:
        return torch.cat(gathered(x_BSH, group.size, group.name).chunk(group.size), dim=1)
    return x_BSH


def leave(x_BSH: Tensor, group: TensorGroup) -> Tensor:
    """From the partial sums that a split layer makes to what lies between: the sum, with
    sequence parallelism this rank's tokens of it."""
    if group.sequence:
        return scattered(torch.cat(x_BSH.chunk(group.size, dim=1)), group.size, group.name)
    return summed(x_BSH, group.name)


def own_tokens(x_S: Tensor, group: TensorGroup) -> Tensor:
    """With sequence parallelism this rank's part of the last dimension."""
    return x_S.chunk(group.size, dim=-1)[group.rank] if group.sequence else x_S
