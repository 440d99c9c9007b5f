"""A wrong graph is found, a right one is not blamed, and looking changes nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainkit.train.proved_graphs import difference

Function = Callable[[nn.Linear, Tensor, float], Tensor]


def function(layer: nn.Linear, x: Tensor, dropped: float) -> Tensor:
    return x + F.dropout(F.gelu(layer(x)), dropped)


def rounded_otherwise(layer: nn.Linear, x: Tensor, dropped: float) -> Tensor:
    """In fp32 within, as a kernel does."""
    y = F.linear(x.float(), layer.weight.float(), layer.bias.float())
    return (x + F.dropout(F.gelu(y), dropped)).to(x.dtype)


def half_missing(layer: nn.Linear, x: Tensor, dropped: float) -> Tensor:
    """As by a loop in steps of a wider vector."""
    y = function(layer, x, dropped)
    return torch.where(torch.arange(y.shape[-1]) % 16 < 8, y, x)


def wrong_backward(layer: nn.Linear, x: Tensor, dropped: float) -> Tensor:
    y = function(layer, x, dropped)
    return y + layer.bias - layer.bias.detach()


def overwritten(layer: nn.Linear, x: Tensor, dropped: float) -> Tensor:
    return function(layer, x.detach().mul_(1e7) + x, dropped)


def nothing(layer: nn.Linear, x: Tensor, dropped: float) -> Tensor:
    return function(layer, x, dropped) * torch.nan


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("learning", [True, False])
@pytest.mark.parametrize(
    ("other", "dropped", "wrong"),
    [
        (rounded_otherwise, 0.0, ""),
        (rounded_otherwise, 0.1, ""),
        (half_missing, 0.0, "result is off by"),
        (wrong_backward, 0.0, "gradient is off by"),
        (overwritten, 0.0, "result is off by"),
        (overwritten, 0.1, "result has norm"),
        (nothing, 0.0, "result is off by nan"),
        (nothing, 0.1, "result has norm nan"),
    ],
)
def test_what_is_wrong_is_found(
    other: Function, dropped: float, wrong: str, dtype: torch.dtype, learning: bool
) -> None:
    torch.manual_seed(1)
    layer = nn.Linear(64, 64, dtype=dtype)
    x = torch.randn(8, 128, dtype=dtype)[:, :64].requires_grad_()  # no whole tensor
    before = x.detach().clone()
    state = torch.get_rng_state()
    with torch.set_grad_enabled(learning):
        said = difference(function, other, (layer, x, dropped))
    if learning or "gradient" not in wrong:
        assert said == "" if not wrong else wrong in said
    assert torch.equal(torch.get_rng_state(), state) and torch.equal(x, before)
    assert x.grad is None and all(each.grad is None for each in layer.parameters())


def test_what_cancels_is_not_judged() -> None:
    """A key's bias has no gradient but rounding."""

    def attended(bias: Tensor, x: Tensor) -> Tensor:
        return torch.softmax((x[:, None] * (x + bias)[None]).sum(-1), 1) @ x

    def by_product(bias: Tensor, x: Tensor) -> Tensor:
        return torch.softmax(x @ (x + bias).T, 1) @ x

    torch.manual_seed(1)
    given = (torch.randn(64, requires_grad=True), torch.randn(8, 64, requires_grad=True))
    assert difference(attended, by_product, given) == ""


def test_arguments_that_are_wrong_themselves_blame_nobody() -> None:
    layer = nn.Linear(4, 4)
    x = torch.full((2, 4), torch.nan, requires_grad=True)
    assert difference(function, rounded_otherwise, (layer, x, 0.0)) == ""
