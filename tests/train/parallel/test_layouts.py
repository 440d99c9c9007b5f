"""One, two and four ranks: the same weights, losses and gradients, and checkpoints that any of
them reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.train.support import Arrays, same

Worlds = dict[int, list[dict[str, Any]]]


@pytest.mark.parametrize("size", [2, 4])
def test_first_step_equals_one_rank(worlds: Worlds, size: int) -> None:
    one = worlds[1][0]
    for rank in worlds[size]:
        assert same(rank["weights"], one["weights"])
        assert rank["checksum"] == one["checksum"]
        assert rank["loss"] == pytest.approx(one["loss"], rel=1e-12)
        assert rank["norm"] == pytest.approx(one["norm"], rel=1e-9)
        for name, gradient in one["gradients"].items():
            np.testing.assert_allclose(
                rank["gradients"][name], gradient, rtol=1e-6, atol=1e-10, err_msg=name
            )


@pytest.mark.parametrize("size", [2, 4])
def test_three_steps_equal_one_rank(worlds: Worlds, size: int) -> None:
    """Also proves that clipping (the limit is below the norm) and weight decay see every shard."""
    assert worlds[1][0]["norm"] > 0.5
    for name, value in worlds[1][0]["saved"].items():
        np.testing.assert_allclose(
            worlds[size][0]["saved"][name], value, rtol=1e-4, atol=1e-6, err_msg=name
        )


@pytest.mark.parametrize("size", [1, 2, 4])
def test_two_ranks_save_and_others_load_every_bit(worlds: Worlds, size: int) -> None:
    saved: Arrays = worlds[2][0]["saved"]
    assert all(same(rank["loaded"], saved) for rank in worlds[size])
    assert all(
        np.abs(saved[f"optimizer.exp_avg_sq.{name}"]).max() > 0 for name in worlds[2][0]["weights"]
    )
