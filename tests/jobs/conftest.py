"""A checkout with a jobs.toml, and the problems it has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from trainkit.base.errors import ConfigError
from trainkit.jobs.load import Jobs, load

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


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    """Write a jobs.toml (and jobs.local.toml) and load it."""

    def make(text: str = GOOD, local: str = "", environ: Mapping[str, str] | None = None) -> Jobs:
        (tmp_path / "jobs.toml").write_text(text, encoding="utf-8")
        if local:
            (tmp_path / "jobs.local.toml").write_text(local, encoding="utf-8")
        return load(tmp_path, environ or {})

    return make


def refused(jobs: Jobs, job: str = "demo", sets: Sequence[str] = ()) -> list[str]:
    """What `resolve` refuses a job with, as printed."""
    with pytest.raises(ConfigError) as caught:
        jobs.resolve(job, sets)
    assert caught.value.exit == 3
    return [str(problem) for problem in caught.value.list]
