"""Products in float8, emulated: beside numbers rounded one by one, and beside torchao's."""

from __future__ import annotations

import os
import pickle
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from trainkit.ops.float8 import Float8Recipe, linear

RECIPES = ("tensorwise", "rowwise")
TORCHAO = "TRAINKIT_TORCHAO_PYTHON"  # an interpreter that has torchao 0.18 and torch
# Reads [(recipe, x, w, bias, g)] and writes what torchao's own emulation makes of them.
PEER = """
import dataclasses, pickle, sys
import torch
from torchao.float8 import Float8LinearConfig
from torchao.float8.float8_linear import Float8Linear
found = []
for recipe, x, w, bias, g in pickle.load(sys.stdin.buffer):
    layer = torch.nn.Linear(w.shape[1], w.shape[0], dtype=w.dtype)
    layer.weight.data, layer.bias.data = w, bias
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    x.requires_grad_()
    y = Float8Linear.from_float(layer, config)(x)
    y.backward(g)
    found.append([t.detach() for t in (y, x.grad, layer.weight.grad, layer.bias.grad)])
pickle.dump(found, open(sys.argv[1], "wb"))
"""


def recipe_of(name: str) -> Float8Recipe:
    return Float8Recipe(name == "rowwise", lambda x, _: x)


def case(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Input (2, 5, 24), weight (40, 24), bias and gradient, whose rows differ in size."""
    make = torch.Generator().manual_seed(3)
    x = torch.randn(2, 5, 24, generator=make) * torch.logspace(-3, 1, 5)[:, None]
    w = torch.randn(40, 24, generator=make) * 0.1
    g = torch.randn(2, 5, 40, generator=make) * 1e-4
    x[0, 2] = 0.0
    return x.to(dtype), w.to(dtype), torch.randn(40, generator=make).to(dtype), g.to(dtype)


def three(name: str, x: Tensor, w: Tensor, bias: Tensor, g: Tensor) -> list[Tensor]:
    """Result and gradients by input, weight and bias."""
    x, w, bias = (t.detach().requires_grad_() for t in (x, w, bias))
    y = linear(x, w, bias, recipe_of(name))
    y.backward(g)  # type: ignore[no-untyped-call]
    found = [y.detach(), x.grad, w.grad, bias.grad]
    assert all(t is not None for t in found)
    return [t for t in found if t is not None]


def values_of(mantissa: int, bias: int, most: float) -> Tensor:
    """All numbers of a format that are not negative, by its definition, in order: their number is
    the code, so that the even one of two neighbours has an even number."""
    steps = 2**mantissa
    found = [
        (code % steps / steps + (code >= steps)) * 2.0 ** (max(code // steps, 1) - bias)
        for code in range(128)
    ]
    return torch.tensor([v for v in found if v <= most], dtype=torch.float64)


FORMATS = {"e4m3": values_of(3, 7, 448.0), "e5m2": values_of(2, 15, 57344.0)}


def rounded(x_MD: Tensor, kind: str, name: str) -> Tensor:
    """Rows as float8 has them: the nearest number, of two the even one, by looking for it."""
    values = FORMATS[kind]
    highest = x_MD.abs().amax(-1, keepdim=True) if name == "rowwise" else x_MD.abs().amax()
    scale = (values[-1] / highest.double().clamp(min=1e-12)).float().double()
    if name == "rowwise":
        scale = 2.0 ** torch.floor(torch.log2(scale))
    scaled = (x_MD.double() * scale).float().double().clamp(-values[-1], values[-1])
    above = torch.searchsorted(values, scaled.abs().contiguous()).clamp(max=len(values) - 1)
    below = (above - 1).clamp(min=0)
    up, down = values[above] - scaled.abs(), scaled.abs() - values[below]
    nearest = torch.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    return values[nearest] * scaled.sign() / scale


@pytest.mark.parametrize("name", RECIPES)
def test_products_are_those_of_numbers_rounded_one_by_one(name: str) -> None:
    x, w, bias, g = case(torch.float32)
    x_TK, g_TN = x.flatten(0, 1), g.flatten(0, 1)
    kind = "e4m3" if name == "rowwise" else "e5m2"
    expected = [
        rounded(x_TK, "e4m3", name) @ rounded(w, "e4m3", name).T + bias,
        rounded(g_TN, kind, name) @ rounded(w.T, "e4m3", name).T,
        rounded(g_TN.T, kind, name) @ rounded(x_TK.T, "e4m3", name).T,
        g_TN.sum(0),
    ]
    for ours, theirs in zip(three(name, x, w, bias, g), expected, strict=True):
        gap = (ours.double().view_as(theirs) - theirs).norm() / theirs.norm()
        assert gap < 1e-6, gap


@pytest.mark.parametrize("name", RECIPES)
def test_it_is_near_to_the_product_and_not_it(name: str) -> None:
    x, w, bias, g = case(torch.float32)
    x_TK, g_TN = x.flatten(0, 1), g.flatten(0, 1)
    exact = [x_TK @ w.T + bias, g_TN @ w, g_TN.T @ x_TK]
    for ours, theirs in zip(three(name, x, w, bias, g), exact, strict=False):
        gap = (ours.view_as(theirs) - theirs).norm() / theirs.norm()
        assert 1e-3 < gap < 0.1


def test_a_scale_is_that_of_all_ranks() -> None:
    """Half of a weight, whose other half, elsewhere, has the highest number."""
    x, w, bias, _ = case(torch.float32)
    w[30] *= 8
    whole = linear(x, w, bias, recipe_of("tensorwise"))
    asked: list[str] = []

    def highest(amax: Tensor, group: str) -> Tensor:
        asked.append(group)
        return torch.maximum(amax, w.abs().amax())

    recipe = Float8Recipe(False, highest, weight=("tensor",))
    assert torch.equal(linear(x, w[:20], bias[:20], recipe), whole[..., :20])
    assert asked == ["tensor"]
    alone = linear(x, w[:20], bias[:20], recipe_of("tensorwise"))
    assert not torch.equal(alone, whole[..., :20])
    # rows' scales are powers of two of rows that are whole
    rows = linear(x, w[:20], bias[:20], recipe_of("rowwise"))
    assert torch.equal(rows, linear(x, w, bias, recipe_of("rowwise"))[..., :20])


@pytest.mark.skipif(TORCHAO not in os.environ, reason=f"{TORCHAO} names no Python with torchao")
def test_it_is_torchaos_bit_for_bit(tmp_path: Path) -> None:
    cases: list[tuple[Any, ...]] = [(name, *case()) for name in RECIPES]
    argv = [os.environ[TORCHAO], "-c", PEER, str(tmp_path / "found")]
    subprocess.run(argv, input=pickle.dumps(cases), check=True)
    theirs = pickle.loads((tmp_path / "found").read_bytes())
    for given, peer in zip(cases, theirs, strict=True):
        for ours, expected in zip(three(*given), peer, strict=True):
            assert torch.equal(ours, expected), given[0]
