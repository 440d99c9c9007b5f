"""gelu and bias_gelu: right, the same every time, and hard to break."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.ops import op_checks
from tests.ops.op_cases import BOUNDS, EMPTY_SHAPES, SHAPES, WIDE_SHAPES, fused, numbers, same_bits
from tests.ops.op_checks import Operation
from trainkit.ops import gelu
from trainkit.ops.kernels import Kernels

OPERATIONS = [
    Operation("gelu", lambda kernels, x: kernels.gelu(x, "none")),
    Operation("gelu by tanh", lambda kernels, x: kernels.gelu(x, "tanh")),
    Operation(
        "bias_gelu", lambda kernels, x, bias: kernels.bias_gelu(x, bias, "none"), lambda s: [s[-1:]]
    ),
    Operation(
        "bias_gelu by tanh",
        lambda kernels, x, bias: kernels.bias_gelu(x, bias, "tanh"),
        lambda s: [s[-1:]],
    ),
]
each = pytest.mark.parametrize("operation", OPERATIONS, ids=lambda o: o.name)


@each
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_fused_is_the_reference(operation: Operation, dtype: torch.dtype) -> None:
    op_checks.check_exact(operation, SHAPES, dtype)


@pytest.mark.slow
@each
def test_wide_and_many_rows(operation: Operation) -> None:
    op_checks.check_exact(operation, WIDE_SHAPES, torch.bfloat16)


@each
def test_it_is_hard_to_break(operation: Operation) -> None:
    op_checks.check_gradient(operation, (2, 3, 5))
    op_checks.check_bits(operation)
    op_checks.check_layouts(operation, (6, 5, 40))
    op_checks.check_empty(operation, EMPTY_SHAPES)
    op_checks.check_not_finite(operation, (3, 40))
    op_checks.check_compiled(operation, (3, 40))


def exact(x: Tensor, approximate: str) -> Tensor:
    """In fp64, without the cancellation of 1 + erf(x)."""
    if approximate == "none":
        share: Tensor = torch.special.erfc(-x * 0.5**0.5) / 2
    else:
        share = torch.sigmoid(1.5957691216057308 * (x + 0.044715 * x**3))
    y: Tensor = x * share
    return y


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_fp32_is_as_exact_as_its_source_says(approximate: str) -> None:
    """csrc/kernels/activations.h: 5 units in the last place above -1, slopes to 3e-7, a relative
    2e-5 below until 1e-36."""
    x = torch.cat([torch.linspace(-14, 14, 400_001), torch.logspace(-40, 0, 10_001)])
    leaf = x.double().requires_grad_()
    expected = exact(leaf, approximate)
    [slopes] = torch.autograd.grad(expected.sum(), leaf)
    expected = expected.detach()
    kernels = fused()
    found = kernels.gelu(x, approximate).double()
    size = expected.abs().float()
    unit = (torch.nextafter(size, size + 1) - size).double()
    error = (found - expected).abs()
    above = x > -1
    assert (error / unit)[above].max() <= 5
    below = ~above & (size > 1e-36)
    assert (error / expected.abs())[below].max() < 2e-5
    assert (gelu.backward(torch.ones_like(x), x, approximate).double() - slopes).abs().max() < 3e-7


def test_a_part_has_the_bits_of_the_whole() -> None:
    """Wherever an element lies among those of a vector."""
    x = numbers((1000,), torch.float32, 0)
    whole = fused().gelu(x, "none")
    for start in (1, 7, 990):
        assert same_bits([fused().gelu(x[start:], "none")], [whole[start:]])


def test_a_bias_of_32_bits() -> None:
    """Of 16-bit inputs: as mixed precision keeps it, and its gradient."""
    x, bias = numbers((9, 40), torch.bfloat16, 0), numbers((40,), torch.float32, 1)

    def gradient(kernels: Kernels, x: Tensor) -> Tensor:
        leaf = bias.to(torch.promote_types(x.dtype, torch.float32)).requires_grad_()
        [found] = torch.autograd.grad(kernels.bias_gelu(x, leaf, "tanh").sum(), leaf)
        return found

    found = gradient(fused(), x)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, gradient(fused(), x.double()).float(), rtol=1e-5, atol=1e-5)


def test_torch_knows_them() -> None:
    x, bias = (numbers(s, torch.float32, 0).requires_grad_() for s in ((3, 8), (8,)))
    op_checks.check_registration(gelu.forward, (x, "none"))
    op_checks.check_registration(gelu.bias_forward, (x, bias, "tanh"))
    op_checks.check_registration(
        gelu.bias_backward, (x.detach(), x.detach(), bias.detach(), "none")
    )


def test_what_makes_no_sense_is_refused() -> None:
    kernels = fused()
    with pytest.raises(RuntimeError, match="a row has 8 elements and the weight 7"):
        kernels.bias_gelu(torch.ones(2, 8), torch.ones(7), "tanh")
    with pytest.raises(RuntimeError, match="it must be the same, or fp32"):
        kernels.bias_gelu(torch.ones(2, 8), torch.ones(8).double(), "tanh")
    with pytest.raises(RuntimeError, match="approximate is 'sigmoid'"):
        kernels.gelu(torch.ones(2, 8), "sigmoid")
    with pytest.raises(RuntimeError, match="must have the same shape"):
        gelu.backward(torch.ones(8, 2), torch.ones(2, 8), "none")


def test_bytes() -> None:
    assert gelu.bytes_moved((10, 64), torch.bfloat16) == 10 * 64 * 4
    assert gelu.bytes_moved((10, 64), torch.bfloat16, torch.float32) == 10 * 64 * 4 + 64 * 4
    assert gelu.bytes_moved((10, 64), torch.float32, backward=True) == 10 * 64 * 12
