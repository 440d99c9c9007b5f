"""What holds for every operation whose results and gradients depend on tensors alone: checks that
the test of an operation calls with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.ops.op_cases import HARD, assert_near, fused, numbers, same_bits, views, with_threads
from trainkit.ops.kernels import REFERENCE, Kernels

FEW = ("random", "far from zero")  # the others leave fp16's range
SHARED = (70, 1040)  # enough elements that threads share them


@dataclass(frozen=True)
class Operation:
    """An operation of one large tensor and, it may be, small ones.

    Args:
        name: for messages.
        call: (kernels, *tensors) -> one result or several.
        others: shape of the large tensor -> shapes of the small ones.
        width: the last dimension is a multiple of it.
        hard: the names in HARD of what it must be exact for.
    """

    name: str
    call: Callable[..., Any]
    others: Callable[[tuple[int, ...]], Sequence[tuple[int, ...]]] = lambda _: ()
    width: int = 1
    hard: Sequence[str] = tuple(HARD)

    def inputs(
        self, shape: tuple[int, ...], dtype: torch.dtype, hard: str = "random"
    ) -> list[Tensor]:
        """Tensors for `call`; the last dimension is rounded up to a multiple of `width`."""
        whole = (*shape[:-1], shape[-1] + -shape[-1] % self.width)
        x = HARD[hard](numbers(whole, torch.float64, 1))
        others = [numbers(s, torch.float64, 2 + i) for i, s in enumerate(self.others(whole))]
        return [t.to(dtype) for t in (x, *others)]

    def compute(
        self, kernels: Kernels, inputs: Iterable[Tensor], dtype: torch.dtype | None = None
    ) -> list[Tensor]:
        """All results, then the gradients of all inputs; `dtype`: of the arithmetic, where it is
        another than theirs."""
        leaves = [t.detach() if dtype is None else t.detach().to(dtype) for t in inputs]
        for leaf in leaves:
            leaf.requires_grad_()
        results = _several(self.call(kernels, *leaves))
        given = [numbers(tuple(r.shape), leaves[0].dtype, 20 + i) for i, r in enumerate(results)]
        return [*results, *torch.autograd.grad(results, leaves, given)]


def _several(results: Any) -> list[Tensor]:
    return list(results) if isinstance(results, tuple) else [results]


def check_exact(
    operation: Operation, shapes: Iterable[tuple[int, ...]], dtype: torch.dtype
) -> None:
    """Within the dtype's bound of the reference in fp64, random and hard numbers."""
    few = dtype in (torch.float16, torch.float64)
    for shape in shapes:
        for hard in FEW if few else operation.hard:
            inputs = operation.inputs(shape, dtype, hard)
            found = operation.compute(fused(), inputs)
            expected = operation.compute(REFERENCE, inputs, torch.float64)
            for number, (one, other) in enumerate(zip(found, expected, strict=True)):
                assert one.dtype == dtype
                assert_near(one, other, dtype, f"{operation.name} {shape}, {hard}, {number}")


def check_gradient(operation: Operation, shape: tuple[int, ...]) -> None:
    """In fp64 the gradient is that of differences: the reference's, and the fused one's."""
    for kernels in (REFERENCE, fused()):
        inputs = [t.requires_grad_() for t in operation.inputs(shape, torch.float64)]
        assert torch.autograd.gradcheck(partial(operation.call, kernels), inputs)


def check_bits(operation: Operation, shape: tuple[int, ...] = SHARED) -> None:
    """The same for any number of threads, and again."""
    kernels = fused()
    for dtype in (torch.float32, torch.bfloat16):
        inputs = operation.inputs(shape, dtype)
        once = operation.compute(kernels, inputs)
        for threads in (1, 2, 3, 4, 4):
            again = with_threads(threads, partial(operation.compute, kernels, inputs))
            assert same_bits(once, again), f"{operation.name}: other bits by {threads} threads"


def check_layouts(operation: Operation, shape: tuple[int, ...]) -> None:
    """Views, strides of 0 and rows that overlap give the bits of a copy; so do gradients."""
    kernels = fused()
    x, *others = operation.inputs(shape, torch.bfloat16)
    width = x.shape[-1]
    overlapping = x.flatten().as_strided(x.shape, (*[1] * (x.dim() - 1), 1))
    for how, view in (
        *views(x),
        ("strides of 0", x[:1].expand(x.shape)),
        ("overlapping", overlapping),
    ):
        found = _several(operation.call(kernels, view, *others))
        copied = _several(operation.call(kernels, view.contiguous(), *others))
        assert same_bits(found, copied), f"{operation.name}: {how}"
    results = _several(operation.call(kernels, x.requires_grad_(), *others))
    of_ones = torch.autograd.grad(results, x, [torch.ones_like(r) for r in results])
    for strange in (
        [torch.ones((), dtype=r.dtype).expand(r.shape) for r in results],
        [torch.ones(*r.shape, 2, dtype=r.dtype)[..., 0] for r in results],
    ):
        again = _several(operation.call(kernels, x, *others))
        found = list(torch.autograd.grad(again, x, strange))
        assert same_bits(found, list(of_ones)), f"{operation.name}: gradient of width {width}"


def check_empty(operation: Operation, shapes: Iterable[tuple[int, ...]]) -> None:
    """Nothing of nothing, and 0 for what is a sum of nothing."""
    for shape in shapes:
        for found in operation.compute(fused(), operation.inputs(shape, torch.float32)):
            assert torch.equal(found, torch.zeros(found.shape)), f"{operation.name} {shape}"


def check_not_finite(operation: Operation, shape: tuple[int, ...]) -> None:
    """NaN, inf and numbers at the end of the range come out where the reference has them."""
    for dtype in (torch.float32, torch.bfloat16):
        for wrong in (torch.nan, torch.inf, -torch.inf, 1e30, -1e30):
            inputs = operation.inputs(shape, dtype)
            inputs[0].view(-1, inputs[0].shape[-1])[1, 2] = wrong
            found = operation.compute(fused(), inputs)
            expected = operation.compute(REFERENCE, inputs)
            for one, other in zip(found, expected, strict=True):
                if wrong in (1e30, -1e30):
                    assert torch.isfinite(one).all()
                else:
                    assert torch.equal(torch.isfinite(one), torch.isfinite(other)), (
                        f"{operation.name} of {wrong}: {one} {other}"
                    )


def check_registration(operation: Any, arguments: tuple[Any, ...]) -> None:
    """As torch.library asks: schema, fake, autograd."""
    fused()
    torch.library.opcheck(operation.default, arguments)


def check_compiled(operation: Operation, shape: tuple[int, ...]) -> None:
    """Without a break in the graph, with the same bits. (The compiler's front and autograd; what
    an operation computes is not a matter of the backend.)"""
    kernels = fused()
    inputs = operation.inputs(shape, torch.float32)
    torch._dynamo.reset()  # it counts compilations of the lambda below
    compiled = torch.compile(
        lambda *t: operation.call(kernels, *t), fullgraph=True, backend="aot_eager"
    )
    eager = operation.compute(kernels, inputs)
    again = Operation(operation.name, lambda _, *t: compiled(*t)).compute(kernels, inputs)
    assert same_bits(eager, again), operation.name
