"""What NeMo reads: one list of weights and prefixes, cut by one splits_string."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainkit.base.errors import Problem, raise_problems
from trainkit.engines.megatron_lm.data import SPLITS, MegatronData
from trainkit.engines.pair_weights import pair_weights
from trainkit.jobs.schema import Job

if TYPE_CHECKING:  # they import numpy, which planning does without
    from trainkit.data.order.resolve_pairs import SplitPair

PREFIX = "model.data.data_prefix"
NAMES = {"train": "train", "valid": "validation", "test": "test"}  # NeMo 2's names of the splits


def data_options(job: Job, data: MegatronData) -> dict[str, object]:
    """The keys of `model.data` that say what is read, without "model.data." before them.

    Args:
        job: the job.
        data: its dataset's pairs.

    Raises ConfigError: the weights that engine_args give are of other files.
    """
    if data.mock:
        # as the launcher's own benchmarks have it
        return {"data_impl": "mock", "splits_string": "99990,8,2", "data_prefix": []}
    found: dict[str, object] = {"data_impl": "mmap"}
    if data.split is not None:
        found["splits_string"] = data.split
        found["data_prefix"] = _blend(job, data.files["train"])
        return found
    found["splits_string"] = None
    found["data_prefix"] = {
        NAMES[split]: _blend(job, data.files[split], given=False) for split in SPLITS
    }
    return found


def _blend(job: Job, pairs: Sequence[SplitPair], *, given: bool = True) -> list[object]:
    """Weights and prefixes by turns. Those of engine_args; the dataset's; by size: NeMo has no
    way to weigh files by itself."""
    if given and PREFIX in job.engine_args:
        return _given(job, pairs)
    prefixes = [str(pair.prefix) for pair in pairs]
    return [*itertools.chain(*zip(_weights(pairs), prefixes, strict=True))]


def _weights(pairs: Sequence[SplitPair]) -> list[float]:
    if len(pairs) == 1:
        return [1.0]
    weights = pair_weights(pairs)
    if any(pair.weight is not None for pair in pairs):
        return weights
    total = sum(weights) or 1
    return [weight / total for weight in weights]


def given_blend(job: Job) -> tuple[list[tuple[float, str]], list[Problem]]:
    """((weight, name) of engine_args' list, what is wrong with it)."""
    value = job.engine_args.get(PREFIX)
    if value is None:
        return [], []
    words = list(value) if isinstance(value, (list, tuple)) else [value]
    pairs = list(zip(words[::2], words[1::2], strict=False))
    right = len(words) % 2 == 0 and all(
        isinstance(weight, (int, float)) and not isinstance(weight, bool) and isinstance(name, str)
        for weight, name in pairs
    )
    if not right:
        said = f"engine_args.'{PREFIX}' is not a list of weights and names by turns"
        hint = '[0.0333, "my-gpt3_00_text_document", ..]: names of the dataset\'s pairs'
        return [], [Problem(said, hint=hint)]
    return [(float(str(weight)), str(name)) for weight, name in pairs], []


def _given(job: Job, pairs: Sequence[SplitPair]) -> list[object]:
    """The weights that engine_args give the dataset's pairs, by their names."""
    there = {pair.prefix.name: pair.prefix for pair in pairs}
    given, problems = given_blend(job)
    found: list[object] = []
    for weight, name in given:
        prefix = there.get(Path(name).name)
        if prefix is None or ("/" in name and Path(name) != prefix):
            problems.append(
                Problem(
                    f"engine_args.'{PREFIX}': '{name}' is not a pair of dataset"
                    f" '{job.dataset.name}'",
                    hint=f"its pairs: {', '.join(sorted(there)[:5])}",
                )
            )
        found += [weight, str(prefix)]
    raise_problems(problems)
    return found


def data_problems(job: Job, data_keys: Sequence[str]) -> Iterator[Problem]:
    """What a version cannot read of a dataset.

    Args:
        job: the job.
        data_keys: what makes each split of a dataset whole files of its own, where anything does.
    """
    yield from given_blend(job)[1]
    for key in data_keys:
        yield Problem(
            f"datasets.{job.dataset.name}.{key}: NeMo of 22.09 cuts one list of files by one"
            " splits_string",
            hint="leave it out, or use engine nemo of 24.12",
        )
