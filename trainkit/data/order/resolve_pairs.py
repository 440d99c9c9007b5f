"""Which .bin/.idx pairs a dataset is made of, split by split, and what each weighs. Reads file
names, the list of shards that were not merged, and sizes where weights follow from them."""

from __future__ import annotations

import glob
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainkit.base.errors import ConfigError, Exit
from trainkit.base.lazy_dataclasses import dataclass, replace
from trainkit.data.fetch.ranges import expand
from trainkit.data.indexed.paths import DataFolder
from trainkit.jobs.schema import Dataset, Job
from trainkit.plan.mixtures import blend_weights, samples_of

if TYPE_CHECKING:
    from trainkit.data.order.native import SplitName

PairPart = tuple[str, Path, str]
NOTHING_DRAWN: Mapping[PairPart, int] = {}
# a split of which one part is everything
WHOLE_SPLIT = {"train": "1,0,0", "valid": "0,1,0", "test": "0,0,1"}


@dataclass(frozen=True)
class SplitPair:
    """One .bin/.idx pair as a split reads it.

    Args:
        name: of the dataset it belongs to, with its file's where there are several: "pile",
            "slimpajama.chunk3_text_document". Salts its order.
        prefix: without .bin and .idx.
        split: which part of it, as `parse_split` takes it.
        mmap: map .bin, or read it by pread.
        group: the dataset's name; `weight` is that of the whole group.
        weight: over the sum of all groups' weights; None: all by size.
    """

    name: str
    prefix: Path
    split: str
    mmap: bool
    group: str
    weight: float | None

    @property
    def part(self) -> PairPart:
        """What it is, whatever it weighs: the same in two blends that hold the same samples."""
        return self.name, self.prefix, self.split


def prefixes_of(dataset: Dataset, root: Path) -> list[Path]:
    """The pairs of a dataset with source = "indexed", in the order of `prefixes`, sorted within
    a glob pattern; without any, those its `urls` name.

    Raises ConfigError (exit 6) where one is not there.
    """
    if not dataset.prefixes:
        from trainkit.data.sources.indexed import fetched_prefixes

        return fetched_prefixes(dataset, DataFolder(root, dataset).corpus)
    found: list[Path] = []
    for pattern in (text for given in dataset.prefixes for text in expand(given)):
        matches = [
            Path(match.removesuffix(".idx"))
            for match in sorted(glob.glob(f"{pattern}.idx", recursive=True))
        ]
        if not matches:
            raise ConfigError(
                f"datasets.{dataset.name}.prefixes: there is no {pattern}.idx",
                exit=Exit.STAGE_FAILED,
                hint=(
                    "give paths without .bin and .idx; relative ones begin at the folder of"
                    " jobs.toml"
                ),
            )
        found += matches
    return list(dict.fromkeys(found))


def pairs_of(root: Path, dataset: Dataset, split: SplitName) -> list[SplitPair]:
    """What the samples of a split come from.

    Args:
        root: the job's `cluster.root`.
        dataset: any but random tokens.
        split: which.

    Raises ConfigError: a pair is not there (exit 6), or too few files for those held out.
    """
    if dataset.source != "blend":
        return _pairs_of_one(root, dataset, split, None)
    apart = bool(dataset.valid_blend or dataset.test_blend)
    blends = {"train": dataset.blend, "valid": dataset.valid_blend, "test": dataset.test_blend}
    pairs: list[SplitPair] = []
    for part in (blends[split] if apart else dataset.blend).values():
        if part.weight == 0:
            continue  # never drawn
        if apart:
            cut = part.dataset.model_copy(
                update={"split": WHOLE_SPLIT[split], "valid_files": 0, "test_files": 0}
            )
        else:
            cut = part.dataset
        pairs += _pairs_of_one(root, cut, split, part.weight)
    return pairs


