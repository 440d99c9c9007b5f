"""rotate_qkv and norm_rotate_qkv: right, the same every time, and hard to break."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests.ops import op_checks
from tests.ops.op_cases import BOUNDS, assert_near, fused, numbers, same_bits
from tests.ops.op_checks import FEW, Operation
from trainkit.ops import rotary
from trainkit.ops.kernels import Kernels

EPS = 1e-6


@dataclass(frozen=True)
class Heads:
    """A shape of attention.

    Args:
        heads, groups: of queries, and of keys and values.
        turning: channels that turn.
        per_sample: every sample has positions of its own.
    """

    heads: int
    groups: int
    turning: int
    per_sample: bool = False

    def tables(self, qkv: Tensor) -> tuple[Tensor, Tensor]:
        """Of angles that are the same for every dtype."""
        samples, tokens, _ = qkv.shape
        shape = (samples, tokens) if self.per_sample else (tokens,)
        count = math.prod(shape) * self.turning // 2
        angles = torch.arange(count, dtype=torch.float64).view(*shape, self.turning // 2)
        angles = torch.cat([angles, angles], dim=-1)
        wide = torch.promote_types(qkv.dtype, torch.float32)
        return angles.cos().to(wide), angles.sin().to(wide)

    def operation(self, size: int) -> Operation:
        """Of heads of `size` channels; shapes are (B, S, anything)."""

        def call(kernels: Kernels, qkv: Tensor) -> rotary.Parts:
            return kernels.rotate_qkv(qkv, *self.tables(qkv), self.heads, self.groups)

        return Operation(str(self), call, width=(self.heads + 2 * self.groups) * size)

    def normed(self, size: int, hard: Sequence[str] = FEW) -> Operation:
        """The same of normed queries and keys; what is small or 0 is what eps decides."""

        def call(kernels: Kernels, qkv: Tensor, weights: Tensor) -> rotary.Parts:
            tables = self.tables(qkv)
            return kernels.norm_rotate_qkv(qkv, weights, *tables, self.heads, self.groups, EPS)

        width = (self.heads + 2 * self.groups) * size
        return Operation(f"normed {self}", call, lambda _: [(2, size)], width=width, hard=hard)


CASES = {
    "all heads alike": Heads(2, 2, 6).operation(6),
    "groups, a part of the channels": Heads(6, 2, 4).operation(10),
    "one group, positions of each sample": Heads(3, 1, 8, per_sample=True).operation(8),
    "odd heads": Heads(1, 1, 2).operation(7),
    "nothing turns": Heads(2, 1, 0).operation(3),
    "normed, all heads alike": Heads(2, 2, 8).normed(8, (*FEW, "large")),
    "normed, groups, a part of the channels": Heads(6, 2, 4).normed(18),
    "normed, one group, positions of each sample": Heads(3, 1, 64, per_sample=True).normed(64),
    "normed, nothing turns": Heads(2, 1, 0).normed(9),
}
SHAPES = [(1, 1, 1), (2, 5, 1), (3, 17, 1)]
each = pytest.mark.parametrize("operation", CASES.values(), ids=CASES)


@each
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_fused_is_the_reference(operation: Operation, dtype: torch.dtype) -> None:
    op_checks.check_exact(operation, SHAPES, dtype)


@pytest.mark.slow
def test_wide_and_many_rows() -> None:
    operation = Heads(512, 128, 128).operation(128)
    op_checks.check_exact(operation, [(1, 3, 1)], torch.bfloat16)
    operation = Heads(2, 1, 32).operation(32)
    op_checks.check_exact(operation, [(3, 20_001, 1)], torch.bfloat16)


@each
def test_it_is_hard_to_break(operation: Operation) -> None:
    op_checks.check_gradient(operation, (2, 3, 1))
    op_checks.check_bits(operation, (2, 900, 1))
    op_checks.check_layouts(operation, (6, 5, 1))
    op_checks.check_empty(operation, [(0, 3, 1), (2, 0, 1)])
    op_checks.check_compiled(operation, (2, 5, 1))


def test_what_is_not_finite_comes_out_in_its_pair() -> None:
    for wrong in (torch.nan, torch.inf):
        qkv = numbers((1, 3, 4 * 8), torch.float32, 0)
        qkv[0, 1, 9] = wrong  # channel 1 of the second head
        q, k, v = fused().rotate_qkv(qkv, *Heads(2, 1, 8).tables(qkv), 2, 1)
        assert (~torch.isfinite(q)).nonzero().tolist() == [[0, 1, 1, 1], [0, 1, 1, 5]]
        assert torch.isfinite(k).all() and torch.isfinite(v).all()


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_normed_has_the_bits_of_a_norm_and_a_turn(dtype: torch.dtype) -> None:
    """Results and the projection's gradient; what the weights get is added up in another order.
    Weights may be wider: Gemma's are 1 and more in fp32."""
    kernels = fused()
    heads = Heads(4, 2, 16, per_sample=True)
    wide = torch.promote_types(dtype, torch.float32)
    leaves = [numbers((2, 9, 8 * 24), dtype, 0), numbers((2, 24), wide, 1)]

    def apart(qkv: Tensor, weights: Tensor) -> rotary.Parts:
        q, k, v = rotary.split(qkv, 4, 2)
        q, k = (kernels.rms_norm(x, w, EPS) for x, w in zip((q, k), weights, strict=True))
        row = torch.cat([part.flatten(2) for part in (q, k, v)], dim=-1)
        return kernels.rotate_qkv(row, *heads.tables(qkv), 4, 2)

    found = heads.normed(24).compute(kernels, leaves)
    expected = Operation("apart", lambda _, *t: apart(*t)).compute(kernels, leaves)
    assert same_bits(found[:4], expected[:4])
    assert_near(found[4], expected[4].double(), wide, "weights")


