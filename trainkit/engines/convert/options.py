"""What a conversion to an engine's format is asked for."""

from __future__ import annotations

from pathlib import Path

import torch

from trainkit.base.errors import ConfigError, Problem
from trainkit.base.lazy_dataclasses import dataclass


@dataclass(frozen=True)
class FileLayout:
    """How the files are to be cut and named.

    Args:
        tensor: tensor-parallel ranks.
        pipeline: pipeline stages; 0: GPT-NeoX's form without a pipeline.
        names: which of a format's sets of names; "": its usual one.
        dtype: of the weights.
        divisor: the vocabulary is padded to a multiple of this and of the tensor-parallel ranks.
        expert: ranks that the experts of a layer lie on.
    """

    tensor: int
    pipeline: int
    names: str
    dtype: torch.dtype
    divisor: int
    expert: int = 1


def refuse(problems: list[str], target: str, place: Path | None = None) -> None:
    """Raise ConfigError with everything that a format cannot say of a model.

    Args:
        problems: what it cannot.
        target: the format.
        place: the checkpoint that is read, if it is one.
    """
    what = str(place) if place is not None else "this model"
    if problems:
        raise ConfigError(
            [Problem(f"{what} cannot be converted to {target}: {problem}") for problem in problems]
        )
