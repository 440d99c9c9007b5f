"""Which rank has which tokens of a sample."""

from __future__ import annotations

import pytest
import torch

from trainkit.train.parallel.context_group import chunks_of, dealt, joined, positions_of


@pytest.mark.parametrize(("size", "chunk"), [(1, 3), (2, 1), (2, 4), (3, 2), (4, 1), (5, 3)])
def test_every_token_is_on_one_rank(size: int, chunk: int) -> None:
    tokens = 2 * size * chunk
    positions = [positions_of(rank, size, tokens) for rank in range(size)]
    assert sorted(torch.cat(positions).tolist()) == list(range(tokens))
    x_BSH = torch.randn(2, tokens, 3)
    parts = dealt(x_BSH, size, 1)
    for part, positions_T in zip(parts, positions, strict=True):
        assert torch.equal(part, x_BSH[:, positions_T])
    assert torch.equal(joined(parts, 1), x_BSH)


def test_each_rank_has_a_chunk_from_both_ends() -> None:
    """As Megatron-LM and Transformer Engine deal them: with a causal mask all see equally many
    pairs of tokens."""
    assert [chunks_of(rank, 3) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]
    assert positions_of(1, 3, 12).tolist() == [2, 3, 8, 9]
    pairs = [int((positions_of(rank, 4, 48) + 1).sum()) for rank in range(4)]
    assert pairs == [294] * 4
