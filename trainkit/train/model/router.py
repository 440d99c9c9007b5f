"""How each token finds its experts: one function from a router's products to weights and experts,
and what losses of balance are made of.

Shapes: T tokens, E experts, K experts of a token, G groups of experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trainkit.families.contract import Routing

TINY = 1e-20  # of a sum of sigmoids, as DeepSeek-V3's published code has it


class Routed(NamedTuple):
    """What a router decides.

    Args:
        weights_TK: of the results of a token's experts, in fp32 or wider.
        experts_TK: their numbers, the best first.
        scores_TE: of all experts, in fp32 or wider.
    """

    weights_TK: Tensor
    experts_TK: Tensor
    scores_TE: Tensor


def best(scores: Tensor, count: int) -> Tensor:
    """Indices of the `count` highest of the last dimension, the highest first. Of equal ones the
    first is taken, on every device: torch.topk takes any."""
    first = torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :count]
    return first.clone()  # a view would keep the numbers of all experts


def _of_kept_groups(choice_TE: Tensor, routing: Routing) -> Tensor:
    """-inf for experts of groups that a token does not keep. Each counts what its best chosen /
    kept_groups experts count together (DeepSeek-V3, arXiv:2412.19437, section 2.1.2:
    the best two). Not 0: a bias may make scores of the others lower."""
    size = routing.experts // routing.groups
    by_group_TGE = choice_TE.view(len(choice_TE), routing.groups, size)
    judged = routing.chosen // routing.kept_groups
    of_group_TG = by_group_TGE.topk(judged, dim=-1).values.sum(-1)
    kept_TG = torch.zeros_like(of_group_TG, dtype=torch.bool)
    kept_TG = kept_TG.scatter(-1, best(of_group_TG, routing.kept_groups), value=True)
    kept_TGE: Tensor = by_group_TGE.masked_fill(~kept_TG[..., None], -torch.inf)
    return kept_TGE.flatten(-2)


def route(logits_TE: Tensor, bias_E: Tensor | None, routing: Routing) -> Routed:
    """The experts of each token and their weights. Softmax, sigmoid and sums are in fp32 or wider.

    Args:
        logits_TE: the router's products.
        bias_E: is added for choosing alone; None: nothing is.
        routing: the rules.
    """
    logits_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
    if routing.score == "sigmoid":
        scores_TE = logits_TE.sigmoid()
    elif routing.pre_softmax:
        scores_TE = logits_TE.softmax(-1)
    else:
        scores_TE = logits_TE
    choice_TE = scores_TE.detach()
    if bias_E is not None:
        choice_TE = choice_TE + bias_E
    if routing.groups:
        choice_TE = _of_kept_groups(choice_TE, routing)
    experts_TK = best(choice_TE, routing.chosen)
    weights_TK = scores_TE.gather(-1, experts_TK)
    if routing.score == "softmax" and not routing.pre_softmax:
        weights_TK = weights_TK.softmax(-1)
    elif routing.normalized and routing.score == "sigmoid":
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + TINY)
    elif routing.normalized:
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    return Routed(weights_TK * routing.scale, experts_TK, scores_TE)


def within_capacity(scores_BSE: Tensor, capacity: int) -> Tensor:
    """Which choices the experts keep, (B, S, E) of truth: of each sample and expert the `capacity`
    with the highest scores; of equal ones those of the first tokens.

    Args:
        scores_BSE: of what was chosen; -inf of what was not.
    """
    kept_BES = torch.zeros_like(scores_BSE.mT, dtype=torch.bool)
    return kept_BES.scatter(-1, best(scores_BSE.mT, capacity), value=True).mT


class Balanced(NamedTuple):
    """What a loss of balance is made of.

    Args:
        shares_TE: of each expert in a token's scores, which sum to 1.
        chosen_TK: the experts that count, by scores alone: without bias and without groups.
    """

    shares_TE: Tensor
    chosen_TK: Tensor


def balanced(logits_TE: Tensor, routed: Routed, routing: Routing) -> Balanced:
    """As Megatron-LM counts for its auxiliary losses (core/transformer/moe/moe_utils.py,
    compute_routing_scores_for_aux_loss)."""
    scores_TE = routed.scores_TE
    if routing.score == "sigmoid":
        shares_TE = scores_TE / (scores_TE.sum(-1, keepdim=True) + TINY)
    elif routing.pre_softmax:
        shares_TE = scores_TE
    else:
        shares_TE = scores_TE.softmax(-1)
    if routing.expert_bias or routing.groups:
        return Balanced(shares_TE, best(scores_TE.detach(), routing.chosen))
    return Balanced(shares_TE, routed.experts_TK)


def loads(experts: Tensor, count: int) -> Tensor:
    """How often each of `count` experts is there, int64: of (T, K) in all, (count,); of (B, S, K)
    in each sample, (B, count)."""
    flat = experts.flatten(-2)
    rows = flat.new_zeros(*flat.shape[:-1], count)
    return rows.scatter_add(-1, flat, torch.ones_like(flat))
