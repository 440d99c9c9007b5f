"""The fused loss of a chunk against its reference in fp64: every dtype, shape and kind of number,
whole and split over a vocabulary."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainkit.ops import cross_entropy, kernels
from trainkit.ops.cross_entropy import NO_LABEL
from trainkit.ops.kernels import choose
from trainkit.train.model.head_loss import Labels, head_loss
from trainkit.train.parallel.tensor_group import TensorGroup
from trainkit.train.parallel.tensor_parallel import VocabularyPart, combined

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
# of a gradient below 1, beside fp64: half a step of the dtype, or what fp32's sums and e^x leave
BOUND = {
    torch.float32: 1e-6,
    torch.bfloat16: 2**-8,
    torch.float16: 2**-11,
    torch.float64: 1e-14,
}


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> None:
    try:
        kernels.load("cpu")
    except kernels.Unavailable as error:
        pytest.skip(str(error))


def chunk(
    rows: int, vocab: int, dtype: torch.dtype, *, padding: int = 0, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """(logits, whose padding holds NaN; labels, some of them NO_LABEL)."""
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(rows, vocab + padding, generator=generator)
    logits[:, vocab:] = torch.nan
    labels = torch.randint(0, vocab, (rows,), generator=generator)
    labels[torch.rand(rows, generator=generator) < 0.3] = NO_LABEL
    return logits.to(dtype), labels


def scale_of(dtype: torch.dtype, scale: float = 0.25) -> Tensor:
    return torch.tensor(scale, dtype=torch.promote_types(dtype, torch.float32))


def expected(
    logits: Tensor, labels: Tensor, vocab: int, z_loss: float = 0.0, scale: float = 0.25
) -> tuple[Tensor, float]:
    """By autograd in fp64, from everyone's own cross-entropy."""
    x = logits[:, :vocab].double().requires_grad_()
    entropy = F.cross_entropy(x, labels, reduction="sum", ignore_index=NO_LABEL)
    z_term = x.logsumexp(1)[labels != NO_LABEL].square().sum()
    (gradient,) = torch.autograd.grad(scale * (entropy + z_loss * z_term), x)
    return F.pad(gradient, (0, logits.shape[1] - vocab)), float(entropy.detach())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "vocab", "padding"),
    [(1, 1, 0), (5, 1, 3), (7, 33, 0), (64, 1001, 7), (3, 100_003, 5), (2, 262_144, 0)],
)
def test_loss_and_gradient(dtype: torch.dtype, rows: int, vocab: int, padding: int) -> None:
    logits, labels = chunk(rows, vocab, dtype, padding=padding)
    wanted, entropy = expected(logits, labels, vocab, 1e-3)
    given = logits.clone()
    gradient, found = cross_entropy.fused(given, labels, vocab, 1e-3, scale_of(dtype), True)
    assert gradient is given and gradient.dtype == dtype and found.dtype == torch.float64
    assert float(found) == pytest.approx(entropy, rel=1e-6, abs=1e-6)
    largest = max(0.25, float(wanted.abs().max()))  # z-loss moves it
    torch.testing.assert_close(gradient.double(), wanted, rtol=0, atol=BOUND[dtype] * largest)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_reference_is_everyones_loss(dtype: torch.dtype) -> None:
    logits, labels = chunk(40, 60, dtype, padding=4)
    wanted, entropy = expected(logits, labels, 60, 1e-3)
    gradient, found = cross_entropy.plain(logits, labels, 60, 1e-3, scale_of(dtype), True)
    assert gradient is logits
    assert float(found) == pytest.approx(entropy, rel=1e-6)
    torch.testing.assert_close(gradient.double(), wanted, rtol=0, atol=BOUND[dtype])


