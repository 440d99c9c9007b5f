"""The head's loss against cross-entropy as everyone writes it: values, gradients, padding,
masks, 16 bits, and what it holds in memory."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainkit.ops import cross_entropy
from trainkit.ops.cross_entropy import NO_LABEL
from trainkit.plan import loss_chunks
from trainkit.train.model import head_loss as loss
from trainkit.train.model.head_loss import Labels, Losses, head_loss, padded_linear


@contextmanager
def chunks_of(tokens: int, columns: int) -> Iterator[None]:
    """Logits of so many tokens at a time, for a product of so many columns."""
    with mock.patch.object(loss_chunks, "ELSEWHERE", 4 * tokens * columns):
        yield


def rounded_up(vocab: int, multiple: int) -> int:
    return -(-vocab // multiple) * multiple


def inputs(
    batch: int,
    length: int,
    hidden: int,
    vocab: int,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """x_BSH, weight_VH, both leaves, and labels_BS of which some are NO_LABEL. The same values
    in every dtype, as far as it can hold them."""
    generator = torch.Generator().manual_seed(seed)
    x_BSH = torch.randn(batch, length, hidden, generator=generator).to(dtype).requires_grad_()
    weight_VH = torch.randn(vocab, hidden, generator=generator).to(dtype).requires_grad_()
    labels_BS = torch.randint(0, vocab, (batch, length), generator=generator)
    labels_BS[torch.rand(batch, length, generator=generator) < 0.3] = NO_LABEL
    return x_BSH, weight_VH, labels_BS


def plain(
    x_BSH: Tensor, weight_VH: Tensor, labels_BS: Tensor, z_loss: float = 0.0, scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """(cross-entropy, gradient of x, gradient of W) by autograd over whole logits, in fp64."""
    x_NH, weight = (t.detach().double().requires_grad_() for t in (x_BSH.flatten(0, 1), weight_VH))
    logits_NV, labels_N = x_NH @ weight.T, labels_BS.flatten()
    entropy = F.cross_entropy(logits_NV, labels_N, reduction="sum", ignore_index=NO_LABEL)
    z_term = z_loss * logits_NV.logsumexp(1)[labels_N != NO_LABEL].square().sum()
    dx_NH, dweight_VH = torch.autograd.grad(scale * (entropy + z_term), (x_NH, weight))
    return entropy.detach(), dx_NH.view(x_BSH.shape), dweight_VH


def ours(
    x_BSH: Tensor, weight_VH: Tensor, labels: Labels, multiple: int = 1
) -> tuple[Losses, Tensor, Tensor]:
    losses = head_loss(x_BSH, weight_VH, labels, multiple)
    dx_BSH, dweight_VH = torch.autograd.grad(losses.objective, (x_BSH, weight_VH))
    return losses, dx_BSH, dweight_VH


def close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Nowhere apart by more than `tolerance` of the largest element."""
    assert actual.shape == expected.shape
    assert (actual.double() - expected.double()).abs().max() <= tolerance * (
        expected.abs().max() + 1e-300
    )


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 7), st.integers(1, 5), st.integers(2, 40)),
    multiple=st.sampled_from([1, 8, 128]),
    chunk=st.integers(1, 25),
    z_loss=st.sampled_from([0.0, 1e-4, 0.3]),
    scale=st.sampled_from([1.0, 2.0**-13, 2.0**20]),
    seed=st.integers(0, 99),
)
def test_equals_cross_entropy(
    sizes: tuple[int, int, int, int],
    multiple: int,
    chunk: int,
    z_loss: float,
    scale: float,
    seed: int,
) -> None:
    """Value and gradients in fp64, whole or in chunks of any size, padded to any multiple, some
    tokens without a label."""
    batch, length, hidden, vocab = sizes
    x_BSH, weight_VH, labels_BS = inputs(batch, length, hidden, vocab, seed=seed)
    with chunks_of(chunk, rounded_up(vocab, multiple)):
        losses, dx_BSH, dweight_VH = ours(
            x_BSH, weight_VH, Labels(labels_BS, z_loss, scale), multiple
        )
    entropy, expected_dx, expected_dweight = plain(x_BSH, weight_VH, labels_BS, z_loss, scale)
    assert losses.cross_entropy.item() == pytest.approx(entropy.item(), rel=1e-12, abs=1e-12)
    assert (
        losses.tokens.item() == (labels_BS != NO_LABEL).sum() and losses.tokens.dtype == torch.int64
    )
    close(dx_BSH, expected_dx, 1e-12)
    close(dweight_VH, expected_dweight, 1e-12)
    assert dx_BSH[labels_BS == NO_LABEL].count_nonzero() == 0
    assert not losses.cross_entropy.requires_grad  # a value for the log


