"""Megatron's blending of several indices, bit for bit.

Sample i of a blend comes from the dataset that is furthest behind its share, the first of equals
in weight * max(i, 1) - drawn (helpers.cpp, build_blending_indices, in float64 without fused
multiply-add); without weights and without a size every dataset is drawn to its end. The blend is
not shuffled again: each dataset's own index is.
(core/datasets/blended_megatron_dataset_builder.py, blended_dataset.py of megatron-core 0.16.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trainkit import _index
from trainkit.base.errors import ConfigError, Exit
from trainkit.base.lazy_dataclasses import dataclass, replace
from trainkit.base.worker import ProgressCallback
from trainkit.data.order.megatron_cache import (
    CacheNames,
    TokenizerIdentifiers,
    check_index_mark,
    describe_index,
    map_array,
    normalize_weights,
    npy_file,
    write_index_files,
)
from trainkit.data.order.megatron_index import (
    IndexRequest,
    MegatronIndex,
    index_facts,
    no_progress,
    progress_counter,
    read_index_sizes,
)

SCHEMA = "megatron-blend/1"
DATASETS = "dataset_index.npy"
NUMBERS = "dataset_sample_index.npy"
MOST_DATASETS = 32766
# what each dataset is asked for beyond its share (Megatron's mid_level_dataset_surplus)
SURPLUS = 0.005
UNLIMITED = 2**44


@dataclass(frozen=True)
class Blend:
    """One split of several datasets, and their shares.

    Args:
        requests: the indices to blend, of one split.
        weights: as `plan_blend` returns them, normalized once; None: by the sizes of the indices.
        size: samples of the blend; None: every sample of every index once.

    Raises ConfigError: no or too many datasets, another number of weights, a weight that is no
    positive number, or weights without a size.
    """

    requests: tuple[IndexRequest, ...]
    weights: tuple[float, ...] | None
    size: int | None

    def __post_init__(self) -> None:
        _check(len(self.requests), self.weights, self.size)
        splits = {request.split_name for request in self.requests}
        if len(splits) != 1:
            raise ConfigError(f"a blend is of one split, not of {', '.join(sorted(splits))}")


def _check(datasets: int, weights: Sequence[float] | None, size: int | None) -> None:
    if not 1 <= datasets <= MOST_DATASETS:
        raise ConfigError(
            f"{datasets:,} datasets are to be blended, but 1 to {MOST_DATASETS:,} can be (their"
            " numbers are int16)",
            hint="merge some",
        )
    if size is not None and size < 1:
        raise ConfigError(
            f"a blend of {size} samples is asked for, at least 1 is needed",
            hint="leave out a split that is not read",
        )
    if weights is None:
        return
    if len(weights) != datasets:
        raise ConfigError(
            f"{len(weights)} weights are given for {datasets} datasets",
            hint="give one weight a dataset",
        )
    for number, weight in enumerate(weights):
        if not (math.isfinite(weight) and weight >= 0):
            raise ConfigError(
                f"weight {weight!r} of dataset {number} is not a number of at least 0",
                hint="weights are shares, for example 0.7",
            )
    if sum(weights) == 0:
        raise ConfigError(
            "all weights of the blend are 0", hint="give at least one dataset a share"
        )
    if 0 in weights:
        raise ConfigError(
            f"dataset {list(weights).index(0)} has the weight 0, which Megatron refuses",
            hint="leave the dataset out",
        )
    if not math.isfinite(sum(weights)):
        raise ConfigError(
            "the weights of the blend are too large to be added",
            hint="weights are shares, for example 0.7",
        )
    if size is None:
        raise ConfigError(
            "a blend with weights needs the number of its samples",
            hint="say how many samples are read, or leave the weights out",
        )


def plan_blend(
    requests: Sequence[IndexRequest], weights: Sequence[float] | None, size: int | None
) -> Blend:
    """The blend of `size` samples and how many each of its datasets is asked for, as
    BlendedMegatronDatasetBuilder decides.

    With weights each dataset is to give ceil(size * weight), the blend is the sum of these, and
    each index is built for 0.5 % more, rounded up. Without weights each is one epoch. A single
    dataset is not a blend for Megatron if it has no weight, or if every split has datasets of its
    own.

    Args:
        requests: one a dataset; their num_samples is set here.
        weights: shares, of any sum; None: by size.
        size: samples that will be read; None, without weights: all.

    Raises ConfigError: see `Blend`.
    """
    _check(len(requests), weights, size)
    if weights is None:
        return Blend(tuple(replace(request, num_samples=None) for request in requests), None, size)
    assert size is not None  # _check
    shares = normalize_weights(weights)
    targets = [math.ceil(size * share) for share in shares]
    asked = [math.ceil(target * (1 + SURPLUS)) for target in targets]
    return Blend(
        tuple(replace(r, num_samples=n) for r, n in zip(requests, asked, strict=True)),
        tuple(shares),
        sum(targets),
    )


def _sizes(blend: Blend) -> list[int]:
    return [read_index_sizes(request).samples for request in blend.requests]


def _shares(blend: Blend, sizes: list[int]) -> tuple[list[float] | list[int], int | None]:
    """Weights and size as BlendedDataset describes itself: normalized (again), or, for all
    samples once, the sizes."""
    if blend.weights is not None:
        return normalize_weights(blend.weights), blend.size
    if blend.size is None:
        return sizes, None
    return normalize_weights(sizes), min(blend.size, sum(sizes))


def blend_names(blend: Blend, tokenizer: TokenizerIdentifiers = None) -> CacheNames:
    """Names of the blend's files in a data_cache_path of Megatron. Raises ConfigError (exit 6):
    see `read_index_sizes`."""
    return _names(blend, _sizes(blend), tokenizer)


def _names(blend: Blend, sizes: list[int], tokenizer: TokenizerIdentifiers) -> CacheNames:
    weights, size = _shares(blend, sizes)
    split = blend.requests[0].split_name
    identifiers = {
        "class": "BlendedDataset",
        "datasets": [request.identifiers(tokenizer) for request in blend.requests],
        "split": split,
        "weights": weights,
        "size": size,
    }
    return CacheNames(describe_index(identifiers), "BlendedDataset", split)


def _blend_facts(blend: Blend, sizes: list[int], total: int) -> dict[str, object]:
    return {
        "datasets": [index_facts(request) for request in blend.requests],
        "sizes": sizes,
        "total": total,
    }


def build_blend(
    blend: Blend,
    folder: Path,
    tokenizer: TokenizerIdentifiers = None,
    progress: ProgressCallback = no_progress,
) -> list[int]:
    """Write which dataset and which of its samples stands at each position; the indices need not
    be built yet. Memory: a few MB.

    Returns the samples each dataset gives.

    Raises:
        ConfigError (exit 6): a dataset is drawn beyond its end; see `read_index_sizes`.
        OSError: as writing does.
    """
    sizes = _sizes(blend)
    weights, size = _shares(blend, sizes)
    total = sum(sizes) if size is None else size
    facts = _blend_facts(blend, sizes, total)
    shares = [n / float(total) for n in sizes] if size is None else weights
    names = _names(blend, sizes, tokenizer)
    with write_index_files(folder, names, (DATASETS, NUMBERS), SCHEMA, facts):
        dataset_file, number_file = (names.path(folder, part) for part in (DATASETS, NUMBERS))
        with (
            npy_file(dataset_file, (total,), np.int16) as (datasets, at),
            npy_file(number_file, (total,), np.int64) as (numbers, number_at),
        ):
            limits = sizes if size is None else [UNLIMITED] * len(sizes)
            drawn = _index.write_blend(
                shares,
                limits,
                total,
                datasets,
                at,
                numbers,
                number_at,
                progress_counter(progress, total),
            )
            _check_drawn(blend, sizes, drawn)
    return drawn


def _check_drawn(blend: Blend, sizes: list[int], drawn: list[int]) -> None:
    for request, size, taken in zip(blend.requests, sizes, drawn, strict=True):
        if taken > size:
            raise ConfigError(
                f"the blend draws {taken:,} samples of {request.prefix}, whose {request.split_name}"
                f" index has {size:,}",
                exit=Exit.STAGE_FAILED,
                hint=(
                    "ask for more samples of each dataset (Megatron: a larger"
                    " mid_level_dataset_surplus), or leave the weights out"
                ),
            )


class MegatronBlend:
    """The two arrays of a blend, mapped.

    Attributes:
        datasets: dataset at each position, int16 [num_samples].
        numbers: its sample, counted from 0 in the order of its own index, int64 [num_samples].
        indexes: the indices that are blended.

    Raises ConfigError (exit 6): it or one of its indices is not built, was built from something
    else, or is damaged.
    """

    def __init__(self, folder: Path, blend: Blend, tokenizer: TokenizerIdentifiers = None) -> None:
        self.indexes = [MegatronIndex(folder, request, tokenizer) for request in blend.requests]
        sizes = [index.num_samples for index in self.indexes]
        _, size = _shares(blend, sizes)
        if size is None:
            self.num_samples = sum(sizes)
        else:
            self.num_samples = size
        names = _names(blend, sizes, tokenizer)
        facts = _blend_facts(blend, sizes, self.num_samples)
        check_index_mark(
            folder, names, SCHEMA, facts, f"a blend of {len(sizes)} datasets ({names.split})"
        )
        self.datasets: NDArray[np.int16] = map_array(
            names.path(folder, DATASETS), (self.num_samples,), np.int16
        )
        self.numbers: NDArray[np.int64] = map_array(
            names.path(folder, NUMBERS), (self.num_samples,), np.int64
        )
