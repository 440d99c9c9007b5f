"""Which documents Megatron-LM gives to which split, asked before it starts: one whose split of a
pair holds no document builds its index of samples for ever, without a word (core 0.4 and later)."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING

from trainkit.base.errors import ConfigError
from trainkit.engines.megatron_lm.data import SPLITS, MegatronData
from trainkit.jobs.schema import Job

if TYPE_CHECKING:  # it imports numpy, which planning does without
    from trainkit.data.order.resolve_pairs import SplitPair


def split_documents(split: str, documents: int) -> list[int]:
    """How many documents train, valid and test get.

    core/datasets/blended_megatron_dataset_builder.py: each ends at round(sum of its weight and
    those before it, over all, x documents).
    """
    weights = [float(part) for part in split.replace("/", ",").split(",")]
    weights += [0.0] * (len(SPLITS) - len(weights))
    ends = [0]
    for number in range(len(SPLITS)):
        ends.append(round(sum(weights[: number + 1]) / sum(weights) * documents))
    return [after - before for before, after in itertools.pairwise(ends)]


def refuse_empty_splits(job: Job, data: MegatronData) -> None:
    """Raise ConfigError (exit 3) where a split with a weight gets no document of a pair."""
    from trainkit.data.indexed.dataset import IndexedDataset

    if data.split is None:
        return
    weights = [float(part) for part in data.split.replace("/", ",").split(",")]
    for pair in data.files.get("train", ()):
        if not Path(f"{pair.prefix}.idx").is_file():
            continue  # it is still to be made
        documents = IndexedDataset(pair.prefix, mmap=pair.mmap).num_documents
        for name, count, weight in zip(
            SPLITS, split_documents(data.split, documents), weights, strict=False
        ):
            if weight and not count:
                raise _empty(job, data.split, name, pair, documents)


def _empty(job: Job, split: str, name: str, pair: SplitPair, documents: int) -> ConfigError:
    return ConfigError(
        f"datasets.{pair.group}.split ({split!r}) leaves the {name} split no document of"
        f" {pair.prefix}, which has {documents}: Megatron-LM would build its index for ever",
        hint=(
            "text without lines of JSON is one document a file; give more documents, a larger"
            f" weight, or 0 for {name}"
        ),
    )
