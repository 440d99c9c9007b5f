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
# rows are looked up or stand for one id each; biases and norms; what has no gradient and moves by
# a rule of its own
Role = Literal["matrix", "table", "vector", "rule"]
TABLES = ("embed_tokens.", "embed_positions.", "head.")


def role_of(name: str, dimensions: int) -> Role:
    """The role of a parameter of the model by its name."""
    if name.endswith(".expert_bias"):
        return "rule"
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


def _adam_factor(training: Training, role: Role, width_factor: float) -> float:
    return 1 / width_factor if role == "matrix" else 1.0


def _sgd_factor(training: Training, role: Role, width_factor: float) -> float:
    return 1.0 if role == "matrix" else width_factor


def _muon_factor(training: Training, role: Role, width_factor: float) -> float:
    if role != "matrix" or training.muon_scale_mode == "original":
        return 1.0
    return float(width_factor**-0.5)


# What the learning rate of a parameter is multiplied with under muP, by its role and
# `Model.width_factor`: Yang et al. 2022, arXiv:2203.03466, table 8; for Muon the spectral condition
# of Yang et al. 2023, arXiv:2310.17813. Weight decay is divided by it, so that a step takes the
# same part of a weight at every width.
RATE_FACTORS: Mapping[str, Callable[[Training, Role, float], float]] = {
    "adam": _adam_factor,
    "sgd": _sgd_factor,
    "muon": _muon_factor,
}


def rate_factor(training: Training, role: Role, width_factor: float) -> float:
    """Of a parameter of a role, in a model so many times wider than the base."""
    return RATE_FACTORS[training.optimizer](training, role, width_factor)


def scalar_rate(training: Training) -> float:
    """AdamW's rate beside Muon, in rates of Muon."""
    if training.muon_scalar_lr is None or not training.lr:
        return 1.0
    return training.muon_scalar_lr / training.lr


EMA = "ema"  # the moving average of a weight, which is kept as moments are


def kept_of(training: Training, role: Role) -> tuple[str, ...]:
    """What the optimizer of a job keeps of a parameter of a role."""
    if role == "rule":
        return ()
    averages = () if training.ema_decay is None else (EMA,)
    return (*KEPT[training.optimizer](training, role), *averages)