def test_what_attention_gives_back() -> None:
    """Gradients in attention's own layout, heads before tokens, and of values alone."""
    kernels = fused()
    heads = Heads(4, 2, 8)
    qkv = numbers((2, 6, 8 * 8), torch.float32, 0).requires_grad_()

    def gradient(of: Callable[..., rotary.Parts]) -> list[Tensor]:
        parts = of(qkv, *heads.tables(qkv), 4, 2)
        q, k, v = (t.transpose(1, 2) for t in parts)
        y = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )
        attended = torch.autograd.grad((y * y).sum(), qkv, retain_graph=True)
        return [*attended, *torch.autograd.grad(v.sum(), qkv)]

    for found, expected in zip(
        gradient(kernels.rotate_qkv), gradient(rotary.reference), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_values_are_those_of_the_projection() -> None:
    qkv = numbers((2, 6, 4 * 8), torch.bfloat16, 0)
    _, _, v = fused().rotate_qkv(qkv, *Heads(2, 1, 8).tables(qkv), 2, 1)
    assert same_bits([v], [rotary.split(qkv, 2, 1)[2]])


def test_torch_knows_it() -> None:
    qkv = numbers((2, 3, 4 * 8), torch.float32, 0).requires_grad_()
    cos, sin = Heads(2, 1, 4).tables(qkv)
    op_checks.check_registration(rotary.forward, (qkv, cos, sin, 2, 1))
    parts = rotary.forward(qkv.detach(), cos, sin, 2, 1)
    op_checks.check_registration(rotary.backward, (*parts, cos, sin))
    weights = numbers((2, 8), torch.float32, 1).requires_grad_()
    op_checks.check_registration(rotary.normed_forward, (qkv, weights, cos, sin, 2, 1, EPS))
    given = (*parts, qkv.detach(), weights.detach(), cos, sin, EPS)
    op_checks.check_registration(rotary.normed_backward, given)


@pytest.mark.parametrize(
    ("cos", "sin", "heads", "words"),
    [
        (torch.ones(3, 4), torch.ones(3, 4), 3, r"32 columns are no 3 \+ 2 \* 1 heads"),
        (torch.ones(3, 10), torch.ones(3, 10), 2, "10 of 8 channels cannot turn"),
        (torch.ones(3, 3), torch.ones(3, 3), 2, "3 of 8 channels cannot turn"),
        (torch.ones(4, 4), torch.ones(4, 4), 2, "are of 4 tokens a sample, the heads of 3"),
        (torch.ones(1, 3, 4), torch.ones(1, 3, 4), 2, "are of 1 x 3 tokens, the heads of 2 x 3"),
        (
            torch.ones(3, 4).double(),
            torch.ones(3, 4).double(),
            2,
            "are torch.Double, not",
        ),
        (torch.ones(3, 4), torch.ones(3, 2), 2, "must have the same shape"),
    ],
)
def test_what_makes_no_sense_is_refused(cos: Tensor, sin: Tensor, heads: int, words: str) -> None:
    rotate = fused().rotate_qkv
    with pytest.raises(RuntimeError, match=words):
        rotate(torch.ones(2, 3, 32), cos, sin, heads, 1)


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        (torch.ones(2, 4), "the weights have 8 elements, not 2 x 8"),
        (torch.ones(16), "the weights have 16 elements, not 2 x 8"),
        (torch.ones(2, 8).double(), "the weight is torch.Double and the input torch.Float"),
    ],
)
def test_weights_that_make_no_sense_are_refused(weights: Tensor, words: str) -> None:
    tables = torch.ones(3, 4), torch.ones(3, 4)
    with pytest.raises(RuntimeError, match=words):
        fused().norm_rotate_qkv(torch.ones(2, 3, 32), weights, *tables, 2, 1, EPS)


def test_bytes() -> None:
    moved = rotary.bytes_moved((2, 8, 96), torch.bfloat16, (8, 16))
    assert moved == 2 * 2 * 8 * 96 * 2 + 2 * 8 * 8 * 4
