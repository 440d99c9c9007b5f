"""Choices of experts above a capacity: which are dropped, and what is left of a token."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.train.model.test_experts import EXPERTS, input_of, layer_of, one_expert
from trainkit.train.model.experts import MixtureOfExperts
from trainkit.train.model.router import within_capacity

TOKENS = 8  # of a sample


def kept(weights: list[list[float]], capacity: int) -> list[list[int]]:
    """Tokens that each expert of one sample keeps; 0 is no choice."""
    scores_SE = torch.tensor(weights)
    scores_SE = torch.where(scores_SE == 0, -torch.inf, scores_SE)
    found_ES = within_capacity(scores_SE[None], capacity)[0].mT
    return [
        [token for token in torch.where(found)[0].tolist() if weights[token][expert]]
        for expert, found in enumerate(found_ES)
    ]


def test_the_highest_weights_stay_and_of_equal_ones_the_first() -> None:
    weights = [[0.2, 0.8], [0.6, 0.4], [0.5, 0.0], [0.6, 0.4], [0.6, 0.4]]
    assert kept(weights, 1) == [[1], [0]]
    assert kept(weights, 2) == [[1, 3], [0, 1]]
    assert kept(weights, 3) == [[1, 3, 4], [0, 1, 3]]
    assert kept(weights, 4) == [[1, 2, 3, 4], [0, 1, 3, 4]]
    assert kept(weights, 9) == [[0, 1, 2, 3, 4], [0, 1, 3, 4]]


def plain(layer: MixtureOfExperts, x_BSH: Tensor) -> tuple[Tensor, int]:
    """By loops over samples, experts and tokens, with how many choices were dropped."""
    moe = layer.moe
    assert moe.expert_capacity_factor is not None
    capacity = math.ceil(TOKENS * moe.router_topk * moe.expert_capacity_factor / EXPERTS)
    logits_BSE = x_BSH @ layer.router.weight.T
    scores_BSE = (
        logits_BSE.sigmoid() if layer.routing.score == "sigmoid" else logits_BSE.softmax(-1)
    )
    samples, dropped = [], 0
    for x_SH, scores_SE in zip(x_BSH, scores_BSE, strict=True):
        best_SK = scores_SE.topk(moe.router_topk).indices
        weights_SE = torch.zeros_like(scores_SE).scatter(1, best_SK, scores_SE.gather(1, best_SK))
        weights_SE = weights_SE / weights_SE.sum(1, keepdim=True)
        stays_SE, compared_SE = torch.zeros_like(weights_SE), weights_SE.bfloat16()
        for expert in range(EXPERTS):
            chose = [token for token in range(TOKENS) if weights_SE[token, expert]]
            if moe.token_drop_policy != "position":
                chose.sort(key=lambda token: -compared_SE[token, expert].item())
            stays_SE[chose[:capacity], expert] = 1
            dropped += len(chose[capacity:])
        weights_SE = weights_SE * stays_SE
        results = [weights_SE[:, [e]] * one_expert(layer, e, x_SH) for e in range(EXPERTS)]
        samples.append(torch.stack(results).sum(0))
    y_BSH = torch.stack(samples)
    return y_BSH if layer.shared_expert is None else y_BSH + layer.shared_expert(x_BSH), dropped


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("policy", [None, "position"])
@pytest.mark.parametrize("factor", [0.1, 0.7, 1.0])
@pytest.mark.parametrize("shared", [None, 6])
def test_results_are_those_of_what_stays(
    score: str, policy: str | None, factor: float, shared: int | None
) -> None:
    """With every gradient, and what is counted: choices, and how many were dropped."""
    capacity: dict[str, Any] = {"expert_capacity_factor": factor, "token_drop_policy": policy}
    layer = layer_of(
        router_score_function=score, shared_expert_intermediate_size=shared, **capacity
    )
    x_BSH = input_of()
    y_BSH = layer(x_BSH, 1.0)
    upstream = torch.randn(y_BSH.shape, dtype=torch.float64)
    inputs = [x_BSH, *layer.parameters()]
    found = torch.autograd.grad(y_BSH, inputs, upstream)
    expected_BSH, dropped = plain(layer, x_BSH)
    assert dropped > 0
    torch.testing.assert_close(y_BSH, expected_BSH, rtol=1e-12, atol=1e-12)
    for one, other in zip(found, torch.autograd.grad(expected_BSH, inputs, upstream), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)
    assert layer.counts is not None
    assert layer.counts.tolist()[-1] == dropped
    assert layer.counts[:-1].sum() == 3 * TOKENS * 2


@pytest.mark.parametrize("rounding", [0.0, 1e-12, -1e-12])
def test_equal_tokens_stay_in_their_order(rounding: float) -> None:
    """A capacity of 4 of 8 tokens that choose alike, but for rounding; the others keep the shared
    expert alone."""
    layer = layer_of(expert_capacity_factor=1.25, shared_expert_intermediate_size=6)
    assert layer.shared_expert is not None
    x_BSH = input_of().detach()[:, :1] * (1 + rounding * torch.arange(TOKENS)[:, None])
    y_BSH, shared_BSH = layer(x_BSH, None), layer.shared_expert(x_BSH)
    assert torch.equal(y_BSH[:, 4:], shared_BSH[:, 4:])
    torch.testing.assert_close(y_BSH[:, :4], layer.eval()(x_BSH, None)[:, :4])
    assert ((y_BSH - shared_BSH)[:, :4].abs().amax(-1) > 1e-3).all()


@pytest.mark.parametrize("training", [True, False])
def test_nothing_is_dropped_below_the_capacity_or_in_evaluation(training: bool) -> None:
    """The same bits as without one: a factor of E / k is enough for all tokens in one expert."""
    without = layer_of().train(training)
    layer = layer_of(expert_capacity_factor=2.5 if training else 0.1).train(training)
    found = []
    for each in (layer, without):
        x_BSH = input_of()
        y_BSH = each(x_BSH, 1.0)
        inputs = [x_BSH, *each.parameters()]
        found.append([y_BSH, *torch.autograd.grad(y_BSH, inputs, torch.ones_like(y_BSH))])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize(("aux", "z"), [(0.7, 0.0), (0.0, 0.3)])
def test_losses_of_routers_know_no_capacity(aux: float, z: float) -> None:
    """They count what tokens chose."""
    gradients = []
    for factor in (None, 0.5):
        layer = layer_of(aux_loss_coeff=aux, z_loss_coeff=z, expert_capacity_factor=factor)
        torch.autograd.backward(layer(input_of(), 0.25), torch.zeros(3, TOKENS, 16).double())
        gradients.append(layer.router.weight.grad)
    assert gradients[0] is not None and gradients[0].abs().max() > 1e-3
    assert gradients[1] is not None and torch.equal(gradients[0], gradients[1])