@settings(max_examples=200, deadline=None)
@given(tokens=st.integers(1, 20_000), columns=st.integers(1, 200_000), limit=st.integers(1, 2**28))
def test_chunks(tokens: int, columns: int, limit: int) -> None:
    """Every token in one chunk; of one size but the last; no larger than the limit but for one
    token, or rounding up to 256 of them."""
    with mock.patch.object(loss_chunks, "ELSEWHERE", limit):
        sizes = [len(range(tokens)[inside]) for inside in loss._chunks(tokens, columns, "cpu")]
    assert sum(sizes) == tokens and set(sizes[:-1]) <= {sizes[0]} and 0 < sizes[-1] <= sizes[0]
    most = max(1, limit // (4 * columns))
    assert sizes[0] <= most + (255 if most > 256 else 0)
    assert len(sizes) <= -(-tokens // most)
    assert len(sizes) == 1 or sizes[0] <= 256 or sizes[0] % 256 == 0


def test_every_label_masked() -> None:
    """A micro-batch without a label: sum 0 over 0 tokens, gradients 0 and not NaN."""
    x_BSH, weight_VH, labels_BS = inputs(2, 3, 4, 11)
    losses, dx_BSH, dweight_VH = ours(
        x_BSH, weight_VH, Labels(torch.full_like(labels_BS, NO_LABEL), 1e-4), 8
    )
    assert losses.cross_entropy.item() == 0 and losses.tokens.item() == 0
    assert torch.equal(dx_BSH, torch.zeros_like(x_BSH)) and torch.equal(
        dweight_VH, torch.zeros_like(weight_VH)
    )


def test_large_logits() -> None:
    """exp would overflow; the loss stays exact."""
    x_BSH, weight_VH, labels_BS = inputs(2, 5, 4, 11)
    x_BSH = (1e4 * x_BSH).detach().requires_grad_()
    losses, dx_BSH, dweight_VH = ours(x_BSH, weight_VH, Labels(labels_BS), 8)
    entropy, expected_dx, expected_dweight = plain(x_BSH, weight_VH, labels_BS)
    assert entropy > 1e4 and losses.cross_entropy.item() == pytest.approx(entropy.item(), rel=1e-12)
    close(dx_BSH, expected_dx, 1e-12)
    close(dweight_VH, expected_dweight, 1e-12)


@pytest.mark.parametrize("multiple", [1, 8, 128])
def test_padding_never_matters(multiple: int) -> None:
    """Even where every logit is far below 0, that of a row of zeros: the padding has no weight
    in the softmax, no gradient, and is never seen."""
    x_BSH, weight_VH, labels_BS = inputs(2, 5, 4, 11)
    x_BSH, weight_VH = (
        x_BSH.detach().abs().requires_grad_(),
        (-9 * weight_VH.abs()).detach().requires_grad_(),
    )
    logits_BSV = padded_linear(x_BSH, weight_VH, multiple)
    torch.testing.assert_close(logits_BSV, x_BSH @ weight_VH.T, rtol=1e-14, atol=1e-14)
    losses, dx_BSH, dweight_VH = ours(x_BSH, weight_VH, Labels(labels_BS), multiple)
    entropy, expected_dx, expected_dweight = plain(x_BSH, weight_VH, labels_BS)
    assert logits_BSV.max() < 0 and losses.cross_entropy.item() == pytest.approx(
        entropy.item(), rel=1e-12
    )
    close(dx_BSH, expected_dx, 1e-12)
    close(dweight_VH, expected_dweight, 1e-12)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float16, 2e-3), (torch.bfloat16, 1.6e-2), (torch.float32, 1e-6)]
)
def test_16_bits(dtype: torch.dtype, tolerance: float) -> None:
    """Sums are fp32 or wider, gradients have the inputs' dtype: as near to fp64 over the same
    numbers as their rounding allows."""
    x_BSH, weight_VH, labels_BS = inputs(4, 32, 16, 50, dtype)
    with chunks_of(10, 56):
        losses, dx_BSH, dweight_VH = ours(x_BSH, weight_VH, Labels(labels_BS, 1e-4), 8)
    entropy, expected_dx, expected_dweight = plain(x_BSH, weight_VH, labels_BS, 1e-4)
    assert losses.cross_entropy.dtype == torch.float64 and losses.objective.dtype == torch.float32
    assert losses.cross_entropy.item() == pytest.approx(entropy.item(), rel=tolerance)
    assert dx_BSH.dtype == dweight_VH.dtype == dtype
    close(dx_BSH, expected_dx, tolerance)
    close(dweight_VH, expected_dweight, tolerance)


