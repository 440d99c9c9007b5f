"""fp16's loss scale against Megatron's rule, step by step and across a resume."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from tests.megatron_core import megatron_file
from trainkit.base.errors import ConfigError
from trainkit.jobs.schema import Training
from trainkit.train.update.loss_scale import LossScale

State = tuple[float, int, int]
# Megatron-Core 0.16.1's DynamicGradScaler(16, min_scale=1, growth_factor=2, backoff_factor=0.5,
# growth_interval=3, hysteresis=2):
# overflow in this step?; after it: scale, growth tracker, hysteresis tracker.
TABLE: list[tuple[bool, float, int, int]] = [
    (False, 16.0, 1, 2),
    (False, 16.0, 2, 2),
    (True, 16.0, 0, 1),  # one chance gone, the scale stays
    (False, 16.0, 1, 1),
    (False, 16.0, 2, 1),
    (True, 8.0, 0, 0),  # two good steps brought no chance back
    (False, 8.0, 1, 0),
    (False, 8.0, 2, 0),
    (False, 16.0, 0, 2),  # growth brings them all back
    (True, 16.0, 0, 1),
    (False, 16.0, 1, 1),
    (True, 8.0, 0, 0),
    (True, 4.0, 0, -1),  # from here every overflow halves
    (False, 4.0, 1, -1),
    (True, 2.0, 0, -2),
    (False, 2.0, 1, -2),
    (False, 2.0, 2, -2),
    (False, 4.0, 0, 2),
    (True, 4.0, 0, 1),
    (True, 2.0, 0, 0),
    (True, 1.0, 0, -1),
    (True, 1.0, 0, -2),  # the minimum
    (True, 1.0, 0, -3),
    (False, 1.0, 1, -3),
    (False, 1.0, 2, -3),
    (False, 2.0, 0, 2),
]


def training(**keys: Any) -> Training:
    """fp16 as in TABLE."""
    usual = {
        "precision": "fp16",
        "initial_loss_scale": 16.0,
        "min_loss_scale": 1.0,
        "loss_scale_window": 3,
        "hysteresis": 2,
    }
    return Training(train_iters=1, lr=1.0, **{**usual, **keys})


def state_of(loss_scale: LossScale) -> State:
    """Scale, growth tracker, hysteresis tracker."""
    return (
        float(loss_scale.scale),
        int(loss_scale.growth_tracker),
        int(loss_scale.hysteresis_tracker),
    )


def resumed(loss_scale: LossScale, t: Training) -> LossScale:
    """Another one that goes on from its state, through a manifest's JSON."""
    other = LossScale(t, "cpu")
    other.load(json.loads(json.dumps(loss_scale.state())))
    return other


@pytest.mark.parametrize("resume_before", range(len(TABLE)))
def test_megatrons_rule_step_by_step_across_a_resume(resume_before: int) -> None:
    loss_scale, seen = LossScale(training(), "cpu"), []
    for step, (overflow, *_) in enumerate(TABLE):
        if step == resume_before:
            loss_scale = resumed(loss_scale, training())
        loss_scale.update(torch.tensor(overflow))
        seen.append((overflow, *state_of(loss_scale)))
    assert seen == TABLE


settings_drawn = st.fixed_dictionaries(
    {
        "initial_loss_scale": st.integers(0, 32).map(lambda power: 2.0**power),
        "min_loss_scale": st.sampled_from([0.25, 1.0]),
        "loss_scale_window": st.integers(1, 5),
        "hysteresis": st.integers(1, 4),
    }
)


@settings(max_examples=60, deadline=None)
@given(settings_drawn, st.lists(st.tuples(st.booleans(), st.booleans()), max_size=40))
def test_any_overflows_and_resumes_as_megatron_core_answers_them(
    keys: dict[str, Any], steps: list[tuple[bool, bool]]
) -> None:
    """Each step: whether it overflows and whether the run is resumed before it."""
    module = megatron_file("optimizer/grad_scaler.py")
    t = training(**keys)
    on_cpu = SimpleNamespace(
        tensor=lambda value, dtype, device: torch.tensor(value, dtype=dtype),
        float=torch.float,
        max=torch.max,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "torch", on_cpu)  # it puts its tensors on CUDA
        theirs = module.DynamicGradScaler(
            t.initial_loss_scale, t.min_loss_scale, 2.0, 0.5, t.loss_scale_window, t.hysteresis
        )
        loss_scale = LossScale(t, "cpu")
        for overflow, resume in steps:
            loss_scale = resumed(loss_scale, t) if resume else loss_scale
            theirs.update(overflow)
            loss_scale.update(torch.tensor(float(overflow)))
            answered = theirs.state_dict()
            assert state_of(loss_scale) == (
                float(answered["scale"]),
                answered["growth_tracker"],
                answered["hysteresis_tracker"],
            )
            assert bool(loss_scale.may_overflow) == (answered["scale"] > t.min_loss_scale)


@pytest.mark.parametrize(
    ("keys", "scale", "may_overflow"),
    [
        ({"loss_scale": 1024.0}, 1024.0, True),
        ({"precision": "bf16"}, 1.0, False),
        ({"precision": "fp32", "min_loss_scale": 0.5}, 1.0, False),
    ],
    ids=["fixed", "bf16", "fp32"],
)
def test_a_fixed_scale_stays(keys: dict[str, Any], scale: float, may_overflow: bool) -> None:
    loss_scale = LossScale(training(**keys), "cpu")
    for overflow in (True, True, True, False, False, False, False):
        loss_scale.update(torch.tensor(overflow))
        assert float(loss_scale.scale) == scale
        assert bool(loss_scale.may_overflow) == may_overflow
    assert loss_scale.state() == {}
    loss_scale.load({"scale": 7.0, "growth_tracker": 1, "hysteresis_tracker": 1})
    assert float(loss_scale.scale) == scale


def test_a_scale_that_fp32_cannot_hold_is_not_grown_into() -> None:
    loss_scale = LossScale(training(initial_loss_scale=2.0**126, hysteresis=1), "cpu")
    for overflow in (False,) * 9 + (True,):
        before = float(loss_scale.scale)
        loss_scale.update(torch.tensor(overflow))
    assert (before, float(loss_scale.scale)) == (2.0**127, 2.0**126)


def test_a_scale_taken_for_a_step_stays_that_steps() -> None:
    loss_scale = LossScale(training(hysteresis=1), "cpu")
    taken = loss_scale.scale
    loss_scale.update(torch.tensor(True))
    assert float(taken) == 16.0 and float(loss_scale.scale) == 8.0


def test_going_on_from_a_run_whose_scale_was_fixed() -> None:
    loss_scale = LossScale(training(), "cpu")
    loss_scale.load(LossScale(training(precision="bf16"), "cpu").state())
    assert state_of(loss_scale) == (16.0, 0, 2)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"scale": 8.0, "growth_tracker": 1}, "hysteresis_tracker = None"),
        ({"scale": float("nan"), "growth_tracker": 1, "hysteresis_tracker": 1}, "scale = nan"),
        ({"scale": 0.0, "growth_tracker": 1, "hysteresis_tracker": 1}, "scale = 0.0"),
    ],
)
def test_a_damaged_state_is_refused(state: dict[str, Any], words: str) -> None:
    loss_scale = LossScale(training(), "cpu")
    with pytest.raises(ConfigError, match=words):
        loss_scale.load(state)
    assert state_of(loss_scale) == (16.0, 0, 2)
