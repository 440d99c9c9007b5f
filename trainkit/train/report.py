"""What rank 0 writes while it trains: metrics.jsonl, TensorBoard and Megatron's log line."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from trainkit.jobs.schema import Job
from trainkit.runs.folder import RunFolder
from trainkit.runs.metrics import cut


class Reporter:
    """Opens the run's files to go on after `step`; what they hold of later steps is taken back first.

    Args:
        run: the run folder.
        job: the job.
        step: the step training goes on from; -1: from the very beginning.
    """

    def __init__(self, run: RunFolder, job: Job, step: int) -> None:
        cut(run.metrics, step)
        self.job = job
        self.metrics = open(run.metrics, "a", encoding="utf-8")  # noqa: SIM115  (stays open for the run)
        self.board = SummaryWriter(str(run.tensorboard), purge_step=step + 1)

    def step(self, row: dict[str, Any]) -> None:
        """One training row: to the metrics, to TensorBoard under Megatron's names, and as its log line to stdout."""
        self._append(row)
        for tag, key in (("lm loss", "lm_loss"), ("learning-rate", "learning_rate"), ("grad-norm", "grad_norm"), ("loss-scale", "loss_scale")):
            self._scalar(tag, row[key], row["step"])
        sys.stdout.write(
            f" iteration {row['step']:8d}/{self.job.training.train_iters:8d} |"
            f" consumed samples: {row['consumed_samples']:12d} |"
            f" elapsed time per iteration (ms): {row['elapsed_ms']:.1f} |"
            f" learning rate: {row['learning_rate']:.6E} |"
            f" global batch size: {self.job.global_batch_size:5d} |"
            f" lm loss: {row['lm_loss']:.6E} |"
            f" loss scale: {row['loss_scale']:.1f} |"
            f" grad norm: {row['grad_norm']:.3f} |"
            f" number of skipped iterations: {0:3d} |"
            f" number of nan iterations: {0:3d} |\n"
        )
        sys.stdout.flush()

    def evaluation(self, row: dict[str, Any]) -> None:
        """One row of an evaluation."""
        self._append(row)
        self._scalar("lm loss validation", row["lm_loss"], row["step"])
        sys.stdout.write(f" validation loss at iteration {row['step']} | lm loss value: {row['lm_loss']:.6E} |\n")
        sys.stdout.flush()

    def sync(self) -> None:
        """Make everything reported so far durable: a checkpoint must not know more than the metrics."""
        os.fsync(self.metrics.fileno())
        self.board.flush()

    def close(self) -> None:
        self.sync()
        self.metrics.close()
        self.board.close()

    def _append(self, row: dict[str, Any]) -> None:
        self.metrics.write(json.dumps(row) + "\n")
        self.metrics.flush()

    def _scalar(self, tag: str, value: float, step: int) -> None:
        self.board.add_scalar(tag, value, step)
