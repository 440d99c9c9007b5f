"""A jobs.toml to spoil, and what is said about it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from trainkit.base.errors import ConfigError
from trainkit.jobs.load import Jobs

GOOD = """\
[clusters.here]
ranks_per_node = 2

[models.tiny]
num_layers = 2
hidden_size = 64
num_attention_heads = 4
seq_length = 64
vocab_size = 512

[jobs.demo]
cluster = "here"
model = "tiny"
dataset = "mock"

[jobs.demo.training]
train_iters = 20
lr = 1e-3
"""

Checkout = Callable[..., Jobs]


def refused(jobs: Jobs, job: str = "demo", sets: Sequence[str] = ()) -> list[str]:
    """What `resolve` refuses a job with, as printed."""
    with pytest.raises(ConfigError) as caught:
        jobs.resolve(job, sets)
    assert caught.value.exit == 3
    return [str(problem) for problem in caught.value.list]
