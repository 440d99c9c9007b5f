"""What the engine reads: model.data.data_prefix, a list of weights and prefixes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it imports numpy, which planning does without
    from trainkit.data.order.resolve_pairs import SplitPair


def weighted(pairs: Sequence[SplitPair]) -> list[float | str]:
    """Each prefix after its weight: a single one after 1.0, as the scripts have it, several
    without weights of their own after their bytes."""
    from trainkit.data.order.resolve_pairs import weights_of

    if len(pairs) == 1:
        weights = [1.0]
    elif all(pair.weight is None for pair in pairs):
        weights = [_bytes(pair) for pair in pairs]
    elif len({pair.group for pair in pairs}) == len(pairs):
        weights = [float(pair.weight or 0) for pair in pairs]
    else:
        weights = weights_of(pairs, [int(_bytes(pair)) for pair in pairs]) or []
    return [
        word
        for weight, pair in zip(weights, pairs, strict=True)
        for word in (weight, str(pair.prefix))
    ]


def _bytes(pair: SplitPair) -> float:
    return float(os.path.getsize(f"{pair.prefix}.bin"))
