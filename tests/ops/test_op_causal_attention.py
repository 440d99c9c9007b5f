"""Our own causal attention against torch's in fp64: shapes that fill no block, shared keys, strided
views, threads, compilers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import opcheck

from trainkit.ops import causal_attention, kernels


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> None:
    try:
        kernels.load("cpu")
    except kernels.Unavailable as error:
        pytest.skip(str(error))
    if not causal_attention.runs_here():
        pytest.skip("the processor has no AVX512-BF16: torch's attention is used")


def inputs(
    batch: int, heads: int, groups: int, tokens: int, channels: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v as views of one projection, and a gradient of the result."""
    generator = torch.Generator().manual_seed(tokens)
    widths = [heads * channels, groups * channels, groups * channels]
    qkv = torch.randn(batch, tokens, sum(widths), generator=generator).bfloat16()
    q, k, v = (
        t.view(batch, tokens, -1, channels).transpose(1, 2) for t in torch.split(qkv, widths, -1)
    )
    return q, k, v, torch.randn(q.shape, generator=generator).bfloat16()


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def gradients(attention: object, leaves: list[Tensor], dy: Tensor) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in leaves]
    y = attention(*leaves)  # type: ignore[operator]
    return [y, *torch.autograd.grad(y, leaves, dy)]


@pytest.mark.parametrize(
    "shape",
    [
        (1, 1, 1, 1, 16),
        (2, 2, 2, 5, 16),
        (2, 4, 2, 64, 32),
        (1, 3, 1, 65, 80),
        (1, 4, 4, 200, 64),
        (1, 2, 1, 130, 128),
    ],
)
def test_values_and_gradients(shape: tuple[int, int, int, int, int]) -> None:
    """Within what bf16 leaves of a result, 2**-9 on average, and at least as near as torch's own
    kernel for bf16."""
    *leaves, dy = inputs(*shape)
    wide = [t.double() for t in leaves]
    wanted = gradients(causal_attention.reference, wide, dy.double())
    torchs = gradients(causal_attention.reference, leaves, dy)
    found = gradients(causal_attention.fused, leaves, dy)
    assert found[0].transpose(1, 2).is_contiguous()
    for ours, theirs, exact in zip(found, torchs, wanted, strict=True):
        if exact.norm() > 1e-6:  # of one token, queries and keys have no gradient
            assert error(ours, exact) < min(0.005, 1.1 * error(theirs, exact) + 1e-4)


def test_no_token_sees_a_later_one() -> None:
    q, k, v, dy = inputs(1, 2, 2, 150, 16)
    before = causal_attention.fused(q, k, v)
    k, v = k.clone(), v.clone()
    k[:, :, 100:] = 9.0
    v[:, :, 100:] = -9.0
    after = causal_attention.fused(q, k, v)
    assert torch.equal(before[:, :, :100], after[:, :, :100])
    assert not torch.equal(before[:, :, 100:], after[:, :, 100:])
    dy = dy.clone()
    dy[:, :, 100:] = 0
    _, _, dk, dv = gradients(causal_attention.fused, [q, k, v], dy)
    assert not dk[:, :, 100:].any() and not dv[:, :, 100:].any()


@pytest.mark.parametrize("window", [1, 2, 63, 64, 65, 130, 199, 300])
@pytest.mark.parametrize("shape", [(1, 3, 1, 65, 80), (2, 4, 2, 200, 32)])
def test_a_window(shape: tuple[int, int, int, int, int], window: int) -> None:
    """Against a dense mask in fp64, and nothing beyond the window counts. What stands there is
    finite: in a block of keys of which some are seen it is multiplied by 0."""
    *leaves, dy = inputs(*shape)
    tokens = shape[3]

    def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen = causal_attention.visible(0, tokens, 0, tokens, window, q.device)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return causal_attention.fused(q, k, v, None, window)

    wanted = gradients(dense, [t.double() for t in leaves], dy.double())
    for found, exact in zip(gradients(ours, leaves, dy), wanted, strict=True):
        if exact.norm() > 1e-6:  # of one token, queries and keys have no gradient
            assert error(found, exact) < 0.005
    if window < tokens:
        q, k, v = (t.clone() for t in leaves)
        for t in (k, v):
            t[:, :, : tokens - window] = 1e30
        assert torch.equal(ours(q, k, v)[:, :, -1], ours(*leaves)[:, :, -1])


def test_large_scores_and_nan() -> None:
    """Softmax of scores beyond what e^x holds; NaN is not hidden."""
    q, k, v, _ = inputs(1, 1, 1, 70, 16)
    found = causal_attention.fused(100 * q, 100 * k, v)
    wanted = causal_attention.reference(100 * q.double(), 100 * k.double(), v.double())
    assert error(found, wanted) < 0.005
    q = q.clone()
    q[0, 0, 40] = torch.nan
    assert causal_attention.fused(q, k, v).isnan().any(-1).nonzero()[:, -1].tolist() == [40]


def test_the_same_bits_for_any_number_of_threads() -> None:
    *leaves, dy = inputs(2, 4, 2, 150, 32)
    found = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3, 3):
            torch.set_num_threads(count)
            found.append(gradients(causal_attention.fused, leaves, dy))
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, found[0], strict=True))


def test_what_it_is_not_made_for_is_torchs() -> None:
    q, k, v, _ = inputs(1, 2, 2, 9, 24)
    assert torch.equal(causal_attention.fused(q, k, v), causal_attention.reference(q, k, v))
    with pytest.raises(RuntimeError, match="channels a multiple of 16"):
        causal_attention.forward(q, k, v, 1.0, 0)
    q, k, v = (t.float() for t in inputs(1, 2, 2, 9, 16)[:3])
    assert torch.equal(causal_attention.fused(q, k, v), causal_attention.reference(q, k, v))


def test_operations_are_declared_as_they_are() -> None:
    q, k, v, dy = inputs(1, 2, 1, 6, 16)
    y, logsum = causal_attention.forward(q, k, v, 0.25, 3)
    opcheck(torch.ops.trainkit.causal_attention.default, (q, k, v, 0.25, 3))
    opcheck(torch.ops.trainkit.causal_attention_backward.default, (dy, q, k, v, y, logsum, 0.25, 3))


def test_compiled_is_eager() -> None:
    *leaves, dy = inputs(1, 2, 2, 40, 16)
    eager = gradients(causal_attention.fused, leaves, dy)
    compiled = torch.compile(causal_attention.fused, fullgraph=True, backend="aot_eager")
    assert all(
        torch.equal(a, b) for a, b in zip(gradients(compiled, leaves, dy), eager, strict=True)
    )


def test_no_channels_and_channels_apart_are_torchs() -> None:
    apart = torch.randn(1, 2, 16, 8).bfloat16().transpose(2, 3)
    for q in (torch.zeros(1, 2, 4, 0).bfloat16(), apart):
        assert torch.equal(causal_attention.fused(q, q, q), causal_attention.reference(q, q, q))
