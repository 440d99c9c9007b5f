"""DeepSeek-V3 of random small shapes against transformers' model: logits, the experts that tokens
take, the gradient of every weight."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.train.expert_peers import SHAPES, all_in, beside, in_their_layout
from tests.train.peers import random_tokens
from trainkit.jobs.schema import Model
from trainkit.train.model.experts import Router
from trainkit.train.model.head_loss import Labels
from trainkit.train.model.router import route
from trainkit.train.model.transformer import Transformer

# of the largest gradient: smaller ones are differences of rounding
FLOOR = 1e-2


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
