"""The order of samples that Megatron trains in, over one index or a blend of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainkit.base.errors import ConfigError, Exit
from trainkit.data.order.megatron_index import MegatronIndex


class MegatronOrder:
    """Which sample stands at which position of a run in Megatron's order (a `SampleOrder`).

    Position p is sample shuffle[p] of the only index, or of a blend sample shuffle_d[numbers[p]]
    of dataset d = datasets[p]. It ends with the index: Megatron's holds as many epochs as were
    asked for.

    Args:
        indexes: one, or those of a blend.
        dataset_index: int16 [n], of a blend.
        dataset_sample_index: int64 [n], of a blend.

    Attributes:
        num_samples: positions there are.
    """

    def __init__(
        self,
        indexes: Sequence[MegatronIndex],
        dataset_index: NDArray[np.int16] | None = None,
        dataset_sample_index: NDArray[np.int64] | None = None,
    ) -> None:
        if dataset_index is None or dataset_sample_index is None:
            if len(indexes) != 1 or dataset_index is not dataset_sample_index:
                raise ValueError(
                    "several indices take the two arrays of a blend, one takes both or none"
                )
        elif len(dataset_index) != len(dataset_sample_index):
            raise ValueError(
                f"dataset_index has {len(dataset_index)} entries, dataset_sample_index"
                f" {len(dataset_sample_index)}"
            )
        self._shuffles = [index.shuffle for index in indexes]
        self._prefixes = [str(index.request.prefix) for index in indexes[:3]]
        self._datasets = dataset_index
        self._numbers = dataset_sample_index
        if dataset_index is None:
            self.num_samples = indexes[0].num_samples
        else:
            self.num_samples = len(dataset_index)

    def window(self, consumed: int, n: int) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
        """The samples at positions consumed .. consumed + n - 1: (dataset_index int16 [n],
        sample_number int64 [n]).

        Raises ConfigError (exit 6): the index ends before.
        """
        end = consumed + n
        if not 0 <= consumed <= end <= self.num_samples:
            raise ConfigError(
                f"samples {consumed:,}..{end - 1:,} are asked for, but Megatron's sample order was"
                f" built with {self.num_samples:,}",
                exit=Exit.STAGE_FAILED,
                hint='use sample_order = "native", which has no end',
            )
        if self._datasets is None or self._numbers is None:
            shuffled = self._shuffles[0][consumed:end].astype(np.int64)
            self._check(shuffled, len(self._shuffles[0]), "a shuffle index")
            return np.zeros(n, np.int16), shuffled
        datasets = np.array(self._datasets[consumed:end])
        self._check(datasets, len(self._shuffles), "the blend's dataset index")
        places = self._numbers[consumed:end]
        numbers = np.empty(n, np.int64)
        for dataset in np.unique(datasets):
            rows = np.flatnonzero(datasets == dataset)
            shuffle = self._shuffles[dataset]
            self._check(places[rows], len(shuffle), "the blend's sample index")
            numbers[rows] = shuffle[places[rows]]
            self._check(numbers[rows], len(shuffle), "a shuffle index")
        return datasets, numbers

    def _check(self, values: NDArray[Any], size: int, what: str) -> None:
        """Refuse what can only be damage: the files are as they were written only by their size
        and time."""
        if len(values) and not 0 <= values.min() <= values.max() < size:
            wrong = values.min() if values.min() < 0 else values.max()
            raise ConfigError(
                f"{what} of {', '.join(self._prefixes)} holds {wrong} among numbers below {size:,}:"
                " it is damaged",
                exit=Exit.STAGE_FAILED,
                hint="build it again: invoke prep-data --force --job JOB",
            )
