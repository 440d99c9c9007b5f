"""Learning rates of engine native in torchtitan."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torchtitan.components.optimizer import LRSchedulersContainer

from trainkit.engines.torchtitan.inside.native_rules import rate_factor


class Schedule(LRSchedulersContainer):
    """A rate for each step."""

    @dataclass(kw_only=True, slots=True)
    class Config(LRSchedulersContainer.Config):
        rates: dict[str, object] = field(default_factory=dict)
        """as `rate_factor` takes them"""

        def build(self, *, optimizers: Any, training_steps: int) -> Schedule:
            return Schedule(optimizers, partial(rate_factor, self.rates))
