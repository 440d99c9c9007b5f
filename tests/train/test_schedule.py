"""The schedule against Megatron's rule, step by step."""

from __future__ import annotations

import pytest

from trainkit.jobs.schema import Training
from trainkit.train.schedule import learning_rate


@pytest.mark.parametrize(
    ("completed", "rate"),
    [(0, 0.0), (1, 0.25), (2, 0.5), (4, 1.0), (5, 0.9657457896300791), (8, 0.55), (10, 0.23180194846605365), (12, 0.1), (13, 0.1), (100, 0.1)],
)
def test_warmup_cosine_floor(completed: int, rate: float) -> None:
    """min + (1 + cos(pi * (n - 4) / 8)) / 2 * (max - min) from 4 to 12."""
    training = Training(train_iters=20, lr=1.0, min_lr=0.1, lr_warmup_iters=4, lr_decay_iters=12)
    assert learning_rate(training, completed) == pytest.approx(rate, rel=1e-12)


def test_without_warmup_the_first_step_has_the_full_rate() -> None:
    training = Training(train_iters=10, lr=3e-4)
    assert learning_rate(training, 0) == 3e-4
    assert learning_rate(training, 10) == pytest.approx(0, abs=1e-18)


def test_a_warmup_longer_than_the_decay() -> None:
    training = Training(train_iters=10, lr=1.0, min_lr=0.1, lr_warmup_iters=8, lr_decay_iters=4)
    assert [learning_rate(training, n) for n in (4, 8, 9)] == [0.5, 1.0, 0.1]
