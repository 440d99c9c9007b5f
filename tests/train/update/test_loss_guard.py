"""The guard's judgement of single steps, against a plain reference."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from trainkit.jobs.schema import Training
from trainkit.train.update.loss_guard import LossGuard

CPU = torch.device("cpu")
NO, YES = torch.tensor(False), torch.tensor(True)


def training(**keys: object) -> Training:
    return Training.model_validate(
        {"train_iters": 10, "lr": 1.0, "spike_window": 4, "spike_factor": 2.0, **keys}
    )


def judge(
    guard: LossGuard, loss: float, norm: float = 1.0, may_overflow: torch.Tensor = NO
) -> tuple[float, ...]:
    verdict = guard.judge(
        torch.tensor(loss, dtype=torch.float64),
        torch.tensor(norm, dtype=torch.float64),
        may_overflow,
    )
    return tuple(float(part) for part in verdict)


@pytest.mark.parametrize(
    "loss,norm", [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.inf), (1.0, math.nan)]
)
def test_what_is_not_finite_is_never_applied(loss: float, norm: float) -> None:
    guard = LossGuard(training(), CPU)
    assert judge(guard, loss, norm) == (1, 0, 1, 0)  # skip, overflow, nan, spike
    assert int(guard.skipped_in_a_row) == 1
    scale = math.isfinite(loss)  # a loss that is not finite is never the loss scale's affair
    assert judge(guard, loss, norm, YES) == (1, scale, not scale, 0)
    assert int(guard.skipped_in_a_row) == (0 if scale else 2)
    assert int(guard.seen) == 0 and float(guard.mean) == 0


def test_exactly_the_factor_is_no_spike_and_none_is_one_without_a_policy() -> None:
    guard, ignoring = LossGuard(training(on_spike="skip"), CPU), LossGuard(training(), CPU)
    losses = (1.0, 1.0, 1.0, 1.0, 2.0, 2.51)  # the last is above twice the mean, 1.25
    assert [judge(guard, loss) for loss in losses] == [(0, 0, 0, 0)] * 5 + [(1, 0, 0, 1)]
    assert {judge(ignoring, loss) for loss in losses} == {(0, 0, 0, 0)}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([1.0, 1.5, 1.9, 3.0, 10.0, math.nan]), max_size=40), st.integers(0, 40)
)
def test_as_a_plain_loop_and_across_save_and_load(losses: list[float], cut: int) -> None:
    guard = LossGuard(training(on_spike="skip"), CPU)
    mean, seen, row = 0.0, 0, 0
    for i, loss in enumerate(losses):
        if i == cut:
            state = guard.state()
            guard = LossGuard(training(on_spike="skip"), CPU)
            guard.load(state)
        nan = math.isnan(loss)
        spike = not nan and seen >= 4 and loss > 2 * mean
        assert judge(guard, loss) == (float(nan or spike), 0, float(nan), float(spike))
        row = row + 1 if nan or spike else 0
        if not (nan or spike):
            mean, seen = mean + (loss - mean) / min(seen + 1, 4), seen + 1
        assert guard.state() == {
            "guard_mean": pytest.approx(mean, rel=1e-12),
            "guard_seen": seen,
            "guard_skipped_in_a_row": row,
        }
