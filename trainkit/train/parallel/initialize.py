"""Initial weights that depend on the seed and a parameter's name only, so that every layout
starts from the same model."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from trainkit.jobs.optimizers import role_of
from trainkit.jobs.schema import Model
from trainkit.train.parallel.shards import sharded_parameters, slices

# what is added to the residual stream
OUTPUT_PROJECTIONS = (
    *("attention.out.weight", "mlp.down.weight"),
    *("mlp.experts.down.weight", "mlp.shared_expert.down.weight"),
)
# one expert below the other
STACKED = ("mlp.experts.gate_up.weight", "mlp.experts.down.weight")


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


def _pieces(name: str, rows: int, model: Model) -> list[tuple[str, int]]:
    """What of a parameter is drawn by itself: (what it is called then, rows). Each expert's, so
    that a rank draws its own experts alone."""
    if model.moe is None or not name.endswith(STACKED):
        return [(name, rows)]
    experts = model.moe.num_experts
    return [(f"{name}.{expert}", rows // experts) for expert in range(experts)]


def _drawn(name: str, shape: tuple[int, ...], std: float, seed: int) -> Tensor:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    # in place: it may be the largest tensor there is
    return torch.randn(shape, generator=generator).mul_(std)


def initial_parts(
    name: str, shape: tuple[int, ...], model: Model, seed: int, wanted: range
) -> Iterator[tuple[int, Tensor]]:
    """The initial value of one parameter, fp32 on the CPU, in parts of rows with the first row of
    each, as far as there are `wanted` rows in them: biases and sinks 0, norms 1 less what is added
    to them, weights normal by `output_layer_init_method` for output projections and `init_method`
    for all others, embeddings and head included. Under muP matrices begin smaller by the root of
    the width's factor."""
    role = role_of(name, len(shape))
    if name.endswith((".bias", ".sinks.weight")) or role == "rule":
        yield 0, torch.zeros(shape)
    elif role == "vector":
        yield 0, torch.full(shape, 1 - model.architecture.norm.offset)
    else:
        output = name.endswith(OUTPUT_PROJECTIONS)
        std = deviation(model.output_layer_init_method if output else model.init_method, model)
        if role == "matrix":
            std /= math.sqrt(model.width_factor)
        start = 0
        for own, rows in _pieces(name, shape[0], model):
            if start < wanted.stop and wanted.start < start + rows:
                yield start, _drawn(own, (rows, *shape[1:]), std, seed)
            start += rows


def initial_value(name: str, shape: tuple[int, ...], model: Model, seed: int) -> Tensor:
    """The whole of it."""
    return torch.cat([part for _, part in initial_parts(name, shape, model, seed, range(shape[0]))])


@torch.no_grad()
def initialize(module: nn.Module, model: Model, seed: int) -> None:
    """Fill a module that has storage with its initial weights, one parameter at a time; of a
    split or sharded one only what is here."""
    for sharded in sharded_parameters(module, 1).values():
        views = {
            offsets: view
            for offsets, view in sharded.views(sharded.parameter).items()
            if view.numel()
        }
        shape = sharded.layout.shape
        wanted = range(
            min((at[0] for at in views), default=0),
            max((at[0] + len(view) for at, view in views.items()), default=0),
        )
        for first, part in initial_parts(sharded.name, shape, model, seed, wanted):
            for at, view in views.items():
                start = max(at[0], first)
                stop = min(at[0] + len(view), first + len(part))
                if start < stop:
                    taken = (slice(start - first, stop - first), *slices(at, view)[1:])
                    view[start - at[0] : stop - at[0]] = part[taken]
