"""AdamW and SGD over sharded parameters: one fused pass that unscales, clips, updates or, on the
device's word, does nothing."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from trainkit.jobs.schema import Training
from trainkit.train.torch_compat import fused_norms, like, local_part, scale_in_place

# elements of a gradient that the CPU looks at in fp64 at once: 2 MiB stay in its cache
CHUNK = 2**18


class Optimizer:
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) or SGD with momentum, over the elements
    that this rank holds.

    Matrices and embeddings decay, biases and norms (one dimension) do not. Decay is decoupled in
    both: a weight loses rate x weight_decay of itself, whatever its gradient, so that
    weight_decay means one thing. (torch's and Megatron-LM's SGD add it to the gradient instead,
    where momentum multiplies it by up to 1 / (1 - sgd_momentum).)

    The state is made here, not at the first step, so that a checkpoint always has somewhere to
    be read into. All of it has the weights' dtype, fp32 in training.

    Memory traffic decides the time of a step. fp32 AdamW moves 32 bytes a parameter: it reads
    weight, gradient and two moments and writes them all, the gradient because the fused kernels
    leave it divided. SGD moves 24 with momentum, 16 without, and 8 more where a weight decays.

    Args:
        parameters: by name; those without a gradient at a step keep their weight and state.
        training: optimizer, its constants and weight_decay.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], training: Training) -> None:
        self._parameters = parameters
        self._decay = training.weight_decay
        self._adam = training.optimizer == "adam"
        self.moments = _moments_of(training)
        device = next(iter(parameters.values())).device
        # applied updates; the place in the table of learning rates
        self.steps = torch.zeros((), dtype=torch.int64, device=device)
        self._locals = {name: nn.Parameter(local_part(p)) for name, p in parameters.items()}
        # a small bias may lie wholly on other ranks
        held = [(parameters[name], p) for name, p in self._locals.items() if p.numel()]
        self._decayed = [p for whole, p in held if whole.dim() > 1]
        others = [p for whole, p in held if whole.dim() <= 1]
        self._fused = _fused_optimizer(training, self._decayed, others)
        self._state = {
            name: {moment: torch.zeros_like(p, requires_grad=False) for moment in self.moments}
            for name, p in self._locals.items()
        }
        for name, p in self._locals.items():
            if self._adam:
                counter = {"step": torch.zeros((), dtype=torch.float32, device=p.device)}
            else:
                counter = {}
            if p.numel():
                self._fused.state[p] = counter | self._state[name]

    @torch.no_grad()
    def step(self, rate: Tensor, divisor: Tensor, skip: Tensor) -> None:
        """Update all weights, without waiting for the device. Gradients are used up: they are
        left divided, for `zero_grad` to drop.

        Args:
            rate: learning rate, shape ().
            divisor: what gradients are divided by first, shape (): loss scale and clipping in one.
            skip: shape (), true (or 1) where nothing may change: not a weight, a moment or a count.
        """
        rate = rate.to(torch.float32)
        divisor = divisor.to(torch.float32)
        skip = skip.to(torch.float32)
        for name, parameter in self._parameters.items():
            mine = self._locals[name]
            mine.data = local_part(parameter)  # fully_shard may move its shard at the first forward
            if parameter.grad is None:
                mine.grad = None
            else:
                mine.grad = local_part(parameter.grad)
        if not self._adam and self._decay:
            scale_in_place(
                [p for p in self._decayed if p.grad is not None],
                1 - rate * self._decay * (1 - skip),
            )
        for group in self._fused.param_groups:
            group["lr"] = rate
        self._fused.grad_scale, self._fused.found_inf = divisor, skip  # type: ignore[attr-defined]
        self._fused.step()
        self.steps += (1 - skip).to(torch.int64)
        for mine in self._locals.values():
            mine.grad = None

    def zero_grad(self) -> None:
        """Free the gradients."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def state_tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds, as "exp_avg.NAME": tensors of the parameters' global shapes
        that share storage with the state, so that reading into them is loading."""
        return {
            f"{moment}.{name}": like(self._parameters[name], self._state[name][moment])
            for moment in self.moments
            for name in self._parameters
        }

    def applied_steps(self) -> int:
        """Updates that were not skipped. Waits for the device."""
        return int(self.steps)

    def set_steps(self, steps: int) -> None:
        """Tell how many updates the state has seen: AdamW's bias correction and the learning
        rate go on from there."""
        self.steps.fill_(steps)
        for state in self._fused.state.values():
            if self._adam:
                cast(Tensor, state["step"]).fill_(steps)


def _moments_of(training: Training) -> tuple[str, ...]:
    """torch's names of what is kept of every parameter."""
    if training.optimizer == "adam":
        return ("exp_avg", "exp_avg_sq")
    if training.sgd_momentum:
        return ("momentum_buffer",)
    return ()


def _fused_optimizer(
    training: Training, decayed: list[nn.Parameter], others: list[nn.Parameter]
) -> torch.optim.Optimizer:
    """torch's; SGD leaves decay to us."""
    if training.optimizer == "adam":
        groups = [
            {"params": decayed, "weight_decay": training.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        betas = (training.adam_beta1, training.adam_beta2)
        return torch.optim.AdamW(
            groups, lr=training.lr, betas=betas, eps=training.adam_eps, fused=True
        )
    groups = [{"params": decayed}, {"params": others}]
    return torch.optim.SGD(groups, lr=training.lr, momentum=training.sgd_momentum, fused=True)


def squared_norm(gradients: list[Tensor]) -> Tensor:
    """Sum of squares of this rank's shards, shape (), in fp64 so that the order of ranks does
    not show; sum it over the ranks.

    Reads every gradient once. torch.linalg.vector_norm(dtype=fp64) would write and read a copy
    of each: on a CPU, five times the time.
    """
    device = gradients[0].device
    held = [g.reshape(-1) for g in gradients if g.numel()]
    if not held:
        return torch.zeros((), dtype=torch.float64, device=device)
    if device.type == "cuda":
        return torch.stack(fused_norms(held)).square().sum()
    room = torch.empty(min(CHUNK, max(g.numel() for g in held)), dtype=torch.float64)
    squares = []
    for chunk in (chunk for g in held for chunk in torch.split(g, CHUNK)):
        wide = room[: chunk.numel()].copy_(chunk)
        squares.append(torch.dot(wide, wide))
    return torch.stack(squares).sum()


def divisor(norm: Tensor, limit: float, scale: Tensor) -> Tensor:
    """What `Optimizer.step` divides gradients by, on the device: the loss scale, and more where
    their norm is above `limit`.

    scale / min(1, limit / (norm / scale + 1e-6)), as torch.nn.utils.clip_grad_norm_ clips after
    unscaling.

    Args:
        norm: global norm of the scaled gradients, shape ().
        limit: highest norm of the unscaled gradients; 0: no clipping.
        scale: the loss scale, shape ().
    """
    scale = scale.to(norm.dtype)
    if limit > 0:
        return torch.maximum(scale, (norm + 1e-6 * scale) / limit)
    return scale
