"""The learning rate of every step."""

from __future__ import annotations

import math

from trainkit.jobs.schema import Training


def learning_rate(training: Training, completed: int) -> float:
    """The rate used by the step that follows `completed` optimizer steps.

    Linear from 0 to `lr` over lr_warmup_iters steps, then half a cosine from `lr` to `min_lr` at lr_decay_iters, then
    `min_lr`. As in Megatron-LM, core/optimizer_param_scheduler.py `get_lr`, step k is taken with get_lr(k - 1): the first
    step of a warmup has rate 0. (Megatron logs the rate after advancing the schedule; trainkit logs the rate the step used.)
    """
    warmup, decay = training.lr_warmup_iters, training.lr_decay_iters or training.train_iters
    if warmup > 0 and completed <= warmup:
        return training.lr * completed / warmup
    if completed > decay:
        return training.min_lr
    progress = (completed - warmup) / max(1, decay - warmup)
    return training.min_lr + 0.5 * (1.0 + math.cos(math.pi * progress)) * (training.lr - training.min_lr)
