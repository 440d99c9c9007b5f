"""Experts in place of an MLP: a router sends each token to a few of them, and their results come
back weighted.

Shapes: B samples, S tokens of a sample, T = B S tokens, K experts of a token, R = T K rows of
tokens beside one another by expert, E experts, H hidden size, I width of an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainkit.jobs.schema import Model
from trainkit.ops import swiglu
from trainkit.ops.kernels import Kernels
from trainkit.train.model.attention import unchanged
from trainkit.train.model.router import Routed, balanced, loads, route, within_capacity


class _RowsByExpert(torch.autograd.Function):
    """Rows of tokens in the order of experts. Backward adds up a token's rows in the order of its
    choices, the same bits on every device and in every layout; that of indexing adds in any."""

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, order_R: Tensor, place_R: Tensor, chosen: int) -> Tensor:
        ctx.save_for_backward(place_R)
        ctx.chosen = chosen
        return x_TH[order_R // chosen]

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (place_R,) = ctx.saved_tensors
        dx_RH = upstream[0][place_R]
        tokens = len(dx_RH) // ctx.chosen
        return dx_RH.view(tokens, ctx.chosen, dx_RH.shape[-1]).sum(1), None, None, None


class _RowsByToken(torch.autograd.Function):
    """Rows in the order of experts back in the order of tokens and their choices, (R, H): a
    permutation, and so is its backward."""

    @staticmethod
    def forward(ctx: Any, y_RH: Tensor, order_R: Tensor, place_R: Tensor) -> Tensor:
        ctx.save_for_backward(order_R)
        return y_RH[place_R]

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (order_R,) = ctx.saved_tensors
        return upstream[0][order_R], None, None


class _BalanceLossAttached(torch.autograd.Function):
    """Its input, with a loss attached: backward gives that a gradient of 1, as if it were a part
    of the objective, and counts the loads. Backward runs once a micro-batch whatever is
    recomputed, and never in evaluation; forward does not."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, loss: Tensor, counts: Tensor, count: Callable[[Tensor], None]
    ) -> Tensor:
        ctx.save_for_backward(counts)
        ctx.count = count
        ctx.like = loss
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (counts,) = ctx.saved_tensors
        ctx.count(counts)
        return upstream[0], torch.ones_like(ctx.like), None, None


