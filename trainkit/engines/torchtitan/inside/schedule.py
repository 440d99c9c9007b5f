"""Learning rates of engine native in torchtitan: trainkit.train.update.schedule has the rules."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torchtitan.components.optimizer import LRSchedulersContainer


class Schedule(LRSchedulersContainer):
    """From lr_warmup_init to lr, then down to min_lr, where it stays."""

    @dataclass(kw_only=True, slots=True)
    class Config(LRSchedulersContainer.Config):
        lr: float = 1.0
        """the highest rate, which the optimizer has"""

        begin: float = 0.0
        """lr_warmup_init"""

        min_lr: float = 0.0
        warmup: float = 0.0
        """steps"""

        decay: float = 1.0
        """the step at which min_lr is reached"""

        style: str = "constant"

        def build(self, *, optimizers: Any, training_steps: int) -> Schedule:
            return Schedule(optimizers, self.factor)

        def factor(self, completed: int) -> float:
            """The rate of the step that follows `completed` steps, as a part of lr."""
            if self.warmup > 0 and completed <= self.warmup:
                rate = self.begin + (self.lr - self.begin) * completed / self.warmup
            elif self.style == "constant":
                rate = self.lr
            else:
                length = self.decay - self.warmup if self.decay > self.warmup else 1.0
                done = min(1.0, max(0.0, (min(completed, self.decay) - self.warmup) / length))
                cosine = self.style == "cosine"
                left = 0.5 * (math.cos(math.pi * done) + 1) if cosine else 1 - done
                rate = self.min_lr + left * (self.lr - self.min_lr)
                if completed > self.decay:
                    rate = self.min_lr
            return rate / self.lr
