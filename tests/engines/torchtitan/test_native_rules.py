"""What other engines are given of engine native is what it does itself."""

from __future__ import annotations

import random

import pytest

from trainkit.data.order.native import NativeOrder
from trainkit.engines.torchtitan.inside.native_rules import Order, rate_factor
from trainkit.engines.torchtitan.values import schedule_of
from trainkit.jobs.schema import Training
from trainkit.train.update.schedule import learning_rate


@pytest.mark.parametrize("seed", range(40))
def test_it_is_the_native_order(seed: int) -> None:
    draw = random.Random(seed)
    datasets = draw.randint(1, 6)
    sizes = [draw.randint(1, draw.choice([3, 50, 10**6, 10**12])) for _ in range(datasets)]
    names = [f"part-{number}" for number in range(datasets)]
    weights = None if seed % 2 else [draw.random() + 1e-3 for _ in range(datasets)]
    native = NativeOrder(sizes, weights, "valid", seed, names)
    order = Order(names, sizes, native.shares.tolist(), "valid", seed)
    for start in (0, draw.randrange(10**4), draw.randrange(10**15)):
        expected = zip(*(each.tolist() for each in native.window(start, 30)), strict=True)
        assert [order.at(start + number) for number in range(30)] == list(expected)


@pytest.mark.parametrize("seed", range(60))
def test_rates_are_those_of_native(seed: int) -> None:
    draw = random.Random(seed)
    wsd = {}
    style = draw.choice(["cosine", "linear", "constant", "WSD"])
    if style == "WSD":
        shape = draw.choice(["exponential", "linear", "cosine", "minus_sqrt"])
        wsd = {"lr_wsd_decay_style": shape, "lr_wsd_decay_iters": draw.randint(1, 20)}
    ends = [draw.randint(30, 60)] if wsd else [None, draw.randint(1, 60)]
    keys = {
        "micro_batch_size": 1,
        "train_iters": draw.randint(1, 40),
        "lr": 1e-3,
        "min_lr": draw.choice([0, 1e-4]),
        "lr_decay_style": style,
        "lr_decay_iters": draw.choice(ends),
        "lr_warmup_iters": draw.choice([0, 1, 5] if wsd else [0, 1, 5, 70]),
        "lr_warmup_init": draw.choice([0, 1e-5]),
    }
    t = Training.model_validate({**keys, **wsd})
    rates = schedule_of(t)
    found = [rate_factor(rates, completed) * t.lr for completed in range(80)]
    assert found == pytest.approx([learning_rate(t, step) for step in range(80)], rel=1e-12)
