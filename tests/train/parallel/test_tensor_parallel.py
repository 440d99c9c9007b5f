"""How tensor parallelism cuts a model, without ranks: every element of every tensor lies
somewhere, and as often as its layout says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from trainkit.jobs.ranks import ParallelDegrees
from trainkit.jobs.schema import Model
from trainkit.train.model.transformer import build_on_meta
from trainkit.train.parallel import tensor_parallel
from trainkit.train.parallel.shards import (
    ShardedParameter,
    Shards,
    replicated_layout,
    sharded_parameters,
    shards_of,
    slices,
)
from trainkit.train.parallel.tensor_group import TensorGroup
from trainkit.train.update.replicas import squared_norm

VOCAB = 61
SIZES: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 8,
    "ffn_hidden_size": 71,
}
MODELS = {
    "gpt": Model(family="gpt", **SIZES),
    "neox": Model(family="gpt-neox", gpt_j_tied=True, **SIZES),
    "llama": Model(family="llama", num_query_groups=2, **SIZES),
    "qwen3": Model(family="qwen3", num_query_groups=2, **SIZES),
    "olmo2": Model(family="olmo2", num_query_groups=2, **SIZES),
    "llama-wide": Model(family="llama", num_query_groups=1, kv_channels=16, **SIZES),
}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_parts_make_up_the_whole(name: str, size: int) -> None:
    model = MODELS[name]
    shapes = {name: tuple(p.shape) for name, p in build_on_meta(model, VOCAB).named_parameters()}
    times = {name: np.zeros(shape) for name, shape in shapes.items()}
    expected = {name: np.zeros(shape) for name, shape in shapes.items()}
    for rank in range(size):
        module = build_on_meta(model, VOCAB)
        tensor_parallel.apply(module, VOCAB, TensorGroup(size, rank, sequence=True))
        held = sharded_parameters(module, size)
        assert held.keys() == shapes.keys()
        for key, h in held.items():
            assert h.layout.shape == shapes[key]
            assert tuple(h.parameter.shape) == h.layout.local_shape
            for cut in h.boxes:
                view = cut.of(h.parameter)
                times[key][slices(cut.offsets, view)] += 1
                expected[key][slices(cut.offsets, view)] = cut.replicas
    for key in shapes:
        assert (times[key] == expected[key]).all() and times[key].min() >= 1, key
    shared = {key for key in shapes if times[key].max() > 1 and not (times[key] == size).all()}
    of_keys = ["qkv", "k_norm"] if model.query_key_norm == "projection" else ["qkv"]
    of_keys = of_keys if model.query_groups < size else []
    assert shared == {k for k in shapes if any(part in k for part in of_keys)}


def test_one_rank_is_left_alone() -> None:
    module = build_on_meta(MODELS["gpt"], VOCAB)
    before = [type(part) for part in module.modules()]
    tensor_parallel.apply(module, VOCAB, TensorGroup())
    assert [type(part) for part in module.modules()] == before


def test_shards_are_views_and_compute_nothing() -> None:
    module = build_on_meta(MODELS["gpt"], VOCAB)
    tensor_parallel.apply(module, VOCAB, TensorGroup(2, 1))
    module.to_empty(device="cpu")
    held = sharded_parameters(module, 2)["layers.1.mlp.down.weight"]
    shards = shards_of(held, held.parameter)
    assert isinstance(shards, Shards) and tuple(shards.shape) == (32, 71)
    ((offsets, view),) = shards.parts.items()
    assert offsets == (0, 35) and tuple(view.shape) == (32, 36)
    view.fill_(3.0)
    assert (held.parameter == 3.0).all()
    with pytest.raises(NotImplementedError, match="for checkpoints only"):
        torch.add(shards, 1)


def test_the_norm_counts_each_element_once_and_misses_no_infinity() -> None:
    """On two ranks: what is whole on both counts half on each, what is split in full, the second
    copy of tied weights not at all, unless it is not finite."""

    def held(name: str, replicas: int, *, counts: bool = True) -> ShardedParameter:
        parameter = torch.nn.Parameter(torch.ones(4))
        parameter.grad = torch.full((4,), 2.0)
        return ShardedParameter(name, parameter, replicated_layout((4,), replicas), counts)

    mesh: Any = SimpleNamespace(degrees=ParallelDegrees(tensor=2), device=torch.device("cpu"))
    parameters = {
        "norm": held("norm", 2),
        "split": held("split", 1),
        "tied@last": held("tied", 1, counts=False),
    }
    assert float(squared_norm(parameters, mesh)) == 16 / 2 + 16
    parameters["tied@last"].parameter.grad[1] = torch.inf  # type: ignore[index]
    assert squared_norm(parameters, mesh).isnan()
