"""Initial weights that depend on the seed and a parameter's name only, so that every layout starts from the same model."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn

from trainkit.jobs.schema import Model
from trainkit.train.torch_compat import local_part, local_slices

OUTPUT_PROJECTIONS = ("attention.out.weight", "mlp.down.weight")  # what is added to the residual stream


def initial_value(name: str, shape: tuple[int, ...], model: Model, seed: int) -> Tensor:
    """The whole initial value of one parameter, fp32 on the CPU.

    Biases are 0, norms 1, weights N(0, init_method_std); output projections have the deviation divided by
    sqrt(2 * num_layers), since as many are summed in the residual stream (GPT-2; Megatron's scaled_init_method_normal).
    """
    if name.endswith(".bias"):
        return torch.zeros(shape)
    if len(shape) == 1:
        return torch.ones(shape)
    std = model.init_method_std
    if name.endswith(OUTPUT_PROJECTIONS):
        std /= math.sqrt(2 * model.num_layers)
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.randn(shape, generator=generator) * std


@torch.no_grad()
def initialize(module: nn.Module, model: Model, seed: int, device: torch.device) -> None:
    """Give a module built on the meta device storage and its initial weights, one parameter at a time; sharded ones keep only their part."""
    module.to_empty(device=device)
    for name, parameter in module.named_parameters():
        whole = initial_value(name, tuple(parameter.shape), model, seed)
        local_part(parameter).copy_(whole[local_slices(parameter)])
