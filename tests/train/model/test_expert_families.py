"""DeepSeek-V3 and gpt-oss of random small shapes against transformers' models: logits, the experts
that tokens take, the gradient of every weight."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.train.expert_peers import SHAPES, all_in, beside, gpt_oss, in_their_layout
from tests.train.peers import documents_of, random_model, random_tokens
from trainkit.jobs.schema import Model
from trainkit.train.decoding.continuation import DecodingState
from trainkit.train.model.experts import Router
from trainkit.train.model.head_loss import Labels
from trainkit.train.model.router import route
from trainkit.train.model.transformer import Transformer

# of the largest gradient: in smaller ones, as of a bias of keys, much cancels and rounding is left
FLOOR = 3e-2


def their_choices(theirs: Any, tokens_BS: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Logits, and the experts (T, K) of each layer that has some, sorted."""
    found: list[Tensor] = []
    hooks = [
        module.register_forward_hook(lambda _, __, made: found.append(made[2].sort(-1).values))
        for module in theirs.modules()
        if type(module).__name__.endswith("TopkRouter")
        or type(module).__name__.endswith("TopKRouter")
    ]
    logits_BSV = theirs(tokens_BS).logits
    for hook in hooks:
        hook.remove()
    return logits_BSV, found


def our_choices(ours: Transformer, tokens_BS: Tensor) -> tuple[Tensor, list[Tensor]]:
    found: list[Tensor] = []

    def keep(router: nn.Module, _: Any, logits_TE: Tensor) -> None:
        assert isinstance(router, Router)
        found.append(
            route(logits_TE, router.expert_bias, router.routing).experts_TK.sort(-1).values
        )

    hooks = [m.register_forward_hook(keep) for m in ours.modules() if isinstance(m, Router)]
    logits_BSV = ours(tokens_BS)
    for hook in hooks:
        hook.remove()
    assert isinstance(logits_BSV, Tensor)
    return logits_BSV, found


def refuse_another(model: Model, dtype: torch.dtype, tolerance: float) -> None:
    """Logits and each gradient within a tolerance of its norm."""
    ours, theirs = beside(model, dtype)
    tokens_BS = random_tokens(2, model.seq_length)
    labels_BS = random_tokens(2, model.seq_length, seed=2)
    with all_in(dtype):
        logits_BSV, their_experts = their_choices(theirs, tokens_BS)
        torch.autograd.backward(F.cross_entropy(logits_BSV.flatten(0, 1), labels_BS.flatten()))
    logits_BSV = logits_BSV.detach()
    with torch.no_grad():
        found_BSV, our_experts = our_choices(ours, tokens_BS)
    assert len(our_experts) == sum(map(model.sparse, range(model.num_layers)))
    for mine, other in zip(our_experts, their_experts, strict=True):
        assert torch.equal(mine, other)
    assert 0.3 < logits_BSV.std() < 3
    assert (found_BSV - logits_BSV).norm() < tolerance * logits_BSV.norm()
    losses: Any = ours(tokens_BS, Labels(labels_BS, scale=1 / labels_BS.numel()))
    torch.autograd.backward(losses.objective)
    gradients = {n: p.grad for n, p in ours.named_parameters() if p.grad is not None}
    assert len(gradients) == len(list(ours.parameters()))
    moved = in_their_layout(model, gradients)
    expected = {n: p.grad for n, p in theirs.named_parameters()}
    assert moved.keys() == expected.keys()
    least = FLOOR * max(float(g.norm()) for g in expected.values())
    for name, gradient in expected.items():
        apart = float((moved[name] - gradient).norm()) / max(float(gradient.norm()), least)
        assert apart < tolerance, (name, apart, model)


def compare(family: str, seed: str, shapes: int) -> None:
    draw = Random(seed)
    for _ in range(shapes):
        model = SHAPES[family](draw)
        refuse_another(model, torch.float32, 1e-5)
        refuse_another(model, torch.float64, 1e-10)


@pytest.mark.parametrize("family", SHAPES)
def test_a_family_with_experts_equals_transformers(family: str) -> None:
    compare(family, family, 6)


@pytest.mark.slow
@pytest.mark.parametrize("family", SHAPES)
def test_many_shapes_of_a_family_with_experts_equal_transformers(family: str) -> None:
    compare(family, f"{family} again", 60)


@pytest.mark.parametrize("family", SHAPES)
@torch.no_grad()
def test_a_text_in_parts(family: str) -> None:
    """Read in parts of any length, it goes on as read at once."""
    draw = Random(family)
    for cuts in ((1, 2, 7), (5,), (11,)):
        model = SHAPES[family](draw, seq_length=12, max_position_embeddings=64)
        ours = random_model(model, torch.float64).eval()
        tokens_S = random_tokens(1, 12)[0]
        expected_SV = ours(tokens_S[None])[0]
        text = DecodingState(ours)
        for first, stop in pairwise((0, *cuts, 12)):
            found_V = text.read(tokens_S[first:stop].tolist())
            torch.testing.assert_close(found_V, expected_SV[stop - 1], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("family", SHAPES)
@torch.no_grad()
def test_documents_do_not_see_each_other(family: str) -> None:
    """Two of a sample, as if each were alone."""
    model = SHAPES[family](Random(family), seq_length=12, max_position_embeddings=64)
    ours = random_model(model, torch.float64).eval()
    tokens_BS = random_tokens(1, 12)
    positions_BS = torch.cat([torch.arange(5), torch.arange(7)])[None]
    found_SV = ours(tokens_BS, positions_BS=positions_BS, documents=documents_of(0, 5, 12))[0]
    alone_SV = torch.cat([ours(tokens_BS[:, :5])[0], ours(tokens_BS[:, 5:])[0]])
    torch.testing.assert_close(found_SV, alone_SV, rtol=1e-11, atol=1e-11)


def test_sinks_drop_nothing() -> None:
    with pytest.raises(ValueError, match="attention_dropout is not for family 'gpt-oss'"):
        gpt_oss(Random(0), attention_dropout=0.1)
