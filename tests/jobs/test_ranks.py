"""The order of ranks, and how widths are shared."""

from __future__ import annotations

from itertools import product

import pytest

from trainkit.jobs.models import Model
from trainkit.jobs.ranks import (
    ParallelDegrees,
    RankCoordinates,
    coordinates_of,
    key_value_heads,
    rank_at,
    share_of_rank,
)


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (4, 1, 1, 1), (2, 3, 1, 4), (2, 2, 2, 3)])
def test_every_rank_has_one_place(sizes: tuple[int, int, int, int]) -> None:
    degrees = ParallelDegrees(*sizes)
    places = [coordinates_of(rank, degrees) for rank in range(degrees.world)]
    assert [rank_at(place, degrees) for place in places] == list(range(degrees.world))
    every = product(
        range(degrees.pipeline),
        range(degrees.replicate),
        range(degrees.shard),
        range(degrees.tensor),
    )
    # tensor fastest, then data (its copies outside its shards), then pipeline
    assert places == [RankCoordinates(*place) for place in every]


def test_neighbours() -> None:
    """TP 4, PP 2, DP 3: as Megatron-LM's order tp-dp-pp."""
    degrees = ParallelDegrees(tensor=4, pipeline=2, shard=3)
    assert (
        rank_at(RankCoordinates(0, 0, 0, 3), degrees) == 3
        and rank_at(RankCoordinates(0, 0, 1, 0), degrees) == 4
        and rank_at(RankCoordinates(1, 0, 0, 0), degrees) == 12
    )


@pytest.mark.parametrize(
    ("size", "parts", "unit"),
    [
        (50257, 8, 64),
        (6144, 8, 64),
        (11008, 8, 64),
        (64, 4, 16),
        (320, 2, 32),
        (3904, 64, 1),
        (1000, 8, 1),
        (61, 4, 16),
        (301, 2, 8),
        (7, 7, 1),
        (171, 2, 8),
    ],
)
def test_shares_cover_and_are_about_equal(size: int, parts: int, unit: int) -> None:
    """Megatron-LM, which asks for a multiple of the ranks, gives 160 of 320 to each of two;
    whole tiles of 64 would give 128 and 192."""
    shares = [share_of_rank(size, parts, index) for index in range(parts)]
    ends = [0, *(start + length for start, length in shares)]
    assert [start for start, _ in shares] == ends[:-1] and ends[-1] == size
    lengths = [length for _, length in shares]
    assert min(lengths) > 0 and max(lengths) <= max(1.05 * size / parts, -(-size // parts))
    assert all(start % unit == 0 for start, _ in shares)
    if size % parts == 0 and (size // parts) % 8 == 0:
        assert lengths == [size // parts] * parts or max(lengths) <= 1.05 * size / parts


@pytest.mark.parametrize(("groups", "tensor"), [(8, 4), (4, 4), (2, 4), (1, 8)])
def test_heads_of_keys_are_those_that_the_queries_read(groups: int, tensor: int) -> None:
    model = Model(
        family="llama",
        num_layers=1,
        hidden_size=64,
        num_attention_heads=8,
        num_query_groups=groups,
        seq_length=8,
    )
    for index in range(tensor):
        first, count = key_value_heads(model, tensor, index)
        queries = range(index * 8 // tensor, (index + 1) * 8 // tensor)
        assert sorted({query * groups // 8 for query in queries}) == list(
            range(first, first + count)
        )
