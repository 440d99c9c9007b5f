"""The learning rate of every step."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainkit.jobs.schema import Training
from trainkit.plan.batch import batch_sizes, consumed_after, global_batch_size

__all__ = ["batch_sizes", "consumed_after", "global_batch_size", "learning_rate", "learning_rates"]

Numbers = NDArray[np.float64]


def learning_rate(training: Training, completed: int) -> float:
    """The rate used by the step that follows `completed` optimizer steps that were applied: a
    skipped step takes the schedule no further.

    Linear from lr_warmup_init to lr over lr_warmup_iters steps, then by lr_decay_style to min_lr
    at lr_decay_iters, then min_lr; `constant` always stays at lr. Rules and formulas are those
    of Megatron-LM, core/optimizer_param_scheduler.py `get_lr`: step k is taken with get_lr(k -
    1), so the first step of a warmup has rate lr_warmup_init. (Megatron logs the rate after
    advancing the schedule; trainkit logs the rate the step used. Megatron counts samples where
    the batch ramps up; trainkit counts steps always.)
    """
    return float(_rates(training, np.array([completed], dtype=np.float64))[0])


def learning_rates(training: Training, device: torch.device | str) -> Tensor:
    """`learning_rate` of 0 .. train_iters completed steps, fp32 (train_iters + 1,) on `device`:
    what the fused optimizers read on a GPU.

    Look it up by a counter on the device with `rates.take(steps)`; `rates[steps]` would wait for
    the device.
    """
    return torch.from_numpy(
        _rates(training, np.arange(training.train_iters + 1, dtype=np.float64)).astype(np.float32)
    ).to(device)


def _rates(t: Training, completed_N: Numbers) -> Numbers:
    warmup = t.warmup_iters
    decay = t.decay_iters
    if t.lr_decay_style == "constant":
        rates_N = np.full_like(completed_N, t.lr)
    else:
        rates_N = np.where(
            completed_N > decay, t.min_lr, _decaying(t, np.minimum(completed_N, decay))
        )
    if warmup > 0:
        rising_N = (
            t.lr_warmup_init + (t.lr - t.lr_warmup_init) * np.minimum(completed_N, warmup) / warmup
        )
        rates_N = np.where(completed_N <= warmup, rising_N, rates_N)
    return rates_N


def _decaying(t: Training, completed_N: Numbers) -> Numbers:
    """Rates between warmup and the end of the decay; what is given for steps of the warmup is
    not used."""
    if t.lr_decay_style == "inverse-square-root":
        falling_N: Numbers = (
            t.lr * max(t.warmup_iters, 1) ** 0.5 / np.sqrt(np.maximum(completed_N, 1))
        )
        return np.maximum(t.min_lr, falling_N)
    if t.lr_decay_style == "WSD":
        assert t.lr_wsd_decay_iters is not None  # the schema asks for it
        progress_N = _progress(completed_N, t.decay_iters - t.lr_wsd_decay_iters, t.decay_iters)
        return t.min_lr + _remaining(t.lr_wsd_decay_style, progress_N) * (t.lr - t.min_lr)
    progress_N = _progress(completed_N, t.warmup_iters, t.decay_iters)
    return t.min_lr + _remaining(t.lr_decay_style, progress_N) * (t.lr - t.min_lr)


def _progress(completed_N: Numbers, begin: float, end: float) -> Numbers:
    """The part of the way from `begin` to `end` that is done, 0 to 1."""
    # may be under one step where the warmup is a fraction
    length = end - begin if end > begin else 1.0
    done_N: Numbers = np.clip((completed_N - begin) / length, 0.0, 1.0)
    return done_N


def _remaining(shape: str, progress_N: Numbers) -> Numbers:
    """The part of the way from min_lr to lr that is left when `progress_N` (0 to 1) of the decay
    is done."""
    if shape == "linear":
        return 1.0 - progress_N
    if shape == "cosine":
        return 0.5 * (np.cos(np.pi * progress_N) + 1.0)
    if shape == "exponential":
        return 2.0 * 0.5**progress_N - 1.0
    if shape == "minus_sqrt":
        return 1.0 - np.sqrt(progress_N)
    raise ValueError(f"no decay of the shape {shape!r}")
