"""Mistakes that trainers of others have made, put into this one: the comparison of layouts must see
each (tests/train/parallel/test_layout_matrix.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.train.model import experts
from trainkit.train.model.router import Routed, route
from trainkit.train.parallel import context_parallel, expert_parallel
from trainkit.train.parallel.initialize import STACKED
from trainkit.train.parallel.mesh import Mesh
from trainkit.train.parallel.ring_attention import ring_attention
from trainkit.train.parallel.shards import ShardedParameter
from trainkit.train.torch_compat import local_part
from trainkit.train.update import replicas, step
from trainkit.train.update.expert_loads import hold_loads, take_loads

Parameters = Mapping[str, ShardedParameter]
add_up, squared_norm = replicas.add_up, replicas.squared_norm
update = step.Step._update


def _nothing(*_: Any) -> None:
    """In the place of a sum."""


def _experts_times_two(parameters: Parameters, mesh: Mesh) -> None:
    add_up(parameters, mesh)
    for h in parameters.values():
        if h.name.endswith(STACKED):
            local_part(h.parameter.grad).mul_(2)  # type: ignore[arg-type]


def _squared_norm(part_of_experts: float) -> Callable[..., Tensor]:
    """The norm with a part only of what experts add to it."""

    def found(parameters: Parameters, *words: Any) -> Tensor:
        stacked = {key: h for key, h in parameters.items() if h.name.endswith(STACKED)}
        others = {key: h for key, h in parameters.items() if key not in stacked}
        return squared_norm(others, *words) + part_of_experts * squared_norm(stacked, *words)

    return found


def _own_norm(self: step.Step, agreed: Tensor, samples: int) -> Tensor:
    agreed[2] = squared_norm(self.model_parts.parameters, self.mesh) * dist.get_world_size()
    return update(self, agreed, samples)


def _loads_of_one_rank(*words: Any) -> Tensor:
    return take_loads(*words) * (dist.get_rank() == 0)


def _weights_without_gradient(*words: Any) -> Routed:
    routed = route(*words)
    return routed._replace(weights_TK=routed.weights_TK.detach())


class _CountedInForward(torch.autograd.Function):
    """As experts._BalanceLossAttached, which counts in backward."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, loss: Tensor, counts: Tensor, count: Callable[[Tensor], None]
    ) -> Tensor:
        count(counts)
        ctx.like = loss
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        return upstream[0], torch.ones_like(ctx.like), None, None


def _forgets_momenta(self: step.Step) -> None:
    for name, tensor in self.optimizer.state_tensors().items():
        if name.startswith("momentum") and dist.get_rank():
            local_part(tensor).zero_()


def _ring_without_sinks(*words: Any, sinks_A: Tensor, **more: Any) -> Tensor:
    return ring_attention(*words, sinks_A=sinks_A - 1e4, **more)


# What a mistake would be like: (object, attribute, what takes its place).
SABOTAGE: dict[str, tuple[Any, str, Any]] = {
    "tensor-parallel replicas are not summed": (replicas, "_over_tensor_ranks", _nothing),
    "tied copies are not summed": (replicas, "_over_tied", _nothing),
    # pytorch#160285, Megatron-LM#5956, Megatron-LM#7165
    "gradients of experts are multiplied": (replicas, "add_up", _experts_times_two),
    # Megatron-LM#5916
    "the norm leaves experts out": (replicas, "squared_norm", _squared_norm(0.0)),
    # radixark/Megatron-LM#80, DeepSpeed#8613
    "the norm has half of experts": (replicas, "squared_norm", _squared_norm(0.5)),
    # Automodel#3816, DeepSpeed#8478
    "each rank clips by its own norm": (step.Step, "_update", _own_norm),
    # Megatron-LM#5047, #3768, Automodel#1412
    "balance is of one rank's tokens": (expert_parallel, "_total", lambda counts, group: counts),
    # Automodel#1408
    "losses of balance are not attached": (
        experts.MixtureOfExperts,
        "_balance",
        lambda self, logits_TE, *_: 0 * logits_TE.sum(),
    ),
    "routers learn by balance alone": (experts, "route", _weights_without_gradient),
    # torchtitan#3666, #3686
    "biases do not move": (step, "move_biases", _nothing),
    # torchtitan#4154
    "loads are of one rank's tokens": (step, "take_loads", _loads_of_one_rank),
    # prime-rl#2953
    "loads are counted in forward": (experts, "_BalanceLossAttached", _CountedInForward),
    "loads of the step before are not there": (
        step,
        "hold_loads",
        lambda *words: hold_loads(*words).clone(),
    ),
    # Megatron-LM's own definition
    "capacities are of one rank's tokens": (
        expert_parallel,
        "_of_all_ranks",
        lambda x, group: torch.cat([x] * group.size, dim=1),
    ),
    # as Megatron-LM#1603: two ways of dispatch that differ
    "rows lie by rank, not by expert": (expert_parallel, "_reordered", lambda x_NH, lengths: x_NH),
    # prime-rl#3397
    "the ring drops sinks": (context_parallel, "ring_attention", _ring_without_sinks),
    # Megatron-LM#1464, TransformerEngine#1557
    "the ring doubles gradients of keys": (
        context_parallel,
        "ring_attention",
        lambda q, k, *words, **more: ring_attention(q, 2 * k - k.detach(), *words, **more),
    ),
    # Megatron-LM#6920
    "some ranks forget momenta": (step.Step, "after_loading", _forgets_momenta),
}
