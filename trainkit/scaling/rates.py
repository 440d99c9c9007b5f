"""Batch and learning rate for a size, by published rules."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Rates:
    """What a rule gives.

    Args:
        batch: tokens of an optimizer step.
        lr: the highest learning rate.
        weight_decay: decoupled, as torch's AdamW has it.
    """

    batch: float
    lr: float
    weight_decay: float


@dataclass(frozen=True)
class RuledSize:
    """What rules ask of a size.

    Args:
        matrices: its parameters without the vocabulary's.
        tokens: that it is trained on.
        flops: of all of them.
        base: rates of the job that the ladder extends.
        base_tokens: tokens of that job.
    """

    matrices: int
    tokens: float
    flops: float
    base: Rates
    base_tokens: float


def _nanochat(size: RuledSize) -> Rates:
    """karpathy/nanochat, scripts/base_train.py: from a base that was tuned, B by D^0.383, rates by
    sqrt(B), decay by sqrt(B) / D."""
    grown = size.tokens / size.base_tokens
    wider = grown**0.383
    base = size.base
    decay = base.weight_decay * math.sqrt(wider) / grown
    return Rates(base.batch * wider, base.lr * math.sqrt(wider), decay)


def _deepseek(size: RuledSize) -> Rates:
    """DeepSeek LLM, arXiv:2401.02954, section 3.1."""
    lr = 0.3118 * size.flops**-0.1250
    return Rates(0.2920 * size.flops**0.3271, lr, size.base.weight_decay)


def _step_law(size: RuledSize) -> Rates:
    """Step Law, arXiv:2503.04715: N without the vocabulary."""
    lr = 1.79 * size.matrices**-0.713 * size.tokens**0.307
    return Rates(0.58 * size.tokens**0.571, lr, size.base.weight_decay)


RULES: Mapping[str, Callable[[RuledSize], Rates]] = {
    "nanochat": _nanochat,
    "deepseek": _deepseek,
    "step-law": _step_law,
}
