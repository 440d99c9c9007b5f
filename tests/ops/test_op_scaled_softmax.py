"""scaled_causal_softmax and scaled_masked_softmax: right for any length."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.ops import op_checks
from tests.ops.op_cases import BOUNDS, fused, numbers
from tests.ops.op_checks import FEW, Operation
from trainkit.ops import scaled_softmax
from trainkit.ops.kernels import REFERENCE, Kernels


def _masked(kernels: Kernels, x: Tensor) -> Tensor:
    """Under a mask for all heads, of which one row hides everything."""
    queries, keys = x.shape[-2:]
    hidden = (torch.arange(queries * keys).view(queries, keys) * 7 % 5) > 2
    hidden[:1] = True
    return kernels.scaled_masked_softmax(x, hidden, 0.3)


OPERATIONS = [
    Operation("causal", lambda kernels, x: kernels.scaled_causal_softmax(x, 0.3), hard=FEW),
    Operation("masked", _masked, hard=FEW),
]
# the kernels that others have end at 2,048 and 4,096 keys
SHAPES = [(1, 1), (7, 3), (3, 7), (2, 3, 5, 33), (2, 777), (3, 4097)]
each = pytest.mark.parametrize("operation", OPERATIONS, ids=lambda o: o.name)


@each
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_fused_is_the_reference(operation: Operation, dtype: torch.dtype) -> None:
    op_checks.check_exact(operation, SHAPES, dtype)


@pytest.mark.slow
@each
def test_wide_rows(operation: Operation) -> None:
    op_checks.check_exact(operation, [(3, 100_003), (2, 262_144)], torch.bfloat16)


@each
def test_it_is_hard_to_break(operation: Operation) -> None:
    op_checks.check_gradient(operation, (2, 3, 6))
    op_checks.check_bits(operation)
    op_checks.check_layouts(operation, (6, 5, 40))
    op_checks.check_empty(operation, [(0, 5, 8), (2, 0, 5), (2, 3, 0)])
    op_checks.check_compiled(operation, (3, 40))


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_what_is_not_finite_spoils_its_row_alone(wrong: float) -> None:
    x = numbers((4, 6), torch.float32, 0)
    x[3, 1] = wrong
    y = fused().scaled_causal_softmax(x, 1.0)
    assert torch.isnan(y[3, :6]).any() and torch.isfinite(y[:3]).all()
    x[3, 1] = -torch.inf
    assert fused().scaled_causal_softmax(x, 1.0)[3, 1] == 0


def test_masks_of_any_shape_that_expands() -> None:
    x = numbers((2, 3, 4, 5), torch.float32, 0)
    for shape in ((5,), (4, 1), (2, 1, 1, 5), (1, 3, 4, 5), (1, 1, 1, 1)):
        mask = numbers(shape, torch.float64, 1) > 0
        torch.testing.assert_close(
            fused().scaled_masked_softmax(x, mask, 2.0),
            REFERENCE.scaled_masked_softmax(x, mask, 2.0),
        )


def test_torch_knows_them() -> None:
    x = numbers((3, 8), torch.float32, 0).requires_grad_()
    op_checks.check_registration(scaled_softmax.causal_forward, (x, 0.5))
    op_checks.check_registration(scaled_softmax.forward, (x, x.detach() > 0, 0.5))
    op_checks.check_registration(scaled_softmax.backward, (x.detach(), x.detach(), 0.5))


def test_what_makes_no_sense_is_refused() -> None:
    kernels = fused()
    with pytest.raises(RuntimeError, match="scores have 1 dimensions, not 2 or more"):
        kernels.scaled_causal_softmax(torch.ones(8), 1.0)
    with pytest.raises(RuntimeError, match=r"the mask is torch.Float, not torch.bool"):
        kernels.scaled_masked_softmax(torch.ones(2, 8), torch.ones(2, 8), 1.0)


def test_bytes() -> None:
    assert scaled_softmax.bytes_moved((2, 3, 4), torch.float32) == 2 * (2 + 3 + 4 + 12) * 4
    assert scaled_softmax.bytes_moved((2, 3, 4), torch.float32, (3, 4)) == 2 * 24 * 4 + 12
    assert scaled_softmax.bytes_moved((2, 3, 4), torch.bfloat16, backward=True) == 3 * 24 * 2


def test_rows_that_see_only_minus_infinity_are_torchs() -> None:
    """NaN where a key is seen, 0 where it is not; 0 in a row that sees nothing."""
    x = numbers((3, 4), torch.float32, 0)
    x[1] = x[2] = -torch.inf
    mask = torch.tensor([[False] * 4, [False, True, False, True], [True] * 4])
    for kernels in (fused(), REFERENCE):
        y = kernels.scaled_masked_softmax(x, mask, 1.0)
        assert torch.isfinite(y[0]).all() and (y[2] == 0).all()
        assert torch.isnan(y[1]).tolist() == [True, False, True, False]
        causal = kernels.scaled_causal_softmax(x, 1.0)
        assert torch.isnan(causal[1]).tolist() == [True, True, True, False]
