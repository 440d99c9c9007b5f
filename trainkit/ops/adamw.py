"""The optimizer step in two passes over memory: the squared norm of the gradients, then unscaling,
clipping, AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) and the copy of the weights that the
model computes with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from trainkit.ops.library import declare

# elements of a gradient that the CPU looks at in fp64 at once: 2 MiB stay in its cache
CHUNK = 2**18


@dataclass(frozen=True)
class Weights:
    """What a step changes and what it reads, a tensor of every weight in the same order.

    Args:
        weights: fp32 or fp64.
        gradients: of any floating dtype, all of one; they are read.
        exp_avgs, exp_avg_sqs: moments, in the weights' dtype.
        copies: the weights as the model computes with them, all of one dtype; empty: there are
            none.
        decays: weight_decay of each.
    """

    weights: list[Tensor]
    gradients: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    copies: list[Tensor]
    decays: list[float]


@dataclass(frozen=True)
class Rule:
    """AdamW's constants."""

    beta1: float
    beta2: float
    eps: float


class Update(Protocol):
    """What `reference` and `fused` are."""

    def __call__(
        self,
        on: Weights,
        rule: Rule,
        *,
        steps: Tensor,
        rate: Tensor,
        divisor: Tensor,
        skip: Tensor,
    ) -> None: ...


def reference(
    on: Weights, rule: Rule, *, steps: Tensor, rate: Tensor, divisor: Tensor, skip: Tensor
) -> None:
    """One step, in place, by torch's fused AdamW. Nothing waits for the device.

    Args:
        on: the tensors; gradients in the weights' dtype are left divided.
        rule: its constants.
        steps: updates before this one, shape (); it stays as it is.
        rate, divisor, skip: fp32, shape (): the learning rate, what gradients are divided by
            first, and what is not 0 where nothing may change.
    """
    for decay in sorted(set(on.decays)):
        chosen = [i for i, own in enumerate(on.decays) if own == decay]
        counters = steps.to(torch.float32).expand(len(chosen)).clone().unbind()
        weights = [on.weights[i] for i in chosen]
        adamw(
            weights,
            [on.gradients[i].to(on.weights[i].dtype) for i in chosen],
            [on.exp_avgs[i] for i in chosen],
            [on.exp_avg_sqs[i] for i in chosen],
            [],
            list(counters),
            fused=True,
            grad_scale=divisor,
            found_inf=skip,
            amsgrad=False,
            beta1=rule.beta1,
            beta2=rule.beta2,
            lr=rate,
            weight_decay=decay,
            eps=rule.eps,
            maximize=False,
        )
    for copy, weight in zip(on.copies, on.weights, strict=False):  # there may be none
        copy.copy_(weight)


def norm_reference(tensors: Sequence[Tensor]) -> Tensor:
    """Sum of squares of all elements, fp64, shape ().

    Reads every gradient once. torch.linalg.vector_norm(dtype=fp64) would write and read a copy
    of each: on a CPU, five times the time.
    """
    if tensors[0].device.type == "cuda":
        # few kernels for all tensors
        norms = torch._foreach_norm(list(tensors), 2, dtype=torch.float64)
        return torch.stack(list(norms)).square().sum()
    room = torch.empty(min(CHUNK, max(t.numel() for t in tensors)), dtype=torch.float64)
    squares = []
    for chunk in (chunk for t in tensors for chunk in torch.split(t.reshape(-1), CHUNK)):
        wide = room[: chunk.numel()].copy_(chunk)
        squares.append(torch.dot(wide, wide))
    return torch.stack(squares).sum()


step_ = declare(
    "adamw_step_(Tensor(a!)[] weights, Tensor[] gradients, Tensor(b!)[] exp_avgs,"
    " Tensor(c!)[] exp_avg_sqs, Tensor(d!)[] copies, Tensor steps, Tensor rate, float beta1,"
    " float beta2, float eps, float[] decays, Tensor divisor, Tensor skip) -> ()",
    lambda *_: None,
)
squared_norm = declare(
    "squared_norm(Tensor[] tensors) -> Tensor",
    lambda tensors: tensors[0].new_empty((), dtype=torch.float64),
)


def fused(
    on: Weights, rule: Rule, *, steps: Tensor, rate: Tensor, divisor: Tensor, skip: Tensor
) -> None:
    """`reference` in one pass over memory for all tensors together."""
    step_(
        on.weights,
        on.gradients,
        on.exp_avgs,
        on.exp_avg_sqs,
        on.copies,
        steps,
        rate,
        rule.beta1,
        rule.beta2,
        rule.eps,
        on.decays,
        divisor,
        skip,
    )


def norm_fused(tensors: Sequence[Tensor]) -> Tensor:
    """`norm_reference` in one pass over memory; its bits do not depend on the number of
    threads."""
    found: Tensor = squared_norm(list(tensors))
    return found


def bytes_moved(
    elements: int, weight: torch.dtype, gradient: torch.dtype, copy: torch.dtype | None
) -> int:
    """The least that an update moves: weight and two moments are read and written, the gradient is
    read, the copy written."""
    copied = 0 if copy is None else copy.itemsize
    return elements * (6 * weight.itemsize + gradient.itemsize + copied)
