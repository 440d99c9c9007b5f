"""Experts in place of an MLP: against the plain formulas, and what is counted of them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainkit.jobs.schema import Model, Training
from trainkit.ops.kernels import REFERENCE
from trainkit.train.model.experts import MixtureOfExperts
from trainkit.train.model.head_loss import Labels, Losses
from trainkit.train.model.mlp import GatedMLP
from trainkit.train.model.transformer import Transformer
from trainkit.train.parallel.recompute import wrap_blocks

WIDTH, EXPERTS = 12, 5
VOCAB = 31
GATE_UP, DOWN = "experts.gate_up.weight", "experts.down.weight"


def model_of(**moe: Any) -> Model:
    table = {"num_experts": EXPERTS, "router_topk": 2, "ffn_hidden_size": WIDTH, **moe}
    shape = {"num_layers": 3, "hidden_size": 16, "num_attention_heads": 2, "seq_length": 8}
    return Model.model_validate({"family": "qwen3-moe", **shape, "moe": table})


def random_weights(module: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)


def layer_of(**moe: Any) -> MixtureOfExperts:
    model = model_of(**moe)
    layer = MixtureOfExperts(model, REFERENCE, partial(GatedMLP, model, REFERENCE)).double()
    random_weights(layer)
    return layer


def input_of(seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, 8, 16, dtype=torch.float64, generator=generator, requires_grad=True)


def gradient(module: nn.Module, name: str) -> Tensor:
    found = module.get_parameter(name).grad
    assert found is not None
    return found


def one_expert(layer: MixtureOfExperts, number: int, x: Tensor) -> Tensor:
    gate, up = layer.get_parameter(GATE_UP).view(EXPERTS, 2, WIDTH, 16)[number]
    down_IH = layer.get_parameter(DOWN).view(EXPERTS, WIDTH, 16)[number]
    y: Tensor = (F.silu(x @ gate.T) * (x @ up.T)) @ down_IH
    return y


@pytest.mark.parametrize("chosen", [2, EXPERTS])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_equal_experts_are_one_mlp(chosen: int, score: str) -> None:
    """Weights that sum to 1, of results that are equal (Megatron-LM#894)."""
    layer = layer_of(router_topk=chosen, router_score_function=score)
    dense = GatedMLP(model_of(), REFERENCE, WIDTH).double()
    random_weights(dense)
    with torch.no_grad():
        layer.get_parameter(GATE_UP).copy_(dense.gate_up.weight.repeat(EXPERTS, 1))
        layer.get_parameter(DOWN).copy_(dense.down.weight.T.repeat(EXPERTS, 1))
    x_BSH, other_BSH = input_of(), input_of()
    y_BSH, expected_BSH = layer(x_BSH, None), dense(other_BSH)
    torch.testing.assert_close(y_BSH, expected_BSH, rtol=1e-12, atol=1e-12)
    upstream = torch.randn(y_BSH.shape, dtype=torch.float64)
    torch.autograd.backward([y_BSH, expected_BSH], [upstream, upstream])
    torch.testing.assert_close(x_BSH.grad, other_BSH.grad, rtol=1e-11, atol=1e-11)
    whole = gradient(layer, GATE_UP).view(EXPERTS, -1, 16).sum(0)
    torch.testing.assert_close(whole, gradient(dense, "gate_up.weight"), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("chosen", [1, 3, EXPERTS])
@pytest.mark.parametrize("shared", [None, 6])
def test_results_are_the_weighted_sum(chosen: int, shared: int | None) -> None:
    """With every gradient, against one product for each expert and token, masked."""
    moe = {"router_norm_topk_prob": False, "shared_expert_intermediate_size": shared}
    layer = layer_of(router_topk=chosen, router_topk_scaling_factor=1.5, **moe)
    x_BSH = input_of()
    y_BSH = layer(x_BSH, None)
    upstream = torch.randn(y_BSH.shape, dtype=torch.float64)
    inputs = [x_BSH, *layer.parameters()]
    found = torch.autograd.grad(y_BSH, inputs, upstream)
    weights_BSE = (x_BSH @ layer.router.weight.T).softmax(-1)
    least = weights_BSE.sort(-1, descending=True).values[..., chosen - 1 : chosen]
    weights_BSE = 1.5 * weights_BSE * (weights_BSE >= least)
    results = [weights_BSE[..., [e]] * one_expert(layer, e, x_BSH) for e in range(EXPERTS)]
    plain_BSH = torch.stack(results).sum(0)
    if layer.shared_expert is not None:
        plain_BSH = plain_BSH + layer.shared_expert(x_BSH)
    torch.testing.assert_close(y_BSH, plain_BSH, rtol=1e-12, atol=1e-12)
    for one, other in zip(found, torch.autograd.grad(plain_BSH, inputs, upstream), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


def test_experts_without_tokens() -> None:
    """All tokens choose the same: the others have gradients of 0, not none."""
    layer = layer_of()
    with torch.no_grad():
        layer.router.weight.copy_(torch.tensor([[9.0], [8], [0], [-8], [-9]]).expand(-1, 16))
    x_BSH = input_of().detach().abs()
    torch.autograd.backward(layer(x_BSH, None).sum())
    down_EIH = gradient(layer, DOWN).view(EXPERTS, WIDTH, 16)
    assert [bool(each.any()) for each in down_EIH] == [True, True, False, False, False]


def plain_losses(x_BSH: Tensor, weight_EH: Tensor, model: Model) -> Tensor:
    """E sum_e f_e P_e of a micro-batch or of each sample, and z; both as sums over tokens."""
    moe = model.moe
    assert moe is not None
    logits_BSE = x_BSH @ weight_EH.T
    if model.routing.score == "sigmoid":
        scores_BSE = logits_BSE.sigmoid()
        shares_BSE = scores_BSE / scores_BSE.sum(-1, keepdim=True)
    else:
        shares_BSE = logits_BSE.softmax(-1)
    loss = moe.z_loss_coeff * (logits_BSE.exp().sum(-1).log() ** 2).sum()
    whole = moe.router_load_balancing_type == "aux_loss"
    for shares_TE in [shares_BSE.flatten(0, 1)] if whole else shares_BSE.unbind():
        tokens, value = len(shares_TE), torch.zeros((), dtype=torch.float64)
        chosen = shares_TE.topk(moe.router_topk).indices
        for expert in range(EXPERTS):
            part = (chosen == expert).double().sum() / (tokens * moe.router_topk)
            value = value + EXPERTS * part * shares_TE[:, expert].mean()
        loss = loss + moe.aux_loss_coeff * tokens * value
    return loss


@pytest.mark.parametrize("scope", ["aux_loss", "seq_aux_loss"])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("aux", "z"), [(0.7, 0.0), (0.0, 0.3), (0.7, 0.3)])
def test_gradients_of_balance_alone(scope: str, score: str, aux: float, z: float) -> None:
    """No gradient comes from above: what the router and its input get is the losses', times the
    factor of the objective."""
    moe = {"aux_loss_coeff": aux, "z_loss_coeff": z, "router_score_function": score}
    layer = layer_of(router_load_balancing_type=scope, **moe)
    x_BSH = input_of()
    torch.autograd.backward(layer(x_BSH, 0.25), torch.zeros_like(x_BSH))
    other_BSH, weight_EH = input_of(), layer.router.weight.detach().clone().requires_grad_()
    model = model_of(router_load_balancing_type=scope, **moe)
    torch.autograd.backward(0.25 * plain_losses(other_BSH, weight_EH, model))
    assert weight_EH.grad is not None and weight_EH.grad.norm() > 0.01
    torch.testing.assert_close(
        gradient(layer, "router.weight"), weight_EH.grad, rtol=1e-10, atol=1e-10
    )
    torch.testing.assert_close(x_BSH.grad, other_BSH.grad, rtol=1e-10, atol=1e-10)
    assert not gradient(layer, GATE_UP).any()


def test_balance_over_a_global_batch_goes_by_the_loads_before() -> None:
    """E sum_e f_e P_e with f of the step before: no gradient where there was none, then that of P
    alone, whatever this batch's loads are."""
    layer = layer_of(router_load_balancing_type="global_aux_loss", aux_loss_coeff=0.7)
    torch.autograd.backward(layer(input_of(), 0.25), torch.zeros_like(input_of()))
    assert not gradient(layer, "router.weight").any()
    layer.previous_E = torch.tensor([1.0, 2, 3, 4, 10], dtype=torch.float64)
    torch.autograd.backward(layer(input_of(), 0.25), torch.zeros_like(input_of()))
    weight_EH = layer.router.weight.detach().clone().requires_grad_()
    shares_BSE = (input_of() @ weight_EH.T).softmax(-1)
    torch.autograd.backward(0.25 * 0.7 * EXPERTS * (shares_BSE @ (layer.previous_E / 20)).sum())
    assert weight_EH.grad is not None and weight_EH.grad.norm() > 0.01
    torch.testing.assert_close(
        gradient(layer, "router.weight"), weight_EH.grad, rtol=1e-10, atol=1e-10
    )


def test_balance_without_a_coefficient_has_no_gradient() -> None:
    layer = layer_of()
    torch.autograd.backward(layer(input_of(), 0.25), torch.zeros_like(input_of()))
    assert not gradient(layer, "router.weight").any()


def test_losses_change_no_result() -> None:
    layer = layer_of(aux_loss_coeff=1.0, z_loss_coeff=1.0)
    assert torch.equal(layer(input_of(), 0.25), layer(input_of(), None))


def trained(training: dict[str, Any]) -> tuple[Transformer, list[Tensor]]:
    """A model after one micro-batch with losses of balance, and its gradients."""
    model = model_of(first_dense_layers=1, aux_loss_coeff=0.5, z_loss_coeff=0.1)
    module = Transformer(model, VOCAB).double()
    random_weights(module)
    wrap_blocks(module, model, Training.model_validate({"train_iters": 1, "lr": 1.0, **training}))
    step(module)
    return module, [p.grad for p in module.parameters() if p.grad is not None]


def step(module: Transformer) -> None:
    tokens_BS = torch.randint(0, VOCAB, (2, 8), generator=torch.Generator().manual_seed(1))
    losses = module(tokens_BS, Labels(tokens_BS.roll(-1, 1), scale=1 / 16))
    assert isinstance(losses, Losses)
    if losses.objective.requires_grad:
        torch.autograd.backward(losses.objective)


def counted(module: Transformer) -> list[list[int] | None]:
    """Loads of each layer with experts."""
    layers = [each for each in module.modules() if isinstance(each, MixtureOfExperts)]
    return [None if each.counts is None else each.counts.tolist() for each in layers]


MODES = [
    {"recompute_granularity": "full"},
    {"recompute_granularity": "full", "recompute_every": 2},
    {"recompute_granularity": "selective"},
]


@pytest.mark.parametrize("mode", MODES, ids=["full", "every-2nd", "selective"])
def test_recomputation_counts_once(mode: dict[str, Any]) -> None:
    """Loads, and losses of balance by their gradients."""
    plain, expected = trained({})
    again, gradients = trained(mode)
    assert counted(again) == counted(plain)
    assert [sum(each or ()) for each in counted(again)] == [2 * 2 * 8] * 2
    assert len(gradients) == len(expected)
    for one, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    step(again)
    assert [sum(each or ()) for each in counted(again)] == [2 * 2 * 2 * 8] * 2


def test_evaluation_counts_nothing() -> None:
    model = model_of(aux_loss_coeff=0.5)
    module = Transformer(model, VOCAB).double()
    random_weights(module)
    with torch.no_grad():
        step(module)
        step(module.eval())
    assert counted(module) == [None] * 3
