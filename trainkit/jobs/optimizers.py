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

# what a parameter is to an optimizer: weights of a block's products; embeddings and the head, whose
# rows are looked up or stand for one id each; biases and norms
Role = Literal["matrix", "table", "vector"]
TABLES = ("embed_tokens.", "embed_positions.", "head.")


def role_of(name: str, dimensions: int) -> Role:
    """The role of a parameter of the model by its name."""
    if dimensions == 1:
        return "vector"
    return "table" if name.startswith(TABLES) else "matrix"


def _adam(training: Training, role: Role) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq")


def _sgd(training: Training, role: Role) -> tuple[str, ...]:
    return ("momentum_buffer",) if training.sgd_momentum else ()


def _muon(training: Training, role: Role) -> tuple[str, ...]:
    return ("momentum_buffer",) if role == "matrix" else _adam(training, role)


# Names of the tensors that an optimizer keeps of a parameter of a role, each of its shape: torch's
# names, by which checkpoints have them. By the optimizer's name in jobs.toml.
KEPT: Mapping[str, Callable[[Training, Role], tuple[str, ...]]] = {
    "adam": _adam,
    "sgd": _sgd,
    "muon": _muon,
}


# Numbers of matrices that a rank of Muon updates at a time, if no single one has more; it holds
# four copies of them meanwhile: sent, put together, updated, taken back.
MUON_ROUND = 2**24


def rate_factor(role: Role, width: float, training: Training) -> float:
    """What the learning rate of a parameter is multiplied with under muP: Yang et al. 2022,
    arXiv:2203.03466, table 8; for Muon the spectral condition of Yang et al. 2023,
    arXiv:2310.17813. Weight decay is divided by it, so that a step takes the same part of a weight
    at every width.

    Args:
        role: of the parameter.
        width: `Model.width_factor`.
        training: optimizer and muon_scale_mode.
    """
    if training.optimizer == "sgd":
        return 1.0 if role == "matrix" else width
    if role != "matrix":
        return 1.0
    if training.optimizer == "adam":
        return 1 / width
    return 1.0 if training.muon_scale_mode == "original" else float(width**-0.5)


def kept_of(training: Training, role: Role) -> tuple[str, ...]:
    """What the optimizer of a job keeps of a parameter of a role."""
    return KEPT[training.optimizer](training, role)
