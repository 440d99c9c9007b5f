"""Initial weights that depend on the seed and a parameter's name only, so that every layout
starts from the same model."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn

from trainkit.jobs.optimizers import role_of
from trainkit.jobs.schema import Model
from trainkit.train.parallel.shards import sharded_parameters, slices

# what is added to the residual stream
OUTPUT_PROJECTIONS = ("attention.out.weight", "mlp.down.weight")


def deviation(method: str, model: Model) -> float:
    """Standard deviation of initial weights.

    normal: init_method_std. scaled: init_method_std / sqrt(2 * num_layers), since as many
    outputs are summed in the residual stream (GPT-2; Megatron's scaled_init_method_normal).
    small_init: sqrt(2 / (5 * hidden_size)) (Nguyen & Salazar 2019). wang_init: 2 / (num_layers *
    sqrt(hidden_size)) (Wang 2021). The last two as GPT-NeoX has them,
    megatron/model/init_functions.py.
    """
    layers = model.num_layers
    hidden = model.hidden_size
    return {
        "normal": model.init_method_std,
        "scaled": model.init_method_std / math.sqrt(2 * layers),
        "small_init": math.sqrt(2 / (5 * hidden)),
        "wang_init": 2 / (layers * math.sqrt(hidden)),
    }[method]


def initial_value(name: str, shape: tuple[int, ...], model: Model, seed: int) -> Tensor:
    """The whole initial value of one parameter, fp32 on the CPU: biases 0, norms 1 less what is
    added to them, weights normal by `output_layer_init_method` for output projections and
    `init_method` for all others, embeddings and head included. Under muP matrices begin smaller
    by the root of the width's factor."""
    if name.endswith(".bias"):
        return torch.zeros(shape)
    role = role_of(name, len(shape))
    if role == "vector":
        return torch.full(shape, 1 - model.architecture.norm.offset)
    std = deviation(
        model.output_layer_init_method if name.endswith(OUTPUT_PROJECTIONS) else model.init_method,
        model,
    )
    if role == "matrix":
        std /= math.sqrt(model.width_factor)
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    # in place: it may be the largest tensor there is
    return torch.randn(shape, generator=generator).mul_(std)


@torch.no_grad()
def initialize(module: nn.Module, model: Model, seed: int) -> None:
    """Fill a module that has storage with its initial weights, one parameter at a time; of a
    split or sharded one only what is here."""
    for parameter in sharded_parameters(module, 1).values():
        whole = initial_value(parameter.name, parameter.layout.shape, model, seed)
        for offsets, view in parameter.views(parameter.parameter).items():
            view.copy_(whole[slices(offsets, view)])
