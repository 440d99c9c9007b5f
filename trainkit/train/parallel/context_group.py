"""Context parallelism: which ranks share the tokens of a sample, and which tokens each has.

A sample is cut into 2 C chunks of equal length, for C ranks. Rank r has the chunks r and 2 C - 1 -
r, in this order: under a causal mask each rank then has equally much to compute (Megatron-LM,
core/utils.py, get_batch_on_this_cp_rank).

Shapes: S tokens of a whole sample, T = S / C tokens of a rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# what every rank calls its own context-parallel group; see tensor_group.TENSOR
CONTEXT = "trainkit-context"


@dataclass(frozen=True)
class ContextGroup:
    """The ranks that share the tokens of a sample.

    Args:
        size, rank: of the group.
        name: the group's.
    """

    size: int = 1
    rank: int = 0
    name: str = CONTEXT


def chunks_of(rank: int, size: int) -> tuple[int, int]:
    """Numbers of a rank's chunks, of 2 x size."""
    return rank, 2 * size - 1 - rank


def positions_of(rank: int, size: int, tokens: int, device: torch.device | None = None) -> Tensor:
    """Where a rank's tokens stand in the whole sample, (T,).

    Args:
        tokens: S, a multiple of 2 x size.
    """
    chunk = tokens // (2 * size)
    return torch.cat(
        [
            torch.arange(number * chunk, (number + 1) * chunk, device=device)
            for number in chunks_of(rank, size)
        ]
    )


def dealt(x: Tensor, size: int, dim: int) -> list[Tensor]:
    """The tokens of every rank, of whole samples' along `dim`."""
    chunks = x.chunk(2 * size, dim)
    return [
        torch.cat([chunks[number] for number in chunks_of(rank, size)], dim) for rank in range(size)
    ]


def joined(parts: list[Tensor], dim: int) -> Tensor:
    """The inverse of `dealt`."""
    size = len(parts)
    chunks: list[Tensor] = [parts[0]] * (2 * size)
    for rank, part in enumerate(parts):
        for number, chunk in zip(chunks_of(rank, size), part.chunk(2, dim), strict=True):
            chunks[number] = chunk
    return torch.cat(chunks, dim)
