"""What ptxas makes of every kernel, for GPUs that are not here: no registers spilled, at least half
of a multiprocessor's threads resident, memory touched 16 bytes at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice

import pytest
import torch

pytest.importorskip("triton", reason="GPU kernels need the extra [triton]")

from tests.ops.gpu.ahead_of_time import Compiled, compiling
from trainkit.ops.triton_kernels import (
    activations,
    adamw,
    cross_entropy,
    launch,
    norms,
    rotary,
    scaled_softmax,
)

ROWS = 8192
MULTIPROCESSORS = 132
Launch = Callable[[], object]
# beside whole steps they have one that may end anywhere, and so goes element by element
WITH_A_TAIL = {"_squares", "_update"}
# twice as many numbers a thread, and registers would spill
IN_8_BYTES = {"_join_normed"}
NOT_TUNED = {"_softmax"}  # a row ends at its query, wherever that is


@pytest.fixture(autouse=True)
def _as_many_programs_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "WITHOUT_A_GPU", MULTIPROCESSORS)
    launch.multiprocessors.cache_clear()


def norm_launches(width: int, dtype: torch.dtype, weights: torch.dtype) -> Iterator[Launch]:
    """All of rms_norm and layer_norm."""
    x = torch.empty(ROWS, width, dtype=dtype)  # never touched: it takes no memory
    w = torch.empty(width, dtype=weights)
    row = torch.empty(ROWS)
    yield partial(norms.rms_norm, x, w, 1e-5)
    yield partial(norms.add_rms_norm, x, x, w, 1e-5)
    yield partial(norms.layer_norm, x, w, w, 1e-5)
    yield partial(norms.add_layer_norm, x, x, w, w, 1e-5)
    yield partial(norms.rms_norm_backward, x, x, w, row)
    yield partial(norms.add_rms_norm_backward, x, x, x, w, row)
    yield partial(norms.layer_norm_backward, x, x, w, row, row)
    yield partial(norms.add_layer_norm_backward, x, x, x, w, row, row)


def activation_launches(width: int, dtype: torch.dtype) -> Iterator[Launch]:
    """All activations of an MLP of this width."""
    gate_up = torch.empty(ROWS, 2 * width, dtype=dtype)
    h = torch.empty(ROWS, width, dtype=dtype)
    bias = torch.empty(width, dtype=dtype)
    yield partial(activations.swiglu, gate_up)
    yield partial(activations.swiglu_backward, h, gate_up)
    for form in ("tanh", "none"):
        yield partial(activations.geglu, gate_up, form)
        yield partial(activations.geglu_backward, h, gate_up, form)
        yield partial(activations.gelu, h, form)
        yield partial(activations.gelu_backward, h, h, form)
        yield partial(activations.bias_gelu, h, bias, form)
        yield partial(activations.bias_gelu_backward, h, h, bias, form)


def rotary_launches(heads: int, groups: int, channels: tuple[int, int]) -> Iterator[Launch]:
    """Both directions, in bf16 and fp32."""
    size, turning = channels
    for dtype in (torch.bfloat16, torch.float32):
        qkv = torch.empty(2, 2048, (heads + 2 * groups) * size, dtype=dtype)
        q = torch.empty(2, 2048, heads, size, dtype=dtype)
        k = torch.empty(2, 2048, groups, size, dtype=dtype)
        cos = torch.empty(2048, turning)
        yield partial(rotary.rotate_qkv, qkv, cos, cos, heads, groups)
        yield partial(rotary.rotate_qkv_backward, q, k, k, cos, cos)
        weights = torch.empty(2, size, dtype=dtype)
        yield partial(rotary.norm_rotate_qkv, qkv, weights, cos, cos, heads, groups, 1e-6)
        yield partial(rotary.norm_rotate_qkv_backward, q, k, k, qkv, weights, cos, cos, 1e-6)


def loss_launches(vocab: int, columns: int, dtype: torch.dtype) -> Iterator[Launch]:
    """Whole, and of a part of a vocabulary."""
    logits = torch.empty(ROWS, columns, dtype=dtype)
    labels = torch.empty(ROWS, dtype=torch.int64)
    row = torch.empty(ROWS)
    for learning in (True, False):
        yield partial(
            cross_entropy.softmax_loss_, logits, labels, vocab, 1e-4, torch.empty(()), learning
        )
    yield partial(cross_entropy.softmax_statistics, logits, labels, vocab)
    yield partial(cross_entropy.softmax_gradient_, logits, labels, vocab, row, row, row)


def optimizer_launches(gradient: torch.dtype) -> Iterator[Launch]:
    """With copies and without."""
    weights = [torch.empty(size) for size in (768, 10**5)]
    gradients = [w.to(gradient) for w in weights]
    one = torch.ones(())
    yield partial(adamw.squared_norm, gradients)
    for copies in ([], [w.to(torch.bfloat16) for w in weights]):
        yield partial(
            adamw.adamw_step_, weights, gradients, weights, weights, copies, one, one,
            0.9, 0.95, 1e-8, [0.1, 0.0], one, one,
        )  # fmt: skip


def softmax_launches(dtype: torch.dtype) -> Iterator[Launch]:
    """All three."""
    x = torch.empty(2, 16, 2048, 2048, dtype=dtype)
    mask = torch.empty(2, 1, 2048, 2048, dtype=torch.bool)
    yield partial(scaled_softmax.scaled_causal_softmax, x, 0.1)
    yield partial(scaled_softmax.scaled_masked_softmax, x, mask, 0.1)
    yield partial(scaled_softmax.scaled_softmax_backward, x, x, 0.1)


def passes(compiled: Compiled) -> bool:
    """All gates."""
    wide = compiled.widths.count(128)
    if compiled.name in WITH_A_TAIL:
        enough = wide > 0
    elif compiled.name in IN_8_BYTES:
        enough = sum(width for width in compiled.widths if width >= 64) > 0.5 * sum(compiled.widths)
    elif compiled.name in NOT_TUNED:
        enough = True
    else:
        # the others are a row's statistics, a label, the weight of a tile of few columns
        enough = compiled.part_in_16_bytes > 0.5
    return compiled.spilled == 0 and compiled.occupancy >= 0.5 and enough


def check(capability: int, launches: Iterator[Launch]) -> None:
    """Compiles what they would launch."""
    with compiling(capability) as found:
        for each in launches:
            each()
    assert found
    failed = {str(compiled) for compiled in found if not passes(compiled)}
    assert not failed, "\n".join(sorted(failed))


FAST = [
    pytest.param(norm_launches(4096, torch.bfloat16, torch.bfloat16), id="norms"),
    pytest.param(activation_launches(11008, torch.bfloat16), id="activations"),
    pytest.param(rotary_launches(32, 8, (128, 128)), id="rotary"),
    pytest.param(loss_launches(131072, 131072, torch.bfloat16), id="cross-entropy"),
    pytest.param(optimizer_launches(torch.float32), id="optimizer"),
    pytest.param(softmax_launches(torch.bfloat16), id="softmax"),
]


@pytest.mark.parametrize("launches", FAST)
def test_kernels_pass_the_gates_on_an_h100(launches: Iterator[Launch]) -> None:
    check(90, launches)


def everything() -> Iterator[Launch]:
    """Hidden sizes from 512 to 16,384 and beyond, in all dtypes that a job computes in."""
    for width in (512, 768, 1024, 2048, 4096, 5120, 8192, 16384, 32768):
        for dtype, weights in (
            (torch.bfloat16, torch.bfloat16),
            (torch.bfloat16, torch.float32),
            (torch.float16, torch.float16),
            (torch.float32, torch.float32),
        ):
            yield from norm_launches(width, dtype, weights)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for width in (512, 3072, 11008, 28672):
            yield from activation_launches(width, dtype)
        for vocab, columns in ((131072, 131072), (50257, 50304), (32000, 32000)):
            yield from loss_launches(vocab, columns, dtype)
        yield from optimizer_launches(dtype)
        yield from softmax_launches(dtype)
    yield from rotary_launches(12, 12, (64, 64))
    yield from rotary_launches(64, 64, (96, 24))
    yield from rotary_launches(16, 4, (128, 32))


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_all_shapes_pass_the_gates(capability: int) -> None:
    check(capability, everything())


def test_a_kernel_that_spills_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows so wide that their gradient and the sums over rows do not fit the registers."""
    monkeypatch.setattr(norms, "_whole_backward", lambda saved: launch.WHOLE)
    with pytest.raises(AssertionError, match="_backward"):
        check(90, norm_launches(launch.WHOLE, torch.float32, torch.float32))


def test_narrow_accesses_fail() -> None:
    """Rows of an odd width begin nowhere in particular."""
    with pytest.raises(AssertionError, match="_gated"):
        check(90, islice(activation_launches(11007, torch.bfloat16), 1))