class Stacked(nn.Module):
    """The matrices of several experts, one below the other, and their biases, if they have some.

    Args:
        weight: all matrices.
        bias: all biases.
        layouts: how tensors here lie in the whole model's, by name.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        layouts: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        super().__init__()
        self.layouts = layouts
        self.weight = nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)


def nothing() -> None:
    """There is no other work."""


class ExpertMLPs(nn.Module):
    """SwiGLU of `count` experts: E times (2I, H), gates above values, and E times (I, H), stored
    (in, out) so that one expert is a block of rows in both.

    Args:
        model: the shape.
        count: experts.
        kernels: what they compute with.
    """

    def __init__(self, model: Model, count: int, kernels: Kernels) -> None:
        super().__init__()
        assert model.moe is not None
        self.count = count
        self.swiglu = swiglu_of(model, kernels)
        width = model.moe.ffn_hidden_size
        hidden = model.hidden_size
        biased = model.routing.bias
        ups, outs = (torch.empty(count * size) if biased else None for size in (2 * width, hidden))
        self.gate_up = Stacked(torch.empty(count * 2 * width, hidden), ups)
        self.down = Stacked(torch.empty(count * width, hidden), outs)

    def forward(
        self, x_RH: Tensor, loads_E: Tensor, meanwhile: Callable[[], None] = nothing
    ) -> Tensor:
        """Rows lie by expert, so many each; grouped products do not have the host wait for how
        many. `meanwhile` is called where rows travel to experts elsewhere: what it computes needs
        none of them. Here all are there."""
        hidden = x_RH.shape[-1]
        gate_up_E2IH = self.gate_up.weight.view(self.count, -1, hidden)
        down_EIH = self.down.weight.view(self.count, -1, hidden)
        if grouped(x_RH, down_EIH):
            ends_E = loads_E.cumsum(0).to(torch.int32)
            h = F.grouped_mm(x_RH, gate_up_E2IH.transpose(1, 2), offs=ends_E)
            h = self.swiglu(_biased(h, self.gate_up.bias, loads_E))
            y_RH = F.grouped_mm(h, down_EIH, offs=ends_E)
        else:
            lengths = loads_E.tolist()
            rows = torch.split(x_RH, lengths)
            h = torch.cat([x @ up.T for x, up in zip(rows, gate_up_E2IH.unbind(), strict=True)])
            h = self.swiglu(_biased(h, self.gate_up.bias, loads_E))
            rows = torch.split(h, lengths)
            y_RH = torch.cat([x @ down for x, down in zip(rows, down_EIH.unbind(), strict=True)])
        return _biased(y_RH, self.out_bias(hidden), loads_E)

    def out_bias(self, hidden: int) -> Tensor | None:
        """Of all experts here."""
        return self.down.bias


def swiglu_of(model: Model, kernels: Kernels) -> Callable[[Tensor], Tensor]:
    """What experts make of their gates and values."""
    return swiglu.clamped if model.routing.clamped else kernels.swiglu


def _biased(y_RW: Tensor, biases: Tensor | None, loads_E: Tensor) -> Tensor:
    """Rows by expert, `loads` each, with the expert's bias. A bias is laid beside its rows, so that
    its gradient is their sum in their order."""
    if biases is None:
        return y_RW
    of_experts = biases.view(len(loads_E), -1)
    pairs = zip(of_experts.unbind(), loads_E.tolist(), strict=True)
    return y_RW + torch.cat([bias_W.expand(rows, -1) for bias_W, rows in pairs])


def grouped(x_RH: Tensor, down_EIH: Tensor) -> bool:
    """Whether torch has one product for all experts: on GPUs, in bf16, of rows of whole 16
    bytes."""
    widths = (x_RH.shape[-1], down_EIH.shape[1])
    return x_RH.is_cuda and x_RH.dtype == torch.bfloat16 and not any(w % 8 for w in widths)


class Router(nn.Module):
    """A product for each expert. Its `expert_bias`, where it has one, is no parameter: it moves by
    a rule of its own (train/update/expert_loads.py), in fp32 whatever the model computes in."""

    expert_bias: Tensor | None

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.routing = model.routing
        self.weight = nn.Parameter(torch.empty(self.routing.experts, model.hidden_size))
        biased = self.routing.bias
        self.bias = nn.Parameter(torch.zeros(self.routing.experts)) if biased else None
        bias = torch.zeros(self.routing.experts) if self.routing.expert_bias else None
        self.register_buffer("expert_bias", bias)

    def forward(self, x_TH: Tensor) -> Tensor:
        if self.routing.wide:
            wide = torch.promote_types(x_TH.dtype, torch.float32)
            wide_E = None if self.bias is None else self.bias.to(wide)
            return F.linear(x_TH.to(wide), self.weight.to(wide), wide_E)
        return F.linear(x_TH, self.weight, self.bias)


class Dispatched(NamedTuple):
    """Tokens on their way to experts.

    Args:
        rows_RH: of the tokens, by expert.
        rows_E: how many each expert has.
        weights_TK: of what comes back.
        order_R: of (T, K) in the rows.
        place_R: of each of (T, K) among the rows.
        loss: of balance, summed over the tokens; None: nothing is learned.
        counts: how often each expert was chosen, and choices that were dropped.
    """

    rows_RH: Tensor
    rows_E: Tensor
    weights_TK: Tensor
    order_R: Tensor
    place_R: Tensor
    loss: Tensor | None
    counts: Tensor | None


class MixtureOfExperts(nn.Module):
    """What stands in a block in place of its MLP. Above a capacity, if there is one, choices are
    dropped in training: the others' weights stay as they are, and a token without any keeps the
    residual stream and the shared expert.

    What is put around it from outside may set `take` (of the block's tokens those that are routed
    here), `give` (what the block goes on with, of their results), `over_all` (counts of all tokens
    of a batch, of those here), `whole` (all tokens of the samples in their order, (B, S, ...), of
    what those here have), `own` (its inverse) and `experts` (what sends rows elsewhere).

    Args:
        model: the shape.
        kernels: what it computes with.
        shared: the expert that all tokens take, by its width.
    """

    def __init__(self, model: Model, kernels: Kernels, shared: Callable[[int], nn.Module]) -> None:
        super().__init__()
        assert model.moe is not None
        self.moe = model.moe
        self.routing = model.routing
        self.router = Router(model)
        self.experts: nn.Module = ExpertMLPs(model, model.moe.num_experts, kernels)
        width = model.moe.shared_expert_intermediate_size
        self.shared_expert = shared(width) if width else None
        self.take: Callable[[Tensor], Tensor] = unchanged
        self.give: Callable[[Tensor, Tensor], Tensor] = lambda y, _: y
        self.over_all: Callable[[Tensor], Tensor] = unchanged
        self.whole: Callable[[Tensor], Tensor] = unchanged
        self.own: Callable[[Tensor], Tensor] = unchanged
        # since the last update: choices of each expert, and how many of all were dropped, (E + 1,)
        self.counts: Tensor | None = None
        # of the global batch before; the trainer keeps them. Zeros have no gradient, as even
        # loads have none
        self.previous_E = torch.zeros(self.routing.experts)

    def forward(self, x_BSH: Tensor, objective: Tensor | float | None) -> Tensor:
        """`objective`: what losses are multiplied with in the objective, for a sum over tokens;
        None: there is no backward."""
        own_BSH = self.take(x_BSH)
        learns = objective is not None and torch.is_grad_enabled()
        sent = self.dispatched(own_BSH, learns)
        shared: list[Tensor] = []
        y_RH = self._computed(sent, partial(self._share, x_BSH, shared))
        y_BSH = self.combined(y_RH, sent).view(own_BSH.shape)
        if objective is not None and sent.loss is not None:
            loss = sent.loss * objective
            y_BSH = _BalanceLossAttached.apply(y_BSH, loss, sent.counts, self._count)  # type: ignore[no-untyped-call]
        y_BSH = self.give(y_BSH, x_BSH)
        if not shared:
            self._share(x_BSH, shared)
        return y_BSH + shared[0] if shared else y_BSH

    def dispatched(self, x_BSH: Tensor, learns: bool) -> Dispatched:
        """Tokens as rows for the experts that the router chooses; losses where it learns."""
        x_TH = x_BSH.flatten(0, 1)
        logits_TE = self.router(x_TH)
        routed = route(logits_TE, self.router.expert_bias, self.routing)
        experts_TK = self._within_capacity(routed, x_BSH.shape[:2])
        experts_R = experts_TK.flatten()
        order_R = experts_R.argsort(stable=True)
        place_R = torch.empty_like(order_R)
        place_R[order_R] = torch.arange(len(order_R), device=order_R.device)
        rows_E = loads(experts_TK, self.routing.experts + 1)[:-1]
        rows_RH = _RowsByExpert.apply(x_TH, order_R, place_R, self.routing.chosen)  # type: ignore[no-untyped-call]
        loss = counts = None
        if learns:
            loss = self._balance(logits_TE, routed, x_BSH.shape[:2])
            chosen_E = loads(routed.experts_TK, self.routing.experts)
            counts = torch.cat([chosen_E, (chosen_E.sum() - rows_E.sum())[None]])
        return Dispatched(rows_RH, rows_E, routed.weights_TK, order_R, place_R, loss, counts)

    def combined(self, y_RH: Tensor, sent: Dispatched) -> Tensor:
        """The experts' results of each token, weighted, in one."""
        y_RH = _RowsByToken.apply(y_RH, sent.order_R, sent.place_R)  # type: ignore[no-untyped-call]
        y_TKH = y_RH.view(*sent.weights_TK.shape, y_RH.shape[-1]) * sent.weights_TK[..., None]
        return y_TKH.sum(1).to(y_RH.dtype)

    def _share(self, x_BSH: Tensor, shared: list[Tensor]) -> None:
        if self.shared_expert is not None:
            shared.append(self.shared_expert(x_BSH))

    def _within_capacity(self, routed: Routed, samples: Sequence[int]) -> Tensor:
        """Experts of each token, (T, K): E, which is none, where a choice is dropped. The capacity
        is of a sample, so that it is the same in every layout. In evaluation nothing is dropped:
        by weights, a later token could take an earlier one's place.

        Weights are compared in bf16. Tokens that begin a sample and are equal have equal weights
        but for rounding, which is not the same in every layout: there the first must count."""
        experts_TK = routed.experts_TK
        if not self._drops:
            return experts_TK
        by_position = self.moe.token_drop_policy == "position"
        weights_TK = routed.weights_TK.detach().bfloat16()
        scores_TE = torch.full_like(routed.scores_TE, -torch.inf, dtype=torch.bfloat16)
        scores_TE.scatter_(
            -1, experts_TK, torch.zeros_like(weights_TK) if by_position else weights_TK
        )
        scores_BSE = self.whole(scores_TE.view(*samples, -1))
        capacity = self.moe.capacity(scores_BSE.shape[1])
        kept_TE = self.own(within_capacity(scores_BSE, capacity)).flatten(0, 1)
        return experts_TK.where(kept_TE.gather(-1, experts_TK), self.routing.experts)

    def _computed(self, sent: Dispatched, meanwhile: Callable[[], None]) -> Tensor:
        """What experts make of their rows; of dropped ones, which lie last and stay here, 0."""
        if not self._drops:
            y_RH: Tensor = self.experts(sent.rows_RH, sent.rows_E, meanwhile)
            return y_RH
        kept = int(sent.rows_E.sum())
        y_RH = self.experts(sent.rows_RH[:kept], sent.rows_E, meanwhile)
        return F.pad(y_RH, (0, 0, 0, len(sent.rows_RH) - kept))

    @property
    def _drops(self) -> bool:
        return self.training and self.moe.expert_capacity_factor is not None

    def _balance(self, logits_TE: Tensor, routed: Routed, samples: Sequence[int]) -> Tensor:
        """The layer's losses, summed over the tokens here: of balance, E sum_e f_e P_e, which is 1
        for even loads (Fedus et al. 2021, arXiv:2101.03961, section 2.2; f of k choices), and z of
        the router's logits (Zoph et al. 2022, arXiv:2202.08906).

        f of the global batch (Qiu et al. 2025, arXiv:2501.11873) is that of the step before: this
        step's is not known before its last micro-batch, and what is known of it so far depends on
        the layout."""
        shares_TE, chosen_TK = balanced(logits_TE, routed, self.routing)
        shares_BSE = shares_TE.view(*samples, self.routing.experts)
        chosen_BSK = chosen_TK.view(*samples, self.routing.chosen)
        if self.moe.router_load_balancing_type == "global_aux_loss":
            counts_BE = self.previous_E[None]
        else:
            counts_BE = loads(chosen_BSK, self.routing.experts)
            if self.moe.router_load_balancing_type == "aux_loss":
                counts_BE = counts_BE.sum(0, keepdim=True)
            counts_BE = self.over_all(counts_BE)
        whole_B1 = counts_BE.sum(-1, keepdim=True).clamp(min=1)
        part_BE = counts_BE.to(shares_BSE.dtype) / whole_B1.to(shares_BSE.dtype)
        balance = self.routing.experts * (shares_BSE.sum(1) * part_BE).sum()
        found: Tensor = self.moe.aux_loss_coeff * balance
        if self.moe.z_loss_coeff:
            wide_TE = logits_TE.to(shares_TE.dtype)
            found = found + self.moe.z_loss_coeff * wide_TE.logsumexp(-1).square().sum()
        return found

    def _count(self, counts: Tensor) -> None:
        self.counts = counts if self.counts is None else self.counts + counts
