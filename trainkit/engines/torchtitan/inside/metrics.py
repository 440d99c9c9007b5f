"""torchtitan's metrics, and a line of each step that trainkit reads whatever the version."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.components.metrics import MetricsProcessor, _get_metrics_rank

MARK = "[trainkit] "  # engines/rank/torchtitan.py reads it


class Metrics(MetricsProcessor):
    """Says a step on the one rank that knows the loss; the others are silent about them."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        train_iters: int = 0
        """the last step"""

    def __init__(self, config: Config, **given: Any) -> None:
        super().__init__(config, **given)
        rank = _get_metrics_rank(
            parallel_dims=given["parallel_dims"], pp_schedule=given.get("pp_schedule", "1F1B")
        )
        self.says = torch.distributed.get_rank() == rank
        if not self.says:
            logging.getLogger().setLevel(logging.WARNING)
        self.train_iters = config.train_iters
        self.step = 0  # of the last line
        self.since = time.perf_counter()

    def log(self, step: int, global_avg_loss: float, *rest: Any, **more: Any) -> None:
        super().log(step, global_avg_loss, *rest, **more)
        now = time.perf_counter()
        _, grad_norm = rest[:2]
        rates = [v for k, v in more.get("extra_metrics", {}).items() if k.startswith("lr/")]
        self._say(
            step=step,
            train_iters=self.train_iters,
            loss=global_avg_loss,
            grad_norm=grad_norm,
            learning_rate=rates[0] if rates else None,
            elapsed_ms=1000 * (now - self.since) / max(1, step - self.step) if self.step else None,
        )
        self.step = step
        self.since = now

    def log_validation(self, loss: float, step: int, *rest: Any, **more: Any) -> None:
        super().log_validation(loss, step, *rest, **more)
        self._say(step=step, valid=loss)

    def _say(self, **found: Any) -> None:
        if self.says:
            print(MARK + json.dumps(found), flush=True)