def test_sums_are_wider_than_16_bits() -> None:
    """512 equal losses of log 2 and as many gradients of a half, one chunk each: sums in bf16
    would stop growing at half of them."""
    count = 512
    x_BSH = torch.ones(1, count, 1, dtype=torch.bfloat16, requires_grad=True)
    weight_VH = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    with chunks_of(1, 2):
        losses, _, dweight_VH = ours(
            x_BSH, weight_VH, Labels(torch.zeros(1, count, dtype=torch.int64))
        )
    assert losses.cross_entropy.item() == pytest.approx(0.6931471805599453 * count, rel=1e-6)
    assert dweight_VH.flatten().tolist() == [-count / 2, count / 2]


@pytest.mark.parametrize("on_device", [False, True])
def test_the_scale_enters_before_rounding(on_device: bool) -> None:
    """1 / tokens of a large batch takes fp16's gradients to 0; with the loss scale in the same
    factor they come through, 2**28 times as large."""
    x_BSH, weight_VH, labels_BS = inputs(2, 16, 8, 50, torch.float16)
    tokens, loss_scale = 2.0**26, 2.0**28
    small, large = 1 / tokens, loss_scale / tokens
    scales = [torch.tensor(s) if on_device else s for s in (small, large)]
    _, lost_dx, lost_dweight = ours(x_BSH, weight_VH, Labels(labels_BS, 0.0, scales[0]))
    assert lost_dx.count_nonzero() == 0 and lost_dweight.count_nonzero() == 0
    _, dx_BSH, dweight_VH = ours(x_BSH, weight_VH, Labels(labels_BS, 0.0, scales[1]))
    _, true_dx, true_dweight = plain(x_BSH, weight_VH, labels_BS, 0.0, small)
    close(dx_BSH.double() / loss_scale, true_dx, 2e-3)
    close(dweight_VH.double() / loss_scale, true_dweight, 2e-3)


def test_the_scale_saves_small_probabilities() -> None:
    """A word of probability 1.5e-8 is 0 in fp16, but its gradient is there when the scale is put
    on in fp32: on the logits' gradient, not later."""
    x_BSH = torch.ones(1, 1, 1, dtype=torch.float16, requires_grad=True)
    weight_VH = torch.tensor([[0.0], [-18.0]], dtype=torch.float16, requires_grad=True)
    _, _, without = ours(x_BSH, weight_VH, Labels(torch.tensor([[0]])))
    _, _, scaled = ours(x_BSH, weight_VH, Labels(torch.tensor([[0]]), scale=2.0**16))
    assert without.flatten().tolist() == [0, 0]
    assert scaled[1].item() == pytest.approx(2**16 * math.exp(-18), rel=2e-3)


def test_an_overflow_shows_in_the_gradient() -> None:
    """A loss scale too large gives inf, which the dynamic scale then sees; the loss itself is as
    before."""
    x_BSH, weight_VH, labels_BS = inputs(2, 16, 8, 50, torch.float16)
    losses, dx_BSH, _ = ours(x_BSH, weight_VH, Labels(labels_BS, 0.0, 2.0**20))
    assert not dx_BSH.isfinite().all() and losses.cross_entropy.isfinite()


def test_a_multiple_of_the_objective_has_that_multiple_of_the_gradient() -> None:
    """Also where both gradients are asked for once more: never a wrong one."""
    found = []
    for factor in (1.0, 3.0):
        torch.manual_seed(0)
        x_BSH, weight_VH = (
            torch.randn(1, 6, 8, requires_grad=True),
            torch.randn(11, 8, requires_grad=True),
        )
        objective = head_loss(x_BSH, weight_VH, Labels(torch.arange(6)[None]), 1).objective * factor
        objective.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        assert x_BSH.grad is not None and weight_VH.grad is not None
        found.append((x_BSH.grad.clone(), weight_VH.grad.clone()))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        objective.backward()  # type: ignore[no-untyped-call]
    for once, thrice in zip(*found, strict=True):
        torch.testing.assert_close(thrice, 3 * once, rtol=1e-6, atol=0)