def weighed_pairs(
    job: Job,
    dataset: Dataset,
    split: SplitName,
    *,
    by_documents: bool,
    samples: int = 0,
    drawn: Mapping[PairPart, int] = NOTHING_DRAWN,
) -> list[SplitPair]:
    """`pairs_of`, with weights of their own where the blend has `temperature` or `max_epochs`: the
    one place where these become numbers, for both orders of samples and for other engines.

    Args:
        job: its root, seq_length and steps count.
        dataset: any but random tokens.
        split: which; `max_epochs` is about the training.
        by_documents: a split is cut between documents, as Megatron does, not between samples.
        samples: that training draws of it; 0: in all of its steps.
        drawn: samples of each `part` that training has drawn before.

    Raises as `pairs_of`; ConfigError: the training is longer than `max_epochs` allow.
    """
    pairs = pairs_of(job.cluster.root_folder, dataset, split)
    if dataset.temperature is None and dataset.max_epochs is None:
        return pairs
    sizes = [_samples_in(job, pair, split, by_documents) for pair in pairs]
    if not any(sizes):
        return pairs  # the order says what is missing
    wanted = samples or samples_of(job, dataset)
    weights = blend_weights(
        dataset,
        [pair.group for pair in pairs],
        {pair.group: pair.weight for pair in pairs},
        sizes,
        samples=wanted if wanted and split == "train" else None,
        drawn=[drawn.get(pair.part, 0) for pair in pairs],
    )
    return [
        replace(pair, group=pair.name, weight=weight)
        for pair, weight in zip(pairs, weights, strict=True)
        if weight  # else it is never drawn
    ]


def _samples_in(job: Job, pair: SplitPair, split: SplitName, by_documents: bool) -> int:
    """Samples of an epoch of a pair in a split, by its order's own cut."""
    from trainkit.data.indexed.dataset import IndexedDataset
    from trainkit.data.order.megatron_cache import split_ranges
    from trainkit.data.order.native import SPLITS, parse_split, split_bounds

    data = IndexedDataset(pair.prefix)
    at = SPLITS.index(split)
    length = job.model.seq_length
    if by_documents:
        first, last = split_ranges(pair.split, len(data))[at] or (0, 0)
        return max(0, int(data.lengths[first:last].sum()) - 1) // length
    first, last = split_bounds(parse_split(pair.split), (data.num_tokens - 1) // length)[at]
    return last - first


def _pairs_of_one(
    root: Path, dataset: Dataset, split: SplitName, weight: float | None
) -> list[SplitPair]:
    if dataset.source == "indexed":
        prefixes = prefixes_of(dataset, root)
    else:
        prefixes = DataFolder(root, dataset).prefixes()
    cut = dataset.split
    if dataset.valid_files or dataset.test_files:
        prefixes = _held_out(dataset, prefixes)[split]
        cut = WHOLE_SPLIT[split]
    if len(prefixes) == 1:
        names = [dataset.name]
    else:
        names = [
            f"{dataset.name}.{name}" for name in _distinct([prefix.name for prefix in prefixes])
        ]
    return [
        SplitPair(name, prefix, cut, dataset.mmap, dataset.name, weight)
        for name, prefix in zip(names, prefixes, strict=True)
    ]


def _distinct(names: list[str]) -> list[str]:
    """Names that come again (files of one name in several folders) with their count behind them."""
    counts = Counter(names)
    distinct = []
    for at, name in enumerate(names):
        distinct.append(name if counts[name] == 1 else f"{name}.{names[: at + 1].count(name)}")
    return distinct


def _held_out(dataset: Dataset, prefixes: list[Path]) -> dict[str, list[Path]]:
    """Files of each split: the last are for validation, those before them for the test, as in
    Azure's GPT-3 scripts (the last 15 of 72, and 15)."""
    train = len(prefixes) - dataset.valid_files - dataset.test_files
    if train < 1:
        held = f"valid_files {dataset.valid_files} + test_files {dataset.test_files}"
        raise ConfigError(
            f"datasets.{dataset.name}: {held} leave none of {len(prefixes)} files to train on",
            hint="hold fewer out",
        )
    test = train + dataset.test_files
    return {"train": prefixes[:train], "test": prefixes[train:test], "valid": prefixes[test:]}


def weights_of(pairs: Sequence[SplitPair], sizes: Sequence[int]) -> list[float] | None:
    """The weight of each pair: that of its dataset, shared among the dataset's pairs by size.
    None where all go by size."""
    if any(pair.weight is None for pair in pairs):
        return None
    totals: dict[str, int] = {}
    for pair, size in zip(pairs, sizes, strict=True):
        totals[pair.group] = totals.get(pair.group, 0) + size
    # without a sample: the order names it
    alone = {pair.group for pair in pairs if not totals[pair.group]}
    return [
        float(pair.weight or 0) * (1.0 if pair.group in alone else size / totals[pair.group])
        for pair, size in zip(pairs, sizes, strict=True)
    ]
