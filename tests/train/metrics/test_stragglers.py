"""A rank that computes 10 % more than the others is named within 50 steps, and noise names none."""

from __future__ import annotations

import numpy as np
import pytest

from trainkit.jobs.ranks import ParallelDegrees
from trainkit.train.metrics.stragglers import STEPS, Straggler, Stragglers


class Ranks:
    """Times of ranks as a run has them: the medians of the steps of a row.

    Args:
        count: of ranks.
        interval: steps of a row.
        spread: lognormal sigma of a step; two of a hundred take three times as long besides.
    """

    def __init__(self, count: int, interval: int, spread: float, seed: int) -> None:
        self.count, self.interval, self.spread = count, interval, spread
        self.dice = np.random.default_rng(seed)

    def row(self, slow: int | None = None) -> list[float]:
        steps = 100.0 * self.dice.lognormal(0.0, self.spread, (self.interval, self.count))
        steps *= np.where(self.dice.random(steps.shape) < 0.02, 3.0, 1.0)
        if slow is not None:
            steps[:, slow] *= 1.1
        return [float(each) for each in np.median(steps, axis=0)]


def side_by_side(ranks: int) -> ParallelDegrees:
    return ParallelDegrees(1, 1, 1, ranks, 1, 1, 1)


@pytest.mark.parametrize(("ranks", "interval"), [(2, 1), (2, 10), (8, 1), (8, 10), (64, 5)])
def test_noise_names_nobody(ranks: int, interval: int) -> None:
    times, found = Ranks(ranks, interval, 0.05, 1), Stragglers(side_by_side(ranks))
    assert not [name for _ in range(1000) if (name := found.add(interval, times.row()))]


@pytest.mark.parametrize(("ranks", "interval"), [(2, 1), (2, 10), (8, 1), (8, 10), (64, 5)])
def test_a_tenth_more_is_named_within_fifty_steps(ranks: int, interval: int) -> None:
    times, found = Ranks(ranks, interval, 0.03, 2), Stragglers(side_by_side(ranks))
    for _ in range(200 // interval):
        assert found.add(interval, times.row()) is None
    names = [found.add(interval, times.row(slow=1)) for _ in range(STEPS // interval)]
    assert isinstance(names[-1], Straggler) and names[-1].rank == 1
    assert names[-1].times == pytest.approx(1.1, abs=0.03)
    for _ in range(STEPS // interval):
        name = found.add(interval, times.row())
    assert name is None, "it is as fast as the others again"


def test_stages_and_tensor_ranks_are_not_compared() -> None:
    """pipeline 2, data 2, tensor 2: ranks 0 and 2, 1 and 3, 4 and 6, 5 and 7 do the same."""
    found = Stragglers(ParallelDegrees(2, 2, 1, 2, 1, 1, 1))
    unlike = [100.0, 150.0, 100.0, 150.0, 300.0, 50.0, 300.0, 50.0]
    for _ in range(STEPS):
        name = found.add(1, unlike)
    assert name is None
    slower = [*unlike[:7], 60.0]
    for _ in range(STEPS):
        name = found.add(1, slower)
    assert name == Straggler(7, 1.2)


def test_a_few_long_steps_make_nobody_slow() -> None:
    found = Stragglers(side_by_side(4))
    for step in range(200):
        assert found.add(1, [100.0, 100.0 if step % 3 else 900.0, 100.0, 100.0]) is None


def test_who_has_no_peer_is_never_slow() -> None:
    found = Stragglers(ParallelDegrees(1, 4, 1, 1, 1, 1, 1))
    assert not any(found.add(10, [1.0, 2.0, 3.0, 4.0]) for _ in range(20))
