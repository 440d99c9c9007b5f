"""Weights of a blend as the integers that csrc/index/blend.h draws by."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trainkit.base.errors import ConfigError

MAX_DATASETS = 32_766  # of a blend: their numbers are int16, as in Megatron
MAX_SUM = 2**62  # of integer weights, and of positions
# what float weights sum to, but for the weights too small to be seen: those count as 1 each
SCALE = MAX_SUM - 2**15


def check_names(names: Sequence[str]) -> None:
    """Raises ConfigError: no dataset, more than 32,766, or a name that comes twice."""
    if not 1 <= len(names) <= MAX_DATASETS:
        raise ConfigError(
            f"{len(names):,} datasets are to be blended, but 1 to {MAX_DATASETS:,} can be",
            hint="merge small datasets",
        )
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ConfigError(
                f"two datasets of a blend are called {name!r}",
                hint="name it once, with its whole weight; give other files another name",
            )
        seen.add(name)


def integer_weights(weights: Sequence[float], names: Sequence[str]) -> NDArray[np.int64]:
    """Weights in proportion, int64 [D]: floor(SCALE * weight / sum of weights), exactly, but at
    least 1 for a weight above 0.

    Raises ConfigError: another number of weights than datasets, a weight that is negative, NaN
    or infinite, or all are 0.
    """
    if len(weights) != len(names):
        raise ConfigError(
            f"{len(weights)} weights are given for {len(names)} datasets",
            hint="give every dataset a weight, or none",
        )
    for name, weight in zip(names, weights, strict=True):
        if not (math.isfinite(weight) and weight >= 0):
            raise ConfigError(
                f"dataset {name!r} has the weight {weight}",
                hint="a weight is a finite number, 0 or more",
            )
    ratios = [weight.as_integer_ratio() for weight in weights]
    common = max(bottom for _, bottom in ratios)  # denominators of floats are powers of 2
    tops = [top * (common // bottom) for top, bottom in ratios]
    total = sum(tops)
    if total == 0:
        raise ConfigError(
            "every dataset has the weight 0:"
            f" {', '.join(names[:5])}{', ..' if len(names) > 5 else ''}",
            hint="give one a weight above 0",
        )
    return np.array([max(1, top * SCALE // total) if top else 0 for top in tops], np.int64)


def size_weights(sizes: Sequence[int]) -> NDArray[np.int64]:
    """The sizes themselves, int64 [D]: the first sum(sizes) positions of the blend hold every
    sample exactly once.

    Raises ConfigError: they sum to more than 2^62 samples.
    """
    if sum(sizes) > MAX_SUM:
        raise ConfigError(
            f"the datasets have {sum(sizes):,} samples together, more than {MAX_SUM:,}",
            hint="blend fewer",
        )
    return np.array(sizes, np.int64)
