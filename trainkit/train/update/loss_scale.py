"""The scale of fp16's loss: high enough that small gradients do not vanish, low enough that
large ones do not overflow."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trainkit.base.errors import ConfigError
from trainkit.jobs.schema import Training

# Megatron-LM's factors
GROWTH = 2.0
BACKOFF = 0.5
STATE = ("scale", "growth_tracker", "hysteresis_tracker")


class LossScale:
    """Megatron-LM's dynamic loss scale (core/optimizer/grad_scaler.py, DynamicGradScaler),
    wholly on the device: no method but `state` waits for it.

    torch's GradScaler has no hysteresis. Like torch's, and unlike Megatron's, the scale grows only
    while fp32 can hold it: an infinite one could never fall again. (apex stopped at 2**24, which is
    below Megatron's initial 2**32.) The tensors, all of shape (), are replaced and never changed in
    place: what was taken from here for a step stays that step's.

    Args:
        training: precision other than fp16: the scale is 1 and stays; fp16 with loss_scale: it is
            that and stays; else dynamic.
        device: where gradients are.
    """

    def __init__(self, training: Training, device: torch.device | str) -> None:
        self.dynamic = training.precision == "fp16" and training.loss_scale is None
        if self.dynamic:
            scale = training.initial_loss_scale
            minimum = training.min_loss_scale
        else:
            scale = training.loss_scale or 1.0
            # where there is a scale it is to blame for every overflow, else for none
            minimum = 0.0 if training.loss_scale else scale
        self._window = training.loss_scale_window
        self._hysteresis = training.hysteresis
        self._minimum = torch.tensor(minimum, dtype=torch.float32, device=device)
        self.scale = torch.tensor(scale, dtype=torch.float32, device=device)
        self.growth_tracker = torch.zeros((), dtype=torch.int64, device=device)
        self.hysteresis_tracker = torch.full((), self._hysteresis, dtype=torch.int64, device=device)

    @torch.no_grad()
    def update(self, overflow: Tensor) -> None:
        """Go on after a step. `overflow`, shape (), is true (or not 0) where a scaled gradient
        was not finite, the same on every rank.

        Overflow: the count of good steps restarts and one chance is gone; with none left the
        scale halves, but not below min_loss_scale. Chances do not come back with a good step,
        only with the next growth: after loss_scale_window good steps in a row the scale doubles,
        unless fp32 cannot hold that.
        """
        if not self.dynamic:
            return
        overflow = overflow != 0
        good = torch.where(overflow, 0, self.growth_tracker + 1)
        chances = self.hysteresis_tracker - overflow.to(torch.int64)
        grows = good >= self._window
        falls = overflow & (chances <= 0)
        fallen = torch.maximum(self.scale * BACKOFF, self._minimum)
        grown = self.scale * GROWTH
        kept = torch.where(falls, fallen, self.scale)
        self.scale = torch.where(grows & torch.isfinite(grown), grown, kept)
        self.growth_tracker = torch.where(grows, 0, good)
        self.hysteresis_tracker = torch.where(grows, self._hysteresis, chances)

    @property
    def may_overflow(self) -> Tensor:
        """Whether an overflow now would be a matter of the scale (bool, shape ()): not where a
        dynamic one cannot fall any more, nor where there is none."""
        return self.scale > self._minimum

    def state(self) -> dict[str, float | int]:
        """What a checkpoint's manifest holds of it; nothing of a fixed scale. Waits for the
        device once."""
        if not self.dynamic:
            return {}
        values = torch.stack(
            [self.scale.double(), self.growth_tracker.double(), self.hysteresis_tracker.double()]
        ).tolist()
        return {
            "scale": values[0],
            "growth_tracker": int(values[1]),
            "hysteresis_tracker": int(values[2]),
        }

    def load(self, state: dict[str, float | int]) -> None:
        """Go on from `state`. An empty one, of a run whose scale was fixed, begins at
        initial_loss_scale; a fixed scale stays what the job says.

        Raises ConfigError where a value is missing or impossible.
        """
        if not (self.dynamic and state):
            return
        wrong = [
            f"{key} = {state.get(key)!r}"
            for key in STATE
            if not isinstance(state.get(key), int | float) or not math.isfinite(state[key])
        ]
        if wrong or state["scale"] <= 0:
            raise ConfigError(
                "the checkpoint's loss scale cannot be gone on from:"
                f" {', '.join(wrong) or 'scale = ' + repr(state['scale'])}",
                hint=(
                    "its manifest is damaged or of another program; resume from an earlier"
                    " checkpoint"
                ),
            )
        device = self.scale.device
        self.scale = torch.tensor(state["scale"], dtype=torch.float32, device=device)
        self.growth_tracker = torch.tensor(
            state["growth_tracker"], dtype=torch.int64, device=device
        )
        self.hysteresis_tracker = torch.tensor(
            state["hysteresis_tracker"], dtype=torch.int64, device=device
        )
