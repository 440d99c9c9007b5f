"""rms_norm and layer_norm, alone and of a residual sum: right, the same every time, and hard to
break."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.op_cases import (
    BOUNDS,
    EMPTY_SHAPES,
    HARD,
    SHAPES,
    WIDE_SHAPES,
    assert_near,
    fused,
    numbers,
    same_bits,
    views,
    with_threads,
)
from trainkit.ops import layer_norm, rms_norm
from trainkit.ops.kernels import REFERENCE, Kernels

EPS = 1e-5
KINDS = ("rms", "layer")
FEW = ("random", "far from zero")  # the others leave fp16's range, or what fp64 itself can tell


@dataclass(frozen=True)
class NormInputs:
    """What goes into both forms of a norm.

    Args:
        kind: "rms" or "layer".
        x, residual: (..., H).
        weights: (H) each: one of RMSNorm, weight and bias of LayerNorm.
        gradients: of the norm, of the norm of the sum and of the sum.
    """

    kind: str
    x: Tensor
    residual: Tensor
    weights: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...]

    @classmethod
    def of(
        cls, kind: str, shape: tuple[int, ...], dtype: torch.dtype, hard: str = "random"
    ) -> NormInputs:
        x, residual, *gradients = (numbers(shape, torch.float64, seed) for seed in range(5))
        count = 1 if kind == "rms" else 2
        weights = [numbers(shape[-1:], dtype, 10 + i) for i in range(count)]
        return cls(
            kind,
            HARD[hard](x).to(dtype),
            residual.to(dtype),
            tuple(weights),
            tuple(g.to(dtype) for g in gradients),
        )

    def compute(self, kernels: Kernels, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Both forms and all gradients; `dtype`: of the arithmetic, where it is another. The sum
        is rounded as the inputs are."""
        wide = dtype or self.x.dtype
        x, residual, *weights = (
            t.detach().to(wide).requires_grad_() for t in (self.x, self.residual, *self.weights)
        )
        norm: Any = getattr(kernels, f"{self.kind}_norm")
        of_sum: Any = getattr(kernels, f"add_{self.kind}_norm")
        y = norm(x, *weights, EPS)
        if dtype is None:
            normed, total = of_sum(x, residual, *weights, EPS)
        else:
            rounded = (self.x + self.residual).to(wide)
            total = x + residual + (rounded - x - residual).detach()
            normed = norm(total, *weights, EPS)
        gradients = [g.to(wide) for g in self.gradients]
        leaves = (x, residual, *weights)
        found = torch.autograd.grad([y, normed, total], leaves, gradients)
        names = ("dx", "dresidual", "dweight", "dbias")
        return {"y": y, "normed": normed, "sum": total, **dict(zip(names, found, strict=False))}


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_fused_is_the_reference(kind: str, dtype: torch.dtype) -> None:
    """Against fp64 of the same inputs."""
    kernels = fused()
    for shape in SHAPES:
        for hard in FEW if dtype in (torch.float16, torch.float64) else HARD:
            inputs = NormInputs.of(kind, shape, dtype, hard)
            expected = inputs.compute(REFERENCE, torch.float64)
            exact = inputs.compute(REFERENCE) if shape[-1] < 8 else {}
            for name, value in inputs.compute(kernels).items():
                what = f"{name} of {shape}, {hard}"
                if shape[-1] < 8:  # statistics of so few numbers cancel: as near as torch itself
                    torch_error = (exact[name].double() - expected[name]).abs().max()
                    error = (value.double() - expected[name]).abs().max()
                    largest = expected[name].abs().max().clamp(min=1)
                    assert error <= 4 * torch_error + 4 * BOUNDS[dtype] * largest, what
                else:
                    assert_near(value, expected[name], dtype, what)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_wide_and_many_rows(kind: str, dtype: torch.dtype) -> None:
    for shape in WIDE_SHAPES:
        inputs = NormInputs.of(kind, shape, dtype)
        expected = inputs.compute(REFERENCE, torch.float64)
        for name, value in inputs.compute(fused()).items():
            assert_near(value, expected[name], dtype, f"{name} of {shape}")


@pytest.mark.parametrize("kind", KINDS)
def test_no_rows_and_no_width(kind: str) -> None:
    for shape in EMPTY_SHAPES:
        inputs = NormInputs.of(kind, shape, torch.float32)
        for name, value in inputs.compute(fused()).items():
            assert torch.equal(value, torch.zeros(value.shape)), f"{name} of {shape}"


@pytest.mark.parametrize("kind", KINDS)
def test_other_layouts_of_memory(kind: str) -> None:
    """A view gives the bits of its copy; one with strides of 0, or whose rows overlap, too."""
    kernels = fused()
    plain = NormInputs.of(kind, (6, 5, 40), torch.bfloat16)
    expected = list(plain.compute(kernels).values())
    for how, x in views(plain.x):
        assert same_bits(list(replace(plain, x=x).compute(kernels).values()), expected), how
    for g in [[view for _, view in views(g)] for g in plain.gradients]:
        others = (g[0], *plain.gradients[1:])
        if torch.equal(g[0], plain.gradients[0]):
            found = replace(plain, gradients=others).compute(kernels)
            assert same_bits(list(found.values()), expected)
    norm: Any = getattr(kernels, f"{kind}_norm")
    for x in (torch.ones(1, 40).expand(7, 40) * 1, torch.arange(46.0).as_strided((7, 40), (1, 1))):
        assert torch.equal(
            norm(x.expand(7, 40), *(w.float() for w in plain.weights), EPS),
            norm(x.clone(), *(w.float() for w in plain.weights), EPS),
        )


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits_every_time_and_for_any_number_of_threads(kind: str) -> None:
    kernels = fused()
    inputs = NormInputs.of(kind, (1000, 96), torch.float32)

    def compute() -> list[Tensor]:
        return list(inputs.compute(kernels).values())

    first = with_threads(1, compute)
    for threads in (1, 2, 3, 7):
        assert same_bits(with_threads(threads, compute), first), f"{threads} threads"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_goes_through(kind: str, value: float) -> None:
    """In its own row and in the gradients of weights; no other row sees it."""
    for dtype in (torch.float32, torch.bfloat16):
        inputs = NormInputs.of(kind, (5, 40), dtype)
        inputs.x[2, 7] = value
        found = inputs.compute(fused())
        assert not torch.isfinite(found["y"][2]).all()
        others = [0, 1, 3, 4]
        for name in ("y", "dx", "normed"):
            assert torch.isfinite(found[name][others]).all(), name
        assert not torch.isfinite(found["dweight"]).all()


