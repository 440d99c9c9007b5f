"""The fused optimizer step and norm against torch's own in fp64; skipped steps, 16-bit copies,
threads, resume."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.library import opcheck

from trainkit.jobs.schema import Training
from trainkit.ops import adamw
from trainkit.ops.adamw import Rule, Weights
from trainkit.ops.kernels import FUSED, REFERENCE, Kernels, Unavailable, load
from trainkit.train.update.optimizer import Optimizer

RULE = Rule(0.8, 0.95, 1e-3)  # not torch's own defaults
SHAPES = [(3, 7), (5,), (70_001,), (0,), ()]  # one of more than a block
GO, SKIP = torch.tensor(0.0), torch.tensor(1.0)


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> None:
    try:
        load("cpu")
    except Unavailable as error:
        pytest.skip(str(error))


def tensors(seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def state(dtype: torch.dtype = torch.float32, copy: torch.dtype | None = None) -> Weights:
    """Weights 0, gradients 1, moments 0."""
    weights = tensors(0, dtype)
    return Weights(
        weights,
        tensors(1, dtype),
        [torch.zeros_like(w) for w in weights],
        [torch.zeros_like(w) for w in weights],
        [] if copy is None else [torch.full_like(w, 9, dtype=copy) for w in weights],
        [0.3, 0.0, 0.3, 0.3, 0.0],
    )


def take(on: Weights, steps: int, gradients: list[Tensor], skip: Tensor = GO) -> None:
    """One fused step."""
    for held, new in zip(on.gradients, gradients, strict=True):
        held.copy_(new)
    adamw.fused(
        on,
        RULE,
        steps=torch.tensor(steps),
        rate=torch.tensor(0.1 / (1 + steps), dtype=torch.float64),
        divisor=torch.tensor(2.0 + steps),
        skip=skip,
    )


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.float64, 1e-12)])
def test_steps_are_torchs(dtype: torch.dtype, bound: float) -> None:
    """Of torch.optim.AdamW in fp64, whose gradients were divided by hand; rate, divisor and
    gradients are others at every step."""
    on = state(dtype)
    theirs = [nn.Parameter(w.double()) for w in tensors(0)]
    groups = [
        {"params": [p], "weight_decay": decay} for p, decay in zip(theirs, on.decays, strict=True)
    ]
    torchs = torch.optim.AdamW(groups, lr=0.1, betas=(0.8, 0.95), eps=1e-3)
    for step in range(4):
        gradients = tensors(10 + step)
        take(on, step, [g.to(dtype) for g in gradients])
        for p, gradient in zip(theirs, gradients, strict=True):
            p.grad = gradient.double() / (2.0 + step)
        for group in torchs.param_groups:
            group["lr"] = 0.1 / (1 + step)
        torchs.step()
    for i, p in enumerate(theirs):
        moments = torchs.state[p]
        for found, wanted in (
            (on.weights[i], p.detach()),
            (on.exp_avgs[i], moments["exp_avg"]),
            (on.exp_avg_sqs[i], moments["exp_avg_sq"]),
        ):
            torch.testing.assert_close(found.double(), wanted, rtol=bound, atol=bound)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_copies_are_the_rounded_weights(dtype: torch.dtype) -> None:
    """And gradients of 16 bits are the same numbers as in fp32."""
    on, plain = state(copy=dtype), state()
    on.gradients[:] = [g.to(dtype) for g in on.gradients]
    for step in range(2):
        gradients = [g.to(dtype) for g in tensors(10 + step)]
        take(on, step, gradients)
        take(plain, step, gradients)
    for copy, weight, same in zip(on.copies, on.weights, plain.weights, strict=True):
        assert torch.equal(copy, weight.to(dtype)) and torch.equal(weight, same)


def test_a_skipped_step_changes_nothing() -> None:
    on = state(copy=torch.bfloat16)
    take(on, 0, tensors(10))
    held = [*on.weights, *on.exp_avgs, *on.exp_avg_sqs, *on.copies]
    before = [t.clone() for t in held]
    take(on, 1, [torch.full_like(g, torch.nan) for g in tensors(11)], SKIP)
    assert all(torch.equal(a, b) for a, b in zip(held, before, strict=True))
    take(on, 1, tensors(11))
    assert not torch.equal(on.weights[0], before[0])


def test_what_is_not_finite_stays_where_it_is() -> None:
    on = state()
    gradients = tensors(10)
    gradients[2][66_000] = torch.nan
    take(on, 0, gradients)
    assert on.weights[2].isnan().nonzero().tolist() == [[66_000]]
    assert all(w.isfinite().all() for i, w in enumerate(on.weights) if i != 2)


def test_the_norm_is_exact_to_fp64() -> None:
    """fp32 alone would leave 1e-8; an element too small to square in fp32 still counts; views and
    16 bits count as they are."""
    wide = torch.randn(300, 700, generator=torch.Generator().manual_seed(3))
    mixed = [wide[:, ::3], wide.T, wide.bfloat16(), torch.full((4,), 1e-30), torch.zeros(0)]
    exact = math.fsum(x * x for t in mixed for x in t.double().reshape(-1).tolist())
    assert float(adamw.norm_fused(mixed)) == pytest.approx(exact, rel=1e-13)
    assert float(adamw.norm_reference(mixed)) == pytest.approx(exact, rel=1e-13)
    assert float(adamw.norm_fused([mixed[3]])) == pytest.approx(4e-60, rel=1e-6)
    for value in (torch.nan, torch.inf):
        wide[299, 699] = value
        assert not adamw.norm_fused([wide]).isfinite()


def test_the_same_bits_for_any_number_of_threads() -> None:
    found = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3, 3):
            torch.set_num_threads(count)
            on = state(copy=torch.bfloat16)
            take(on, 0, tensors(10))
            found.append([adamw.norm_fused(on.gradients), *on.weights, *on.copies])
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, found[0], strict=True))


def test_what_is_refused() -> None:
    on = state()
    on.gradients[0] = on.gradients[0].T
    with pytest.raises(RuntimeError, match=r"gradients\[0\] must be contiguous"):
        take(on, 0, [torch.zeros_like(g) for g in on.gradients])
    on = state(torch.bfloat16)
    with pytest.raises(RuntimeError, match="weights are fp32 or fp64"):
        take(on, 0, tensors(1))
    on = state()
    del on.copies[:], on.exp_avgs[-1]
    with pytest.raises(RuntimeError, match="4 exp_avgs for 5 weights"):
        take(on, 0, tensors(1))


def test_operations_are_declared_as_they_are() -> None:
    on = state(copy=torch.bfloat16)
    ops = torch.ops.trainkit
    lists = (on.weights, on.gradients, on.exp_avgs, on.exp_avg_sqs, on.copies)
    numbers = (torch.tensor(3), torch.tensor(0.1), 0.9, 0.95, 1e-8, on.decays)
    opcheck(ops.adamw_step_.default, (*lists, *numbers, torch.tensor(1.0), GO))
    opcheck(ops.squared_norm.default, (on.weights,))


def training() -> Training:
    return Training(
        train_iters=9, lr=0.1, adam_beta1=0.8, adam_beta2=0.95, adam_eps=1e-3, weight_decay=0.3
    )


def optimizer_of(kernels: object, seed: int = 0) -> tuple[Optimizer, dict[str, nn.Parameter]]:
    parameters = {str(i): nn.Parameter(w) for i, w in enumerate(tensors(seed)) if w.numel()}
    return Optimizer(parameters, training(), kernels), parameters  # type: ignore[arg-type]


def step_of(optimizer: Optimizer, parameters: dict[str, nn.Parameter], step: int) -> None:
    for i, gradient in enumerate(tensors(20 + step)):
        if str(i) in parameters:
            parameters[str(i)].grad = gradient
    rate, divisor = torch.tensor(0.1 / (1 + step)), torch.tensor(1.5, dtype=torch.float64)
    optimizer.step(rate, divisor, torch.tensor(step == 1))
    optimizer.zero_grad()


def test_the_optimizer_follows_its_reference_and_goes_on_from_its_state() -> None:
    """The second of four steps is skipped; the state of the reference, read into a fused one,
    gives the same further steps, and a fused one's own state the same bits."""
    (fused, mine), (plain, theirs) = optimizer_of(FUSED), optimizer_of(REFERENCE)
    for step in range(3):
        step_of(fused, mine, step)
        step_of(plain, theirs, step)
    assert fused.applied_steps() == plain.applied_steps() == 2
    for kernels, source, weights in ((FUSED, plain, theirs), (FUSED, fused, mine)):
        resumed, found = optimizer_of(kernels, seed=7)
        for name, tensor in source.state_tensors().items():
            resumed.state_tensors()[name].copy_(tensor)
        for name, parameter in weights.items():
            found[name].data.copy_(parameter.data)
        resumed.set_steps(2)
        step_of(resumed, found, 3)
        last = found
    step_of(fused, mine, 3)
    step_of(plain, theirs, 3)
    for name, parameter in mine.items():
        assert torch.equal(parameter, last[name])
        torch.testing.assert_close(parameter, theirs[name], rtol=2e-6, atol=2e-6)


def test_bytes() -> None:
    fp32, bf16 = torch.float32, torch.bfloat16
    assert adamw.bytes_moved(10, fp32, fp32, None) == 280
    assert adamw.bytes_moved(10, fp32, bf16, bf16) == 280


def test_what_a_beta_near_one_leaves_is_not_lost_in_fp32() -> None:
    def moment(kernels: Kernels) -> float:
        one = [torch.ones(1) for _ in range(2)]
        on = Weights([one[0]], [one[1]], [torch.zeros(1)], [torch.zeros(1)], [], [0.0])
        number = torch.ones(())
        kernels.adamw(
            on,
            Rule(0.9, 0.99999, 1e-8),
            steps=torch.tensor(0),
            rate=number * 1e-3,
            divisor=number,
            skip=GO,
        )
        return on.exp_avg_sqs[0].item()

    assert moment(FUSED) == pytest.approx(1e-5, rel=1e-6)
    assert moment(FUSED) == pytest.approx(moment(REFERENCE), rel=1e-6)
