"""Which experts tokens find, and with which weights: against a router that lists all experts of one
token and sorts them."""

from __future__ import annotations

import math
from random import Random

import pytest
import torch
from torch import Tensor

from trainkit.families.contract import Routing
from trainkit.train.model.router import balanced, loads, route

TOKENS = 40
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def scores_of(logits: list[float], routing: Routing) -> list[float]:
    """Of one token, by the formulas."""
    if routing.score == "sigmoid":
        return [1 / (1 + math.exp(-logit)) for logit in logits]
    if not routing.pre_softmax:
        return logits
    powers = [math.exp(logit) for logit in logits]
    total = sum(powers)
    return [power / total for power in powers]


def chosen_of(choice: list[float], routing: Routing) -> list[int]:
    """The best experts of the best groups: of equal ones the first."""
    every = range(routing.experts)
    if routing.groups:
        size, best = routing.experts // routing.groups, routing.chosen // routing.kept_groups
        groups = [choice[i * size : (i + 1) * size] for i in range(routing.groups)]
        worth = [sum(sorted(group, reverse=True)[:best]) for group in groups]
        order = sorted(range(routing.groups), key=lambda i: (-worth[i], i))
        kept = order[: routing.kept_groups]
        return sorted((e for e in every if e // size in kept), key=lambda e: (-choice[e], e))[
            : routing.chosen
        ]
    return sorted(every, key=lambda e: (-choice[e], e))[: routing.chosen]


def weights_of(scores: list[float], chosen: list[int], routing: Routing) -> list[float]:
    found = [scores[e] for e in chosen]
    if routing.score == "softmax" and not routing.pre_softmax:
        found = [math.exp(score) for score in found]
    elif not routing.normalized:
        return [routing.scale * score for score in found]
    return [routing.scale * score / sum(found) for score in found]


def random_routing(draw: Random) -> Routing:
    """Any of the rules. Groups are judged by one expert or two: a sum of two is exact in any
    order, so that equal groups are equal."""
    groups = draw.choice([0, 0, 2, 3, 4])
    kept = draw.randint(1, groups) if groups else 0
    size = draw.randint(2, 5)
    experts = groups * size or draw.randint(2, 17)
    return Routing(
        score=draw.choice(["softmax", "sigmoid"]),
        pre_softmax=draw.choice([False, True]),
        normalized=draw.choice([False, True]),
        experts=experts,
        chosen=kept * draw.randint(1, 2) or draw.randint(1, experts),
        scale=draw.choice([1.0, 2.5]),
        groups=groups,
        kept_groups=kept,
    )


def random_logits(draw: Random, experts: int, dtype: torch.dtype) -> Tensor:
    """(T, E): steps of a quarter, so that many are equal; of some tokens all are."""
    steps = draw.choice([2, 6, 30])
    rows = [[draw.randint(-steps, steps) / 4 for _ in range(experts)] for _ in range(TOKENS)]
    rows[0] = [0.25] * experts
    return torch.tensor(rows, dtype=dtype)


def random_bias(draw: Random, experts: int) -> Tensor | None:
    """(E,), of eighths; also one below which all scores fall."""
    kind = draw.choice(["none", "any", "negative"])
    if kind == "none":
        return None
    first, last = (-8, 8) if kind == "any" else (-80, -40)
    return torch.tensor([draw.randint(first, last) / 8 for _ in range(experts)])


def test_every_rule_against_sorting() -> None:
    """10^4 tokens. The choice itself is compared exactly, from the scores that the router has."""
    draw = Random(0)
    for number in range(250):
        routing, dtype = random_routing(draw), DTYPES[number % len(DTYPES)]
        logits_TE = random_logits(draw, routing.experts, dtype)
        bias_E = random_bias(draw, routing.experts)
        routed = route(logits_TE, bias_E, routing)
        wide = torch.promote_types(dtype, torch.float32)
        assert routed.weights_TK.dtype == routed.scores_TE.dtype == wide
        choice_TE = routed.scores_TE if bias_E is None else routed.scores_TE + bias_E
        experts = [chosen_of(choice, routing) for choice in choice_TE.tolist()]
        assert routed.experts_TK.tolist() == experts, routing
        scores = [scores_of(row, routing) for row in logits_TE.tolist()]
        both = zip(scores, experts, strict=True)
        weights = [weights_of(row, chosen, routing) for row, chosen in both]
        close = 1e-12 if dtype == torch.float64 else 1e-5
        for found, by_hand in ((routed.scores_TE, scores), (routed.weights_TK, weights)):
            wanted = torch.tensor(by_hand, dtype=torch.float64)
            torch.testing.assert_close(found.double(), wanted, rtol=close, atol=0.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("experts", [5, 64, 100])
def test_of_equal_experts_the_first_are_taken(experts: int, dtype: torch.dtype) -> None:
    """Equal products are equal scores, wherever in a row they stand."""
    for score in ("softmax", "sigmoid"):
        routing = Routing(score=score, experts=experts, chosen=5)
        logits_TE = torch.full((3, experts), -3.3, dtype=dtype)
        assert route(logits_TE, None, routing).experts_TK.tolist() == [[0, 1, 2, 3, 4]] * 3
        logits_TE[:, -1] = -3
        assert (
            route(logits_TE, None, routing).experts_TK.tolist() == [[experts - 1, 0, 1, 2, 3]] * 3
        )


def test_groups_judged_by_three() -> None:
    """By hand: group 1 has the best expert, group 0 the best three, group 2 the best two."""
    routing = Routing(
        score="sigmoid", experts=9, chosen=3, groups=3, kept_groups=1, normalized=False
    )
    scores = torch.tensor([[0.5, 0.5, 0.5, 0.9, 0.1, 0.1, 0.7, 0.7, 0.01]], dtype=torch.float64)
    routed = route(torch.logit(scores), None, routing)
    assert routed.experts_TK.tolist() == [[0, 1, 2]]
    assert routed.weights_TK.tolist() == [pytest.approx([0.5, 0.5, 0.5])]


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("pre_softmax", [False, True])
def test_balance_counts_the_choice_without_bias_and_groups(score: str, pre_softmax: bool) -> None:
    draw = Random(score)
    routing = Routing(
        score="sigmoid" if score == "sigmoid" else "softmax",
        pre_softmax=pre_softmax,
        expert_bias=score == "sigmoid",
        experts=8,
        chosen=2,
        groups=4,
        kept_groups=1,
    )
    logits_TE = random_logits(draw, 8, torch.float64)
    bias_E = torch.arange(8.0) if score == "sigmoid" else None
    routed = route(logits_TE, bias_E, routing)
    shares_TE, chosen_TK = balanced(logits_TE, routed, routing)
    plain = Routing(score=routing.score, experts=8, chosen=2)
    for token in range(TOKENS):
        scores = scores_of(logits_TE[token].tolist(), plain)
        shares = [score / sum(scores) for score in scores]
        assert shares_TE[token].tolist() == pytest.approx(shares, rel=1e-12)
        assert chosen_TK[token].tolist() == chosen_of(routed.scores_TE[token].tolist(), plain)
    assert not torch.equal(chosen_TK, routed.experts_TK)


def test_loads_in_all_and_of_each_sample() -> None:
    chosen_BSK = torch.tensor([[[0, 2], [2, 3]], [[0, 1], [0, 3]]])
    assert loads(chosen_BSK, 5).tolist() == [[1, 0, 2, 1, 0], [2, 1, 0, 1, 0]]
    assert loads(chosen_BSK.flatten(0, 1), 5).tolist() == [3, 1, 2, 2, 0]