def test_weights_of_another_dtype() -> None:
    """fp32 weights of 16-bit inputs are right, and get fp32 gradients; others are refused."""
    kernels = fused()
    x = numbers((4, 48), torch.bfloat16, 0).requires_grad_()
    weight = numbers((48,), torch.float32, 1).requires_grad_()
    y = kernels.rms_norm(x, weight, EPS)
    assert y.dtype == torch.bfloat16
    torch.autograd.backward([y.sum()])
    assert weight.grad is not None and weight.grad.dtype == torch.float32
    expected = REFERENCE.rms_norm(x.detach().double(), weight.detach().double(), EPS)
    assert_near(y.detach(), expected, torch.bfloat16, "y")
    refused = "the weight is torch.Half and the input torch.BFloat16; it must be the same, or fp32"
    with pytest.raises(RuntimeError, match=refused):
        kernels.rms_norm(x, weight.detach().half(), EPS)
    with pytest.raises(RuntimeError, match="a row has 48 elements and the weight 47"):
        kernels.rms_norm(x, weight.detach()[:47], EPS)
    with pytest.raises(RuntimeError, match=r"takes fp32, bf16, fp16 and fp64, not torch\.Int"):
        kernels.rms_norm(torch.ones(2, 48, dtype=torch.int32), torch.ones(48).int(), EPS)
    with pytest.raises(RuntimeError, match="must have the same shape"):
        kernels.add_rms_norm(x, x[:2], weight, EPS)


def test_torch_agrees_with_what_is_declared() -> None:
    """opcheck: schemas, fakes and gradients are as torch expects them."""
    fused()
    x, residual = (numbers((3, 16), torch.float32, i).requires_grad_() for i in range(2))
    weight, bias = (numbers((16,), torch.float32, i).requires_grad_() for i in range(2))
    checks: list[tuple[Any, tuple[Any, ...]]] = [
        (rms_norm.forward, (x, weight, EPS)),
        (rms_norm.add_forward, (x, residual, weight, EPS)),
        (layer_norm.forward, (x, weight, bias, EPS)),
        (layer_norm.add_forward, (x, residual, weight, bias, EPS)),
    ]
    for operation, given in checks:
        torch.library.opcheck(operation.default, given)


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradients_of_the_reference(kind: str) -> None:
    inputs = NormInputs.of(kind, (3, 5), torch.float64)
    leaves = [t.requires_grad_() for t in (inputs.x, inputs.residual, *inputs.weights)]
    of_sum: Any = getattr(REFERENCE, f"add_{kind}_norm")
    assert torch.autograd.gradcheck(lambda *given: of_sum(*given, EPS), leaves)


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_is_the_same(kind: str) -> None:
    """One graph, and the bits of eager."""
    kernels = fused()
    torch._dynamo.reset()
    inputs = NormInputs.of(kind, (6, 32), torch.float32)
    of_sum: Any = getattr(kernels, f"add_{kind}_norm")

    def block(x: Tensor, residual: Tensor, *weights: Tensor) -> Tensor:
        y, total = of_sum(x, residual, *weights, EPS)
        product: Tensor = y * total
        return product

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    leaves = [t.requires_grad_() for t in (inputs.x, inputs.residual, *inputs.weights)]
    results = []
    for run in (block, compiled):
        y = run(*leaves)
        results.append([y, *torch.autograd.grad(y, leaves, inputs.gradients[0])])
    assert same_bits(*results)


def test_bytes_moved() -> None:
    """x and y in bf16, a weight in fp32, a statistic a row."""
    moved = rms_norm.bytes_moved((2, 3, 64), torch.bfloat16, torch.float32)
    assert moved == 2 * 6 * 64 * 2 + 64 * 4 + 6 * 4
    added = layer_norm.bytes_moved((6, 64), torch.float32, torch.float32, added=True, backward=True)
    assert added == 4 * 6 * 64 * 4 + 3 * 64 * 4 + 2 * 6 * 4


@pytest.mark.parametrize("rstd", [torch.ones(1), torch.ones(4, dtype=torch.float64)])
def test_statistics_of_other_rows_are_refused(rstd: Tensor) -> None:
    fused()
    x, weight = torch.ones(4, 8), torch.ones(8)
    with pytest.raises(RuntimeError, match="takes statistics of 4 rows"):
        torch.ops.trainkit.rms_norm_backward(x, x, weight, rstd)
    with pytest.raises(RuntimeError, match="takes statistics of 4 rows"):
        torch.ops.trainkit.layer_norm_backward(x, x, weight, torch.ones(4), rstd)
