"""AdamW, SGD and Muon over sharded parameters: one pass that unscales, clips, updates or, on the
device's word, does nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from trainkit.jobs.optimizers import EMA, Role, kept_of, rate_factor, role_of, scalar_rate
from trainkit.jobs.schema import Training
from trainkit.ops.adamw import Rule, Weights
from trainkit.ops.kernels import REFERENCE, Kernels
from trainkit.train.torch_compat import like, local_part, scale_in_place
from trainkit.train.update.muon import Matrices, MatrixShard, Muon


class _Held(NamedTuple):
    """What this rank holds of a parameter that has a gradient.

    Args:
        name: of the parameter.
        weight, gradient: its elements.
        state: its moments, by torch's names.
        role: of the whole parameter.
        factor: of the learning rate.
        copy: the weight as the model computes with it; None: the update does not write it.
    """

    name: str
    weight: Tensor
    gradient: Tensor
    state: dict[str, Tensor]
    role: Role
    factor: float
    copy: Tensor | None


class _Now(NamedTuple):
    """The updates before this one, and what `Optimizer.step` is given."""

    steps: Tensor
    rate: Tensor
    divisor: Tensor
    skip: Tensor

    def scaled(self, factor: float) -> _Now:
        """With another learning rate."""
        return self._replace(rate=self.rate * factor)


class Optimizer:
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101), SGD with momentum, or Muon with AdamW,
    over the elements that this rank holds.

    Matrices and embeddings decay, biases and norms (one dimension) do not. Decay is decoupled in
    both: a weight loses rate x weight_decay of itself, whatever its gradient, so that
    weight_decay means one thing. (torch's and Megatron-LM's SGD add it to the gradient instead,
    where momentum multiplies it by up to 1 / (1 - sgd_momentum).)

    The state is made here, not at the first step, so that a checkpoint always has somewhere to
    be read into. All of it has the weights' dtype, fp32 in training.

    Memory traffic decides the time of a step. fp32 AdamW moves 28 bytes a parameter: it reads
    weight, gradient and two moments and writes them all but the gradient; torch's moves 32, for it
    leaves the gradient divided. SGD moves 24 with momentum, 16 without, and 8 more where a weight
    decays.

    Args:
        parameters: by name; those without a gradient at a step keep their weight and state.
        training: optimizer, its constants and weight_decay.
        kernels: what AdamW is computed with.
        matrices: for an optimizer of whole matrices, those of this rank and its neighbours, by
            the groups of ranks that hold them together.
        width_factor: width of the model, in widths of the one that rates were tuned on (muP).

    `writes_copies`: its kernel writes the weights as the model computes with them in the same pass.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        training: Training,
        kernels: Kernels = REFERENCE,
        matrices: Sequence[Matrices] = (),
        width_factor: float = 1.0,
    ) -> None:
        self._parameters = parameters
        device = next(iter(parameters.values())).device
        # applied updates; the place in the table of learning rates
        self.steps = torch.zeros((), dtype=torch.int64, device=device)
        self._roles = {name: role_of(name, p.dim()) for name, p in parameters.items()}
        self._factors = {
            role: rate_factor(training, role, width_factor) for role in set(self._roles.values())
        }
        self.adam_eps = training.adam_eps / width_factor  # as gradients are
        self._state = {
            name: {
                kept: torch.zeros_like(local_part(p))
                for kept in kept_of(training, self._roles[name])
            }
            for name, p in parameters.items()
        }
        self.training = training
        self.kernels = kernels
        self.muon = Muon(matrices, training) if matrices else None
        # exchanged by all, also by ranks that have none of one
        self._exchanged = frozenset(name for each in matrices for name in each.parameters)
        self._rule = UPDATES[training.optimizer]
        self.writes_copies = self._rule.writes_copies and kernels.name != "reference"

    @torch.no_grad()
    def step(
        self,
        rate: Tensor,
        divisor: Tensor,
        skip: Tensor,
        copies: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        """Update all weights, without waiting for the device. Gradients are used up: they may be
        left divided, for `zero_grad` to drop.

        Args:
            rate: learning rate, shape ().
            divisor: what gradients are divided by first, shape (): loss scale and clipping in one.
            skip: shape (), true (or 1) where nothing may change: not a weight, a moment or a count.
            copies: weights as the model computes with them, by name: of all parameters or of none.
                AdamW writes them as it updates.
        """
        skip = skip.to(torch.float32)
        # a small bias may lie wholly on other ranks; fully_shard may move its shard at the first
        # forward
        held = [
            _Held(
                name,
                local_part(p),
                local_part(p.grad),
                self._state[name],
                self._roles[name],
                self._factors[self._roles[name]],
                copies.get(name),
            )
            for name, p in self._parameters.items()
            if p.grad is not None and (local_part(p).numel() or name in self._exchanged)
        ]
        if held:
            now = _Now(self.steps, rate.to(torch.float32), divisor.to(torch.float32), skip)
            self._rule.update(self, held, now)
        self._average(skip)
        self.steps += (1 - skip).to(torch.int64)

    def _average(self, skip: Tensor) -> None:
        """Move the averages, if there are some, towards the weights. They begin with those of the
        first update: what was before, chance decided."""
        decay = self.training.ema_decay
        if decay is None:
            return
        share = (1 - skip.double()) * (1 - decay * (self.steps > 0).double())
        for name, state in self._state.items():
            if EMA in state:
                weight = local_part(self._parameters[name])
                state[EMA].lerp_(weight, share.to(weight.dtype))

    def zero_grad(self) -> None:
        """Free the gradients."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def state_tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds, as "exp_avg.NAME": tensors of the parameters' global shapes
        that share storage with the state, so that reading into them is loading."""
        kinds = dict.fromkeys(kept for state in self._state.values() for kept in state)
        return {
            f"{kept}.{name}": like(self._parameters[name], state[kept])
            for kept in kinds
            for name, state in self._state.items()
            if kept in state
        }

    def applied_steps(self) -> int:
        """Updates that were not skipped. Waits for the device."""
        return int(self.steps)

    def set_steps(self, steps: int) -> None:
        """Tell how many updates the state has seen: AdamW's bias correction and the learning
        rate go on from there."""
        self.steps.fill_(steps)


def _by_factor(held: list[_Held]) -> Iterator[tuple[float, list[_Held]]]:
    """One group where nothing is multiplied."""
    for factor in dict.fromkeys(h.factor for h in held):
        yield factor, [h for h in held if h.factor == factor]


def _adamw(optimizer: Optimizer, held: list[_Held], now: _Now) -> None:
    t = optimizer.training
    rule = Rule(t.adam_beta1, t.adam_beta2, optimizer.adam_eps)
    for factor, group in _by_factor(held):
        weights = Weights(
            [h.weight for h in group],
            [h.gradient for h in group],
            [h.state["exp_avg"] for h in group],
            [h.state["exp_avg_sq"] for h in group],
            [h.copy for h in group if h.copy is not None],
            [t.weight_decay / factor * (h.role != "vector") for h in group],
        )
        optimizer.kernels.adamw(weights, rule, **now.scaled(factor)._asdict())


def _sgd(optimizer: Optimizer, held: list[_Held], now: _Now) -> None:
    """torch's fused SGD, which counts no steps; decay is ours."""
    t = optimizer.training
    if t.weight_decay:
        decaying = [h.weight for h in held if h.role != "vector"]
        scale_in_place(decaying, 1 - now.rate * t.weight_decay * (1 - now.skip))
    for factor, group in _by_factor(held):
        sgd(
            [h.weight for h in group],
            [h.gradient for h in group],
            [h.state["momentum_buffer"] for h in group if t.sgd_momentum],
            fused=True,
            grad_scale=now.divisor,
            found_inf=now.skip,
            weight_decay=0.0,
            momentum=t.sgd_momentum,
            lr=now.rate * factor,  # type: ignore[arg-type]
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )


