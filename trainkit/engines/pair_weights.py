"""What the pairs of a blend weigh, for engines that are given it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainkit.base.errors import ConfigError, Exit

if TYPE_CHECKING:  # it imports numpy, which planning does without
    from trainkit.data.order.resolve_pairs import SplitPair


def pair_weights(pairs: Sequence[SplitPair]) -> list[float]:
    """The weight of each pair: its bytes where the job gives none, its own where each is of another
    dataset, else that of its dataset, shared among the dataset's pairs by their bytes.

    Raises ConfigError (exit 6): a pair is not there, and its size is asked for.
    """
    from trainkit.data.order.resolve_pairs import weights_of

    given = [float(pair.weight) for pair in pairs if pair.weight is not None]
    if len(given) == len({pair.group for pair in pairs}) == len(pairs):
        return given
    sizes = [_bytes(pair) for pair in pairs]
    return weights_of(pairs, sizes) or [float(size) for size in sizes]


def _bytes(pair: SplitPair) -> int:
    try:
        return os.path.getsize(f"{pair.prefix}.bin")
    except OSError as error:
        raise ConfigError(
            f"{pair.prefix}.bin cannot be read ({error.strerror}), and its size is its weight",
            hint="prepare the data, or give the parts of the blend weights of their own",
            exit=Exit.STAGE_FAILED,
        ) from error
