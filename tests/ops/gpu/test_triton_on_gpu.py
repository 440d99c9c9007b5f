"""All kernels on a GPU: numbers at the sizes of models, the same bits on every run, and what torch
asks of an operation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

pytest.importorskip("triton", reason="GPU kernels need the extra [triton]")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from tests.ops.gpu import kernel_cases
from trainkit.ops import kernels

pytestmark = pytest.mark.gpu
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# rows that registers hold, rows of an odd width, rows that are walked through
WIDTHS = (1, 33, 512, 768, 4096, 5120, 8192, 16384, 20001, 100_000, 262_144)
Build = Callable[[kernel_cases.Inputs], Iterator[kernel_cases.Case]]

BUILDS: dict[str, Build] = {
    **{
        f"norms-{width}": partial(
            kernel_cases.norm_cases, rows=37 if width < 16384 else 5, width=width, times=(1, 1)
        )
        for width in WIDTHS
    },
    **{
        f"activations-{width}": partial(kernel_cases.activation_cases, rows=37, width=width)
        for width in (1, 33, 3072, 11008)
    },
    **{
        f"rotary-{size}-{turning}": partial(
            kernel_cases.rotary_cases, tokens=129, size=size, turning=turning
        )
        for size, turning in ((128, 128), (64, 64), (96, 24), (128, 32), (2, 2))
    },
    **{
        f"cross-entropy-{vocab}": partial(
            kernel_cases.loss_cases, rows=19, vocab=vocab, columns=columns
        )
        for vocab, columns in ((1, 1), (61, 61), (50257, 50304), (131072, 131072), (262144, 262144))
    },
    "optimizer": partial(kernel_cases.optimizer_cases, sizes=(5, 4096, 400_000, 1, 3_000_000)),
    **{
        f"softmax-{keys}": partial(kernel_cases.softmax_cases, queries=queries, keys=keys)
        for queries, keys in ((5, 9), (64, 5000), (3, 2))
    },
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_numbers_and_bits(build: Build, dtype: torch.dtype) -> None:
    """Right, and the same twice."""
    first = build(kernel_cases.inputs(dtype, "cuda"))
    second = build(kernel_cases.inputs(dtype, "cuda"))
    for case, again in zip(first, second, strict=True):
        found = kernel_cases.outputs(case)
        kernel_cases.check_numbers(case, dtype, found)
        for number, (a, b) in enumerate(zip(found, kernel_cases.outputs(again), strict=True)):
            assert torch.equal(a, b), (case.name, number)


def test_infinite_and_missing_numbers_propagate() -> None:
    kernels.load("cuda")
    x = torch.randn(4, 4096, device="cuda")
    x[1, 7] = torch.nan
    x[2, 9] = torch.inf
    y = kernels.FUSED.rms_norm(x, torch.ones(4096, device="cuda"), 1e-5)
    assert y[1].isnan().all() and y[2].isnan().any()
    assert y[[0, 3]].isfinite().all()


def test_more_than_2_31_elements() -> None:
    """Addresses are computed in 64 bits."""
    kernels.load("cuda")
    rows = 2**31 // 16384 + 8
    x = torch.zeros(rows, 16384, dtype=torch.bfloat16, device="cuda")
    x[-1] = 3
    y = kernels.FUSED.rms_norm(x, torch.ones(16384, dtype=torch.bfloat16, device="cuda"), 1e-5)
    assert (y[-1] == 1).all() and not y[:-1].any()


def test_torch_accepts_the_operations() -> None:
    """Schema, fake tensors, gradients, and fullgraph compilation."""
    kernels.load("cuda")
    x = torch.randn(8, 512, device="cuda", requires_grad=True)
    w = torch.randn(512, device="cuda", requires_grad=True)
    # leaves: opcheck differentiates more than once
    residual, bias = (
        torch.randn_like(x, requires_grad=True),
        torch.randn_like(w, requires_grad=True),
    )
    torch.library.opcheck(torch.ops.trainkit.rms_norm.default, (x, w, 1e-5))
    torch.library.opcheck(torch.ops.trainkit.add_rms_norm.default, (x, residual, w, 1e-5))
    torch.library.opcheck(torch.ops.trainkit.layer_norm.default, (x, w, bias, 1e-5))
    torch.library.opcheck(torch.ops.trainkit.swiglu.default, (x,))
    torch.library.opcheck(torch.ops.trainkit.gelu.default, (x, "tanh"))

    def block(x: torch.Tensor) -> torch.Tensor:
        return kernels.FUSED.swiglu(kernels.FUSED.rms_norm(x, w, 1e-5))

    compiled = torch.compile(block, fullgraph=True)
    assert torch.equal(compiled(x), block(x))


def test_rows_of_any_strides() -> None:
    """A part of a wider matrix, every second column, one row repeated."""
    kernels.load("cuda")
    whole = torch.randn(64, 1024, device="cuda")
    w = torch.randn(256, device="cuda")
    for x in (whole[:, 128:384], whole[:, :512:2], whole[:1, :256].expand(9, 256), whole[:0, :256]):
        y = kernels.FUSED.rms_norm(x, w, 1e-5)
        torch.testing.assert_close(y, kernels.REFERENCE.rms_norm(x, w, 1e-5))