def _muon(optimizer: Optimizer, held: list[_Held], now: _Now) -> None:
    """Muon of the matrices, AdamW of all else by its own rate."""
    t = optimizer.training
    assert optimizer.muon is not None
    matrices = {
        h.name: MatrixShard(h.weight, h.gradient, h.state["momentum_buffer"])
        for h in held
        if h.role == "matrix"
    }
    optimizer.muon.step(matrices, rate=now.rate, divisor=now.divisor, skip=now.skip)
    if rest := [h for h in held if h.role != "matrix"]:
        _adamw(optimizer, rest, now.scaled(scalar_rate(t)))


class _UpdateRule(NamedTuple):
    """One step of all weights. Whether it writes copies of weights as it goes, and whether it is of
    whole matrices."""

    update: Callable[[Optimizer, list[_Held], _Now], None]
    writes_copies: bool = False
    of_matrices: bool = False


UPDATES: Mapping[str, _UpdateRule] = {
    "adam": _UpdateRule(_adamw, writes_copies=True),
    "sgd": _UpdateRule(_sgd),
    "muon": _UpdateRule(_muon, of_matrices=True),
}


def squared_norm(gradients: list[Tensor], kernels: Kernels = REFERENCE) -> Tensor:
    """Sum of squares of this rank's shards, shape (), in fp64 so that the order of ranks does
    not show; sum it over the ranks."""
    held = [g for g in gradients if g.numel()]
    if not held:
        return torch.zeros((), dtype=torch.float64, device=gradients[0].device)
    return kernels.squared_norm(held)


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
