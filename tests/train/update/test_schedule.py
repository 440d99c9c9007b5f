"""The schedule against Megatron's rule, step by step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from tests.megatron_core import megatron_file
from trainkit.jobs.schema import Training
from trainkit.train.update.schedule import learning_rate, learning_rates

COMPLETED = (0, 1, 4, 5, 8, 9, 11, 12, 13)
BASE: dict[str, Any] = {
    "train_iters": 20,
    "lr": 1.0,
    "min_lr": 0.1,
    "lr_warmup_iters": 4,
    "lr_decay_iters": 12,
}
# What Megatron-Core 0.16.1's OptimizerParamScheduler.get_lr answers for num_steps in COMPLETED,
# whole schedules of 12 steps.
MEGATRON: list[tuple[dict[str, Any], list[float]]] = [
    ({"lr_decay_style": "linear"}, [0.0, 0.25, 1.0, 0.8875, 0.55, 0.4375, 0.2125, 0.1, 0.1]),
    ({"lr_decay_style": "constant"}, [0.0, 0.25, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
    (
        {"lr_decay_style": "cosine"},
        [
            0.0,
            0.25,
            1.0,
            0.9657457896300791,
            0.55,
            0.3777924554357096,
            0.13425421036992097,
            0.1,
            0.1,
        ],
    ),
    (
        {"lr_decay_style": "inverse-square-root"},
        [
            0.0,
            0.25,
            1.0,
            0.8944271909999159,
            0.7071067811865475,
            0.6666666666666666,
            0.6030226891555273,
            0.5773502691896258,
            0.1,
        ],
    ),
    (
        {"lr_decay_style": "inverse-square-root", "lr_warmup_iters": 0},
        [
            1.0,
            1.0,
            0.5,
            0.4472135954999579,
            0.35355339059327373,
            0.3333333333333333,
            0.30151134457776363,
            0.2886751345948129,
            0.1,
        ],
    ),
    (
        {"lr_decay_style": "inverse-square-root", "min_lr": 0.65},
        [
            0.0,
            0.25,
            1.0,
            0.8944271909999159,
            0.7071067811865475,
            0.6666666666666666,
            0.65,
            0.65,
            0.65,
        ],
    ),
    (
        {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 4},
        [0.0, 0.25, 1.0, 1.0, 1.0, 0.7136135474566861, 0.2702864035024489, 0.1, 0.1],
    ),
    (
        {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 4, "lr_wsd_decay_style": "linear"},
        [0.0, 0.25, 1.0, 1.0, 1.0, 0.775, 0.325, 0.1, 0.1],
    ),
    (
        {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 4, "lr_wsd_decay_style": "cosine"},
        [0.0, 0.25, 1.0, 1.0, 1.0, 0.8681980515339464, 0.23180194846605365, 0.1, 0.1],
    ),
    (
        {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 4, "lr_wsd_decay_style": "minus_sqrt"},
        [0.0, 0.25, 1.0, 1.0, 1.0, 0.55, 0.22057713659400527, 0.1, 0.1],
    ),
    (
        {"lr_warmup_init": 0.2},
        [
            0.2,
            0.4,
            1.0,
            0.9657457896300791,
            0.55,
            0.3777924554357096,
            0.13425421036992097,
            0.1,
            0.1,
        ],
    ),
    (
        {"lr_decay_style": "linear", "lr_warmup_iters": 0, "lr_warmup_fraction": 0.2},
        [0.0, 0.41666666666666663, 0.85, 0.75625, 0.475, 0.38125, 0.19375, 0.1, 0.1],
    ),
    (  # the decay is shorter than one step
        {"lr_decay_style": "linear", "lr_warmup_iters": 0, "lr_warmup_fraction": 0.95},
        [
            0.0,
            0.08771929824561404,
            0.3508771929824562,
            0.4385964912280702,
            0.7017543859649124,
            0.7894736842105264,
            0.9649122807017545,
            0.1,
            0.1,
        ],
    ),
    (
        {"lr_decay_style": "inverse-square-root", "lr_warmup_iters": 0, "lr_warmup_fraction": 0.3},
        [
            0.0,
            0.2777777777777778,
            0.9486832980505138,
            0.8485281374238569,
            0.6708203932499368,
            0.6324555320336759,
            0.5720775535473553,
            0.5477225575051661,
            0.1,
        ],
    ),
]


def test_without_warmup_the_first_step_has_the_full_rate() -> None:
    training = Training(train_iters=10, lr=3e-4)
    assert learning_rate(training, 0) == 3e-4
    assert learning_rate(training, 10) == pytest.approx(0, abs=1e-18)


def test_a_warmup_longer_than_the_decay() -> None:
    training = Training(train_iters=10, lr=1.0, min_lr=0.1, lr_warmup_iters=8, lr_decay_iters=4)
    assert [learning_rate(training, n) for n in (4, 8, 9)] == [0.5, 1.0, 0.1]


@pytest.mark.parametrize(
    ("keys", "rates"),
    MEGATRON,
    ids=lambda v: " ".join(str(x) for x in v.values()) if isinstance(v, dict) else "",
)
def test_every_style_as_megatron_has_it(keys: dict[str, Any], rates: list[float]) -> None:
    training = Training(**{**BASE, **keys})
    assert [learning_rate(training, n) for n in COMPLETED] == pytest.approx(rates, rel=1e-12)


@st.composite
def schedules(draw: st.DrawFn) -> Training:
    """Any schedule that Megatron takes: a warmup shorter than the decay."""
    decay = draw(st.integers(2, 60))
    style = draw(st.sampled_from(["cosine", "linear", "constant", "inverse-square-root", "WSD"]))
    keys: dict[str, Any] = {"lr_decay_iters": decay}
    if draw(st.booleans()):
        keys["lr_warmup_fraction"] = draw(st.floats(0, 0.9))
    else:
        keys["lr_warmup_iters"] = draw(st.integers(0, decay - 1))
    warmup = keys.get("lr_warmup_iters", keys.get("lr_warmup_fraction", 0) * decay)
    if style == "WSD" and decay - warmup < 1:
        style = "cosine"
    keys["lr_decay_style"] = style
    if style == "WSD":
        keys["lr_wsd_decay_iters"] = draw(st.integers(1, int(decay - warmup)))
        keys["lr_wsd_decay_style"] = draw(
            st.sampled_from(["exponential", "linear", "cosine", "minus_sqrt"])
        )
    lr = draw(st.floats(1e-6, 1))
    low, first = lr * draw(st.floats(0, 1)), lr * draw(st.floats(0, 1))
    return Training(train_iters=70, lr=lr, min_lr=low, lr_warmup_init=first, **keys)


@settings(max_examples=60, deadline=None)
@given(schedules())
def test_any_schedule_as_megatron_core_has_it(training: Training) -> None:
    module = megatron_file("optimizer_param_scheduler.py")
    theirs = module.OptimizerParamScheduler(
        optimizer=SimpleNamespace(param_groups=[]),
        init_lr=training.lr_warmup_init,
        max_lr=training.lr,
        min_lr=training.min_lr,
        lr_warmup_steps=training.warmup_iters,
        lr_decay_steps=training.decay_iters,
        lr_decay_style=training.lr_decay_style,
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=1,
        wd_incr_style="constant",
        wsd_decay_steps=training.lr_wsd_decay_iters,
        lr_wsd_decay_style=training.lr_wsd_decay_style,
    )
    for n in range(training.train_iters + 1):
        theirs.num_steps = n
        assert learning_rate(training, n) == pytest.approx(
            theirs.get_lr({}), rel=1e-12, abs=1e-18
        ), n


@settings(max_examples=30, deadline=None)
@given(schedules())
def test_the_table_on_the_device_holds_the_same_rates(training: Training) -> None:
    rates = learning_rates(training, "cpu")
    assert rates.dtype == torch.float32 and rates.shape == (training.train_iters + 1,)
    assert rates.tolist() == [
        float(np.float32(learning_rate(training, n))) for n in range(training.train_iters + 1)
    ]
    steps = torch.tensor(7)
    assert rates.take(steps).shape == () and float(rates.take(steps)) == float(rates[7])


def test_every_shape_of_jobs_toml_has_a_rate() -> None:
    for key in ("lr_decay_style", "lr_wsd_decay_style"):
        for style in get_args(Training.model_fields[key].annotation):
            given = {**BASE, "lr_decay_style": "WSD", "lr_wsd_decay_iters": 4, key: style}
            assert 0 <= learning_rate(Training.model_validate(given), 9) <= BASE["lr"]
