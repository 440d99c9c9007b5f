"""swiglu and geglu: right, the same every time, and hard to break."""

from __future__ import annotations

import pytest
import torch

from tests.ops import op_checks
from tests.ops.op_cases import BOUNDS, EMPTY_SHAPES, SHAPES, WIDE_SHAPES, fused, numbers
from tests.ops.op_checks import Operation
from trainkit.ops import swiglu

OPERATIONS = [
    Operation("swiglu", lambda kernels, x: kernels.swiglu(x), width=2),
    Operation("geglu", lambda kernels, x: kernels.geglu(x, "none"), width=2),
    Operation("geglu by tanh", lambda kernels, x: kernels.geglu(x, "tanh"), width=2),
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
    op_checks.check_gradient(operation, (2, 3, 6))
    op_checks.check_bits(operation)
    op_checks.check_layouts(operation, (6, 5, 40))
    op_checks.check_empty(operation, EMPTY_SHAPES[:2])
    op_checks.check_not_finite(operation, (3, 40))
    op_checks.check_compiled(operation, (3, 40))


def test_torch_knows_them() -> None:
    x = numbers((3, 8), torch.float32, 0).requires_grad_()
    op_checks.check_registration(swiglu.forward, (x,))
    op_checks.check_registration(swiglu.geglu_forward, (x, "tanh"))
    op_checks.check_registration(swiglu.backward, (x.detach()[:, :4], x.detach()))


def test_what_makes_no_sense_is_refused() -> None:
    kernels = fused()
    with pytest.raises(RuntimeError, match="a row has 7 elements, which are no two halves"):
        kernels.swiglu(torch.ones(2, 7))
    with pytest.raises(RuntimeError, match=r"not torch\.Int"):
        kernels.swiglu(torch.ones(2, 8, dtype=torch.int32))
    with pytest.raises(RuntimeError, match="approximate is 'erf', not 'none' or 'tanh'"):
        kernels.geglu(torch.ones(2, 8), "erf")
    with pytest.raises(RuntimeError, match="they must be the same"):
        swiglu.backward(torch.ones(2, 4).double(), torch.ones(2, 8))
    with pytest.raises(RuntimeError, match="the gradient has 3 rows of 4, not 2 of 4"):
        swiglu.backward(torch.ones(3, 4), torch.ones(2, 8))


def test_bytes() -> None:
    assert swiglu.bytes_moved((10, 64), torch.bfloat16) == 10 * (64 + 32) * 2
    assert swiglu.bytes_moved((10, 64), torch.float32, backward=True) == 10 * (64 + 32 + 64) * 4
