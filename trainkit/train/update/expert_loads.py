"""How often each expert was chosen in a step, and the bias that moves against uneven loads (Wang et
al. 2024, arXiv:2408.15664; DeepSeek-V3, arXiv:2412.19437, section 2.1.2).

Shapes: L blocks of the whole model, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from trainkit.jobs.schema import Model
from trainkit.train.model.experts import MixtureOfExperts
from trainkit.train.model.transformer import Block, Transformer


def _sparse(modules: Sequence[Transformer]) -> Iterator[tuple[int, MixtureOfExperts]]:
    for module in modules:
        for block in module.layers.values():
            assert isinstance(block, Block)
            if isinstance(block.mlp, MixtureOfExperts):
                yield block.number, block.mlp


def take_loads(modules: Sequence[Transformer], model: Model, device: torch.device) -> Tensor:
    """How often this rank's tokens chose each expert since this was last asked and, after the
    experts of each layer, how many of these choices were dropped: (L (E + 1),) in fp64, where sums
    of ranks are exact; 0 for layers that are elsewhere or have no experts."""
    assert model.moe is not None
    found = torch.zeros(model.blocks, model.moe.num_experts + 1, dtype=torch.float64, device=device)
    for number, mixture in _sparse(modules):
        if mixture.counts is not None:
            found[number] = mixture.counts
        mixture.counts = None
    return found.flatten()


def hold_loads(modules: Sequence[Transformer], model: Model, device: torch.device) -> Tensor:
    """Loads of a global batch, (L E,) in fp64 and 0 at first, that losses of balance read from now
    on: what is written into them counts for the next step."""
    assert model.moe is not None
    loads = torch.zeros(model.blocks * model.moe.num_experts, dtype=torch.float64, device=device)
    for number, mixture in _sparse(modules):
        mixture.previous_E = loads.view(model.blocks, -1)[number]
    return loads


@torch.no_grad()
def move_biases(modules: Sequence[Transformer], model: Model, loads: Tensor, skip: Tensor) -> None:
    """Once a step: the bias of an expert with less than the mean goes up by
    router_bias_update_rate, of one with more down.

    Args:
        loads: of the global batch, as `take_loads` has them.
        skip: shape (), true where nothing may change.
    """
    assert model.moe is not None
    loads_LE = loads.view(model.blocks, -1)[:, :-1]
    for number, mixture in _sparse(modules):
        bias_E = mixture.router.expert_bias
        if bias_E is not None:
            step_E = (loads_LE[number].mean() - loads_LE[number]).sign()
            step_E = torch.where(skip > 0, 0.0, step_E * model.moe.router_bias_update_rate)
            bias_E += step_E.to(bias_E.dtype)