def test_the_gradient_is_not_differentiated_again() -> None:
    """It is a constant to autograd: a second derivative would be wrong without a word."""
    x_BSH, weight_VH, labels_BS = inputs(1, 4, 3, 7)
    factor = torch.ones(3, dtype=torch.float64, requires_grad=True)
    losses = head_loss(x_BSH * factor, weight_VH, Labels(labels_BS), 1)
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(losses.objective, factor, create_graph=True)


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Names of what runs, shapes of new storages, and the bytes alive at most, besides those of
    `known` tensors."""

    def __init__(self, *known: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []
        self.made: list[torch.Size] = []
        self.alive = {t.untyped_storage()._cdata: 0 for t in known}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.names.append(func.overloadpacket.__name__)
        for t in tree_leaves(made):
            if isinstance(t, Tensor):
                storage = t.untyped_storage()
                if storage._cdata not in self.alive:
                    self.made.append(t.shape)
                    self.alive[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self.alive.pop, storage._cdata)
        self.peak = max(self.peak, sum(self.alive.values()))
        return made


def watched(dtype: torch.dtype, tokens: int, chunk: int, *, learning: bool = True) -> Watch:
    """head_loss of `tokens` tokens with 1000 columns, `chunk` at a time; hidden size 2, so that
    logits are nearly all there is."""
    x_BSH, weight_VH, labels_BS = inputs(1, tokens, 2, 1000, dtype)
    watch = Watch(x_BSH, weight_VH, labels_BS)
    with chunks_of(chunk, 1000), torch.set_grad_enabled(learning), watch:
        head_loss(x_BSH, weight_VH, Labels(labels_BS, 1e-4), 8)
    return watch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_one_chunk_of_logits(dtype: torch.dtype) -> None:
    """However many tokens: one chunk in fp32, and half of that again where it is cast from or to
    16 bits."""
    chunk_bytes = 4 * 40 * 1000
    few, many = watched(dtype, 80, 40), watched(dtype, 400, 40)
    assert max(shape.numel() for shape in many.made) == 40 * 1000
    # W's gradient three times: sum, product, result
    assert (
        chunk_bytes
        <= many.peak
        < (1.1 if dtype == torch.float32 else 1.6) * chunk_bytes + 3 * 4 * 2000
    )
    # x's gradient and little else grows with the tokens
    assert many.peak - few.peak <= 320 * (2 * dtype.itemsize + 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_alone_where_nothing_is_learned(dtype: torch.dtype) -> None:
    """Evaluation: the weight still requires a gradient, but under no_grad there is one product a
    chunk and no more."""
    products = {"mm", "addmm", "addmm_", "linear", "matmul", "bmm"}
    learning, reading = watched(dtype, 80, 40), watched(dtype, 80, 40, learning=False)
    assert sum(name in products for name in learning.names) == 6
    assert sum(name in products for name in reading.names) == 2
    gradients = torch.Size([80, 2]), torch.Size([1000, 2])
    assert all(learning.made.count(shape) > reading.made.count(shape) == 0 for shape in gradients)


def test_values_under_no_grad_are_the_same() -> None:
    x_BSH, weight_VH, labels_BS = inputs(2, 5, 4, 11)
    with torch.no_grad():
        reading = head_loss(x_BSH, weight_VH, Labels(labels_BS), 8)
    learning = head_loss(x_BSH, weight_VH, Labels(labels_BS), 8)
    assert torch.equal(reading.cross_entropy, learning.cross_entropy) and torch.equal(
        reading.tokens, learning.tokens
    )
    assert learning.objective.requires_grad and not reading.objective.requires_grad


def test_a_weight_that_needs_no_padding_is_not_copied() -> None:
    weight_VH = torch.randn(16, 3)
    assert loss.padded(weight_VH, 8) is weight_VH
    assert loss.padded(weight_VH, 10).shape == (20, 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 3, 20])
def test_blocks_are_only_a_matter_of_caches(dtype: torch.dtype, rows: int) -> None:
    """A chunk taken in blocks of 1, 3 (the last is shorter) or 20 tokens: the same bits of every
    gradient, the same sum but for its order."""
    x_BSH, weight_VH, labels_BS = inputs(2, 10, 8, 50, dtype)
    whole, whole_dx, whole_dweight = ours(x_BSH, weight_VH, Labels(labels_BS, 1e-4, 0.5), 8)
    with mock.patch.object(cross_entropy, "BLOCK_BYTES", 4 * 56 * rows):
        losses, dx_BSH, dweight_VH = ours(x_BSH, weight_VH, Labels(labels_BS, 1e-4, 0.5), 8)
    assert torch.equal(dx_BSH, whole_dx) and torch.equal(dweight_VH, whole_dweight)
    assert losses.cross_entropy.item() == pytest.approx(whole.cross_entropy.item(), rel=1e-6)
