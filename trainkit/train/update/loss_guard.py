"""Losses that are not finite, and losses that jump: judged on the device, so that no step waits
for the host."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trainkit.jobs.schema import Training


class StepVerdict(NamedTuple):
    """What was found about one step, scalars on the device.

    Args:
        skip: 1.0 where the weights must stay as they are, fp32 (what fused optimizers call
            found_inf).
        overflow: fp16: gradients overflow though the loss is finite: the loss scale was too large;
            nothing is wrong with the run.
        nan: loss or gradient norm is not finite, and no loss scale is to blame.
        spike: the loss is above spike_factor times its running mean.
    """

    skip: Tensor
    overflow: Tensor
    nan: Tensor
    spike: Tensor


class LossGuard:
    """Remembers the running mean of the loss and how many steps were skipped one after another.

    The mean is exponential over spike_window steps (the plain mean until there are so many), of
    losses that were neither skipped nor spikes.
    """

    def __init__(self, training: Training, device: torch.device) -> None:
        self.training = training
        self.withhold_spikes = training.on_spike != "ignore"
        self.fixed_scale = training.loss_scale is not None  # the next step will be no better
        self.mean = torch.zeros((), dtype=torch.float64, device=device)
        self.seen = torch.zeros((), dtype=torch.int64, device=device)
        self.skipped_in_a_row = torch.zeros((), dtype=torch.int64, device=device)

    def judge(self, loss: Tensor, norm: Tensor, may_overflow: Tensor) -> StepVerdict:
        """Judge one step.

        Args:
            loss: mean loss of the global batch, the same on all ranks.
            norm: global gradient norm, the same on all ranks; not finite if any gradient is not.
            may_overflow: the loss scale is fixed, or dynamic and can still fall.
        """
        window = self.training.spike_window
        factor = self.training.spike_factor
        bad = ~(torch.isfinite(loss) & torch.isfinite(norm))
        overflow = torch.isfinite(loss) & bad & may_overflow  # the loss itself carries no scale
        nan = bad & ~overflow
        spike = ~bad & (self.seen >= window) & (loss > factor * self.mean) & self.withhold_spikes
        skip = bad | spike
        weight = (self.seen + 1).clamp(max=window).double().reciprocal()
        self.mean = torch.where(skip, self.mean, self.mean + weight * (loss - self.mean))
        self.seen = self.seen + ~skip
        counts = nan | spike | (overflow & self.fixed_scale)
        self.skipped_in_a_row = torch.where(counts, self.skipped_in_a_row + 1, 0)
        return StepVerdict(skip.float(), overflow, nan, spike)

    def state(self) -> dict[str, float | int]:
        """For the checkpoint; waits for the device."""
        return {
            "guard_mean": float(self.mean),
            "guard_seen": int(self.seen),
            "guard_skipped_in_a_row": int(self.skipped_in_a_row),
        }

    def load(self, state: dict[str, int | float | bool]) -> None:
        """Go on from `state()`; a checkpoint from before there was a guard has none."""
        self.mean.fill_(state.get("guard_mean", 0.0))
        self.seen.fill_(state.get("guard_seen", 0))
        self.skipped_in_a_row.fill_(state.get("guard_skipped_in_a_row", 0))
