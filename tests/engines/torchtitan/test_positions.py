"""The order of samples in Python alone is that of the compiled one."""

from __future__ import annotations

import random

import pytest

from trainkit.data.order.native import NativeOrder
from trainkit.engines.torchtitan.inside.positions import Order


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
