"""AdamW over sharded parameters, and clipping by the global norm."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn

from trainkit.jobs.schema import Training
from trainkit.train.torch_compat import local_part, scale_in_place

MOMENTS = ("exp_avg", "exp_avg_sq")


def adamw(parameters: dict[str, nn.Parameter], training: Training) -> torch.optim.AdamW:
    """AdamW (Loshchilov & Hutter 2019) in its fused form; matrices and embeddings decay, biases and norms (one dimension) do not.

    The state is made here, not at the first step, so that a checkpoint always has somewhere to be read into.
    """
    decayed = [p for p in parameters.values() if p.dim() > 1]
    others = [p for p in parameters.values() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": training.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=training.lr, betas=(training.adam_beta1, training.adam_beta2), eps=training.adam_eps, fused=True)
    for p in parameters.values():
        optimizer.state[p] = {"step": torch.zeros((), device=p.device), **{moment: torch.zeros_like(p) for moment in MOMENTS}}
    return optimizer


def set_steps(optimizer: torch.optim.AdamW, steps: int) -> None:
    """Tell AdamW's bias correction how many steps the moments have seen."""
    for state in optimizer.state.values():
        cast(Tensor, state["step"]).fill_(steps)


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """This rank's shards of all gradients."""
    return [local_part(p.grad) for p in parameters if p.grad is not None]


def squared_norm(gradients: list[Tensor]) -> Tensor:
    """Sum of squares of this rank's shards, in fp64 so that the order of ranks does not show; sum it over the ranks."""
    return torch.stack([torch.linalg.vector_norm(g, dtype=torch.float64) for g in gradients]).square().sum()


def clip(gradients: list[Tensor], norm: float, limit: float) -> None:
    """Scale gradients of global norm `norm` down to `limit` (0: leave them), as torch.nn.utils.clip_grad_norm_ does."""
    factor = limit / (norm + 1e-6)
    if limit > 0 and factor < 1:
        scale_in_place(gradients, factor)
