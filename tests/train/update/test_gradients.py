"""Gradients of every parameter of every family against transformers' models."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.train.peer_shapes import CASES, ONE_OF_EACH, random_shape
from tests.train.peers import THEIRS, beside, in_their_layout, random_model, random_tokens
from trainkit.jobs.schema import Model
from trainkit.ops.cross_entropy import NO_LABEL
from trainkit.train.model.experts import Router
from trainkit.train.model.head_loss import Labels, Losses
from trainkit.train.model.router import route
from trainkit.train.model.transformer import Transformer

Z_LOSS = 1e-2
# Of the largest gradient of a random shape: smaller ones are differences of rounding, as those of
# queries that see two tokens.
FLOOR = 1e-2


def labels_for(model: Model, batch: int) -> Tensor:
    """(B, S), every fifth without a label."""
    labels_BS = random_tokens(batch, model.positions, seed=2)
    labels_BS.view(-1)[::5] = NO_LABEL
    return labels_BS


def our_gradients(
    ours: Transformer, tokens_BS: Tensor, labels: Labels
) -> tuple[Losses, dict[str, Tensor]]:
    losses = ours(tokens_BS, labels)
    assert isinstance(losses, Losses)
    torch.autograd.backward(losses.objective)
    gradients = {name: p.grad for name, p in ours.named_parameters()}
    assert all(g is not None for g in gradients.values())
    return losses, gradients  # type: ignore[return-value]


def their_gradients(
    theirs: Any, model: Model, tokens_BS: Tensor, labels_BS: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """(mean cross-entropy, gradients of it and the mean z-loss) of transformers' logits."""
    logits_NV, labels_N = theirs(tokens_BS).logits.flatten(0, 1), labels_BS.flatten()
    entropy = F.cross_entropy(logits_NV, labels_N, ignore_index=NO_LABEL)
    (entropy + Z_LOSS * logits_NV.logsumexp(1)[labels_N != NO_LABEL].square().mean()).backward()
    gradients = {name: p.grad for name, p in theirs.named_parameters()}
    if model.gpt_j_tied:  # two norms with one weight there: its gradient is their sum
        for name in [n for n in gradients if "post_attention_layernorm" in n]:
            gradients[name.replace("post_attention", "input")] += gradients.pop(name)
    return entropy.detach(), gradients


def refuse_other_experts(ours: Transformer, theirs: Any, tokens_BS: Tensor) -> None:
    """Every token takes the same experts in every layer, the best first."""
    chosen: list[Tensor] = []

    def here(router: Router, _: Any, logits_TE: Tensor) -> None:
        chosen.append(route(logits_TE, None, router.routing).experts_TK)

    hooks = [m.register_forward_hook(here) for m in ours.modules() if isinstance(m, Router)]
    hooks += [
        block.mlp.gate.register_forward_hook(lambda _, __, found: chosen.append(found[2]))
        for block in theirs.model.layers
        if hasattr(block.mlp, "gate")
    ]
    ours(tokens_BS)
    theirs(tokens_BS)
    for hook in hooks:
        hook.remove()
    layers = len(chosen) // 2
    assert layers and len(chosen) == 2 * layers
    for one, other in zip(chosen[:layers], chosen[layers:], strict=True):
        assert torch.equal(one, other)


def refuse_other_gradients(case: str | Model, floor: float = 0.0) -> None:
    """Of the mean loss over tokens with a label, z-loss included: each tensor within 1e-5 of its
    norm in fp32, within 1e-10 in fp64 (there with transformers' norms and rotary tables
    widened)."""
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-10)):
        model, ours, theirs = beside(case, dtype)
        tokens_BS, labels_BS = random_tokens(2, model.positions), labels_for(model, 2)
        with torch.no_grad():
            logits_BSV = theirs(tokens_BS).logits
            assert (ours(tokens_BS) - logits_BSV).norm() < tolerance * logits_BSV.norm()
            if model.moe is not None:
                refuse_other_experts(ours, theirs, tokens_BS)
        count = int((labels_BS != NO_LABEL).sum())
        entropy, expected = their_gradients(theirs, model, tokens_BS, labels_BS)
        losses, gradients = our_gradients(ours, tokens_BS, Labels(labels_BS, Z_LOSS, 1 / count))
        assert losses.tokens.item() == count
        assert losses.cross_entropy.item() / count == pytest.approx(entropy.item(), rel=tolerance)
        moved = in_their_layout(model, gradients, theirs)
        if model.gpt_j_tied:
            moved = {n: g for n, g in moved.items() if "post_attention_layernorm" not in n}
        assert moved.keys() == expected.keys()
        least = floor * max(g.norm().item() for g in expected.values())
        apart = {
            n: (moved[n] - expected[n]).norm().item() / max(g.norm().item(), least)
            for n, g in expected.items()
        }
        assert max(apart.values()) < tolerance, max(apart.items(), key=lambda item: item[1])


@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_transformers(name: str) -> None:
    refuse_other_gradients(name)


@pytest.mark.parametrize("family", THEIRS)
def test_gradients_of_random_shapes(family: str) -> None:
    draw = Random(family)
    for _ in range(4):
        refuse_other_gradients(random_shape(family, draw), FLOOR)


@pytest.mark.slow
@pytest.mark.parametrize("family", THEIRS)
def test_gradients_of_many_random_shapes(family: str) -> None:
    draw = Random(f"{family} again")
    for _ in range(60):
        refuse_other_gradients(random_shape(family, draw), FLOOR)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_micro_batches_add_up(name: str) -> None:
    """Gradients summed over samples are those of all samples at once: nothing in the model or
    its loss is a mean over a micro-batch."""
    model = CASES[name]
    tokens_BS, labels_BS = random_tokens(4, model.positions), labels_for(model, 4)
    _, whole = our_gradients(
        random_model(model, torch.float64), tokens_BS, Labels(labels_BS, Z_LOSS, 0.5)
    )
    ours = random_model(model, torch.float64)
    for rows in (slice(0, 1), slice(1, 4)):
        _, summed = our_gradients(ours, tokens_BS[rows], Labels(labels_BS[rows], Z_LOSS, 0.5))
    for n, gradient in whole.items():
        torch.testing.assert_close(summed[n], gradient, rtol=1e-11, atol=1e-11, msg=n)
