"""Initial weights: which deviation, for whom, and that nothing but seed and name decides them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.train.peer_shapes import CASES, ONE_OF_EACH
from trainkit.jobs.schema import Model
from trainkit.train.model.transformer import Transformer, build_on_meta
from trainkit.train.parallel.initialize import deviation, initial_value, initialize

NEOX_20B = Model(
    family="gpt-neox", num_layers=44, hidden_size=6144, num_attention_heads=64, seq_length=2048
)


def initialized(model: Model, vocab: int = 97, seed: int = 1) -> Transformer:
    module = build_on_meta(model, vocab).to_empty(device="cpu")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(torch.nan)  # what is not written shows
    initialize(module, model, seed)
    return module


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("normal", 0.02),
        ("scaled", 0.0021320071635561044),
        ("small_init", 0.008068715304598786),
        ("wang_init", 0.0005798981398634418),
    ],
)
def test_deviations_of_20b(method: str, expected: float) -> None:
    """0.02, 0.02 / sqrt(88), sqrt(2 / 30720), 2 / (44 sqrt(6144)); the last two are what 20B was
    trained from."""
    assert deviation(method, NEOX_20B) == pytest.approx(expected, rel=1e-12)
    twice = NEOX_20B.model_copy(update={"init_method_std": 0.04})
    ratio = 2 if method in ("normal", "scaled") else 1
    assert deviation(method, twice) == pytest.approx(ratio * expected, rel=1e-12)


@pytest.mark.parametrize("name", ONE_OF_EACH)
@pytest.mark.parametrize(
    ("method", "output"),
    [("normal", "scaled"), ("small_init", "wang_init"), ("wang_init", "normal")],
)
def test_which_parameters_get_which(name: str, method: str, output: str) -> None:
    """Output projections by output_layer_init_method; embeddings, head and all other matrices by
    init_method; biases 0, norms 1 with what is added to them."""
    shape = {
        "num_layers": 3,
        "hidden_size": 192,
        "init_method": method,
        "output_layer_init_method": output,
    }
    model = CASES[name].model_copy(update=shape)
    parameters = dict(initialized(model, vocab=300).named_parameters())
    down = (".attention.out.weight", ".mlp.down.weight", ".experts.down.weight")
    outputs = {n for n in parameters if n.endswith(down)}
    assert len(outputs) == 6
    for n, p in parameters.items():
        value = p.detach()
        if n.endswith(".bias"):
            assert value.count_nonzero() == 0, n
        elif "norm" in n:
            assert torch.equal(value, torch.full_like(value, 1 - model.architecture.norm.offset)), n
        else:
            expected = deviation(output if n in outputs else method, model)
            count = value.numel()
            # five standard errors
            assert value.std().item() == pytest.approx(expected, rel=5 / math.sqrt(2 * count)), n
            assert abs(value.mean().item()) < 5 * expected / math.sqrt(count), n
            # normal, not uniform
            assert (value.abs() < expected).float().mean().item() == pytest.approx(
                0.6827, abs=5 * 0.466 / math.sqrt(count)
            ), n


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_the_value_depends_on_seed_and_name_only(name: str) -> None:
    """Not on the generators of torch, which it leaves alone, nor on the other parameters."""
    model = CASES[name]
    torch.manual_seed(1)
    first = dict(initialized(model).named_parameters())
    torch.manual_seed(2)
    state = torch.get_rng_state()
    second = dict(initialized(model).named_parameters())
    assert torch.equal(torch.get_rng_state(), state)
    for n, p in first.items():
        assert torch.equal(p, second[n]), n
        assert torch.equal(p, initial_value(n, tuple(p.shape), model, 1)), n
    other = dict(initialized(model, seed=2).named_parameters())
    assert {n for n in first if not torch.equal(first[n], other[n])} == {
        n for n, p in first.items() if p.dim() == 2
    }


def test_a_part_of_the_model_gets_its_part() -> None:
    """As a pipeline stage would: the last two layers and the head alone."""
    model = CASES["neox"].model_copy(update={"num_layers": 4})
    whole, stage = initialized(model), build_on_meta(model, 97)
    for n in ("0", "1"):
        del stage.layers[n]
    stage.embed_tokens = None  # type: ignore[assignment]
    stage.to_empty(device="cpu")
    initialize(stage, model, 1)
    expected = dict(whole.named_parameters())
    found = dict(stage.named_parameters())
    assert len(found) == 2 * 12 + 2 + 1
    assert all(torch.equal(p, expected[n]) for n, p in found.items())


def test_names_and_seeds_have_streams_of_their_own() -> None:
    """No two alike, and no likeness between them: layers, kinds, neighbouring seeds, and names
    that run into seeds."""
    model, shape = CASES["neox"], (100, 100)
    names = [
        f"layers.{i}.{kind}.weight" for i in (0, 1, 11) for kind in ("attention.qkv", "mlp.up")
    ] + ["head.weight", "1head.weight"]
    draws: list[Tensor] = [
        initial_value(n, shape, model, seed).flatten()
        for n in names
        for seed in (0, 1, 11, 2**63 - 1)
    ]
    likeness = torch.corrcoef(torch.stack(draws)) - torch.eye(len(draws))
    assert likeness.abs().max() < 6 / 100  # six standard errors


def test_values_do_not_change_with_time() -> None:
    """Runs of different versions of trainkit start from the same weights: two numbers, written
    down."""
    value = initial_value("layers.0.mlp.up.weight", (4, 2), CASES["gpt"], 1234)
    assert value.dtype == torch.float32
    assert value[0].tolist() == pytest.approx([0.0163798146, -0.0345210694], rel=1e-5)
