"""What tests of fused operations share: where they can run at all, inputs that are out to break
them, and how exact they must be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch
from torch import Tensor

from trainkit.ops.build import missing_tools
from trainkit.ops.kernels import Kernels, choose

# relative to the largest number of a result: a few roundings of the dtype, and of fp32 sums
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
# rows and width: 1, odd, not a multiple of any vector, more rows than a block of a sum over rows
SHAPES = [(1, 1), (5, 1), (3, 7), (2, 3, 64), (70, 33), (2, 777)]
WIDE_SHAPES = [(3, 100_003), (1, 262_144), (4097, 96)]
EMPTY_SHAPES = [(0, 8), (2, 0, 5), (3, 0)]


@cache
def why_no_kernels() -> str:
    """Why the fused kernels cannot be used here; "" if they can. (tests/conftest.py compiles
    them.)"""
    if missing := missing_tools():
        return f"the kernels cannot be built here: {'; '.join(missing)}"
    return ""


def fused() -> Kernels:
    """The fused kernels of this CPU, compiled first where they are not; skips the test where they
    cannot be."""
    if why := why_no_kernels():
        pytest.skip(why)
    return choose("fused", "cpu").kernels


def numbers(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Random numbers, the same for a seed whatever the dtype."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


# Rows that are harder than random ones: all by the same name of what they are.
HARD: dict[str, Callable[[Tensor], Tensor]] = {
    "random": lambda x: x,
    "far from zero": lambda x: x + 30,
    "small": lambda x: x * 1e-4,
    "large": lambda x: x * 1e3,
    "zero": lambda x: x * 0,
    "one that is larger than all others": lambda x: torch.where(
        torch.arange(x.shape[-1]) == x.shape[-1] // 2, x * 100, x
    ),
}


def views(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The same values laid out otherwise: (how, tensor)."""
    yield "transposed", x.transpose(0, -1).contiguous().transpose(0, -1)
    yield "every second", torch.stack([x, x + 1], dim=-1)[..., 0]
    yield "of a wider tensor", torch.cat([x, x], dim=-1)[..., : x.shape[-1]]


def assert_near(found: Tensor, expected: Tensor, dtype: torch.dtype, what: str) -> None:
    """Within the dtype's bound of the largest expected number; not finite where that is not."""
    found, expected = found.double(), expected.double()
    assert found.shape == expected.shape, what
    finite = torch.isfinite(expected)
    assert torch.equal(torch.isfinite(found), finite), f"{what}: other numbers are not finite"
    if not finite.any():
        return
    largest = expected[finite].abs().max().clamp(min=1e-30)
    error = ((found - expected)[finite].abs().max() / largest).item()
    assert error <= BOUNDS[dtype], f"{what}: {error:.1e} of the largest number"


def with_threads(count: int, compute: Callable[[], list[Tensor]]) -> list[Tensor]:
    """What it gives when torch uses so many threads."""
    former = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        return compute()
    finally:
        torch.set_num_threads(former)


def same_bits(first: list[Tensor], second: list[Tensor]) -> bool:
    """Whether both hold the same bits."""
    return all(
        torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in zip(first, second, strict=True)
    )
