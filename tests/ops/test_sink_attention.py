"""Attention with a sink against a softmax over one more column, and by differences."""

from __future__ import annotations

import math
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from trainkit.ops import sink_attention as ops
from trainkit.ops.sink_attention import sink_attention

Leaves = tuple[Tensor, Tensor, Tensor, Tensor]


def leaves(
    queries: int,
    tokens: int,
    heads: int,
    groups: int,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Leaves:
    """Queries, keys, values, sinks."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2, heads, queries, 4), (2, groups, tokens, 4), (2, groups, tokens, 4), (heads,)]
    q, k, v, sinks = (
        torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes
    )
    return q, k, v, sinks


def with_a_column(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, scale: float, window: int
) -> Tensor:
    """The sink as one more column of the scores, dropped after the softmax."""
    each, before = q.shape[1] // k.shape[1], k.shape[2] - q.shape[2]
    k, v = k.repeat_interleave(each, 1), v.repeat_interleave(each, 1)
    at = torch.arange(q.shape[2])[:, None] + before
    keys = torch.arange(k.shape[2])
    hidden = (keys > at) | ((keys <= at - window) if window else False)
    scores = (q @ k.mT * scale).masked_fill(hidden, -math.inf)
    column = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    weights: Tensor = torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ v
    return weights


@settings(max_examples=40, deadline=None)
@given(
    queries=st.integers(1, 20),
    before=st.integers(0, 9),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 1), (3, 3)]),
    window=st.integers(0, 12),
    block=st.integers(1, 8),
    seed=st.integers(0, 99),
)
def test_equals_one_more_column(
    queries: int, before: int, heads: tuple[int, int], window: int, block: int, seed: int
) -> None:
    """Values and all gradients; blocks of any size, keys of a cache."""
    given_leaves = leaves(queries, queries + before, *heads, seed)
    with patch.object(ops, "BLOCK", block):
        found = sink_attention(*given_leaves, 0.7, window)
        expected = with_a_column(*given_leaves, 0.7, window)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        upstream = torch.randn(found.shape, dtype=torch.float64)
        mine, theirs = (torch.autograd.grad(y, given_leaves, upstream) for y in (found, expected))
    for gradient, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("window", [0, 3])
def test_gradients_by_differences(window: int) -> None:
    with patch.object(ops, "BLOCK", 4):
        assert torch.autograd.gradcheck(
            lambda q, k, v, sinks: sink_attention(q, k, v, sinks, None, window), leaves(6, 6, 4, 2)
        )


def test_one_visible_key_has_a_gradient() -> None:
    """Without the logsumexp's gradient those of query and key would be 0 there."""
    q, k, v, sinks = leaves(1, 1, 1, 1)
    gradients = torch.autograd.grad(sink_attention(q, k, v, sinks).sum(), (q, k, sinks))
    assert all(gradient.abs().max() > 1e-3 for gradient in gradients)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_no_farther_than_a_plain_softmax(dtype: torch.dtype) -> None:
    given_leaves = leaves(200, 200, 4, 2, dtype=torch.float64)
    exact = sink_attention(*given_leaves, 0.5, 50)
    q, k, v, sinks = (leaf.detach().to(dtype) for leaf in given_leaves)
    off, plain_off = (
        (of(q, k, v, sinks, 0.5, 50) - exact).std() for of in (sink_attention, with_a_column)
    )
    assert 0 < off < 1.1 * plain_off


def test_compiled_operations_are_what_they_say() -> None:
    q, k, v, sinks = leaves(5, 5, 4, 2)
    q, k, v = (x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    operands = [x.requires_grad_() for x in (q, k, v, sinks)]
    torch.library.opcheck(ops.forward.default, (*operands, 0.5, 2))