def test_values_alone_leave_the_logits() -> None:
    logits, labels = chunk(9, 50, torch.bfloat16)
    before = logits.clone()
    _, found = cross_entropy.fused(logits, labels, 50, 0.0, scale_of(torch.bfloat16), False)
    assert torch.equal(logits, before)
    assert float(found) == pytest.approx(expected(before, labels, 50)[1], rel=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_to_learn_from(dtype: torch.dtype) -> None:
    """All labels ignored, or no tokens at all: zeros, never NaN."""
    logits, labels = chunk(6, 21, dtype)
    nothing = torch.full_like(labels, NO_LABEL)
    gradient, found = cross_entropy.fused(logits, nothing, 21, 1e-3, scale_of(dtype), True)
    assert float(found) == 0.0 and not gradient.any()
    gradient, found = cross_entropy.fused(logits[:0], labels[:0], 21, 0.0, scale_of(dtype), True)
    assert float(found) == 0.0 and gradient.shape == (0, 21)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_numbers_that_are_not_finite(dtype: torch.dtype, value: float) -> None:
    """They reach the loss and every gradient of their row, as in the reference, and no other row.
    -inf is a logit like another: its gradient is 0."""
    logits, labels = chunk(5, 40, dtype)
    labels[:] = torch.tensor([1, 2, 3, 4, 5])
    logits[2, 17] = value
    wanted, _ = expected(logits, labels, 40)
    gradient, found = cross_entropy.fused(logits, labels, 40, 0.0, scale_of(dtype), True)
    assert bool(found.isfinite()) == (value == -torch.inf)
    assert torch.equal(gradient.isnan(), wanted.isnan())
    assert torch.equal(wanted.isnan().any(1), torch.arange(5) == (2 if found.isnan() else 9))
    if value == -torch.inf:
        assert gradient[2, 17] == 0


def test_the_label_of_a_logit_far_below() -> None:
    """e^-200 is 0 in fp32; its gradient is -1 all the same, and the loss is 200."""
    logits = torch.tensor([[0.0, -200.0, -300.0]])
    one = torch.tensor(1.0)
    gradient, found = cross_entropy.fused(logits, torch.tensor([1]), 3, 0.0, one, True)
    assert gradient.tolist() == [[1.0, -1.0, 0.0]] and float(found) == 200.0


@pytest.mark.parametrize("make", [lambda x: x.T.contiguous().T, lambda x: x[:1].expand(6, -1)])
def test_logits_that_cannot_be_written_row_by_row(make) -> None:  # type: ignore[no-untyped-def]
    logits, labels = chunk(6, 30, torch.float32)
    strange = make(logits)
    wanted, entropy = expected(strange, labels, 30)
    gradient, found = cross_entropy.fused(strange, labels, 30, 0.0, scale_of(torch.float32), True)
    assert float(found) == pytest.approx(entropy, rel=1e-6)
    torch.testing.assert_close(gradient.double(), wanted, rtol=0, atol=1e-6)
    with pytest.raises(RuntimeError, match="rows must not overlap"):
        cross_entropy.loss_(strange, labels, 30, 0.0, scale_of(torch.float32), True)


LOGITS, LABELS, SCALE = torch.ones(4, 9), torch.tensor([3, 1, 8, 0]), torch.tensor(1.0)


@pytest.mark.parametrize(
    ("logits", "labels", "vocab", "scale", "words"),
    [
        (LOGITS, LABELS + LABELS // 8, 9, SCALE, "label 9 of row 2 is not one of 9"),
        (LOGITS, LABELS, 10, SCALE, "10 columns of 9"),
        (LOGITS, LABELS.int(), 9, SCALE, "takes 4 labels of int64"),
        (LOGITS, LABELS, 9, SCALE.double(), r"takes 1 numbers of torch\.Float"),
        (LOGITS.int(), LABELS, 9, SCALE, r"takes fp32, bf16, fp16 and fp64"),
    ],
)
def test_what_is_refused(
    logits: Tensor, labels: Tensor, vocab: int, scale: Tensor, words: str
) -> None:
    with pytest.raises(RuntimeError, match=words):
        cross_entropy.fused(logits, labels, vocab, 0.0, scale, True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bits_for_any_number_of_threads(dtype: torch.dtype) -> None:
    logits, labels = chunk(67, 5003, dtype)
    found = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3, 3):
            torch.set_num_threads(count)
            found.append(
                cross_entropy.fused(logits.clone(), labels, 5000, 1e-3, scale_of(dtype), True)
            )
    finally:
        torch.set_num_threads(threads)
    for gradient, entropy in found[1:]:
        assert torch.equal(gradient, found[0][0]) and torch.equal(entropy, found[0][1])


def split(
    logits: Tensor, labels: Tensor, starts: list[int], z_loss: float, scale: Tensor, *, fused: bool
) -> tuple[Tensor, Tensor]:
    """The loss of a vocabulary that lies in parts, as ranks that gather each other's numbers."""
    statistics = cross_entropy.statistics_fused if fused else cross_entropy.statistics_reference
    gradient = cross_entropy.gradient_fused if fused else cross_entropy.gradient_reference
    ends = [*starts[1:], logits.shape[1]]
    parts = [logits[:, a:b] for a, b in zip(starts, ends, strict=True)]
    rows = [labels - a for a in starts]
    found = [statistics(p, r, p.shape[1]) for p, r in zip(parts, rows, strict=True)]
    highest, total, target = combined(torch.stack(found))
    logsum = highest + total.log()
    counted = labels != NO_LABEL
    factor = counted * scale
    softmax = factor * (1 + 2 * z_loss * logsum) / total
    gradients = [
        gradient(p, r, p.shape[1], highest, softmax, factor)
        for p, r in zip(parts, rows, strict=True)
    ]
    return torch.cat(gradients, 1), torch.where(counted, logsum - target, 0).double().sum()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_vocabulary_in_parts(dtype: torch.dtype, fused: bool) -> None:
    """Parts of unequal width; in the second nothing of row 0 is above -inf."""
    logits, labels = chunk(23, 301, dtype)
    labels[0] = 5
    logits[0, 100:107] = -torch.inf
    wanted, entropy = expected(logits, labels, 301, 1e-3)
    gradient, found = split(logits, labels, [0, 100, 107], 1e-3, scale_of(dtype), fused=fused)
    assert float(found) == pytest.approx(entropy, rel=1e-6)
    torch.testing.assert_close(gradient.double(), wanted, rtol=0, atol=BOUND[dtype])


def test_a_vocabulary_in_parts_hides_no_nan() -> None:
    logits, labels = chunk(4, 30, torch.float32)
    labels[:] = 3
    logits[1] = -torch.inf
    logits[1, 20] = torch.nan  # of its part nothing else counts
    gradient, found = split(logits, labels, [0, 15], 0.0, torch.tensor(1.0), fused=True)
    assert found.isnan() and torch.equal(gradient.isnan().all(1), torch.arange(4) == 1)


def test_operations_are_declared_as_they_are() -> None:
    logits, labels = chunk(6, 11, torch.float32)
    numbers = torch.randn(6)
    ops = torch.ops.trainkit
    opcheck(ops.softmax_loss_.default, (logits, labels, 11, 0.1, torch.tensor(0.5), True))
    opcheck(ops.softmax_statistics.default, (logits, labels, 9))
    opcheck(ops.softmax_gradient_.default, (logits, labels, 9, numbers, numbers, numbers))


def test_compiled_is_eager() -> None:
    logits, labels = chunk(12, 70, torch.bfloat16, padding=2)
    words = (labels, 70, 1e-3, scale_of(torch.bfloat16), True)
    eager, entropy = cross_entropy.fused(logits.clone(), *words)
    compiled = torch.compile(cross_entropy.fused, fullgraph=True, backend="aot_eager")
    gradient, found = compiled(logits.clone(), *words)
    assert torch.equal(gradient, eager) and torch.equal(found, entropy)


class _Wide(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the elements of the largest fp32 tensor that is made."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        made = func(*args, **(kwargs or {}))
        for t in tree_leaves(made):
            if isinstance(t, Tensor) and t.dtype == torch.float32:
                self.largest = max(self.largest, t.numel())
        return made


def test_logits_never_exist_in_fp32() -> None:
    """The head's loss and gradients in bf16, with the fused loss and with the reference."""
    generator = torch.Generator().manual_seed(0)
    x_BSH = torch.randn(1, 64, 8, generator=generator).bfloat16().requires_grad_()
    weight_VH = torch.randn(500, 8, generator=generator).bfloat16().requires_grad_()
    labels = Labels(torch.randint(0, 500, (1, 64), generator=generator), 1e-4, 0.125)
    found = []
    for softmax in (cross_entropy.fused, cross_entropy.reference):
        x_BSH.grad = weight_VH.grad = None
        with _Wide() as watch:  # type: ignore[no-untyped-call]
            losses = head_loss(x_BSH, weight_VH, labels, 128, softmax)
            losses.objective.backward()  # type: ignore[no-untyped-call]
        found.append((losses.cross_entropy, x_BSH.grad, weight_VH.grad))
        assert (watch.largest < 64 * 500) == (softmax is cross_entropy.fused)
    (fused, dx, dweight), (reference, dx_reference, dweight_reference) = found
    assert float(fused) == pytest.approx(float(reference), rel=1e-6)
    torch.testing.assert_close(dx, dx_reference, rtol=2**-7, atol=2**-9)
    torch.testing.assert_close(dweight, dweight_reference, rtol=2**-7, atol=2**-9)


def test_bytes() -> None:
    """Read once, written once."""
    assert cross_entropy.bytes_moved(8192, 131072, torch.bfloat16) == 4 * 8192 * 131072 + 8 * 8192


def test_a_rank_without_a_finite_logit_beside_very_low_ones() -> None:
    nothing, low = torch.tensor([-torch.inf, 0.0, 0.0]), torch.tensor([-200.0, 2.0, -201.0])
    highest, summed, target = combined(torch.stack([nothing, low])[..., None])
    assert (highest.item(), summed.item(), target.item()) == (-200.0, 2.0, -201.0)


@pytest.mark.parametrize("label", [-5, 9, 2**40])
@pytest.mark.parametrize("kernels", ["reference", "fused"])
def test_a_label_of_no_token_is_refused(label: int, kernels: str) -> None:
    """Whole and split: it is never counted as another token's, nor as one without a logit."""
    chosen = choose("reference" if kernels == "reference" else "fused", "cpu").kernels
    part = VocabularyPart(TensorGroup(1, 0, sequence=False), 0, 9, chosen)
    logits, labels = chunk(3, 9, torch.float32)
    labels[1] = label
    for loss in (chosen.softmax_loss, part.softmax_loss):
        with pytest.raises((RuntimeError, ValueError), match=str(label)):
            loss(logits.clone(), labels, 9, 0.0, torch.tensor(1.0), True)
