"""Counts and sizes as they were published, against those that are found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from trainkit.base.errors import Exit, Problem, raise_problems

if TYPE_CHECKING:
    from trainkit.jobs.schema import Dataset

ROUND = 4  # digits; a number with fewer before its zeros is somebody's "about"
ABOUT = 0.05
ROUNDED = 0.01


def tolerance(published: int) -> int:
    """How far from a published number the true one may be. One that ends in 0 was rounded, often
    from other units (GiB): a hundredth; an "about": a twentieth.

    36,445,475: 0; 457,414,000,000 (426 GiB): 4,574,140,000; 895,000,000,000: 44,750,000,000.
    Whether every file is there is not judged by this.
    """
    digits = str(published).rstrip("0")
    if digits == str(published):
        return 0
    return int(published * (ABOUT if len(digits) < ROUND else ROUNDED))


def check_published(dataset: Dataset, found: Mapping[str, int]) -> None:
    """Compare what was found with the dataset's key of the same name, where it is given.

    Args:
        dataset: whose `files`, `documents`, `download_bytes`, `text_bytes`, `tokens` were
            published.
        found: the true numbers, before anything was left out on purpose.

    Raises ConfigError (exit 6) naming every number that is wrong.
    """
    problems = []
    for key, number in found.items():
        published = getattr(dataset, key)
        if published is not None and abs(number - published) > tolerance(published):
            message = (
                f"datasets.{dataset.name}.{key} = {published:,} was published, {number:,} are there"
            )
            problems.append(
                Problem(
                    message,
                    hint=(
                        f"part of the dataset is missing or it is another version; if {number:,} is"
                        " right, write that"
                    ),
                )
            )
    raise_problems(problems, Exit.STAGE_FAILED)
