"""What each optimizer keeps of a parameter: the trainer makes it, checkpoints hold it, plan counts
it.

A new optimizer is a line of KEPT, its name and constants in `Training`, and its update in UPDATES
of trainkit/train/update/optimizer.py. An engine that has it too says so in its own files; the
others refuse it by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from trainkit.jobs.training import Training

# what a parameter is to an optimizer: weights of products and embeddings, or biases and norms
Role = Literal["matrix", "vector"]


def role_of(dimensions: int) -> Role:
    """The role of a parameter with so many dimensions."""
    return "matrix" if dimensions > 1 else "vector"


def _adam(training: Training, role: Role) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq")


def _sgd(training: Training, role: Role) -> tuple[str, ...]:
    return ("momentum_buffer",) if training.sgd_momentum else ()


# Names of the tensors that an optimizer keeps of a parameter of a role, each of its shape: torch's
# names, by which checkpoints have them. By the optimizer's name in jobs.toml.
KEPT: Mapping[str, Callable[[Training, Role], tuple[str, ...]]] = {"adam": _adam, "sgd": _sgd}


def kept_of(training: Training, role: Role) -> tuple[str, ...]:
    """What the optimizer of a job keeps of a parameter of a role."""
    return KEPT[training.optimizer](training, role)
